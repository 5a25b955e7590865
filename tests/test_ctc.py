"""CTC's own kernels against torch's: compiled for two architectures, emulated on the CPU, and, where there is one, on a
GPU."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import emulator
import mslmn
from mslmn import packing
from mslmn.objectives import CTC
from mslmn.ops import backends, ctc, cuda, nvrtc
from properties import given, st

F32, F64 = torch.float32, torch.float64
H200 = cuda.Device((9, 0), 132, 232448)
needs_gpp = pytest.mark.skipif(not shutil.which("g++"), reason="the emulator needs g++")
needs_nvrtc = pytest.mark.skipif(nvrtc.why_not() is not None, reason=f"nothing can be compiled: {nvrtc.why_not()}")


def labels_of(*lengths, O=6):
    return [torch.randint(1, O, (n,)) for n in lengths]


def batch(lengths, O=6, dtype=F64, scale=2.0, device="cpu"):
    """Packed logits, sequences in the caller's order."""
    xs = [(scale * torch.randn(n, O, dtype=F64)).to(device, dtype) for n in lengths]
    return pack_sequence(xs, enforce_sorted=False)


def with_gradient(loss, packed, target):
    """The sum of the losses, its gradient with respect to the logits, and the number of sequences."""
    data = packed.data.detach().clone().requires_grad_()
    score = loss(PackedSequence(data, *packed[1:]), target)
    (gradient,) = torch.autograd.grad(score.total, data)
    return score.total.detach(), gradient, score.items


def truth(packed, target):
    """Torch's, sequence by sequence, in float64."""
    data = packed.data.detach().cpu().double().requires_grad_()
    order = range(len(target)) if packed.sorted_indices is None else packed.sorted_indices.tolist()
    lengths, starts = packing.lengths(packed), packed.batch_sizes.cumsum(0) - packed.batch_sizes
    total = data.sum() * 0
    for place, i in enumerate(order):
        rows = data[starts[: lengths[place]] + place].log_softmax(-1)[:, None]
        lengths_of = (torch.tensor([len(rows)]), torch.tensor([len(target[i])]))
        total = total + F.ctc_loss(rows, target[i].cpu()[None], *lengths_of, reduction="sum", zero_infinity=True)
    return total.detach(), torch.autograd.grad(total, data)[0], len(target)


def assert_same(ours, expected, tolerance=1e-12):
    for a, b in zip(ours[:2], expected[:2], strict=True):
        assert (a.cpu().double() - b).norm() <= tolerance * b.norm() + 1e-13
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
    assert ctc.choose(31) == ctc.Layout(1, 1, 8) and ctc.choose(32) == ctc.choose(63) == ctc.Layout(2, 1, 8)
    for longest in (0, 64, 500, ctc.LONGEST):
        layout = ctc.choose(longest)
        assert 32 * layout.pairs * layout.warps > longest
        for real in (F32, F64):
            assert ctc.finish_bytes(layout, real) + ctc.sweep_bytes(layout, real) <= ctc.SHARED
    assert ctc.LONGEST == 2047


# Emulation: the same kernels and the same host code, on CPU tensors


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture
def emulated(monkeypatch, folder):
    """The objective, whose kernels run on the CPU."""
    emulator.install(monkeypatch, folder, H200)
    monkeypatch.setattr(ctc, "takes", lambda *_: True)
    yield CTC().loss
    ctc._functions.cache_clear()


@needs_gpp
@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize(
    ("lengths", "labels", "O"),
    [
        ((12, 7, 3), (3, 1, 1), 5),
        ((1, 1, 1), (1, 0, 2), 4),  # one step: a label, nothing, too short
        ((9, 30, 9, 17), (0, 12, 9, 4), 3),  # repeated labels; equally long sequences keep their order
        ((40, 33), (15, 20), 100),  # many outputs
        ((80,), (40,), 7),  # two pairs a thread
        ((150, 4, 170), (70, 1, 80), 9),  # two warps
        ((6, 5), (0, 0), 1),  # nothing but the blank
    ],
)
def test_emulated_kernels_agree_with_torch(emulated, dtype, lengths, labels, O):
    packed, target = batch(lengths, O, dtype), labels_of(*labels, O=max(O, 2))
    assert_same(with_gradient(emulated, packed, target), truth(packed, target), 1e-12 if dtype == F64 else 1e-6)


@needs_gpp
def test_what_is_too_short_counts_zero(emulated):
    packed = batch((5, 9))
    target = [torch.tensor([1, 1, 2, 2]), torch.tensor([3, 4])]
    total, gradient, items = with_gradient(emulated, packed, target)
    assert items == 2
    assert_same((total, gradient, 2), truth(packed, target))
    short = packing.pad(PackedSequence(gradient, packed.batch_sizes))[:, 1]
    assert torch.equal(short, torch.zeros_like(short))
    total, gradient, _ = with_gradient(emulated, batch((2,)), [torch.tensor([3, 3])])
    assert total == 0 and not gradient.any()
