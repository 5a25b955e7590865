"""The fused CPU kernels of cpu.cpp: float32 and float64, training and inference."""

import ctypes
import importlib.machinery
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from .fitting import check_batch, check_results, fitting, plain, unmoved
from .weights import Sizes, Weights, numels

DTYPES = {torch.float32: "f32", torch.float64: "f64"}
INSTRUCTION_SETS = ("baseline", "AVX2", "AVX-512")


def _load() -> tuple[ctypes.CDLL | None, str | None]:
    """The kernels, or why they cannot be had."""
    paths = [Path(__file__).with_name(f"_cpu{suffix}") for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    for path in paths:
        if path.exists():
            try:
                return ctypes.CDLL(str(path)), None
            except OSError as error:
                return None, f"they could not be loaded ({error}); reinstall the package"
    return None, "they were not built: no C++ compiler when the package was installed; get one and reinstall"


_library, _why_not = _load()
_isa = -1  # what fits the sizes best; the tests try each
_prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_functions: dict[tuple[str, torch.dtype], Callable[[int, int, int], int]] = {
    (name, dtype): _prototype((f"mslmn_{name}_{suffix}", _library))
    for name in ("forward", "backward")
    for dtype, suffix in DTYPES.items()
    if _library is not None
}


def why_not() -> str | None:
    """Why these kernels cannot be used here, or None if they can."""
    return _why_not


def instruction_set() -> str:
    """The best instruction set that this processor has kernels for."""
    return "none" if _library is None else INSTRUCTION_SETS[_library.mslmn_best_isa()]


def forward(
    x: Tensor,  # (T, B, I), or packed (N, I)
    m: Tensor,  # (B, G)
    clock: Tensor,  # (B,) int64
    weights: Weights,
    batch_sizes: Tensor | None,  # (T,) int64
    reverse: bool,
    need_hidden: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Memories, hidden states (None if not needed) and last memories."""
    x, m, clock = plain(x), plain(m), clock.contiguous()
    check_batch(batch_sizes, x, m)
    sizes, offsets = weights.sizes, _offsets(batch_sizes)
    _alive, pointers = fitting(x, m, clock, weights)
    memory = x.new_empty((*x.shape[:-1], m.shape[1]))
    hidden = x.new_empty((*x.shape[:-1], sizes.H)) if need_hidden else None
    last = m.new_empty(m.shape)
    problem = _problem(x, m, clock, sizes, offsets, reverse)
    _call("forward", x.dtype, problem, (x, m, pointers, memory, hidden, last))
    return memory, hidden, last


def backward(
    x: Tensor,
    m: Tensor,
    clock: Tensor,
    weights: Weights,
    batch_sizes: Tensor | None,
    reverse: bool,
    memory: Tensor,
    hidden: Tensor | None,  # None: of the Clockwork RNN
    gmemory: Tensor | None,  # None: zero
    ghidden: Tensor | None,
    glast: Tensor | None,
    need_x: bool,
    need_weights: bool,
    *,
    checked: bool = False,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of x (None if not needed), of m, and of the weights, one after the other (empty if not needed).

    Where ``checked``, all but the gradients is what a forward pass took and gave, and autograd has looked at these.
    """
    x, m, clock, memory = plain(x), plain(m), clock.contiguous(), plain(memory)
    hidden, gmemory, ghidden, glast = (t if t is None else plain(t) for t in (hidden, gmemory, ghidden, glast))
    sizes, offsets = weights.sizes, _offsets(batch_sizes)
    H = sizes.H
    check_batch(batch_sizes, x, m)
    pointers = unmoved(weights, x, m, clock, memory) if checked else None
    if pointers is None:
        _alive, pointers = fitting(x, m, clock, weights)
        check_results(x, m, H, memory, hidden, gmemory, ghidden, glast)
    gx = torch.empty_like(x) if need_x else None
    gm = torch.empty_like(m)
    gflat = x.new_empty(sum(numels(sizes)) if need_weights else 0)
    given = (x, m, memory, hidden, pointers, gmemory, ghidden if H else None, glast)
    wanted = (gx, gm, gflat if need_weights else None)
    _call("backward", x.dtype, _problem(x, m, clock, sizes, offsets, reverse), (*given, *wanted))
    return gx, gm, gflat


def _offsets(batch_sizes: Tensor | None) -> Tensor | None:  # (T,) -> (T + 1,)
    if batch_sizes is None:
        return None
    sizes = batch_sizes.to("cpu", torch.int64)
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


def _problem(x: Tensor, m: Tensor, clock: Tensor, sizes: Sizes, offsets: Tensor | None, reverse: bool) -> "array[int]":
    """`Problem` of cpu.cpp."""
    steps = x.shape[0] if offsets is None else len(offsets) - 1
    I, H, M, g, _ = sizes
    threads = torch.get_num_threads()
    return array("Q", (steps, m.shape[0], I, H, M, g, reverse, threads, _address(offsets), _address(clock)))


def _address(of: "Tensor | array[int] | None") -> int:
    if isinstance(of, array):
        return of.buffer_info()[0]
    return 0 if of is None else of.data_ptr()


def _call(
    name: str, dtype: torch.dtype, problem: "array[int]", arguments: "Sequence[Tensor | array[int] | None]"
) -> None:
    """Run a pass: ``arguments`` are the fields of `Forward` or `Backward` of cpu.cpp."""
    addresses = array("Q", map(_address, arguments))
    if _functions[name, dtype](_isa, _address(problem), _address(addresses)):
        raise MemoryError(f"the {name} pass could not allocate its workspace; use smaller batches")
