"""The CUDA kernels: compiled for two architectures, emulated on the CPU, and, where there is one, on a GPU."""

import ctypes
import itertools
import shutil
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils.rnn import pack_sequence

import emulator
import mslmn
from helpers import LAYERS, captured, make
from mslmn import LMN, MSLMN, ClockworkRNN
from mslmn.ops import backends, clocked, cuda, nvrtc
from mslmn.ops.weights import Sizes, Weights, shapes
from properties import given, st

F32, F64 = torch.float32, torch.float64
H200 = cuda.Device((9, 0), 132, 232448)
HANDWRITING, WORDS, GENERATION = Sizes(4, 144, 16, 9, True), Sizes(13, 25, 25, 7, True), Sizes(0, 1, 4, 9, True)
LARGEST_SMALL = Sizes(4, 16, 8, 6, True)  # of two rows a lane
needs_gpp = pytest.mark.skipif(not shutil.which("g++"), reason="the emulator needs g++")
needs_nvrtc = pytest.mark.skipif(nvrtc.why_not() is not None, reason=f"nothing can be compiled: {nvrtc.why_not()}")


def test_this_machine_can_compile_the_kernels():
    """The suite must not pass by skipping: NVRTC is a development dependency."""
    pytest.importorskip("hypothesis")  # a bare machine
    assert nvrtc.why_not() is None


# Compiling


@needs_nvrtc
@pytest.mark.parametrize(("architecture", "B"), [("sm_80", 1), ("sm_90", 1000)])
@pytest.mark.parametrize("part", ["forward", "backward"])
@pytest.mark.parametrize(
    ("sizes", "real", "value"),
    [
        (HANDWRITING, F32, F32),
        (HANDWRITING, F32, torch.bfloat16),
        (HANDWRITING, F32, torch.float16),
        (HANDWRITING, F64, F64),
        (WORDS, F32, F32),
        (GENERATION, F32, F32),
        (GENERATION, F64, F64),
        (LARGEST_SMALL, F32, F32),
        (LARGEST_SMALL, F32, torch.bfloat16),
        (Sizes(40, 7, 3, 2, False), F32, torch.float16),  # small, the input multiplied before
        (Sizes(3, 5, 9, 1, True), F32, F32),  # a small LMN
        (Sizes(40, 128, 128, 1, False), F32, F32),  # an LMN whose input is multiplied before
        (Sizes(3, 0, 5, 12, True), F32, F32),  # a Clockwork RNN
        (Sizes(4, 900, 200, 4, True), F32, F32),  # more than a block's shared memory holds
    ],
)
def test_the_kernels_compile(architecture, B, part, sizes, real, value):
    choices = cuda.choose(part, sizes, real, value, B, H200)
    code = nvrtc.compile_source(
        cuda.source(part, sizes, real, value, choices), (*nvrtc.OPTIONS, f"--gpu-architecture={architecture}")
    )
    assert code[:4] == b"\x7fELF"


@needs_nvrtc
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_kernels_for_larger_networks_compile_for_small_ones_too(part, monkeypatch):
    monkeypatch.setattr(cuda, "is_small", lambda *_: False)
    choices = cuda.choose(part, GENERATION, F32, F32, 1, H200)
    source = cuda.source(part, GENERATION, F32, F32, choices)
    assert not choices.small and "#define SMALL" not in source
    assert nvrtc.compile_source(source, (*nvrtc.OPTIONS, "--gpu-architecture=sm_90"))[:4] == b"\x7fELF"


@needs_nvrtc
def test_what_nvrtc_says_reaches_the_user():
    with pytest.raises(RuntimeError, match=r"(?s)NVRTC refuses the kernels: .*error: .*nonsense"):
        nvrtc.compile_source("nonsense", nvrtc.OPTIONS)


@needs_nvrtc
def test_compiled_kernels_are_kept_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("MSLMN_CACHE", str(tmp_path / "kernels"))
    source = 'extern "C" __global__ void nothing() {}'
    code = nvrtc.compiled(source, (8, 0))
    (file,) = (tmp_path / "kernels").iterdir()
    assert file.suffix == ".cubin"
    with monkeypatch.context() as without:
        without.setattr(nvrtc, "compile_source", lambda *_: pytest.fail("compiled again"))
        assert nvrtc.compiled(source, (8, 0)) == code
    file.write_bytes(file.read_bytes()[:-7])  # cut off
    assert nvrtc.compiled(source, (8, 0)) == code
    with monkeypatch.context() as without:  # and mended
        without.setattr(nvrtc, "compile_source", lambda *_: pytest.fail("compiled again"))
        assert nvrtc.compiled(source, (8, 0)) == code
    other = nvrtc.compiled(source, (9, 0))
    assert other != code and len(list((tmp_path / "kernels").iterdir())) == 2
    (tmp_path / "file").touch()
    monkeypatch.setenv("MSLMN_CACHE", str(tmp_path / "file"))  # where nothing can be kept
    assert nvrtc.compiled(source, (8, 0)) == code


def test_the_cache_is_where_users_expect_it(monkeypatch):
    monkeypatch.delenv("MSLMN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert str(nvrtc.cache_folder()) == "/caches/mslmn"
    monkeypatch.setenv("MSLMN_CACHE", "/mine")
    assert str(nvrtc.cache_folder()) == "/mine"


# Choices


@given(
    st.builds(Sizes, st.integers(0, 600), st.integers(0, 1500), st.integers(1, 300), st.integers(1, 63), st.booleans()),
    st.sampled_from([(F32, F32), (F32, torch.bfloat16), (F64, F64)]),
    st.integers(1, 2000),
    st.sampled_from([H200, cuda.Device((8, 0), 108, 166912), cuda.Device((8, 9), 58, 101376)]),
)
def test_choices_fit_the_device(sizes, types, B, device):
    for part in ("forward", "backward"):
        choices = cuda.choose(part, sizes, *types, B, device)
        if choices is None:
            least = [cuda.Choices(1, 512, lanes, 8, False, 0) for lanes in (1, 2, 4)]  # more are more padding
            assert any(cuda.shared_bytes(part, sizes, *types, choices) > device.shared for choices in least)
            continue
        assert choices.blocks * (cuda.shared_bytes(part, sizes, *types, choices) + 1024) <= device.shared + 1024
        if choices.small:
            assert (choices.compute, choices.blocks) == (32, 1)
            continue
        assert choices.compute & 31 == 0 and choices.compute + 32 * cuda.CARRIERS[part] <= 1024
        assert choices.lanes == 1 or choices.lanes * sizes.M <= choices.compute


@pytest.mark.parametrize(
    ("sizes", "real", "forward", "backward"),
    [
        (GENERATION, F32, True, True),
        (GENERATION, F64, True, True),
        (LARGEST_SMALL, F32, True, True),
        (LARGEST_SMALL, F64, False, False),  # twice the registers
        (Sizes(4, 17, 8, 6, True), F32, False, False),  # 65 rows
        (Sizes(4, 32, 2, 4, True), F32, True, True),
        (Sizes(4, 33, 2, 4, True), F32, False, False),  # h in more than one row a lane
        (Sizes(3, 1, 1, 32, True), F32, True, True),
        (Sizes(3, 1, 1, 33, True), F32, False, False),  # a lane each for the modules' records
        (Sizes(16, 8, 48, 1, True), F32, True, False),  # 128 registers
        (Sizes(16, 8, 49, 1, True), F32, False, False),
        (Sizes(17, 8, 48, 1, True), F32, True, False),  # multiplied before
        (Sizes(3, 0, 4, 3, True), F32, False, False),  # a Clockwork RNN
    ],
)
def test_one_warp_takes_a_small_network_through_time(sizes, real, forward, backward):
    assert [cuda.choose(part, sizes, real, real, 1, H200).small for part in cuda.CARRIERS] == [forward, backward]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_packing_says_where_everything_lies(lengths):
    packed = pack_sequence([torch.zeros(n) for n in sorted(lengths, reverse=True)])
    T, B = max(lengths), len(lengths)
    found = cuda.packing_of(packed.batch_sizes, torch.device("cpu")).tolist()
    offsets, by_length = [0, *itertools.accumulate(packed.batch_sizes.tolist())], sorted(lengths, reverse=True)
    assert found == [*offsets, *by_length, 0, *itertools.accumulate(by_length)]
    assert len(found) == T + 1 + B + B + 1


def test_packings_are_kept_but_not_for_ever():
    cuda._packings.clear()
    cpu = torch.device("cpu")
    first = cuda.packing_of(torch.tensor([3, 1]), cpu)
    assert cuda.packing_of(torch.tensor([3, 1]), cpu) is first
    for n in range(4, 4 + cuda.PACKINGS):
        cuda.packing_of(torch.tensor([n]), cpu)
    assert len(cuda._packings) == cuda.PACKINGS
    assert cuda.packing_of(torch.tensor([3, 1]), cpu) is not first


# Emulation: the same kernels and the same host code, on CPU tensors


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture
def emulate(monkeypatch, folder):
    """Make the CUDA backend compute CPU tensors on a device of a few processors with so much shared memory."""

    def install(processors=132, shared=H200.shared, small=True, **forced):
        emulator.install(monkeypatch, folder, cuda.Device((9, 0), processors, shared))
        if not small or forced:  # the kernels for larger networks
            monkeypatch.setattr(cuda, "is_small", lambda *_: False)
        if forced:
            monkeypatch.setattr(cuda, "choose", lambda *_: forced_choices(*_, **forced))

    choose = cuda.choose

    def forced_choices(*arguments, **forced):
        return choose(*arguments)._replace(**forced)

    yield install
    cuda._kernels_of.cache_clear()


def problem(sizes, T=13, B=3, lengths=None, dtype=F64, value=None):
    flat = [0.3 * torch.randn(shape, dtype=dtype) for shape in shapes(sizes)]
    weights = Weights.from_flat(flat, sizes.H == 0, sizes.bias)
    x, batch_sizes = torch.randn(T, B, sizes.I, dtype=dtype), None
    if lengths:
        packed = pack_sequence([torch.randn(n, sizes.I, dtype=dtype) for n in sorted(lengths, reverse=True)])
        x, batch_sizes, B = packed.data, packed.batch_sizes, len(lengths)
    m, clock = torch.randn(B, sizes.g * sizes.M, dtype=dtype), torch.tensor([0, 3, 2**40, 7, 2**62 - 1, 6][:B])
    return x.to(value or dtype), m, clock, weights, batch_sizes


def both_passes(backend, given, reverse, gradients=None, wanted=(True, True)):
    """Everything a backend returns: three results, three gradients."""
    torch.manual_seed(1)
    H = given[3].H
    memory, hidden, last = backend.forward(*given, reverse, True)
    kinds = gradients or ("memory", "hidden", "last")
    outputs = {"memory": memory, "hidden": hidden, "last": last}
    g = {name: torch.randn(t.shape, dtype=F64).to(t.dtype) for name, t in outputs.items()}
    chosen = [g[name] if name in kinds and (H or name != "hidden") else None for name in g]
    return [memory, hidden, last, *backend.backward(*given, reverse, memory, hidden, *chosen, *wanted)]


def assert_same(ours, expected, tolerance=1e-11):
    for a, b in zip(ours, expected, strict=True):
        if a is None or b is None:
            assert a is b
            continue
        assert a.shape == b.shape
        if b.numel():
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(b.abs().max().item(), 1e-3))


@needs_gpp
@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (Sizes(4, 20, 8, 6, True), {"T": 70}),  # in quads; every number of modules that fire has its turn
        (Sizes(2, 7, 3, 6, False), {"T": 70}),
        (Sizes(19, 5, 2, 4, True), {"lengths": [9, 13, 1, 4, 4]}),  # multiplied before; packed
        (Sizes(3, 0, 4, 5, True), {"lengths": [17, 30, 2]}),
        (Sizes(0, 0, 3, 2, False), {}),
        (Sizes(3, 40, 33, 1, True), {"T": 5}),  # an LMN: more sums than threads
        (Sizes(0, 1, 4, 9, True), {"T": 33, "B": 1}),
    ],
)
def test_emulated_kernels_agree(emulate, sizes, options, small):
    if small and not cuda.is_small("forward", sizes, F64):
        pytest.skip("not small: the kernels are the same")
    emulate(small=small)
    given = problem(sizes, **options)
    for reverse in (False, True):
        assert_same(both_passes(cuda, given, reverse), both_passes(clocked, given, reverse))


@needs_gpp
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (Sizes(0, 1, 4, 9, True), {"T": 150, "B": 6}),
        (Sizes(2, 1, 4, 9, True), {"lengths": [40, 1, 33, 2, 1, 7]}),
        (Sizes(16, 3, 5, 3, True), {"T": 20}),  # the most inputs multiplied inside
        (Sizes(1, 1, 1, 1, False), {"T": 9}),
        (Sizes(3, 5, 9, 1, True), {"lengths": [9, 13, 1]}),  # an LMN
        (Sizes(2, 9, 11, 2, True), {"T": 11}),
        (Sizes(2, 5, 3, 4, True), {"T": 40}),  # all modules' weights in registers
        (Sizes(2, 5, 3, 5, False), {"T": 40}),  # not those of the slowest
        (Sizes(3, 2, 1, 29, True), {"T": 40}),
        (Sizes(17, 2, 3, 5, True), {"lengths": [9, 21, 1]}),  # multiplied before, for two values of h of every lane
    ],
)
def test_emulated_kernels_of_one_warp_agree(emulate, sizes, options):
    emulate()
    given = problem(sizes, **options)
    assert cuda.is_small("forward", sizes, F64)
    for reverse in (False, True):
        assert_same(both_passes(cuda, given, reverse), both_passes(clocked, given, reverse))


@needs_gpp
@pytest.mark.parametrize("sizes", [LARGEST_SMALL, Sizes(1, 32, 16, 2, False), Sizes(2, 16, 48, 1, True)])
def test_emulated_kernels_of_one_warp_agree_where_it_is_full(emulate, monkeypatch, sizes):
    monkeypatch.setattr(cuda, "IN_REGISTERS", 1024)  # exactly, in float64: the emulator has as many as it takes
    emulate()
    given = problem(sizes, T=35)
    assert all(cuda.is_small(part, sizes, F64) for part in cuda.CARRIERS)
    assert_same(both_passes(cuda, given, False), both_passes(clocked, given, False))


@needs_gpp
@pytest.mark.parametrize(
    "forced",
    [
        {"resident": 0, "cached": False},  # no weight in shared memory
        {"resident": 2, "lanes": 4, "compute": 32},  # several rows a thread
        {"ahead": 4, "compute": 64, "lanes": 2},
        {"blocks": 2, "cached": False, "compute": 96},
    ],
)
def test_emulated_kernels_agree_however_they_are_laid_out(emulate, forced):
    emulate(**forced)
    given = problem(Sizes(3, 22, 5, 5, True), T=35)
    assert_same(both_passes(cuda, given, False), both_passes(clocked, given, False))


@needs_gpp
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("gradients", [("memory",), ("hidden",), ("last",)])
@pytest.mark.parametrize("sizes", [Sizes(4, 20, 8, 6, True), Sizes(4, 3, 2, 6, True)])
def test_emulated_kernels_agree_where_gradients_are_missing_or_not_wanted(emulate, reverse, gradients, sizes):
    emulate()
    given = problem(sizes, lengths=[9, 21, 1])
    for wanted in itertools.product([False, True], repeat=2):
        ours, expected = (both_passes(b, given, reverse, gradients, wanted) for b in (cuda, clocked))
        assert_same(ours, expected)


@needs_gpp
@pytest.mark.parametrize("T", [13, 3])  # 3: fewer steps than are fetched ahead
@pytest.mark.parametrize(("low", "tolerance"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
@pytest.mark.parametrize("small", [True, False])
def test_emulated_kernels_store_half_and_compute_whole(emulate, low, tolerance, T, small):
    """Rows of an odd number of 16-bit values begin in the middle of a word; the state is never rounded."""
    emulate(small=small)
    others = [Sizes(17, 21, 5, 3, True), Sizes(3, 1, 5, 3, True)] if small else [Sizes(3, 0, 5, 3, True)]
    for sizes in (Sizes(3, 21, 5, 3, True), *others):
        given = problem(sizes, T, dtype=F32, value=low)
        ours = both_passes(cuda, given, False)
        expected = both_passes(clocked, (given[0].float(), *given[1:]), False)
        assert [t.dtype for t in ours] == [low, low, F32, low, F32, F32]
        if sizes.H and sizes.I <= cuda.INLINE_INPUT:  # else Wxh x is rounded
            assert_same(ours[2:3], expected[2:3], 1e-6)
        assert_same([t.float() for t in ours], expected, tolerance)


@needs_gpp
@pytest.mark.parametrize("sizes", [Sizes(4, 20, 8, 6, True), LARGEST_SMALL])
def test_no_result_depends_on_which_thread_comes_first(emulate, sizes):
    """Every launch of the emulator has another order of threads and another moment for every copy."""
    emulate()
    given = problem(sizes, T=70, dtype=F32)
    first = both_passes(cuda, given, False)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(both_passes(cuda, given, False), first, strict=True))


@needs_gpp
def test_the_emulator_sees_threads_that_wait_for_ever(emulate, monkeypatch):
    """A check of the check: a kernel with a barrier too few is found out."""
    text = nvrtc.text("cuda.cu")
    broken = text.replace(
        "            barrier(THREADS);\n            fetch_step();\n", "            fetch_step();\n", 1
    )
    assert broken != text
    emulate(small=False)
    monkeypatch.setattr(nvrtc, "text", lambda *names: broken)
    with pytest.raises(RuntimeError, match="threads wait for others who never come"):
        cuda.forward(*problem(Sizes(4, 20, 8, 3, True)), False, True)


@needs_gpp
@pytest.mark.parametrize("nth", range(2))
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_the_emulator_sees_lanes_that_do_not_wait(emulate, monkeypatch, part, nth):
    """Another: without one of the two barriers of a step, lanes read what others have yet to write."""
    loop = "each_step(\n        [&]" if part == "forward" else "constexpr bool slowest"
    *first, step = nvrtc.text("cuda.cu", "small.cu").rpartition(loop)
    head, *rest = step.split("barrier(32);")
    broken = head + "".join((" " if i == nth else "barrier(32);") + after for i, after in enumerate(rest))
    assert len(rest) >= 2 and first[1]
    given = problem(Sizes(2, 3, 4, 5, True), T=9)
    expected = both_passes(clocked, given, False)
    emulate()
    if part == "forward":  # the backward pass is as it was
        assert_same(both_passes(cuda, given, False), expected)
        cuda._kernels_of.cache_clear()
    monkeypatch.setattr(nvrtc, "text", lambda *names: "".join(first) + broken)
    with pytest.raises(AssertionError):
        assert_same(both_passes(cuda, given, False), expected)


@needs_gpp
@pytest.mark.parametrize("kind", list(LAYERS))
def test_a_layer_on_the_emulated_backend(emulate, monkeypatch, kind):
    emulate()
    layer = make(kind, bidirectional=True)
    x = torch.randn(9, 3, 2, dtype=F64, requires_grad=True)
    with mslmn.set_backend("reference"):
        output, end = layer(x)
        weigh = torch.randn_like(output)
        truth = [output, end.memory, *torch.autograd.grad((output * weigh).sum(), [x, *layer.parameters()])]
    monkeypatch.setattr("mslmn.ops.fused.choose_for", lambda *_: "cuda")
    output, end = layer(x)
    ours = [output, end.memory, *torch.autograd.grad((output * weigh).sum(), [x, *layer.parameters()])]
    assert_same(ours, truth)


@needs_gpp
def test_the_backend_refuses_tensors_that_do_not_fit(emulate):
    emulate()
    x, m, clock, weights, sizes = problem(Sizes(2, 4, 3, 3, True))
    with pytest.raises(ValueError, match=r"m must be \(3, 9\) torch.float64 on the cpu, got \(3, 6\)"):
        cuda.forward(x, m[:, :6], clock, weights, sizes, False, True)
    with pytest.raises(ValueError, match=r"weight 1 of 14 must be \(4,\) .* got \(2,\)"):
        cuda.forward(x, m, clock, weights._replace(b_h=weights.b_h[:2]), sizes, False, True)
    with pytest.raises(ValueError, match=r"memory must be \(13, 3, 9\)"):
        cuda.backward(x, m, clock, weights, sizes, False, x, x, None, None, None, True, True)


# The choice of the backend, without a GPU


@pytest.fixture
def pretend(monkeypatch):
    """A CUDA device that can compile, as far as the choice is concerned."""
    monkeypatch.setattr(cuda, "why_not", lambda index: None)
    monkeypatch.setattr(cuda, "device_of", lambda index: H200)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cuda.why_not_these.cache_clear()
    yield torch.device("cuda:0")
    cuda.why_not_these.cache_clear()


def test_cuda_tensors_get_the_cuda_kernels(pretend):
    assert backends.choose(pretend) == "cuda"
    assert backends.choose_for(pretend, HANDWRITING, F32, torch.bfloat16, 600) == "cuda"
    assert backends.choose_for(torch.device("cpu"), HANDWRITING, F32, F32, 600) in ("cpu", "torch")
    with mslmn.set_backend("cuda"), pytest.raises(RuntimeError, match="computes CUDA tensors, these are on cpu"):
        backends.choose(torch.device("cpu"))


@pytest.mark.parametrize(
    ("sizes", "steps", "why"),
    [
        (Sizes(4, 9000, 10, 9, True), 10, "does not fit the 232448 bytes of shared memory"),
        (HANDWRITING, 2**30 + 1, "1073741824 steps of all sequences together at most, here are 1073741825"),
    ],
)
def test_what_does_not_fit_falls_back_with_a_warning(pretend, sizes, steps, why):
    with pytest.warns(UserWarning, match=f"no fused CUDA kernels for a layer of Sizes.*{why}.*torch backend"):
        assert backends.choose_for(pretend, sizes, F32, F32, steps) == "torch"
    with mslmn.set_backend("cuda"), pytest.raises(RuntimeError, match=f"cannot compute this layer: .*{why}"):
        backends.choose_for(pretend, sizes, F32, F32, steps)


def test_without_a_compiler_torch_computes_and_the_doctor_says_why(monkeypatch):
    monkeypatch.setattr(cuda, "why_not", lambda index: "there is no NVRTC")
    device = torch.device("cuda:0")
    assert backends.choose(device) == "torch"
    assert backends.explain(device) == "no fused kernels: there is no NVRTC"
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="backend 'cuda' cannot be had: there is no CUDA device, or take 'auto'"):
            mslmn.set_backend("cuda")


def test_the_doctor_says_where_kernels_are_kept(pretend, monkeypatch):
    monkeypatch.setattr(cuda, "compiler", lambda: "13.0")
    monkeypatch.setenv("MSLMN_CACHE", "/kernels")
    assert backends.explain(pretend) == (
        "fused kernels, compiled by NVRTC 13.0 when a layer first runs, kept in /kernels"
    )
    monkeypatch.setenv("MSLMN_CACHE", "/dev/null/kernels")
    assert backends.explain(pretend).endswith(
        "runs, and again in each process, because /dev/null/kernels cannot be written (set MSLMN_CACHE)"
    )


@pytest.mark.parametrize("value", [F32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [Sizes(2, 4, 3, 4, True), Sizes(2, 0, 3, 4, True)])
def test_shapes_and_dtypes_on_fake_cuda_tensors(sizes, value):
    """No GPU, no memory, no kernel: what compilers and exporters see of the operators."""
    clockwork, G = sizes.H == 0, sizes.g * sizes.M
    with FakeTensorMode(), torch.no_grad():  # autograd asks for the device's streams
        weights = [torch.empty(shape, device="cuda") for shape in shapes(sizes)]
        x = torch.empty(9, 3, 2, device="cuda", dtype=value)
        m, clock = torch.empty(3, G, device="cuda"), torch.empty(3, device="cuda", dtype=torch.int64)
        results = torch.ops.mslmn.run(x, m, clock, weights, None, clockwork, True, False, not clockwork)
        assert [t.shape for t in results] == [(9, 3, G), (0,) if clockwork else (9, 3, 4), (3, G)]
        assert [t.dtype for t in results] == [value, value, F32] and results[0].device.type == "cuda"
        grads = torch.ops.mslmn.run_backward(
            *(x, m, clock, weights, None, clockwork, True, False, *results[:2], results[0], None, None, True, True)
        )
        assert [t.shape for t in grads] == [x.shape, m.shape, (sum(w.numel() for w in weights),)]
        assert [t.dtype for t in grads] == [value, F32, F32]


def fake(layer):
    """As if it lay on a GPU; within a FakeTensorMode."""
    for module in layer.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="cuda:0"))


@contextmanager
def autocast_as_on_a_gpu(enabled):
    """`torch.autocast` itself switches off where there is none."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", enabled)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


@pytest.mark.parametrize("kind", ["fp32", "autocast", "bfloat16"])
def test_compilers_see_one_graph_of_a_layer_on_a_gpu(monkeypatch, kind):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    cuda.why_not.cache_clear()
    layer = MSLMN(4, 24, 8, 4, dtype=torch.bfloat16 if kind == "bfloat16" else F32)
    torch.compiler.reset()
    with FakeTensorMode(), torch.no_grad(), autocast_as_on_a_gpu(kind == "autocast"):
        fake(layer)
        x = torch.empty(30, 3, 4, device="cuda:0", dtype=layer.cells[0].weight.dtype)
        output, state = torch.compile(layer, backend="eager", fullgraph=True)(x)
    assert output.shape == (30, 3, 32) and output.dtype == (F32 if kind == "fp32" else torch.bfloat16)
    assert state.clock.shape == (3,)
    torch.compiler.reset()
    cuda.why_not.cache_clear()


def test_a_layer_on_a_gpu_is_exported_for_batches_of_any_size(pretend):
    layer = MSLMN(4, 24, 8, 4)
    dynamic = {"input": {0: torch.export.Dim("T", min=2), 1: torch.export.Dim("B")}}
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True), torch.no_grad():
        fake(layer)
        program = torch.export.export(layer, (torch.empty(30, 3, 4, device="cuda:0"),), dynamic_shapes=dynamic)
    assert all(found.upper > 2**31 for found in program.range_constraints.values())


@needs_nvrtc
def test_code_is_for_the_newest_architecture_that_is_known_and_runs(monkeypatch):
    known = [75, 80, 86, 90, 100, 120]
    monkeypatch.setattr("cuda.bindings.nvrtc.nvrtcGetSupportedArchs", lambda: (mock.Mock(value=0), known))
    found = [nvrtc.architecture.__wrapped__(capability) for capability in ((8, 0), (8, 9), (9, 0), (10, 3), (13, 0))]
    assert found == [80, 86, 90, 100, None]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (13, 0))
    monkeypatch.setattr(nvrtc, "architecture", nvrtc.architecture.__wrapped__)
    with mock.patch.object(cuda, "compiler", return_value="12.8"):
        why = cuda.why_not.__wrapped__(0)
    assert why == "NVRTC 12.8 does not know its compute capability, 13.0; update PyTorch"


@pytest.mark.parametrize("lengths", [[6, 5, 4]])
def test_nothing_depends_on_rows_of_no_step(emulate, lengths):
    """Of a placed batch, which has fewer rows than there is room for."""
    emulate()
    x, m, clock, weights, batch_sizes = problem(Sizes(20, 7, 3, 2, True), lengths=lengths)
    table = torch.from_numpy(cuda.packing_table(np.array([3, 2, 1]), 6))
    torch.use_deterministic_algorithms(True)  # what is not written is NaN
    found = []
    for rest in (0.0, 7.0):
        x[6:] = rest
        with cuda.placed(table):
            memory, hidden, _ = cuda.forward(x, m, clock, weights, batch_sizes, False, True)
            assert not memory[6:].any() and not hidden[6:].any()
            ones = torch.ones_like(memory)
            found.append(
                cuda.backward(x, m, clock, weights, batch_sizes, False, memory, hidden, ones, None, None, True, True)
            )
    torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*found, strict=True))


def test_weights_that_are_negated_lazily_are_read_as_they_mean(emulate):
    emulate()
    x, m, clock, weights, _ = problem(Sizes(3, 5, 4, 2, True))
    expected = cuda.forward(x, m, clock, weights.map(torch.neg), None, False, True)
    found = cuda.forward(x, m, clock, weights.map(torch._neg_view), None, False, True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# On a GPU


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    assert backends.choose(torch.device("cuda", 0)) == "cuda", backends.explain(torch.device("cuda", 0))
    return torch.device("cuda", 0)


def passes(layer, x, weigh):
    x = x.clone().requires_grad_()
    output, end = layer(x)
    return [output, end.memory, *torch.autograd.grad((output * weigh).sum(), [x, *layer.parameters()])]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sizes", "T", "B"),
    [(HANDWRITING, 600, 32), (HANDWRITING, 600, 200), (WORDS, 97, 25), (LARGEST_SMALL, 300, 7)],
)
def test_float32_errors_on_a_gpu(gpu, sizes, T, B):
    layer = MSLMN(*sizes[:4], device=gpu)
    exact = MSLMN(*sizes[:4], device=gpu, dtype=F64)
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(T, B, sizes.I, device=gpu)
    weigh = torch.rand(T, B, layer.output_size, device=gpu)
    with mslmn.set_backend("torch"):
        truth = passes(exact, x.double(), weigh.double())
    for ours, true in zip(passes(layer, x, weigh), truth, strict=True):
        assert (ours.double() - true).norm() <= 1e-5 * true.norm()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "layer",
    [
        *(MSLMN(4, 144, 16, 9), LMN(40, 128, 128), ClockworkRNN(4, 16, 9), MSLMN(4, 600, 96, 5)),
        *(MSLMN(4, 16, 8, 6), MSLMN(0, 1, 4, 9), MSLMN(20, 5, 3, 4), LMN(3, 5, 9)),  # one warp a sequence
    ],
    ids=repr,
)
@pytest.mark.parametrize("B", [1, 33, 300])
def test_sizes_and_batches_on_a_gpu_bit_for_bit_again(gpu, layer, B):
    layer = layer.to(gpu)
    x = torch.randn(40, B, layer.input_size, device=gpu)
    weigh = torch.randn(40, B, layer.output_size, device=gpu)
    ours = passes(layer, x, weigh)
    assert all(torch.equal(a, b) for a, b in zip(ours, passes(layer, x, weigh), strict=True))
    with mslmn.set_backend("torch"):
        for a, b in zip(ours, passes(layer, x, weigh), strict=True):
            assert (a - b).norm() <= 1e-4 * b.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("sizes", [(4, 48, 8, 4), (4, 5, 3, 5)])
def test_a_training_step_as_a_cuda_graph(gpu, packed, bidirectional, sizes):
    layer = MSLMN(*sizes, bidirectional=bidirectional, device=gpu)
    xs = [torch.randn(n, 4, device=gpu) for n in (31, 17, 17, 5)]
    x = pack_sequence(xs) if packed else torch.stack([xs[0]] * 3, 1)
    data = x.data if packed else x

    def step():
        layer.zero_grad(set_to_none=False)
        output, _ = layer(x)
        (output.data if packed else output).square().sum().backward()

    graph, _ = captured(step)
    data.normal_()
    graph.replay()
    replayed = [p.grad.clone() for p in layer.parameters()]
    step()
    for p, found in zip(layer.parameters(), replayed, strict=True):
        torch.testing.assert_close(found, p.grad)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", list(LAYERS))
@pytest.mark.parametrize(("low", "tolerance"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_autocast_stores_half_and_computes_whole(gpu, kind, low, tolerance):
    layer = LAYERS[kind](8, device=gpu)
    x = torch.randn(300, 3, 8, device=gpu).to(low)
    expected, end = layer(x.float())
    expected.square().mean().backward()
    grads = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    with torch.autocast("cuda", dtype=low):
        output, state = layer(x)
        output.float().square().mean().backward()
    assert output.dtype == low and state.memory.dtype == F32
    if kind != "ClockworkRNN":  # whose Wxh x is rounded too
        torch.testing.assert_close(state.memory, end.memory, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.float(), expected, rtol=tolerance, atol=tolerance)
    for p, g in zip(layer.parameters(), grads, strict=True):
        assert p.grad.dtype == F32
        assert (p.grad - g).norm() <= 2 * tolerance * g.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("small", [True, False])
def test_short_sequences_stored_in_half(gpu, monkeypatch, small):
    """Fewer steps than the kernels fetch ahead: what lies behind the last one must not be believed."""
    if not small:
        monkeypatch.setattr(cuda, "is_small", lambda *_: False)
    cuda._kernels_of.cache_clear()
    layer = MSLMN(2, 4, 3, 3, device=gpu)
    for T in range(1, 12):
        x = torch.randn(T, 3, 2, device=gpu).bfloat16()
        expected = layer(x.float())[0]
        for _ in range(50):  # shared memory holds what others left there
            with torch.autocast("cuda", dtype=torch.bfloat16):
                output = layer(x)[0]
            output.sum().backward()
        torch.testing.assert_close(output.float(), expected, rtol=0.03, atol=0.03)
    cuda._kernels_of.cache_clear()


@pytest.mark.gpu
def test_a_thread_that_has_no_context_yet(gpu):
    """As autograd's may be: the first thing that it does on the GPU is a backward pass."""
    cuda._kernels_of.cache_clear()
    layer, x = MSLMN(2, 5, 3, 2, device=gpu), torch.randn(6, 3, 2, device=gpu)
    (weights,) = [cell.weights() for cell in layer.cells]
    m, clock = x.new_zeros(3, 6), torch.zeros(3, dtype=torch.int64, device=gpu)
    with torch.no_grad():
        memory, hidden, _ = cuda.forward(x, m, clock, weights, None, False, True)
        given = (x, m, clock, weights, None, False, memory, hidden, torch.ones_like(memory), None, None, False, True)
        expected = [t.clone() for t in cuda.backward(*given)[1:]]
    cuda._kernels_of.cache_clear()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(cuda.backward, *given).result()[1:]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_compiled_on_a_gpu(gpu):
    torch.compiler.reset()
    layer = MSLMN(4, 24, 8, 4, bidirectional=True, device=gpu)
    x, weigh = torch.randn(30, 3, 4, device=gpu), torch.randn(30, 3, 64, device=gpu)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = passes(layer, x, weigh)
    y = x.clone().requires_grad_()
    output, end = compiled(y)
    ours = [output, end.memory, *torch.autograd.grad((output * weigh).sum(), [y, *layer.parameters()])]
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
def test_a_view_that_begins_anywhere(gpu):
    """Kernels read 16 bytes at a time; what a user hands over need not begin at a multiple."""
    layer = MSLMN(4, 24, 8, 4, device=gpu)
    memory = torch.randn(5 * 3 * 4 + 1, device=gpu)
    x = memory[1:].view(5, 3, 4)
    output, _ = layer(x)
    assert torch.equal(output, layer(x.clone())[0])
    odd = torch.randn(output.numel() + 1, device=gpu)[1:].view_as(output)
    x.requires_grad_()
    for gradient in (odd, odd.clone()):
        output, _ = layer(x)
        grads = torch.autograd.grad(output, [x, *layer.parameters()], gradient)
    again = torch.autograd.grad(layer(x)[0], [x, *layer.parameters()], odd)
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


@pytest.mark.gpu
def test_the_clock_of_a_state_is_the_callers_own(gpu):
    """Many are filled at once."""
    layer, x = MSLMN(2, 5, 3, 2, device=gpu), torch.randn(6, 3, 2, device=gpu)
    with torch.inference_mode():
        for _ in range(3):
            layer(x)
    side = torch.cuda.Stream(gpu)
    for i in range(150):
        with torch.no_grad(), torch.cuda.stream(side if i % 3 == 0 else torch.cuda.current_stream(gpu)):
            state = layer(x)[1]
            assert state.clock.tolist() == [6, 6, 6]
            state.clock.add_(1)  # a later one does not see it
    _, state = layer(x)
    output, end = layer(x, state)
    output.sum().backward()
    assert end.clock.tolist() == [12, 12, 12]
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        clock = layer(x)[1].clock
        clock += 1
    for _ in range(2):
        graph.replay()
        assert clock.tolist() == [7, 7, 7]


def test_launches_hand_the_driver_what_they_were_given(monkeypatch):
    """And in each thread, and after more kinds of launches than are kept."""
    seen = []

    def driver(config, function, parameters, extra):
        grid_block_shared = (ctypes.c_uint * 7).from_address(config)
        stream, attributes = (ctypes.c_uint64 * 2).from_address(config + 32)
        (count,) = (ctypes.c_uint * 1).from_address(config + 48)
        struct = (ctypes.c_uint64 * 1).from_address(parameters)[0]
        arguments = (ctypes.c_int64 * 3).from_address(struct)
        seen.append((function, *grid_block_shared, stream, attributes, count, *arguments, extra))
        return 0

    monkeypatch.setattr(nvrtc, "_cuLaunchKernelEx", lambda: driver)
    monkeypatch.setattr(nvrtc, "enter_context", lambda: None)
    monkeypatch.setattr(nvrtc, "_here", threading.local())

    def launch(i):
        arguments, first = ([2**62, -1], array("Q", [i])) if i % 2 else ([i, 2**62, -1], None)
        nvrtc.launch(7, (i + 1, 2), 64, 1024, arguments, 2**40, first)

    launches = [*range(nvrtc.PREPARED + 3), *range(5), *[2] * 5]
    for i in launches:
        launch(i)
    expected = [(7, i + 1, 2, 1, 64, 1, 1, 1024, 2**40, 0, 0, i, 2**62, -1, 0) for i in launches]
    assert seen == expected
    assert len(nvrtc._here.launches) <= nvrtc.PREPARED
    seen.clear()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(launch, launches))
    assert sorted(seen) == sorted(expected)
