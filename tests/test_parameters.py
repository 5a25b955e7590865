"""Parameters: only those that exist, initial values as documented, and what travels with a layer."""

import copy
import inspect
import math
import re

import numpy as np
import pytest
import torch

from helpers import LAYERS, make
from mslmn import LMN, MSLMN, ClockworkRNN
from mslmn.cells import INITS, largest_singular_values
from properties import given, st

kinds = pytest.mark.parametrize("kind", list(LAYERS))


def count(layer):
    return sum(p.numel() for p in layer.parameters())


@given(
    I=st.integers(0, 5), H=st.integers(1, 5), M=st.integers(1, 4), g=st.integers(1, 6),
    bias=st.booleans(), learn=st.booleans(),
)  # fmt: skip
def test_mslmn_has_the_parameters_of_the_paper_and_no_lower_blocks(I, H, M, g, bias, learn):
    layer = MSLMN(I, H, M, g, bias=bias, learn_initial_state=learn, device="meta")
    Wmm = M * M * g * (g + 1) // 2
    assert count(layer) == H * I + 2 * H * g * M + Wmm + bias * (H + g * M) + learn * g * M


@given(I=st.integers(0, 5), M=st.integers(1, 4), g=st.integers(1, 6), bias=st.booleans())
def test_clockwork_rnn_has_no_lower_blocks(I, M, g, bias):
    layer = ClockworkRNN(I, M, g, bias=bias, device="meta")
    assert count(layer) == g * M * I + M * M * g * (g + 1) // 2 + bias * g * M


def test_shapes_and_names_are_those_of_the_documentation():
    layer = MSLMN(5, 4, 3, num_modules=2, num_layers=2, bidirectional=True, learn_initial_state=True)
    one = {
        "Wxh": (4, 5), "b_h": (4,), "Wmh.0": (4, 3), "Wmh.1": (4, 3), "Whm.0": (3, 4), "Whm.1": (3, 4),
        "Wmm.0": (3, 3), "Wmm.1": (6, 3), "b_m.0": (3,), "b_m.1": (3,), "m_0.0": (3,), "m_0.1": (3,),
    }  # fmt: skip
    upper = {**one, "Wxh": (4, 12)}
    expected = {f"cells.{i}.{n}": s for i in range(4) for n, s in (one if i < 2 else upper).items()}
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == expected


def test_a_new_module_adds_parameters_and_leaves_names_and_shapes():
    small = dict(MSLMN(5, 4, 3, num_modules=2).named_parameters())
    large = dict(MSLMN(5, 4, 3, num_modules=3).named_parameters())
    assert all(large[name].shape == p.shape for name, p in small.items())


@pytest.mark.parametrize("M", [1, 2, 16])
def test_leaky_modules_are_banks_of_leaky_integrators(M):
    cell = MSLMN(3, 400, M, num_modules=3).cells[0]
    tau = [30 ** ((i - 0.5) / M) for i in range(1, M + 1)]
    d = torch.tensor([math.exp(-1 / t) for t in tau])
    for j, W in enumerate(cell.Wmm):
        assert torch.equal(W[: j * M], torch.zeros(j * M, M))
        torch.testing.assert_close(W[j * M :], torch.diag(d))
        row_std = cell.Whm[j].std(dim=1)
        torch.testing.assert_close(row_std, (1 - d) * math.sqrt(2 / (M + 400)), rtol=0.2, atol=0)
    biases = [cell.b_h, *cell.b_m]
    assert all(b.abs().max() == 0 for b in biases)


@pytest.mark.parametrize("I", [0, 1, 4])
def test_fan_in_is_leaky_but_for_what_reads_the_input(I):
    torch.manual_seed(0)
    cell, leaky = (MSLMN(I, 300, 4, num_modules=2, init=init).cells[0] for init in ("fan-in", "leaky"))
    assert cell.Wxh.shape == (300, I)
    if I:
        assert cell.Wxh.std().item() == pytest.approx(math.sqrt(2 / I), rel=0.1)
    for name in ("Wmh", "Whm", "Wmm"):
        for ours, theirs in zip(getattr(cell, name), getattr(leaky, name), strict=True):
            assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.2)
    torch.testing.assert_close(cell.Wmm[0], leaky.Wmm[0])
    clockwork = ClockworkRNN(4, 300, num_modules=1, init="fan-in").cells[0]
    d = clockwork.Whh[0].diag()
    assert (clockwork.Wxh[0] / (1 - d[:, None])).std().item() == pytest.approx(math.sqrt(0.5), rel=0.1)


@pytest.mark.parametrize("M", [1, 3, 16, 60])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 1e3])
def test_the_largest_singular_value_is_bounded_from_below_and_closely(M, scale):
    W = scale * torch.randn(4, M, M, generator=torch.Generator().manual_seed(M), dtype=torch.float64)
    W[3] = scale * torch.eye(M)  # all are the largest
    W[2] = torch.diag(torch.tensor([scale, *[0.0] * (M - 1)]))  # one is
    true, found = torch.linalg.matrix_norm(W, 2), largest_singular_values(W)
    assert (found <= true * (1 + 1e-9)).all() and (found >= true * M ** (-1 / 512) * (1 - 1e-9)).all()


def test_contracted_memories_do_not_explode_and_contractions_stay_as_they_are():
    torch.manual_seed(0)
    layer = MSLMN(2, 6, 5, num_modules=3, bidirectional=True, init="xavier")
    with torch.no_grad():
        for cell in layer.cells:
            for W in cell.Wmm:
                W.mul_(5)
    layer.cells[1].Wmm[1].data[-5:] = torch.eye(5).flip(0)
    before = [[W.clone() for W in cell.Wmm] for cell in layer.cells]
    assert not layer(torch.randn(1000, 1, 2))[0].isfinite().all()
    layer.contract()
    for cell, old in zip(layer.cells, before, strict=True):
        for W, was in zip(cell.Wmm, old, strict=True):
            assert torch.equal(W[:-5], was[:-5])  # what slower modules send stays
            assert torch.linalg.matrix_norm(W[-5:], 2) <= 5 ** (1 / 512) + 1e-6
    assert torch.equal(layer.cells[1].Wmm[1], before[1][1])
    assert layer(torch.randn(1000, 1, 2))[0].isfinite().all()
    again = [p.clone() for p in layer.parameters()]
    layer.contract()
    for p, q in zip(layer.parameters(), again, strict=True):
        torch.testing.assert_close(p, q, rtol=0.01, atol=0)  # within the bound


def test_leaky_clockwork_modules_are_leaky_too():
    I, M = 400, 4
    cell = ClockworkRNN(I, M, num_modules=3).cells[0]
    d = MSLMN(3, 5, M, num_modules=1).cells[0].Wmm[0].diag()
    for j, W in enumerate(cell.Whh):
        assert torch.equal(W[: j * M], torch.zeros(j * M, M))
        torch.testing.assert_close(W[j * M :], torch.diag(d))
        row_std = cell.Wxh[j].std(dim=1)
        torch.testing.assert_close(row_std, (1 - d) * math.sqrt(2 / (M + I)), rtol=0.2, atol=0)


def test_leaky_feedback_has_half_the_gain_of_xavier_and_typically_contracts():
    """The loop m -> h -> m at zero frequency, where leaky integrators have gain 1: Wmh Whm / (1 - d)."""
    for H, M, g in [(25, 25, 7), (144, 16, 9), (200, 2, 12), (20, 100, 2)]:
        for seed in range(10):
            torch.manual_seed(seed)
            cell = MSLMN(3, H, M, num_modules=g).cells[0]
            gain = 1 - cell.Wmm[0].diag()
            loop = sum(cell.Wmh[j] @ (cell.Whm[j] / gain[:, None]) for j in range(g))
            assert torch.linalg.eigvals(loop).abs().max() < 1
        std = torch.cat(list(cell.Wmh), dim=1).std().item()
        assert std == pytest.approx(0.5 * math.sqrt(2 / (H + g * M)), rel=0.1)


def test_xavier_is_that_of_the_whole_matrices():
    H, M, g, I = 60, 20, 5, 30
    G = g * M
    cell = MSLMN(I, H, M, num_modules=g, init="xavier").cells[0]
    for weight, (rows, columns) in {
        cell.Wxh: (H, I),
        cell.Wmh[2]: (H, G),
        cell.Whm[2]: (G, H),
        cell.Wmm[4]: (G, G),
    }.items():
        assert weight.std().item() == pytest.approx(math.sqrt(2 / (rows + columns)), rel=0.1)
        assert abs(weight.mean().item()) < 0.05
    clockwork = ClockworkRNN(I, M, num_modules=g, init="xavier").cells[0]
    assert clockwork.Wxh[0].std().item() == pytest.approx(math.sqrt(2 / (G + I)), rel=0.1)
    assert clockwork.Whh[4].std().item() == pytest.approx(math.sqrt(2 / (G + G)), rel=0.1)


@kinds
def test_leaky_layers_neither_explode_nor_go_silent_over_long_sequences(kind):
    layer = LAYERS[kind](3)
    output, _ = layer(torch.randn(2000, 2, 3))
    assert output[-500:].abs().max() < 5
    assert output[-500:].std() > 1e-2


@kinds
@pytest.mark.parametrize("init", INITS)
def test_the_same_seed_gives_the_same_layer_and_reset_draws_anew(kind, init):
    torch.manual_seed(3)
    a = LAYERS[kind](3, init=init)
    torch.manual_seed(3)
    b = LAYERS[kind](3, init=init)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    b.reset_parameters()
    weights = [n for n, p in a.named_parameters() if p.std() > 0 and "Wxh" in n]
    assert weights
    assert not any(torch.equal(a.get_parameter(n), b.get_parameter(n)) for n in weights)


@kinds
def test_state_dict_and_deepcopy_round_trip(kind):
    options = {"bidirectional": True, "num_layers": 2, "learn_initial_state": True, "layer_norm": True}
    layer, x = make(kind, **options), torch.randn(5, 2, 2, dtype=torch.float64)
    output, _ = layer(x)
    other = make(kind, **options)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x)[0], output)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x)[0], output)
    with torch.no_grad():
        next(twin.parameters()).add_(1)
    assert torch.equal(layer(x)[0], output)


@kinds
def test_meta_construction_costs_nothing_and_can_be_made_real(kind):
    options = {"bidirectional": True, "num_layers": 2, "layer_norm": True}
    with torch.device("meta"):
        by_context = LAYERS[kind](2, **options)
    layer = LAYERS[kind](2, **options, device="meta")
    for shell in (by_context, layer):
        assert all(p.is_meta for p in shell.parameters())
        output, state = shell(torch.randn(5, 3, 2, device="meta"))
        assert output.is_meta and output.shape == (5, 3, shell.output_size) and state.clock.is_meta
    layer = layer.to_empty(device="cpu")
    torch.manual_seed(1)
    layer.reset_parameters()
    torch.manual_seed(1)
    real = LAYERS[kind](2, **options)
    assert all(torch.equal(p, q) for p, q in zip(layer.parameters(), real.parameters(), strict=True))


CONFIGURED = [
    LMN(4, 6, 3, batch_first=True),
    MSLMN(4, 144, 16, num_modules=9, bidirectional=True, device="meta"),
    MSLMN(0, 1, 4, 9, 2, False, True, 0.5, True, "xavier", True, True, 3, device="meta"),
    ClockworkRNN(4, 33, num_modules=9, init="xavier"),
]


@pytest.mark.parametrize("layer", CONFIGURED, ids=repr)
def test_repr_tells_the_configuration_and_builds_its_like(layer):
    twin = eval(repr(layer), {"LMN": LMN, "MSLMN": MSLMN, "ClockworkRNN": ClockworkRNN})
    assert twin.config == layer.config == type(layer)(**layer.config).config
    assert re.fullmatch(r"\w+\([^\n]*\)", repr(layer))
    assert set(layer.config) == set(inspect.signature(type(layer)).parameters) - {"device", "dtype"}


def test_repr_is_short_where_the_defaults_are_used():
    assert repr(CONFIGURED[0]) == "LMN(input_size=4, hidden_size=6, memory_size=3, batch_first=True)"


def test_numpy_integers_are_sizes_and_become_ints():
    layer = MSLMN(np.int64(3), np.int32(4), np.int64(2), num_modules=np.int64(5))
    assert all(type(value) is not np.int64 and type(value) is not np.int32 for value in layer.config.values())


def test_a_class_derived_from_a_layer_can_be_printed():
    class Tiny(MSLMN):
        def __init__(self, features):
            super().__init__(features, 4, 2, num_modules=3)

    assert repr(Tiny(5)) == "Tiny(input_size=5, hidden_size=4, memory_size=2, num_modules=3)"
