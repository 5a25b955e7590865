"""CTC's own kernels against torch's: compiled for two architectures, emulated on the CPU, and, where there is one, on a
GPU."""

import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import emulator
import mslmn
from helpers import captured
from mslmn import packing
from mslmn.objectives import CTC
from mslmn.ops import ctc, cuda, nvrtc
from properties import given, st

F32, F64 = torch.float32, torch.float64
H200 = cuda.Device((9, 0), 132, 232448)
needs_gpp = pytest.mark.skipif(not shutil.which("g++"), reason="the emulator needs g++")
needs_nvrtc = pytest.mark.skipif(nvrtc.why_not() is not None, reason=f"nothing can be compiled: {nvrtc.why_not()}")


def labels_of(*lengths, O=6):
    return [torch.randint(1, O, (n,)) for n in lengths]


def batch(lengths, O=6, dtype=F64, scale=2.0):
    """Packed logits, sequences in the caller's order."""
    return pack_sequence([(scale * torch.randn(n, O, dtype=F64)).to(dtype) for n in lengths], enforce_sorted=False)


def truth(packed, target):
    """Torch's, sequence by sequence, in float64."""
    data = packed.data.double().requires_grad_()
    order = range(len(target)) if packed.sorted_indices is None else packed.sorted_indices.tolist()
    lengths, starts = packing.lengths(packed), packed.batch_sizes.cumsum(0) - packed.batch_sizes
    total = data.new_zeros(())
    for place, i in enumerate(order):
        rows = data[starts[: lengths[place]] + place].log_softmax(-1)[:, None]
        lengths_of = (torch.tensor([len(rows)]), torch.tensor([len(target[i])]))
        total = total + F.ctc_loss(rows, target[i][None], *lengths_of, reduction="sum", zero_infinity=True)
    return total.detach(), torch.autograd.grad(total, data)[0], len(target)


def assert_same(ours, expected, tolerance=1e-12):
    for a, b in zip(ours[:2], expected[:2], strict=True):
        assert (a.double() - b).norm() <= tolerance * b.norm() + 1e-13
    assert ours[2] == expected[2]


# Compiling


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("real", [F32, F64])
@pytest.mark.parametrize("layout", ctc.LAYOUTS)
def test_the_kernels_compile_and_keep_to_their_registers(architecture, real, layout):
    strict = ("--ptxas-options=--warn-on-spills", "--ptxas-options=--warning-as-error")
    options = (*nvrtc.OPTIONS, f"--gpu-architecture={architecture}", *strict)
    assert nvrtc.compile_source(ctc.source(layout, real), options)[:4] == b"\x7fELF"


def test_layouts_have_room():
    assert ctc.choose(31) == ctc.Layout(1, 1, 16) and ctc.choose(32) == ctc.choose(63) == ctc.Layout(1, 2, 8)
    for longest in (0, 64, 500, ctc.LONGEST):
        layout = ctc.choose(longest)
        assert 32 * layout.pairs * layout.warps > longest
        for real in (F32, F64):
            assert ctc.finish_bytes(layout, real) + ctc.sweep_bytes(layout, real) <= ctc.SHARED
    assert ctc.LONGEST == 2047


# On CPU tensors, by the emulator: the same kernels and the same host code; and on a GPU


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch, folder):
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device here")
        yield torch.device("cuda", 0)
        return
    if not shutil.which("g++"):
        pytest.skip("the emulator needs g++")
    emulator.install(monkeypatch, folder, H200)
    monkeypatch.setattr(ctc, "takes", lambda *_: True)
    yield torch.device("cpu")
    ctc._functions.cache_clear()


def moved(packed, device):
    return PackedSequence(packed.data.to(device), *packed[1:])


def ours(packed, target, device):
    """The sum of the losses, its gradient with respect to the logits, and the number of sequences, all on the CPU."""
    counts = [len(t) for t in target]
    assert ctc.takes(device, packed.batch_sizes, counts)
    packed = moved(packed, device)
    data = packed.data.clone().requires_grad_()
    score = CTC().loss(PackedSequence(data, *packed[1:]), target)
    (gradient,) = torch.autograd.grad(score.total, data)
    with torch.no_grad():  # the same without a gradient
        assert torch.equal(CTC().loss(packed, target).total, score.total) or score.total.isnan()
    assert score.items.dtype == score.total.dtype == gradient.dtype == data.dtype
    return score.total.detach().cpu(), gradient.cpu(), score.items.cpu()


PROBLEMS = [
    ((12, 7, 3), (3, 1, 1), 5),
    ((1, 1, 1), (1, 0, 2), 4),  # one step: a label, nothing, too short
    ((9, 30, 9, 17), (0, 12, 9, 4), 3),  # repeated labels; equally long sequences keep their order
    ((40, 33), (15, 20), 100),  # many outputs
    ((80,), (40,), 7),  # two pairs of states a thread
    ((150, 4, 170), (70, 1, 80), 9),  # two warps
    ((6, 5), (0, 0), 1),  # nothing but the blank
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-12), (F32, 2e-6)])
@pytest.mark.parametrize(("lengths", "labels", "O"), PROBLEMS)
def test_it_is_torch_s(device, dtype, tolerance, lengths, labels, O):
    packed, target = batch(lengths, O, dtype), labels_of(*labels, O=max(O, 2))
    assert_same(ours(packed, target, device), truth(packed, target), tolerance)


@pytest.mark.parametrize("layout", [ctc.Layout(1, 1, 2), ctc.Layout(1, 2, 4), ctc.Layout(2, 2, 1), ctc.LAYOUTS[-2]])
def test_however_it_is_laid_out(device, monkeypatch, layout):
    monkeypatch.setattr(ctc, "choose", lambda longest: layout)
    packed, target = batch((37, 21, 50)), labels_of(31, 0, 17)
    assert_same(ours(packed, target, device), truth(packed, target))


@needs_gpp
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 12)), min_size=1, max_size=4),
    st.integers(2, 70),
    st.sampled_from([0.0, 1.0, 30.0]),
    st.integers(0, 2**31),
)
def test_any_lengths_and_labels(monkeypatch, folder, sizes, O, scale, seed):
    torch.manual_seed(seed)
    with monkeypatch.context() as inside:
        emulator.install(inside, folder, H200)
        inside.setattr(ctc, "takes", lambda *_: True)
        packed = batch([T for T, _ in sizes], O, scale=scale)
        target = labels_of(*(L for _, L in sizes), O=O)
        assert_same(ours(packed, target, torch.device("cpu")), truth(packed, target), 1e-11)


def test_what_is_too_short_counts_zero(device):
    packed, target = batch((5, 9)), [torch.tensor([1, 1, 2, 2]), torch.tensor([3, 4])]
    total, gradient, items = ours(packed, target, device)
    assert_same((total, gradient, items), truth(packed, target))
    assert items == 2
    short = packing.pad(PackedSequence(gradient, packed.batch_sizes))[:, 1]
    assert torch.equal(short, torch.zeros_like(short))
    total, gradient, _ = ours(batch((2,)), [torch.tensor([3, 3])], device)
    assert total == 0 and not gradient.any()


@pytest.mark.parametrize("kind", ["random", "sure of blanks", "sure of the labels", "wrong"])
def test_float32_is_accurate_on_long_sequences(device, kind):
    """Probabilities far below the smallest float, and states 100 orders of magnitude apart, as early in training."""
    T, L, O = 400, 34, 58
    packed, target = batch((T, T - 9), O, F32, scale=1.0), labels_of(L, L - 5, O=O)
    data = packed.data.view(-1, O)
    if kind == "sure of blanks":
        data[:, 0] += 14
    elif kind == "wrong":
        data[:, 1:] += 9 * torch.randn(O - 1)
    elif kind == "sure of the labels":
        places, starts = packing.lengths(packed).tolist(), packed.batch_sizes.cumsum(0) - packed.batch_sizes
        for b, length in enumerate(places):
            for i, label in enumerate(target[b].tolist()):
                data[starts[i * length // L] + b, label] += 12
    assert_same(ours(packed, target, device), truth(packed, target), 1e-5)


def test_the_same_bits_every_time(device):
    """Every launch of the emulator has another order of threads."""
    packed, target = batch((60, 41, 41), 9, F32), labels_of(20, 15, 3, O=9)
    first = ours(packed, target, device)
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(ours(packed, target, device), first, strict=True))


def test_logits_that_exclude_a_label_or_are_no_numbers(device):
    packed, target = batch((8, 6, 5)), [torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4, 4])]
    masked = packed.data.clone()
    starts = packed.batch_sizes.cumsum(0) - packed.batch_sizes
    masked[starts[:6] + 1, 5] = -math.inf  # not in its labels
    masked[starts[:3], 1] = -math.inf  # the first label comes late
    masked[starts[4:5] + 2, 0] = -1e5  # a number that has no exponential
    found = ours(PackedSequence(masked, *packed[1:]), target, device)
    nearly = PackedSequence(masked.clamp(min=-1e5), *packed[1:])  # torch's gradient is NaN where logits are infinite
    assert_same(found, truth(nearly, target))
    masked[starts[:6] + 1, 3] = -math.inf  # impossible: counts zero
    total, gradient, _ = ours(PackedSequence(masked, *packed[1:]), target, device)
    before, after = (packing.pad(PackedSequence(g, packed.batch_sizes)) for g in (found[1], gradient))
    assert 0 < total < found[0] and not after[:, 1].any() and torch.equal(after[:, [0, 2]], before[:, [0, 2]])
    masked[starts[2], 2] = math.nan
    total, gradient, _ = ours(PackedSequence(masked, *packed[1:]), target, device)
    assert total.isnan()
    first = packing.pad(PackedSequence(gradient, packed.batch_sizes))
    assert first[:, 0].isnan().any(1).all() and not first[:, 1:].isnan().any()


def test_half_precision_is_widened_and_views_are_read_as_they_are(device):
    packed, target = batch((9, 5), dtype=torch.bfloat16), labels_of(3, 2)
    data = packed.data.to(device).requires_grad_()
    score = CTC().loss(PackedSequence(data, *packed[1:]), target)
    score.total.backward()
    expected = truth(packed, target)
    assert score.total.dtype == F32 and data.grad.dtype == torch.bfloat16
    assert_same((score.total.detach().cpu(), data.grad.cpu(), 2), expected, 0.01)
    wide = packed.data.to(device).double().repeat_interleave(2, 1)[:, ::2]
    assert not wide.is_contiguous()
    total, _ = ctc.loss(wide, ctc.prepare(torch.cat(target), [3, 2], packed.batch_sizes, device))
    assert_same((total.cpu(), expected[1], 2), expected)


def test_the_gradient_is_scaled_and_has_none_itself(device):
    packed, target = batch((9, 5)), labels_of(3, 2)
    data = packed.data.to(device).requires_grad_()
    total = CTC().loss(PackedSequence(data, *packed[1:]), target).total
    (once,) = torch.autograd.grad(total, data, retain_graph=True)
    (thrice,) = torch.autograd.grad(3 * total, data, create_graph=True)
    torch.testing.assert_close(thrice.detach(), 3 * once)
    with pytest.raises(RuntimeError, match=r"CTC has no second derivatives, .*; leave its loss out"):
        thrice.sum().backward()


def test_what_does_not_fit_together_is_refused(device):
    packed, target = batch((9, 5)), labels_of(3, 2)
    with pytest.raises(ValueError, match="labels of 2 sequences, 5 in all, got 2 that add up to 4; count those"):
        ctc.prepare(torch.cat(target), [3, 1], packed.batch_sizes, device)
    targets = ctc.prepare(torch.cat(target), [3, 2], packed.batch_sizes, device)
    logits = packed.data.to(device)
    for wrong in (logits[1:], logits.half(), logits[None]):
        with pytest.raises(ValueError, match=r"logits must be \(14, O\), float32 or float64, got .*; give those of"):
            ctc.loss(wrong, targets)
    with pytest.raises(ValueError, match=r"on one device, got meta and .*; prepare the targets for the device"):
        ctc.loss(logits.to("meta"), targets)


# The choice, without a GPU


def test_the_kernels_are_taken_where_they_can_be(monkeypatch):
    cuda_0, sizes = torch.device("cuda", 0), torch.tensor([2, 1])
    monkeypatch.setattr(cuda, "why_not", lambda index: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert ctc.takes(cuda_0, sizes, [3, 0])
    assert ctc.takes(cuda_0, sizes, [ctc.LONGEST, 0]) and not ctc.takes(cuda_0, sizes, [ctc.LONGEST + 1, 0])
    assert not ctc.takes(cuda_0, torch.ones(ctc.STEPS * ctc.LARGEST_GRID + 1), [3])
    assert not ctc.takes(torch.device("cpu"), sizes, [3, 0])
    for name, taken in {"cuda": True, "torch": False, "reference": False}.items():
        with mslmn.set_backend(name):
            assert ctc.takes(cuda_0, sizes, [3, 0]) == taken
    monkeypatch.setattr(cuda, "why_not", lambda index: "there is no NVRTC")
    assert not ctc.takes(cuda_0, sizes, [3, 0])


# On a GPU only


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return torch.device("cuda", 0)


@pytest.mark.gpu
@pytest.mark.parametrize(("L", "T"), [(200, 500), (500, 1100), (1000, 2100), (2047, 4500), (2048, 4500)])
def test_long_labels_on_a_gpu(gpu, L, T):
    packed, target = batch((T, T // 2), 20), labels_of(L, L // 5, O=20)
    assert ctc.takes(gpu, packed.batch_sizes, [L, L // 5]) == (L <= ctc.LONGEST)
    data = packed.data.to(gpu).requires_grad_()
    total = CTC().loss(PackedSequence(data, *packed[1:]), target).total
    total.backward()
    assert_same((total.detach().cpu(), data.grad.cpu(), 2), truth(packed, target), 1e-8)


@pytest.mark.gpu
def test_a_large_batch_on_a_gpu(gpu):
    lengths = torch.randint(1, 300, (300,)).tolist()
    packed, target = batch(lengths, 58, F32), labels_of(*(n // 4 for n in lengths), O=58)
    first = ours(packed, target, gpu)
    assert_same(first, truth(packed, target), 1e-5)
    assert all(torch.equal(a, b) for a, b in zip(ours(packed, target, gpu), first, strict=True))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_gpu(gpu):
    """From the labels on the CPU to the gradient, on a stream of its own."""
    packed, target = batch((60, 41, 41), 9, F32), labels_of(20, 15, 3, O=9)
    expected = ours(packed, target, gpu)
    data = packed.data.to(gpu).requires_grad_()
    given = PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    try:
        torch.cuda.set_sync_debug_mode("error")
        with torch.cuda.stream(side):
            for _ in range(3):
                score = CTC().loss(given, target)
                (gradient,) = torch.autograd.grad(score.total / score.items, data)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side.synchronize()
    assert torch.equal(score.total.detach().cpu(), expected[0])
    torch.testing.assert_close(gradient.cpu() * 3, expected[1])


@pytest.mark.gpu
def test_a_cuda_graph_takes_new_logits_and_new_labels(gpu):
    packed = batch((60, 41, 41), 9, F32)
    one, two = labels_of(20, 15, 3, O=9), labels_of(20, 15, 3, O=9)
    order = packed.sorted_indices.tolist()

    def prepared(target):
        return ctc.prepare(
            torch.cat([target[i] for i in order]), [len(target[i]) for i in order], packed.batch_sizes, gpu
        )

    targets, data = prepared(one), packed.data.to(gpu).requires_grad_()

    def step():
        total, _ = ctc.loss(data, targets)
        return total.detach(), *torch.autograd.grad(total, data)

    graph, (total, gradient) = captured(step)
    for target in (one, two):
        with torch.no_grad():
            data.normal_()
        targets.data.copy_(prepared(target).data)
        graph.replay()
        again = PackedSequence(data.detach().cpu(), *packed[1:])
        assert_same((total.cpu(), gradient.cpu(), 3), truth(again, target), 1e-5)
