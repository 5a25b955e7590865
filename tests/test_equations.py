"""MS-LMN and Clockwork RNN against the equations of the paper, written out in NumPy, one unit at a time."""

import numpy as np
import pytest
import torch

from mslmn import MSLMN, ClockworkRNN, State
from properties import given, st

pytestmark = pytest.mark.usefixtures("everywhere")


def blocks(W_of_sender, M):
    """The full block matrix W[k][i], i -> k, from what each sender i sends to modules 0..i."""
    return {(i, k): W[k * M : (k + 1) * M] for i, W in enumerate(W_of_sender) for k in range(i + 1)}


def numpy_mslmn(x, m, t0, p, M):
    """x (T, I), m (g, M) -> memories (T, g*M); p: the cell's parameters as arrays."""
    g = len(p["Whm"])
    Wmm = blocks(p["Wmm"], M)
    out, hidden = [], []
    for step in range(len(x)):
        t = t0 + step + 1
        h = np.tanh(p["Wxh"] @ x[step] + p["b_h"] + sum(p["Wmh"][i] @ m[i] for i in range(g)))
        m_prev, m = m, []
        for k in range(1, g + 1):
            if t % 2 ** (k - 1) == 0:
                new = p["Whm"][k - 1] @ h + p["b_m"][k - 1]
                for i in range(k, g + 1):
                    new = new + Wmm[i - 1, k - 1] @ m_prev[i - 1]
                m.append(new)
            else:
                m.append(m_prev[k - 1])
        out.append(np.concatenate(m))
        hidden.append(h)
    return np.stack(out), np.stack(hidden)


def numpy_clockwork(x, m, t0, p, M):
    g = len(p["Whh"])
    Whh = blocks(p["Whh"], M)
    out = []
    for step in range(len(x)):
        t = t0 + step + 1
        m_prev, m = m, []
        for k in range(1, g + 1):
            if t % 2 ** (k - 1) == 0:
                new = p["Wxh"][k - 1] @ x[step] + p["b_h"][k - 1]
                for i in range(k, g + 1):
                    new = new + Whh[i - 1, k - 1] @ m_prev[i - 1]
                m.append(np.tanh(new))
            else:
                m.append(m_prev[k - 1])
        out.append(np.concatenate(m))
    return np.stack(out)


def arrays(cell):
    """A cell's parameters as NumPy arrays: lists where there is one per module."""
    result = {}
    for name, parameter in cell.named_parameters():
        value = parameter.detach().cpu().numpy()
        if "." in name:
            result.setdefault(name.split(".")[0], []).append(value)
        else:
            result[name] = value
    return result


def randomise(layer):
    """Weights of every size and sign, biases too: initial values would leave whole blocks at zero."""
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(0.4 * torch.randn_like(p))
    return layer


sizes = st.fixed_dictionaries(
    {
        "I": st.integers(0, 3),
        "H": st.integers(1, 4),
        "M": st.integers(1, 3),
        "g": st.integers(1, 5),
        "T": st.integers(1, 20),
        "clocks": st.lists(st.integers(0, 1000), min_size=1, max_size=3),
        "seed": st.integers(0, 2**31),
    }
)


@given(sizes)
def test_mslmn_equals_the_equations_for_any_sizes_lengths_and_clocks(s):
    torch.manual_seed(s["seed"])
    B, G = len(s["clocks"]), s["g"] * s["M"]
    layer = randomise(MSLMN(s["I"], s["H"], s["M"], s["g"], dtype=torch.float64))
    x = torch.randn(s["T"], B, s["I"], dtype=torch.float64)
    start = State(torch.randn(1, B, G, dtype=torch.float64), torch.tensor(s["clocks"]))
    output, state = layer(x, start)
    run = layer.cells[0](x, start.memory[0], start.clock, None, reverse=False)
    for b, t0 in enumerate(s["clocks"]):
        m = start.memory[0, b].cpu().numpy().reshape(s["g"], s["M"])
        memory, hidden = numpy_mslmn(x[:, b].cpu().numpy(), m, t0, arrays(layer.cells[0]), s["M"])
        np.testing.assert_allclose(output[:, b].detach().cpu(), memory, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(run.hidden[:, b].detach().cpu(), hidden, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(state.memory[0, b].detach().cpu(), memory[-1], rtol=1e-10, atol=1e-10)
    assert state.clock.tolist() == [t0 + s["T"] for t0 in s["clocks"]]


@given(sizes)
def test_clockwork_rnn_equals_the_equations_for_any_sizes_lengths_and_clocks(s):
    torch.manual_seed(s["seed"])
    B, G = len(s["clocks"]), s["g"] * s["M"]
    layer = randomise(ClockworkRNN(s["I"], s["M"], s["g"], dtype=torch.float64))
    x = torch.randn(s["T"], B, s["I"], dtype=torch.float64)
    start = State(torch.randn(1, B, G, dtype=torch.float64), torch.tensor(s["clocks"]))
    output, state = layer(x, start)
    for b, t0 in enumerate(s["clocks"]):
        m = start.memory[0, b].cpu().numpy().reshape(s["g"], s["M"])
        memory = numpy_clockwork(x[:, b].cpu().numpy(), m, t0, arrays(layer.cells[0]), s["M"])
        np.testing.assert_allclose(output[:, b].detach().cpu(), memory, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(state.memory[0, b].detach().cpu(), memory[-1], rtol=1e-10, atol=1e-10)


def test_growing_by_a_module_with_zero_weights_changes_no_bit():
    """Sums run slowest first: what a silent slowest module adds is exactly nothing."""
    small = randomise(MSLMN(3, 5, 4, num_modules=3))
    large = randomise(MSLMN(3, 5, 4, num_modules=4))
    with torch.no_grad():
        for name, p in small.named_parameters():
            large.get_parameter(name).copy_(p)
        large.cells[0].Wmh[3].zero_()
        large.cells[0].Wmm[3][:12].zero_()
    x = torch.randn(40, 2, 3)
    assert torch.equal(large(x)[0][..., :12], small(x)[0])
