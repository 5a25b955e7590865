"""The recurrence as operators that PyTorch knows: autograd, torch.compile, torch.export and opcheck see one node.

``mslmn::run`` and ``mslmn::run_backward`` stand for every fused backend. In plain eager execution nobody looks, and at
small sizes the dispatcher would cost several times what the kernels do: there `run` calls them directly.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from . import backends, clocked, cpu, cuda, streams
from .backends import choose_for
from .weights import KeptWeights, Sizes, Weights, are_plain, have_memory, unflatten

Results = tuple[Tensor, Tensor | None, Tensor]  # memories, hidden states (None if not needed), last memories
Derived = tuple[Tensor | None, Tensor, Tensor]  # gradients of x (None if not needed), of m, and of the weights


class Backend(Protocol):
    """What a fused backend offers: its arguments are those of the operators below."""

    def forward(
        self,
        x: Tensor,
        m: Tensor,
        clock: Tensor,
        weights: Weights,
        batch_sizes: Tensor | None,
        reverse: bool,
        need_hidden: bool,
    ) -> Results: ...

    def backward(
        self,
        x: Tensor,
        m: Tensor,
        clock: Tensor,
        weights: Weights,
        batch_sizes: Tensor | None,
        reverse: bool,
        memory: Tensor,
        hidden: Tensor | None,
        gmemory: Tensor | None,
        ghidden: Tensor | None,
        glast: Tensor | None,
        need_x: bool,
        need_weights: bool,
        *,
        checked: bool = False,  # all but the gradients is what `forward` took and gave
    ) -> Derived: ...


BACKENDS: dict[str, Backend] = {"cpu": cpu, "cuda": cuda, "torch": clocked}


def backend_for(x: Tensor, m: Tensor, weights: Weights) -> Backend:
    steps = x.shape[:-1].numel()
    key = (weights.sizes, m.dtype, x.dtype, x.device, backends.wish())
    if key in _kernels_for and steps <= cuda.LONGEST:
        return cuda
    name = choose_for(x.device, *key[:3], steps)
    if name == "cuda" and x.is_cuda:
        _kernels_for.add(key)
    if name != "cuda" and cuda.place() is not None:
        raise RuntimeError(f"only the CUDA kernels know placed batches, here is the backend {name!r}; do without")
    return Widened(BACKENDS[name]) if x.dtype != m.dtype and name != "cuda" else BACKENDS[name]


_kernels_for: set[tuple[Sizes, torch.dtype, torch.dtype, torch.device, str]] = set()  # what gets the CUDA kernels


class Widened:
    """A backend that has one dtype, for inputs and outputs stored in another than the weights'."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def forward(self, x: Tensor, m: Tensor, *rest: Any) -> Results:
        memory, hidden, last = self.backend.forward(x.to(m.dtype), m, *rest)
        return memory.to(x.dtype), None if hidden is None else hidden.to(x.dtype), last

    def backward(
        self, x: Tensor, m: Tensor, clock: Tensor, weights: Weights, *rest: Any, checked: bool = False
    ) -> Derived:
        wide: Any = [t.to(m.dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in rest]
        gx, gm, gflat = self.backend.backward(x.to(m.dtype), m, clock, weights, *wide, checked=checked)
        return None if gx is None else gx.to(x.dtype), gm, gflat


def run(
    x: Tensor,  # (T, B, I), or packed (N, I)
    m: Tensor,  # (B, G)
    clock: Tensor,  # (B,) int64
    weights: Weights,
    batch_sizes: Tensor | None,  # (T,) int64, on the CPU
    reverse: bool,
    need_hidden: bool,
) -> Results:
    """Memories, hidden states (None if not needed) and last memories."""
    clockwork, grad = weights.Wxh is None, torch.is_grad_enabled()
    need_hidden = need_hidden and not clockwork
    if not _eager(weights, x, m, clock):
        _refuse_place(cuda.place())
        flags = clockwork, weights.has_bias, reverse, (need_hidden or grad) and not clockwork
        memory, hidden, last = run_op(x, m, clock, weights.flat(), batch_sizes, *flags)
        return memory, hidden if need_hidden else None, last
    if not grad:
        backend = backend_for(x, m, weights)
        return backend.forward(x, m, clock, weights, batch_sizes, reverse, need_hidden)
    flat = weights.flat()
    aside = _aside(flat)
    given = flat if aside is None else [_anchor(x.device)]
    return _apply(x, m, clock, batch_sizes, weights, reverse, need_hidden, aside, *given)  # type: ignore[no-any-return,no-untyped-call]


def _refuse_place(place: Tensor | None) -> None:
    if place is not None:
        raise RuntimeError(
            "a placed batch is computed in plain eager execution only, see ops.placed; do without it here"
        )


def _eager(weights: Weights, *tensors: Tensor | None) -> bool:
    """Whether these are plain tensors with memory, and execution is plain too."""
    return (
        backends.eager()  # first: the rest is not for tracers to see
        and are_plain(*tensors)
        and have_memory(*tensors)
        and weights.plain
        and tensors[0].device.type != "meta"  # type: ignore[union-attr]
    )


def run_both(
    x: Tensor,  # (T, B, I), or packed (N, I)
    first: tuple[Tensor, Tensor, Weights],  # initial memory, clock, weights, forward in time
    second: tuple[Tensor, Tensor, Weights],  # the same, backward in time
    batch_sizes: Tensor | None,
    need_hidden: bool,
) -> tuple[Results, Results]:
    """Both directions of a layer: on a CUDA device at once."""
    (m, clock, weights), (m_2, clock_2, weights_2) = first, second
    tensors = x, m, clock, m_2, clock_2
    need_hidden = need_hidden and weights.Wxh is not None
    if x.device.type != "cuda" or not (_eager(weights, *tensors) and weights_2.plain):
        return run(x, *first, batch_sizes, False, need_hidden), run(x, *second, batch_sizes, True, need_hidden)
    if torch.is_grad_enabled():
        flat = [*weights.flat(), *weights_2.flat()]
        aside = _aside(flat)
        given = flat if aside is None else [_anchor(x.device)]
        found = _apply_both(*tensors, batch_sizes, weights, weights_2, need_hidden, aside, *given)  # type: ignore[no-untyped-call]
        return found[:3], found[3:]
    backend = backend_for(x, m, weights)
    return streams.both(
        x.device,
        lambda: backend.forward(x, *first, batch_sizes, False, need_hidden),
        lambda: backend.forward(x, *second, batch_sizes, True, need_hidden),
    )


class Gradients(NamedTuple):
    """Of the weights of one recurrence."""

    weights: list[Tensor]
    sizes: Sizes
    flat: Tensor  # one gradient after the other
    stream: int = 0  # on which it is computed

    def views(self, flat: Tensor) -> list[Tensor]:
        """Of each weight, in a tensor laid out as ``flat``."""
        return unflatten(flat, self.sizes)


class Aside(list[Gradients]):
    """Where gradients are put, until the block ends."""

    open = True


@contextmanager
def gradients_aside() -> Iterator[list[Gradients]]:
    """Gradients of passes begun within the block are put aside here by their backward passes, for the weights that are
    parameters, instead of going through autograd one by one: to hand over dozens of small ones takes longer than to
    compute them. For those who know that nobody else waits for them."""
    found = Aside()
    before, _here.aside = getattr(_here, "aside", None), found
    try:
        yield found
    finally:
        _here.aside, found.open = before, False


_here = threading.local()


def _aside(weights: Sequence[Tensor]) -> Aside | None:
    """Where gradients are put, if they are put aside; hooks of a weight wait for them in autograd."""
    found: Aside | None = getattr(_here, "aside", None)
    if found is None or not all(type(w) is nn.Parameter and w.requires_grad for w in weights):
        return None
    if any(w._backward_hooks or w._post_accumulate_grad_hooks for w in weights):
        return None
    return found


@lru_cache
def _anchor(device: torch.device) -> Tensor:
    """Stands for the weights: without an input that requires a gradient there would be no backward pass."""
    with torch.inference_mode(False):
        return torch.empty(0, device=device, requires_grad=True)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, m: Tensor, clock: Tensor, batch_sizes: Tensor | None, *args: Any) -> Results:
        weights, reverse, need_hidden, ctx.aside = args[:4]
        ctx.backend = backend = backend_for(x, m, weights)
        ctx.place, ctx.reverse = cuda.place(), reverse
        memory, hidden, last = backend.forward(x, m, clock, weights, batch_sizes, reverse, weights.Wxh is not None)
        ctx.save_for_backward(x, m, clock, batch_sizes, memory, hidden, *_keep(ctx, weights))
        ctx.set_materialize_grads(False)
        return memory, hidden if need_hidden else None, last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, m, clock, batch_sizes, memory, hidden, *saved = ctx.saved_tensors
        need_x, need_weights = wanted = ctx.needs_input_grad[0], any(ctx.needs_input_grad[8:])
        operator, (weights,) = _through_operator(x, grads), _kept(ctx, saved)
        given = (x, m, clock, weights, batch_sizes, ctx.reverse, memory, hidden, *grads, *wanted)
        gx, gm, gflat = _back(ctx, operator, *given)
        parts = _handed_over(ctx, weights, gflat, need_weights, operator)
        return gx if need_x else None, gm, None, None, None, None, None, None, *parts


def _keep(ctx: Any, *weights: Weights) -> list[Tensor]:
    """What autograd is to save of the weights for `_kept`. Parameters are not saved one by one: to do so for dozens of
    small ones, and to look at each again, takes longer than to compute their gradients."""
    ctx.forms = [(w.Wxh is None, w.has_bias) for w in weights]
    ctx.parameters = None
    kept = all(isinstance(w, KeptWeights) for w in weights)  # those are parameters
    flat = [] if kept else [t for w in weights for t in w.flat()]
    if kept or all(type(t) is nn.Parameter for t in flat):
        with suppress(RuntimeError):  # of inference tensors, which autograd refuses with a remedy
            ctx.parameters = [(w, w.version()) for w in weights]
            return []
    return flat or [t for w in weights for t in w.flat()]


def _kept(ctx: Any, saved: Sequence[Tensor]) -> list[Weights]:
    """The weights of the forward pass."""
    if ctx.parameters is None:
        each = len(saved) // len(ctx.forms)
        return [Weights.from_flat(saved[i * each : (i + 1) * each], *form) for i, form in enumerate(ctx.forms)]
    if any(w.version() != version for w, version in ctx.parameters):
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a weight "
            "of the layer, between its forward and its backward pass; change weights after backward()"
        )
    return [w for w, _ in ctx.parameters]


def _back(
    ctx: Any,
    operator: bool,
    x: Tensor,
    m: Tensor,
    clock: Tensor,
    weights: Weights,
    batch_sizes: Tensor | None,
    reverse: bool,
    memory: Tensor,
    hidden: Tensor | None,
    *rest: Any,  # gradients, and which are needed
) -> Derived:
    """A backward pass, by the operator or without it."""
    if operator:
        _refuse_place(ctx.place)
        flags = weights.Wxh is None, weights.has_bias, reverse
        seen = memory.new_empty(0) if hidden is None else hidden
        return run_backward_op(x, m, clock, weights.flat(), batch_sizes, *flags, memory, seen, *rest)  # type: ignore[no-any-return]
    backend: Backend = ctx.backend
    with nullcontext() if ctx.place is None else cuda.placed(ctx.place):  # autograd's threads do not know of it
        return backend.backward(x, m, clock, weights, batch_sizes, reverse, memory, hidden, *rest, checked=True)


def _handed_over(
    ctx: Any, weights: Weights, gflat: Tensor, need_weights: bool, operator: bool
) -> Sequence[Tensor | None]:
    """What autograd gets for the weights, or for their anchor."""
    if ctx.aside is not None:
        if not ctx.aside.open:
            raise RuntimeError(
                "a backward pass came after the block of direct_gradients in which its forward pass was; put both in it"
            )
        anchor = ctx.next_functions[-1][0]
        if torch._C._will_engine_execute_node(anchor):  # else nobody asked for gradients of weights
            ctx.aside.append(Gradients(weights.flat(), weights.sizes, gflat, cuda.stream_of(gflat)))
        return [None]
    if not need_weights:
        return [None] * len(weights.flat())
    return _separate(gflat, weights.flat()) if operator else unflatten(gflat, weights.sizes)


def _through_operator(x: Tensor, grads: Sequence[Tensor | None]) -> bool:
    """Whether a backward pass goes through the operator, which tells those who want a second derivative, and knows how
    to take many gradients at once."""
    eager = backends.eager() and are_plain(x, *grads)
    if eager and not have_memory(*grads):
        raise RuntimeError(
            "the fused recurrence cannot take batched gradients (is_grads_batched, jacobian(vectorize=True)); "
            "use torch.func.jacrev or torch.vmap, or with mslmn.set_backend('reference'): ..."
        )
    return torch.is_grad_enabled() or not eager


class _Both(torch.autograd.Function):
    """Both directions as one node of the graph: what runs on a stream beside it is its own affair, and gradients are
    accumulated where parameters are used."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor | None, ...]:
        x, m, clock, m_2, clock_2, batch_sizes, w, w_2, show, ctx.aside = args[:10]
        ctx.backend = backend = backend_for(x, m, w)
        ctx.place = cuda.place()
        need_hidden = w.Wxh is not None  # backward does
        one, two = streams.both(
            x.device,
            lambda: backend.forward(x, m, clock, w, batch_sizes, False, need_hidden),
            lambda: backend.forward(x, m_2, clock_2, w_2, batch_sizes, True, need_hidden),
        )
        ctx.save_for_backward(x, batch_sizes, m, clock, *one[:2], m_2, clock_2, *two[:2], *_keep(ctx, w, w_2))
        ctx.set_materialize_grads(False)
        return one[0], one[1] if show else None, one[2], two[0], two[1] if show else None, two[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, batch_sizes, m, clock, memory, hidden, m_2, clock_2, memory_2, hidden_2, *saved = ctx.saved_tensors
        need_x, need_weights = wanted = ctx.needs_input_grad[0], any(ctx.needs_input_grad[10:])
        w, w_2 = _kept(ctx, saved)
        operator = _through_operator(x, grads)
        first = (x, m, clock, w, batch_sizes, False, memory, hidden, *grads[:3], *wanted)
        second = (x, m_2, clock_2, w_2, batch_sizes, True, memory_2, hidden_2, *grads[3:], *wanted)
        if operator:
            found = _back(ctx, True, *first), _back(ctx, True, *second)
        else:
            found = streams.both(x.device, lambda: _back(ctx, False, *first), lambda: _back(ctx, False, *second))
        (gx, gm, gflat), (gx_2, gm_2, gflat_2) = found
        parts = list(_handed_over(ctx, w, gflat, need_weights, operator))
        parts_2 = _handed_over(ctx, w_2, gflat_2, need_weights, operator)
        parts += [] if ctx.aside is not None else parts_2  # one anchor for both
        both = gx + gx_2 if gx is not None and gx_2 is not None and need_x else None
        return both, gm, None, gm_2, None, None, None, None, None, None, *parts


# `_Run.apply`, without a look at every argument for what torch.func leaves behind, which has no storage.
_apply = super(torch.autograd.Function, _Run).apply
_apply_both = super(torch.autograd.Function, _Both).apply


def _separate(gflat: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """What the operator returns for the weights, one by one; its sizes may be symbols, not for `unflatten` to take."""
    parts = gflat.split([w.numel() for w in weights])
    return [part.view_as(w) for part, w in zip(parts, weights, strict=True)]


@torch.library.custom_op("mslmn::run", mutates_args=())
def run_op(
    x: Tensor,
    m: Tensor,
    clock: Tensor,
    weights: Sequence[Tensor],  # as Weights.flat gives them
    batch_sizes: Tensor | None,
    clockwork: bool,
    bias: bool,
    reverse: bool,
    need_hidden: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    w = Weights.from_flat(weights, clockwork, bias)
    memory, hidden, last = backend_for(x, m, w).forward(x, m, clock, w, batch_sizes, reverse, need_hidden)
    return memory, x.new_empty(0) if hidden is None else hidden, last


@run_op.register_fake
def _(x, m, clock, weights, batch_sizes, clockwork, bias, reverse, need_hidden):  # type: ignore[no-untyped-def]
    H = 0 if clockwork else weights[0].shape[0]
    hidden = x.new_empty((*x.shape[:-1], H) if need_hidden else (0,))
    return x.new_empty((*x.shape[:-1], m.shape[1])), hidden, m.new_empty(m.shape)


@torch.library.custom_op("mslmn::run_backward", mutates_args=())
def run_backward_op(
    x: Tensor,
    m: Tensor,
    clock: Tensor,
    weights: Sequence[Tensor],
    batch_sizes: Tensor | None,
    clockwork: bool,
    bias: bool,
    reverse: bool,
    memory: Tensor,
    hidden: Tensor,
    gmemory: Tensor | None,  # None: zero
    ghidden: Tensor | None,
    glast: Tensor | None,
    need_x: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (empty if not needed), of m, and of the weights, one after the other (likewise)."""
    w = Weights.from_flat(weights, clockwork, bias)
    seen = None if clockwork else hidden
    gx, gm, gflat = backend_for(x, m, w).backward(
        *(x, m, clock, w, batch_sizes, reverse, memory, seen, gmemory, ghidden, glast, need_x, need_weights)
    )
    return x.new_empty(0) if gx is None else gx, gm, gflat


@run_backward_op.register_fake
def _(x, m, clock, weights, *args):  # type: ignore[no-untyped-def]
    need_x, need_weights = args[-2:]
    size = sum(w.numel() for w in weights) if need_weights else 0
    return x.new_empty(x.shape if need_x else (0,)), m.new_empty(m.shape), m.new_empty(size)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, m, clock, weights, batch_sizes, clockwork, bias, reverse, need_hidden = inputs
    if not need_hidden and not clockwork:
        raise RuntimeError("the gradient of mslmn::run needs its hidden states; pass need_hidden=True")
    memory, hidden, _ = output
    ctx.save_for_backward(x, m, clock, batch_sizes, memory, hidden, *weights)
    ctx.flags = (clockwork, bias, reverse)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    x, m, clock, batch_sizes, memory, hidden, *weights = ctx.saved_tensors
    need_x, need_weights = ctx.needs_input_grad[0], any(ctx.needs_input_grad[3])
    gx, gm, gflat = run_backward_op(
        *(x, m, clock, weights, batch_sizes, *ctx.flags, memory, hidden, *grads, need_x, need_weights)
    )
    gweights = _separate(gflat, weights) if need_weights else [None] * len(weights)
    return gx if need_x else None, gm, None, gweights, None, None, None, None, None


def _no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        "the fused recurrence has no second derivative; "
        "compute under plain autograd to get one: with mslmn.set_backend('reference'): ..."
    )


run_op.register_autograd(_differentiate, setup_context=_save)
run_backward_op.register_autograd(_no_second_derivative, setup_context=lambda ctx, inputs, output: None)


def _one_by_one(op: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
    """vmap, as a loop over what is mapped: every member of an ensemble runs at full speed."""

    def rule(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        def pick(value: Any, dim: Any, i: int) -> Any:
            if isinstance(value, (list, tuple)):
                return [pick(v, d, i) for v, d in zip(value, dim, strict=True)]
            return value if dim is None else value.select(dim, i)

        members = [
            op(*(pick(value, dim, i) for value, dim in zip(args, in_dims, strict=True))) for i in range(info.batch_size)
        ]
        return tuple(torch.stack(parts) for parts in zip(*members, strict=True)), (0, 0, 0)

    return rule


run_op.register_vmap(_one_by_one(run_op))
run_backward_op.register_vmap(_one_by_one(run_backward_op))
