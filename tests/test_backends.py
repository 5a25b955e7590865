"""Every backend against the reference: outputs, final state and all gradients, and what may not change them."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode

import mslmn
from conftest import keep_lengths_here
from helpers import LAYERS, make
from mslmn import LMN, MSLMN, ClockworkRNN, State, ops
from mslmn.cells import MSLMNCell
from mslmn.ops import backends, cpu, fused, streams

F64 = torch.float64
CPU = ["torch", *(f"cpu, {isa}" for isa in cpu.INSTRUCTION_SETS)]
CUDA = [pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "torch on cuda")]
everywhere = pytest.mark.usefixtures("everywhere")


@pytest.fixture(params=[*CPU, *CUDA])
def backend(request, monkeypatch):
    """Force a backend, and one instruction set of the kernels; what the test makes lies on its device."""
    if "cuda" in request.param and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    name, _, isa = request.param.partition(", ")
    if name == "cpu":
        if reason := cpu.why_not():
            pytest.skip(f"no CPU kernels: {reason}")
        wanted, best = (cpu.INSTRUCTION_SETS.index(i) for i in (isa, cpu.instruction_set()))
        if wanted > best:
            pytest.skip(f"this processor has no {isa}")
        monkeypatch.setattr(cpu, "_isa", wanted)
    keep_lengths_here(monkeypatch)
    with mslmn.set_backend(name.removesuffix(" on cuda")), torch.device("cuda" if "cuda" in name else "cpu"):
        yield request.param


@pytest.fixture(autouse=True)
def _poison():
    """Whatever a backend does not fill is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def results(layer, x, state=None, need_x=True):
    """Output, final memory, and the gradients of everything that has one, of a loss that weighs all parts."""
    data = x.data if isinstance(x, PackedSequence) else x
    inputs = [data.requires_grad_()] if need_x else []
    if state is not None:
        inputs.append(state.memory.requires_grad_())
    inputs += [p for p in layer.parameters() if p.requires_grad]
    output, end = layer(x, state)
    output = output.data if isinstance(output, PackedSequence) else output
    generator = torch.Generator("cpu").manual_seed(1)
    weigh = [torch.randn(t.shape, dtype=F64, generator=generator, device="cpu").to(t) for t in (output, end.memory)]
    loss = (output * weigh[0]).sum() + (end.memory * weigh[1]).sum()
    return [output, end.memory, *torch.autograd.grad(loss, inputs, allow_unused=True)]


def assert_agrees(layer, x, state=None, **options):
    ours = results(layer, x, state, **options)
    with mslmn.set_backend("reference"):
        expected = results(layer, x, state, **options)
    for a, b in zip(ours, expected, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            scale = b.abs().max().item() if b.numel() else 1.0
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11 * max(scale, 1e-3))


def test_this_machine_has_the_kernels():
    """The suite must not pass by skipping: where there is a compiler, the kernels are there."""
    import shutil

    if not shutil.which("g++"):
        pytest.skip("no C++ compiler, no kernels")
    assert cpu.why_not() is None


@pytest.mark.parametrize("M", [1, 3, 16])
@pytest.mark.parametrize("B", [1, 15, 17, 33])
def test_agrees_on_odd_batches_and_modules(backend, B, M):
    g, T = 5, 21  # the slowest period is 16
    for layer in (
        MSLMN(3, 7, M, g, dtype=F64),
        ClockworkRNN(3, M, g, dtype=F64),
        LMN(2, 5, M, bidirectional=True, dtype=F64),
    ):
        random_weights(layer)
        assert_agrees(layer, torch.randn(T, B, layer.input_size, dtype=F64))


@pytest.mark.parametrize("B", [*range(2, 15), 25, 27])
def test_agrees_on_batches_of_any_size(backend, B):
    """Kernels are compiled for every number of rows in a tile, and batches are cut into tiles of equal size."""
    layer = MSLMN(3, 17, 18, 3, dtype=F64)
    random_weights(layer)
    assert_agrees(layer, torch.randn(9, B, 3, dtype=F64))


@pytest.mark.parametrize("g", range(1, 13))
def test_agrees_for_any_number_of_modules_even_if_slow_ones_never_fire(backend, g):
    for layer in (MSLMN(2, 4, 3, g, dtype=F64), ClockworkRNN(2, 3, g, dtype=F64)):
        random_weights(layer)
        assert_agrees(layer, torch.randn(70, 3, 2, dtype=F64))


@pytest.mark.parametrize("kind", list(LAYERS))
@pytest.mark.parametrize("bias", [True, False])
def test_agrees_from_any_clocks_together_in_one_batch(backend, kind, bias):
    layer = make(kind, bias=bias, num_layers=2)
    B, G = 19, layer.output_size
    clocks = torch.tensor([0, 1, 2, 3, 4, 7, 8, 8, 8, 8, 8, 15, 16, 31, 1023, 2**40, 2**62 - 1, 5, 5])
    memory = torch.randn(2, B, G, dtype=F64)
    assert_agrees(layer, torch.randn(13, B, 2, dtype=F64), State(memory, clocks))
    assert_agrees(layer, torch.randn(13, B, 2, dtype=F64), State(memory, torch.full((B,), 6)))


@pytest.mark.parametrize("kind", list(LAYERS))
def test_agrees_on_packed_batches_in_both_directions(backend, kind):
    layer = make(kind, bidirectional=True, num_layers=2, learn_initial_state=True)
    lengths = [5, 17, 1, 9, 9, 9, 30, 2, 9, 9, 9, 9]
    x = pack_sequence([torch.randn(n, 2, dtype=F64) for n in lengths], enforce_sorted=False)
    assert_agrees(layer, x)
    memory = torch.randn(4, len(lengths), layer.output_size // 2, dtype=F64)
    x = pack_sequence([torch.randn(n, 2, dtype=F64) for n in lengths], enforce_sorted=False)
    assert_agrees(layer, x, State(memory, torch.arange(len(lengths))))


@pytest.mark.parametrize("kind", list(LAYERS))
@pytest.mark.parametrize("I", [0, 1, 19])
def test_agrees_for_any_input_size(backend, kind, I):
    assert_agrees(make(kind, I=I), torch.randn(9, 10, I, dtype=F64))


@pytest.mark.parametrize("kind", list(LAYERS))
def test_agrees_where_some_gradients_are_not_wanted(backend, kind):
    layer = make(kind)
    x = torch.randn(9, 3, 2, dtype=F64)
    assert_agrees(layer, x.clone(), need_x=False)
    parameters = list(layer.parameters())
    for p in parameters[1::2]:
        p.requires_grad_(False)
    assert_agrees(layer, x.clone())
    for p in parameters:
        p.requires_grad_(False)
    assert_agrees(layer, x.clone())


def test_gradients_of_hidden_states(backend):
    """Growth and regularisers look at h: it is differentiable too."""
    cell = make("MSLMN").cells[0]
    x, m = torch.randn(9, 3, 2, dtype=F64, requires_grad=True), torch.randn(3, 12, dtype=F64)
    clock, w = torch.tensor([0, 1, 2]), torch.randn(9, 3, 4, dtype=F64)

    def gradients():
        run = cell(x, m, clock)
        return [run.hidden, *torch.autograd.grad((run.hidden * w).sum(), [x, *cell.parameters()])]

    ours = gradients()
    with mslmn.set_backend("reference"):
        for a, b in zip(ours, gradients(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_non_contiguous_input_state_weights_and_gradients(backend):
    layer = make("MSLMN")
    with torch.no_grad():
        for p in layer.parameters():
            if p.dim() == 2:
                p.data = p.data.T.contiguous().T  # same values, columns first
    x = torch.randn(2, 3, 9, dtype=F64).permute(2, 1, 0)
    memory = torch.randn(1, 12, 3, dtype=F64).transpose(1, 2)
    assert not x.is_contiguous() and not layer.cells[0].Wmm[3].is_contiguous()
    assert_agrees(layer, x, State(memory, torch.arange(6)[::2]))
    layer(x)[0].sum().backward()  # the gradient of a sum is one value expanded


def test_empty_batches(backend):
    for kind in LAYERS:
        layer = make(kind, bidirectional=True)
        output, end = layer(torch.randn(5, 0, 2, dtype=F64, requires_grad=True))
        assert output.shape == (5, 0, layer.output_size) and end.clock.shape == (0,)
        output.sum().backward()
        assert all(p.grad.abs().sum() == 0 for p in layer.parameters())


@pytest.mark.parametrize("kind", list(LAYERS))
def test_float32_is_as_near_to_float64_as_the_reference_is(backend, kind):
    exact = LAYERS[kind](5, dtype=F64)
    random_weights(exact)
    layer = LAYERS[kind](5)
    layer.load_state_dict(exact.state_dict())
    x = torch.randn(60, 21, 5, dtype=F64)
    with mslmn.set_backend("reference"):
        truth, plain = results(exact, x.clone()), results(layer, x.float())
    for ours, reference, true in zip(results(layer, x.float()), plain, truth, strict=True):
        scale = true.abs().max()
        error, allowed = ((t.double() - true).abs().max() / scale for t in (ours, reference))
        assert error < 4 * allowed + 1e-6


@pytest.mark.parametrize("kind", list(LAYERS))
def test_no_result_depends_on_the_number_of_threads(kind):
    layer, x = make(kind, I=3, dtype=torch.float32), torch.randn(200, 150, 3)
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        found.append(results(layer, x))
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_tanh_is_right_everywhere(backend, dtype):
    """h of a layer whose pre-activation is its input, against torch, in units in the last place."""
    cell = LMN(1, 1, 1, bias=False, dtype=dtype).cells[0]
    with torch.no_grad():
        cell.Wxh.fill_(1)
        for W in (cell.Wmh[0], cell.Whm[0], cell.Wmm[0]):
            W.zero_()
    tiny = torch.logspace(-30, 0, 500, dtype=dtype)
    x = torch.cat([torch.linspace(-25, 25, 5001, dtype=dtype), tiny, -tiny, torch.tensor([0.0, 1e30, -1e30])])
    x = torch.cat([x, torch.tensor([torch.inf, -torch.inf, torch.nan])]).to(dtype)
    with torch.no_grad():
        h = cell(x[None, :, None], torch.zeros(len(x), 1, dtype=dtype), torch.zeros(len(x)).long()).hidden
    expected = torch.tanh(x)
    error = (h.flatten() - expected).abs() / expected.abs().clamp(min=1e-38)
    assert error[:-4].nan_to_num(0).max() < 4 * torch.finfo(dtype).eps
    assert h.flatten()[-3:-1].tolist() == [1.0, -1.0] and h.flatten()[-1].isnan()


@pytest.mark.parametrize("kind", list(LAYERS))
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_low_precision_layers_compute_in_float32_and_round_at_the_end(backend, kind, low):
    layer = LAYERS[kind](4, dtype=low)
    wide = LAYERS[kind](4)
    wide.load_state_dict(layer.state_dict())
    x = torch.randn(50, 3, 4).to(low)
    output, end = layer(x)
    expected, expected_end = wide(x.float())
    if backend == "cuda" and kind == "ClockworkRNN":  # whose Wxh x is rounded too
        torch.testing.assert_close(output, expected.to(low), rtol=0, atol=4 * torch.finfo(low).eps)
    else:
        assert torch.equal(output, expected.to(low)) and torch.equal(end.memory, expected_end.memory.to(low))
    output.sum().backward()
    assert all(p.grad.dtype == low for p in layer.parameters())


# Operators


def operator_arguments(kind, packed):
    layer = make(kind, I=3, dtype=torch.float32)
    cell = layer.cells[0]
    clockwork = kind == "ClockworkRNN"
    if clockwork:
        weights = [*cell.Wxh, *cell.Whh, *cell.b_h]
    else:
        weights = [cell.Wxh, cell.b_h, *cell.Wmh, *cell.Whm, *cell.Wmm, *cell.b_m]
    weights = [w.detach().clone().requires_grad_() for w in weights]
    sizes = torch.tensor([3, 3, 2, 1]) if packed else None
    x = torch.randn(9, 3, requires_grad=True) if packed else torch.randn(4, 3, 3, requires_grad=True)
    m = torch.randn(3, layer.output_size, requires_grad=True)
    return x, m, torch.tensor([0, 1, 5]), weights, sizes, clockwork, True, packed, not clockwork


@everywhere
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", list(LAYERS))
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(kind, packed):
    arguments = operator_arguments(kind, packed)
    torch.library.opcheck(torch.ops.mslmn.run.default, arguments)
    x, m, clock, weights, sizes, clockwork, bias, reverse, _ = arguments
    with torch.no_grad():
        memory, hidden, last = torch.ops.mslmn.run(*arguments)
    grads = torch.randn_like(memory), None, torch.randn_like(last)
    torch.library.opcheck(
        torch.ops.mslmn.run_backward.default,
        (x, m, clock, weights, sizes, clockwork, bias, reverse, memory, hidden, *grads, True, True),
        test_utils=("test_schema", "test_faketensor"),
    )


@everywhere
@pytest.mark.parametrize("kind", list(LAYERS))
def test_the_operator_and_the_direct_call_agree_to_the_bit(kind):
    layer, x = make(kind, bidirectional=True), torch.randn(9, 3, 2, dtype=F64)
    direct = results(layer, x)

    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.add(str(function))
            return function(*args, **(kwargs or {}))

    with Watch():
        through_operator = results(layer, x)
    assert {"mslmn.run.default", "mslmn.run_backward.default"} <= seen
    assert all(torch.equal(a, b) for a, b in zip(direct, through_operator, strict=True))


@pytest.mark.parametrize("need_x", [False, True])
@pytest.mark.parametrize("kind", list(LAYERS))
@pytest.mark.parametrize("packed", [False, True])
def test_both_directions_as_one_node_are_two_passes(monkeypatch, kind, packed, need_x):
    """As CUDA devices compute them, here without the second stream."""
    monkeypatch.setattr(streams, "both", lambda device, first, second: (first(), second()))
    layer = make(kind, bidirectional=True)
    lengths = [7, 7, 4, 1] if packed else [7] * 4
    x = pack_sequence([torch.randn(n, 2, dtype=F64) for n in lengths])
    sizes = x.batch_sizes if packed else None
    data = (x.data if packed else x.data.view(7, 4, 2)).requires_grad_(need_x)
    ms = [torch.randn(4, layer.output_size // 2, dtype=F64, requires_grad=True) for _ in range(2)]
    clocks = [torch.tensor([0, 3, 5, 1]), torch.zeros(4, dtype=torch.int64)]
    weights = [cell.weights() for cell in layer.cells]
    flat = [t for w in weights for t in w.flat()]
    separate = [fused.run(data, ms[d], clocks[d], weights[d], sizes, d == 1, True) for d in range(2)]
    together = fused._Both.apply(data, ms[0], clocks[0], ms[1], clocks[1], sizes, *weights, True, None, *flat)
    wanted = [*([data] if need_x else []), *ms, *flat]
    generator = torch.Generator().manual_seed(0)
    grads = []
    for outputs in ([t for results in separate for t in results], list(together)):
        generator.manual_seed(0)
        loss = sum((t * torch.randn(t.shape, generator=generator, dtype=F64)).sum() for t in outputs if t is not None)
        grads.append(torch.autograd.grad(loss, wanted, retain_graph=True))
    for a, b in zip([*together, *grads[1]], [t for r in separate for t in r] + [*grads[0]], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    anchor = fused._anchor(data.device)  # weights' gradients put aside
    aside = fused.Aside()
    put = fused._Both.apply(data, ms[0], clocks[0], ms[1], clocks[1], sizes, *weights, True, aside, anchor)
    generator.manual_seed(0)
    loss = sum((t * torch.randn(t.shape, generator=generator, dtype=F64)).sum() for t in put if t is not None)
    loss.backward()
    others = [t.grad for t in wanted[: -len(flat)]]
    found = [*others, *(view for one in aside for view in one.views(one.flat))]
    assert all(torch.equal(a, b) for a, b in zip(found, grads[1], strict=True))
    assert all(a is b for a, b in zip((w for one in aside for w in one.weights), flat, strict=True))
    (g,) = torch.autograd.grad(together[0].square().sum(), ms[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        g.sum().backward()


@everywhere
@pytest.mark.parametrize("kind", list(LAYERS))
def test_weights_that_change_before_the_backward_pass_are_noticed(kind):
    layer, x = make(kind), torch.randn(4, 2, 2, dtype=F64)
    output = layer(x)[0]
    with torch.no_grad():
        next(layer.parameters()).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@everywhere
@pytest.mark.parametrize("kind", list(LAYERS))
def test_a_second_derivative_is_refused_clearly_and_the_reference_has_it(kind):
    layer, x = make(kind), torch.randn(4, 2, 2, dtype=F64, requires_grad=True)
    weight = layer.cells[0].weight

    def second(loss):
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), weight)

    with pytest.raises(RuntimeError, match=r"no second derivative.*set_backend\('reference'\)"):
        second(layer(x)[0].square().sum())
    with mslmn.set_backend("reference"):
        assert second(layer(x)[0].square().sum())[0].abs().sum() > 0


# The choice


def test_auto_takes_the_kernels_where_there_are_some_and_torch_elsewhere():
    assert backends.choose(torch.device("cpu")) == ("torch" if cpu.why_not() else "cpu")
    assert backends.choose(torch.device("meta")) == "torch"
    assert backends.explain(torch.device("xpu")) == "no fused kernels: there are none for xpu"


def test_without_kernels_auto_takes_torch_and_a_wish_for_them_is_an_error(monkeypatch):
    monkeypatch.setattr(cpu, "_why_not", "they were not built")
    assert backends.choose(torch.device("cpu")) == "torch"
    assert backends.explain(torch.device("cpu")) == "no fused kernels: they were not built"
    with pytest.raises(RuntimeError, match="backend 'cpu' cannot be had: they were not built, or take 'auto'"):
        mslmn.set_backend("cpu")
    assert backends.wish() == "auto"
    layer = make("MSLMN")
    assert_agrees(layer, torch.randn(5, 2, 2, dtype=F64))


@pytest.mark.skipif(cpu.why_not() is not None, reason="no CPU kernels to wish for")
def test_an_impossible_wish_is_an_error_not_another_backend():
    with (
        mslmn.set_backend("cpu"),
        pytest.raises(RuntimeError, match="computes CPU tensors, these are on cuda:0"),
    ):
        backends.choose(torch.device("cuda:0"))
    with pytest.raises(ValueError, match="must be one of 'auto', 'reference', 'cpu', 'cuda', 'torch', got 'gpu'"):
        mslmn.set_backend("gpu")


def test_a_backend_is_set_for_good_or_for_a_block():
    mslmn.set_backend("torch")
    assert backends.wish() == "torch"
    with mslmn.set_backend("reference"):
        assert backends.wish() == "reference"
    assert backends.wish() == "torch"
    mslmn.set_backend("auto")


def test_the_environment_chooses_too(tmp_path):
    import os
    import subprocess
    import sys

    def run(name):
        code = "import mslmn.ops.backends as b; print(b.wish())"
        environment = {**os.environ, "MSLMN_BACKEND": name}
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)

    assert run("torch").stdout == "torch\n"
    assert "got 'abacus'" in run("abacus").stderr


def random_weights(layer, scale=0.7):
    """Away from zero everywhere, and away from saturation, where gradients are rounding errors."""
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(scale * torch.randn_like(p) / p.shape[-1] ** 0.5 / layer.num_modules**0.5)


# What other parts of torch may do to a layer


@everywhere
@pytest.mark.parametrize("kind", list(LAYERS))
def test_torch_func_and_forward_mode_get_the_right_derivatives(kind):
    layer, x = make(kind), torch.randn(4, 2, 2, dtype=F64)
    v = torch.randn_like(x)

    def loss(x):
        return layer(x)[0].square().sum()

    with mslmn.set_backend("reference"):
        y = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(loss(y), y)
    torch.testing.assert_close(torch.func.grad(loss)(x), expected)
    torch.testing.assert_close(torch.func.jvp(loss, (x,), (v,))[1], (expected * v).sum())
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(x[None])[0], expected)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, v)
        tangent = torch.autograd.forward_ad.unpack_dual(loss(dual)).tangent
    torch.testing.assert_close(tangent, (expected * v).sum())
    with mslmn.set_backend("torch"), pytest.raises(RuntimeError, match="reverse-mode gradients only"):
        torch.func.grad(loss)(x)


@everywhere
def test_many_gradients_at_once():
    """torch.func's way works; the older one, which hides its batch from operators, is refused clearly."""
    layer, x = make("MSLMN"), torch.randn(3, 2, 2, dtype=F64, requires_grad=True)

    def f(x):
        return layer(x)[0].sum((0, 1))

    one_by_one = torch.autograd.functional.jacobian(f, x)
    torch.testing.assert_close(torch.func.jacrev(f)(x), one_by_one)
    output = f(x)
    torch.testing.assert_close(
        torch.vmap(lambda v: torch.autograd.grad(output, x, v, retain_graph=True)[0])(torch.eye(12, dtype=F64)),
        one_by_one,
    )
    with pytest.raises(RuntimeError, match=r"batched gradients.*set_backend\('reference'\)"):
        torch.autograd.functional.jacobian(f, x, vectorize=True)
    with mslmn.set_backend("reference"):
        torch.testing.assert_close(torch.autograd.functional.jacobian(f, x, vectorize=True), one_by_one)


def test_lazily_negated_tensors_are_read_as_they_mean(backend):
    layer, x = make("MSLMN"), torch.randn(3, 2, 2, dtype=F64)
    assert torch.equal(layer(torch._neg_view(x))[0], layer(-x)[0])
    x.requires_grad_()
    output, _ = layer(x)
    v = torch.randn_like(output)
    (negated,) = torch.autograd.grad(output, x, torch._neg_view(v), retain_graph=True)
    assert torch.equal(negated, torch.autograd.grad(output, x, -v)[0])


@everywhere
def test_weights_of_another_class_go_through_the_operator():
    """A subclass may have no memory of its own: the kernels never see it."""

    class Wrapped(torch.Tensor):
        pass

    layer, x = make("MSLMN"), torch.randn(3, 2, 2, dtype=F64)
    expected, _ = layer(x)
    weights = {name: p.detach().as_subclass(Wrapped) for name, p in layer.named_parameters()}
    output, _ = torch.func.functional_call(layer, weights, (x,))
    assert torch.equal(output.as_subclass(torch.Tensor), expected)


@everywhere
@pytest.mark.parametrize("grad", [True, False])
def test_what_a_transform_left_behind_is_read_as_it_means(grad):
    """A tensor that outlived its torch.func transform has no memory of its own."""
    layer, x, kept = make("MSLMN"), torch.randn(3, 2, 2, dtype=F64), []
    torch.func.grad(lambda v: (kept.append(v), v.sum())[1])(x)
    with torch.set_grad_enabled(grad):
        assert torch.equal(layer(kept[0])[0], layer(x)[0])


@pytest.mark.skipif(cpu.why_not() is not None, reason="no CPU kernels")
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda cell: setattr(cell.b_h, "data", cell.b_h.data[:1].clone()),
            r"weight 1 of 18 must be \(4,\) .* got \(1,\)",
        ),
        (
            lambda cell: setattr(cell.b_h, "data", cell.b_h.data.float()),
            r"weight 1 of 18 .* torch.float64 .* got .* torch.float32",
        ),
    ],
)
def test_the_kernels_refuse_weights_that_do_not_fit(spoil, message):
    layer = make("MSLMN")
    spoil(layer.cells[0])
    with pytest.raises((ValueError, IndexError), match=message), mslmn.set_backend("cpu"):
        layer(torch.randn(3, 2, 2, dtype=F64))


@pytest.mark.skipif(cpu.why_not() is not None, reason="no CPU kernels")
def test_the_operator_refuses_tensors_that_do_not_fit():
    x, m, clock, weights, sizes, *flags = operator_arguments("MSLMN", packed=True)
    run = torch.ops.mslmn.run
    with pytest.raises(ValueError, match=r"m must be \(3, 12\) torch.float32 on the cpu, got \(3, 6\)"):
        run(x, m[:, :6], clock, weights, sizes, *flags)
    with pytest.raises(ValueError, match=r"clock must be \(3,\) torch.int64 on the cpu, got \(3,\) torch.int32"):
        run(x, m, clock.int(), weights, sizes, *flags)
    for wrong in ([3, 3, 2], [1, 2, 3, 3], [3, 3, 3, 0], [4, 3, 2]):
        with pytest.raises(ValueError, match="batch_sizes must be positive, never grow, begin with the 3 rows of m"):
            run(x, m, clock, weights, torch.tensor(wrong), *flags)


def test_a_backend_object_can_be_entered_again():
    choice = mslmn.set_backend("torch")
    mslmn.set_backend("auto")
    with choice:
        assert backends.wish() == "torch"
    assert backends.wish() == "auto"


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_sizes_of_a_batch_are_looked_at_each_time(backend):
    """They may have been changed since, where torch does not see it."""
    layer, sizes = make("MSLMN"), torch.tensor([2, 2, 1])
    packed = PackedSequence(torch.randn(5, 2, dtype=F64), sizes)
    with mslmn.set_backend(backend):
        layer(packed)
        for wrong in (9, 2, 3, 0):
            sizes.numpy()[2] = wrong
            with pytest.raises(ValueError, match="batch_sizes"):
                layer(packed)
            if backend == "cpu":  # the kernels check by themselves
                with pytest.raises(ValueError, match="batch_sizes"):
                    layer.cells[0](
                        packed.data, torch.zeros(2, layer.output_size, dtype=F64), torch.zeros(2).long(), sizes
                    )


# Weights that are kept from pass to pass


def swapped(cell):
    for p in cell.parameters():
        p.data = torch.randn_like(p)


def transposed(cell):
    W = cell.Whm[0] if isinstance(cell, MSLMNCell) else cell.Whh[0]
    W.data = W.data.T.contiguous().T


def assigned(cell):
    cell.load_state_dict({name: 2 * value for name, value in cell.state_dict().items()}, assign=True)


def replaced(cell):
    cell.b_h = None if cell.b_h is None else copy.deepcopy(cell.b_h)


def without_biases(cell):
    cell.b_h = cell.b_m = None  # b_m of the Clockwork RNN has never been there


def masked(cell):
    with torch.no_grad():  # it makes the weight once, with a graph that is gone after a backward pass
        prune.random_unstructured(cell.Whm if isinstance(cell, MSLMNCell) else cell.Wxh, "0", 0.5)


class Late(nn.Module):
    """Does nothing at first."""

    calls = 0

    def forward(self, W):
        self.calls += 1
        return W if self.calls < 3 else W / 2


def parametrised_later(cell):
    nn.utils.parametrize.register_parametrization(cell.Whm if isinstance(cell, MSLMNCell) else cell.Wxh, "0", Late())
    cell.weights()


def halved(cell):
    """Half as many hidden units."""
    if isinstance(cell, MSLMNCell):
        for p in (cell.Wxh, cell.b_h, *cell.Wmh):
            p.data = p.data[:2]
        for p in cell.Whm:
            p.data = p.data[:, :2]


def exchanged(cell):
    W = cell.Wmm[0] if isinstance(cell, MSLMNCell) else cell.Whh[0]
    torch.utils.swap_tensors(W, nn.Parameter(torch.randn_like(W)))


def parametrised(cell):
    W = cell.Wmm if isinstance(cell, MSLMNCell) else cell.Whh
    nn.utils.parametrize.register_parametrization(W, "0", nn.Tanh())


CHANGES = {
    "in place": lambda cell: [p.data.mul_(2) for p in cell.parameters()],
    "other memory": swapped,
    "another layout": transposed,
    "another dtype": lambda cell: cell.float(),
    "other parameters": assigned,
    "one other parameter": replaced,
    "parametrised": parametrised,
    "parametrised later": parametrised_later,
    "pruned": masked,
    "no biases": without_biases,
    "half the units": halved,
    "swapped": exchanged,
    "frozen": lambda cell: cell.requires_grad_(False),
    "initialised anew": lambda cell: cell.reset_parameters(),
    "grown": lambda cell: cell.grow(torch.randn(cell.M, 4), torch.randn(cell.M, cell.M)),
}


@everywhere
@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("kind", list(LAYERS))
def test_kept_weights_are_those_of_now(kind, change):
    cell = make(kind).cells[0]
    if change == "grown" and not isinstance(cell, MSLMNCell):
        pytest.skip("only the MS-LMN grows")
    x = torch.randn(5, 2, 2, dtype=F64)

    def results(weights):
        m, clock = cell.initial_memory(2), torch.zeros(2, dtype=torch.int64)
        memory = ops.run(x.to(m.dtype), m, clock, weights()).memory
        wanted = [p for p in cell.parameters() if p.requires_grad]
        return [memory, *(torch.autograd.grad(memory.square().sum(), wanted, allow_unused=True) if wanted else [])]

    def assert_same():
        for a, b in zip(results(cell.kept_weights), results(cell.weights), strict=True):
            assert (a is None and b is None) or torch.equal(a, b)

    assert cell.kept_weights() is cell.kept_weights()
    assert_same()
    CHANGES[change](cell)
    assert_same()
    assert (cell.kept_weights() is cell.kept_weights()) == (
        change not in ("parametrised", "parametrised later", "pruned")
    )
    with torch.inference_mode():
        weights = {name: p + 1 for name, p in cell.named_parameters()}
        assert torch.equal(
            torch.func.functional_call(Kept(cell), {f"cell.{name}": w for name, w in weights.items()}, (x,)),
            torch.func.functional_call(cell, weights, (x.to(cell.weight.dtype), *state_of(cell))).memory,
        )
    assert_same()


def state_of(cell):
    return cell.initial_memory(2), torch.zeros(2, dtype=torch.int64)


class Kept(nn.Module):
    """A cell whose weights are kept, as layers on a GPU do."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        m, clock = state_of(self.cell)
        return ops.run(x.to(m.dtype), m, clock, self.cell.kept_weights()).memory


@everywhere
def test_a_pruned_weight_stays_in_its_place():
    layer, x = make("MSLMN"), torch.randn(5, 2, 2, dtype=F64)
    expected = layer(x)[0]
    prune.identity(layer.cells[0].Wmh, "0")
    assert torch.equal(layer(x)[0], expected)


def test_copies_keep_weights_of_their_own():
    cell = make("MSLMN").cells[0]
    kept = cell.kept_weights()
    for other in (copy.deepcopy(cell), pickle.loads(pickle.dumps(cell))):
        assert cell.kept_weights() is kept
        assert not {id(w) for w in other.kept_weights().flat()} & {id(w) for w in kept.flat()}
        assert all(torch.equal(a, b) for a, b in zip(other.kept_weights().flat(), kept.flat(), strict=True))


@everywhere
def test_kept_weights_may_be_exchanged_for_a_subclass():
    class Wrapped(nn.Parameter):
        pass

    cell, x = make("MSLMN").cells[0], torch.randn(5, 2, 2, dtype=F64)
    expected = Kept(cell)(x)
    torch.utils.swap_tensors(cell.Wxh, Wrapped(cell.Wxh.detach().clone()))
    assert not isinstance(cell.kept_weights(), ops.KeptWeights)
    assert torch.equal(Kept(cell)(x), expected)


@everywhere
def test_what_is_no_parameter_is_let_go_after_the_backward_pass():
    layer, saved = make("MSLMN").bfloat16(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(weakref.ref(t)), t)[1], lambda t: t):
        loss = layer(torch.randn(4, 2, 2).bfloat16())[0].sum()
    float32 = [ref for ref in saved if ref() is not None and ref().dtype == torch.float32]
    assert len(float32) >= len(list(layer.parameters()))
    loss.backward()
    gc.collect()
    assert not any(ref() is not None for ref in float32)


def test_weights_made_in_inference_mode_are_refused_as_torch_does():
    with torch.inference_mode():
        layer = make("MSLMN")
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        layer(torch.randn(4, 2, 2, dtype=F64, requires_grad=True))


def test_kept_weights_that_do_not_fit_are_refused_at_every_pass():
    cell = make("MSLMN").cells[0]
    x = torch.randn(5, 2, 2, dtype=F64)
    with torch.no_grad(), mslmn.set_backend("auto"):
        ops.run(x, *state_of(cell), cell.kept_weights())
        cell.b_h.data = cell.b_h.data[:1]
        for _ in range(2):
            with pytest.raises((ValueError, RuntimeError), match=r"weight 1 of 18|size"):
                ops.run(x, *state_of(cell), cell.kept_weights())


def test_a_weight_that_lies_otherwise_in_the_same_memory_is_read_as_it_lies(backend):
    """Between passes: the same object, address and size, another order."""
    layer, x = MSLMN(3, 5, 4, num_modules=2, dtype=F64), torch.randn(7, 3, 3, dtype=F64)
    random_weights(layer)
    assert_agrees(layer, x)
    weight = layer.cells[0].Wmm[0]
    weight.data = weight.data.t()
    for _ in range(2):
        assert_agrees(layer, x)


@everywhere
def test_kept_weights_that_change_before_the_backward_pass_are_noticed():
    cell, x = make("MSLMN").cells[0], torch.randn(4, 2, 2, dtype=F64)
    memory = Kept(cell)(x)
    with torch.no_grad():
        cell.Wmm[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        memory.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layer, x: layer.double()(x.detach().double()), "weight 0 of .* must be .* torch.float32"),
        (lambda layer, x: setattr(x, "data", torch.randn(2, 3, 3)), "memory must be"),
        (lambda layer, x: setattr(x, "data", torch.randn(40000, 3, 3)), "memory must be"),
        (lambda layer, x: setattr(x, "data", torch.randn(9, 2, 3)), r"x must be \(T, 3, I\)"),
        (lambda layer, x: setattr(x, "data", torch.randn(9, 3, 4)), "the|weight|x must be"),
    ],
)
def test_what_changes_behind_autograd_s_back_is_seen_before_the_backward_pass(backend, change, message):
    if backend.startswith("torch"):
        pytest.skip("it reads no memory but through torch")
    layer, x = MSLMN(3, 5, 4, num_modules=2), torch.randn(9, 3, 3, requires_grad=True)
    loss = layer(x)[0].square().sum()
    change(layer, x)
    with pytest.raises((ValueError, RuntimeError), match=message):
        loss.backward()
