"""A training step, as it comes and in a room that a CUDA graph has: the same loss, the same weights."""

import shutil

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

import emulator
from mslmn import LMN, MSLMN, ClockworkRNN, SequenceModel, ops, packing, step
from mslmn.objectives import CTC, NMSE
from mslmn.ops import ctc, cuda
from mslmn.step import ROOMS, Room, Step, rounded
from mslmn.update import Update
from properties import given, st

F64 = torch.float64
H200 = cuda.Device((9, 0), 132, 232448)
O = 5
LONGEST = 30  # steps
EVERY = {"learn_initial_state": True, "layer_norm": True}
LAYERS = {
    "stacked": lambda: MSLMN(3, 5, 4, num_modules=3, num_layers=2, bidirectional=True, **EVERY),
    "projected": lambda: MSLMN(17, 5, 4, num_modules=5),
    "LMN": lambda: LMN(3, 6, 5),
    "ClockworkRNN": lambda: ClockworkRNN(3, 4, num_modules=3, bidirectional=True, num_layers=2),
    "pooled": lambda: MSLMN(3, 5, 4, num_modules=2, num_layers=2, bidirectional=True, layer_norm=True, pool=2),
    "pooled by three": lambda: MSLMN(3, 5, 4, num_modules=2, num_layers=2, pool=3),
    "many units": lambda: MSLMN(3, 34, 8, num_modules=2, bidirectional=True),
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch, folder):
    """A GPU; or the CPU as if it were one, with memory that is not a number where nobody wrote."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device here")
        yield torch.device("cuda", 0)
        return
    if not shutil.which("g++"):
        pytest.skip("the emulator needs g++")
    emulator.install(monkeypatch, folder, H200)
    monkeypatch.setattr(ctc, "takes", lambda *_: True)
    monkeypatch.setattr("mslmn.ops.fused.choose_for", lambda *_: "cuda")
    torch.use_deterministic_algorithms(True)  # so it fills what is empty
    yield torch.device("cpu")
    torch.use_deterministic_algorithms(False)
    ctc._functions.cache_clear()
    cuda._kernels_of.cache_clear()


def batch(lengths, counts, I, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = sorted(lengths, reverse=True)
    packed = packing.pack([torch.randn(n, I, generator=generator, dtype=F64) for n in lengths])
    return packed.to(device), [torch.randint(1, O, (n,), generator=generator) for n in counts]


BATCHES = [
    ((30, 28, 25), (4, 3, 2)),
    ((27, 27, 27), (0, 4, 1)),
    ((30, 29, 22), (4, 4, 4)),  # as many rows, other lengths
    ((9, 2, 1), (3, 4, 1)),  # one sequence is too short
    ((30, 28, 25), (1, 1, 1)),
    ((4, 1, 1), (1, 0, 0)),
    ((12, 7), (3, 2)),  # the last of an epoch
    ((20,), (6,)),
]
OUTSIDE = ((31, 5), (4, 2))  # longer than there is room for


def trained(layer, device, rooms, flat=False, norm="layer", replays=None, dropout=0.0, noise=0.0):
    """Loss and weights after some steps, in rooms or not."""
    torch.manual_seed(0)
    model = SequenceModel(LAYERS[layer](), O, output="all", norm=norm, dropout=dropout).double().to(device)
    update = Update(model, {}, learning_rate=1e-2, weight_decay=1e-3, clip=0.5, contract=layer != "ClockworkRNN")
    one = Step(model, CTC(), update, longest=LONGEST, noise=noise)
    one.begin()
    one.graphs = rooms
    for i, (lengths, counts) in enumerate([*BATCHES, OUTSIDE] * 2):
        if i == len(BATCHES) + 1:
            torch.manual_seed(1)  # as each epoch has one
        input, target = batch(lengths, counts, model.encoder.input_size, device, i)
        one(input, target, rate=1e-2 / (1 + i), flat=flat)
    if replays is not None:
        replays.append(one)
    return one.total.cpu(), {name: value.cpu() for name, value in model.state_dict().items()}


class Called:
    """Stands in for a CUDA graph."""

    def __init__(self, call):
        self.replay = call


def test_dropout_is_drawn_before_what_is_replayed(monkeypatch):
    model = SequenceModel(MSLMN(3, 5, 40, num_modules=2), O, output="all", dropout=0.25)
    update = Update(model, {}, learning_rate=1, weight_decay=0, clip=1, contract=False)
    one = Step(model, CTC(), update, longest=LONGEST)
    one_batch, target = batch((20, 17), (3, 2), 3, "cpu")
    one_batch = PackedSequence(one_batch.data.float(), *one_batch[1:])
    room = one._room(one_batch, target, False)
    masks = []
    for _ in range(2):
        room.take(one_batch, target)
        masks.append(room.kept.clone())
    assert masks[0].shape == (room.x.shape[0], 80) and not torch.equal(*masks)
    assert masks[0].unique().tolist() == pytest.approx([0.0, 1 / 0.75]) and 0.7 < (masks[0] > 0).double().mean() < 0.8
    seen = []
    monkeypatch.setattr(model.readout, "forward", lambda x: seen.append(x) or x)
    x = PackedSequence(torch.randn(room.x.shape), room.batch_sizes[0])
    with one._kept(room.kept):
        model(x)
    torch.testing.assert_close(seen[0], model.features(x).data * masks[1])
    assert model.kept is None
    model.eval()
    with one._kept(room.kept):
        model(x)
    torch.testing.assert_close(seen[1], model.features(x).data)


@pytest.mark.parametrize(("layer", "flat"), [*((layer, False) for layer in LAYERS), ("stacked", True)])
def test_a_batch_in_a_room_is_computed_as_it_is_outside(device, monkeypatch, layer, flat):
    if device.type == "cpu":
        monkeypatch.setattr(step, "captured", lambda call, *_: Called(call))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    total, weights = trained(layer, device, False, flat)
    found = []
    in_rooms = trained(layer, device, True, flat, replays=found)
    torch.testing.assert_close(in_rooms[0], total, rtol=1e-11, atol=0)
    assert total.isfinite().all()
    for name, value in weights.items():
        torch.testing.assert_close(in_rooms[1][name], value, rtol=0, atol=1e-9)
    rooms = found[0].rooms
    assert set(rooms) == {(len(lengths), rounded(sum(lengths)), 15, flat) for lengths, _ in BATCHES}
    assert all(room.graph is not None for room in rooms.values())


@pytest.mark.gpu
@pytest.mark.parametrize(("norm", "drawn"), [(None, 0.0), ("layer", 0.3), ("prefix", 0.3)])
def test_graphs_compute_the_same_bits(norm, drawn, monkeypatch):
    """As one by one, dropout and noise too: a run that goes on, whose first steps are not replayed, ends as if it had
    gone on."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    device = torch.device("cuda", 0)
    replayed = trained("stacked", device, True, norm=norm, dropout=drawn, noise=drawn)
    monkeypatch.setattr(step, "captured", lambda call, *_: Called(call))
    called = trained("stacked", device, True, norm=norm, dropout=drawn, noise=drawn)
    assert torch.equal(replayed[0], called[0])
    assert all(torch.equal(replayed[1][name], called[1][name]) for name in called[1])


@given(st.integers(1, 40), st.integers(1, 200), st.integers(1, 60), st.integers(1, 4), st.data())
def test_a_room_has_what_a_batch_needs(B, longest, labels, pool, data):
    lengths = sorted(data.draw(st.lists(st.integers(1, longest), min_size=B, max_size=B)), reverse=True)
    packed = packing.pack([torch.zeros(n, 1) for n in lengths])
    N = min(rounded(sum(lengths)), B * longest)
    poolings = data.draw(st.integers(0, 3)) if pool > 1 else 0
    room = Room(B, N, labels, False, longest, O, packed.data, pool=pool, poolings=poolings)
    target = [torch.ones(data.draw(st.integers(0, labels)), dtype=torch.long) for _ in lengths]
    room.x.fill_(float("nan"))  # of an earlier batch
    room.take(packed, target)
    assert not room.x.any() and len(room.x) == N
    found = packed.batch_sizes.numpy()
    for i, (table, sizes) in enumerate(zip(room.packings, map(torch.Tensor.numpy, room.batch_sizes), strict=True)):
        T = len(sizes)
        assert len(found) <= T and sizes[0] == B and sizes[-1] >= 1 and (np.diff(sizes) <= 0).all()
        assert sizes.sum() >= found.sum()
        assert table[: len(found) + 1].tolist() == [0, *found.cumsum().tolist()]
        assert table[T + 1 : T + 1 + B].tolist() == packing.lengths_of(found).tolist()
        if i < poolings:
            pooling, rows = room.poolings()[i], found.sum()
            found, places, counts = packing.windows(found, pool)
            windows = len(pooling.counts)
            assert len(pooling.places) == sizes.sum() and windows == pooling.batch_sizes.sum() > len(counts)
            assert pooling.places[:rows].tolist() == places.tolist()
            assert (pooling.places[rows:] // pool == windows - 1).all()  # the spare one
            assert pooling.counts.tolist() == [*counts.tolist(), *[1] * (windows - len(counts))]


@given(st.integers(1, 10**6))
def test_rooms_are_few_and_not_much_too_large(N):
    found = rounded(N)
    assert N <= found <= N + N // ROOMS + 1
    assert rounded(found) == found
    octave = {rounded(n) for n in range(N, 2 * N, max(1, N // 1000))}
    assert len(octave) <= ROOMS + 1


def test_only_kernels_that_know_rooms_compute_in_them(monkeypatch):
    layer = MSLMN(3, 5, 4, num_modules=2)
    packed = packing.pack([torch.randn(4, 3), torch.randn(2, 3)])
    table = torch.from_numpy(ops.packing_table(packed.batch_sizes.numpy(), 4))
    with ops.placed(table), pytest.raises(RuntimeError, match="only the CUDA kernels know placed batches"):
        layer(packed)
    assert not ops.places(layer.cells[0].weights(), torch.device("cpu"))
    layer(packed)
    monkeypatch.setattr("mslmn.ops.fused._eager", lambda *_: False)
    with (
        ops.placed(table),
        pytest.raises(RuntimeError, match="a placed batch is computed in plain eager execution only"),
    ):
        layer(packed)


def test_rooms_are_for_transcription_by_layers_of_this_package_that_nobody_watches(monkeypatch):
    monkeypatch.setattr(ops, "places", lambda *_: True)
    monkeypatch.setattr(ctc, "has_kernels", lambda *_: True)

    def placeable(encoder, objective=None, output="all", alone=True, longest=LONGEST, change=None):
        model = SequenceModel(encoder, O, output=output)
        update = Update(model, {}, learning_rate=1, weight_decay=0, clip=1, contract=False, alone=alone)
        update.replay = alone
        if change:
            change(model)
        one = Step(model, objective or CTC(), update, longest=longest)
        one.begin()
        return one.graphs

    def layer():
        return MSLMN(3, 5, 4, num_modules=2)

    assert placeable(layer())
    assert not placeable(layer(), longest=None)
    assert not placeable(layer(), alone=False)
    assert not placeable(layer(), NMSE())
    assert not placeable(layer(), output="last")
    assert not placeable(nn.LSTM(3, 5))
    assert placeable(MSLMN(3, 5, 4, num_modules=2, num_layers=2, layer_norm=True))
    assert not placeable(MSLMN(3, 5, 4, num_modules=2, num_layers=2, dropout=0.1))
    assert not placeable(layer(), change=lambda model: model.readout.register_forward_hook(lambda *_: None))
    assert not placeable(layer(), change=lambda model: model.encoder.cells[0].Wxh.register_hook(lambda g: g))
    batch_norm = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, O))  # it would see rows of no step
    assert not placeable(layer(), change=lambda model: setattr(model, "readout", batch_norm))
    with torch.autograd.set_detect_anomaly(True):  # it looks at each gradient
        assert not placeable(layer())
    monkeypatch.setattr(ops, "places", lambda *_: False)
    assert not placeable(layer())
