"""The fused CPU kernels of cpu.cpp: float32 and float64, training and inference."""

import ctypes
import importlib.machinery
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor

from .weights import Weights

DTYPES = {torch.float32: "f32", torch.float64: "f64"}
INSTRUCTION_SETS = ("baseline", "AVX2", "AVX-512")

_Pointer = ctypes.c_void_p


class _Problem(ctypes.Structure):  # mirrors cpu.cpp
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("steps", "batch", "I", "H", "M", "g", "reverse", "threads")),
        ("offsets", _Pointer),
        ("clock", _Pointer),
    ]


class _Forward(ctypes.Structure):
    _fields_ = [(name, _Pointer) for name in ("x", "m0", "weights", "memory", "hidden", "last")]


class _Backward(ctypes.Structure):
    _fields_ = [
        (name, _Pointer)
        for name in (
            *("x", "m0", "memory", "hidden", "weights", "gmemory", "ghidden", "glast"),
            *("gx", "gm0", "gweights"),
        )
    ]


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
_functions: dict[tuple[str, torch.dtype], Callable[..., int]] = {
    (name, dtype): getattr(_library, f"mslmn_{name}_{suffix}")
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Memories, hidden states (empty if not needed) and last memories."""
    x, m, clock = _plain(x), _plain(m), clock.contiguous()
    offsets = _offsets(batch_sizes, x, m)
    _check(x, m, clock, weights)
    memory = x.new_empty((*x.shape[:-1], m.shape[1]))
    hidden = x.new_empty((*x.shape[:-1], weights.H) if need_hidden else (0,))
    last = torch.empty_like(m)
    W = _Pointers(weights)
    tensors = (x, m, W, memory, hidden if need_hidden else None, last)
    _call("forward", _problem(x, m, clock, weights, offsets, reverse), _Forward, tensors, x.dtype)
    return memory, hidden, last


def backward(
    x: Tensor,
    m: Tensor,
    clock: Tensor,
    weights: Weights,
    batch_sizes: Tensor | None,
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
    x, m, clock, memory, hidden = _plain(x), _plain(m), clock.contiguous(), _plain(memory), _plain(hidden)
    gmemory, ghidden, glast = (g if g is None else _plain(g) for g in (gmemory, ghidden, glast))
    offsets = _offsets(batch_sizes, x, m)
    _check(x, m, clock, weights)
    steps = x.shape[:-1]
    for name, t, shape in (
        ("memory", memory, (*steps, m.shape[1])),
        ("hidden", hidden, (*steps, weights.H) if weights.H else hidden.shape),
        ("the gradient of memory", gmemory, (*steps, m.shape[1])),
        ("the gradient of hidden", ghidden if weights.H else None, (*steps, weights.H)),
        ("the gradient of last", glast, m.shape),
    ):
        if t is not None:
            _expect(name, t, shape, x.dtype)
    gx = torch.empty_like(x) if need_x else x.new_empty(0)
    gm = torch.empty_like(m)
    W = _Pointers(weights)
    gflat = x.new_empty(sum(map(Tensor.numel, W.tensors)) if need_weights else 0)
    gW = W.into(gflat) if need_weights else None
    tensors = (x, m, memory, hidden, W, gmemory, ghidden if weights.H else None, glast, gx if need_x else None, gm, gW)
    _call("backward", _problem(x, m, clock, weights, offsets, reverse), _Backward, tensors, x.dtype)
    return gx, gm, gflat


class _Pointers:
    """The addresses of the weights, in the order of cpu.cpp; null where there is none."""

    def __init__(self, w: Weights) -> None:
        self.weights = w
        self.tensors = w.flat()
        if not all(map(Tensor.is_contiguous, self.tensors)):
            self.tensors = list(map(Tensor.contiguous, self.tensors))  # kept alive
        self.array = _in_place(w, list(map(Tensor.data_ptr, self.tensors)))

    def into(self, flat: Tensor) -> "_Pointers":
        """The same places in a flat tensor that holds one after the other, as `Weights.flat` lists them."""
        other = _Pointers.__new__(_Pointers)
        other.tensors = [flat]
        bytes_each = flat.element_size()
        sizes = (t.numel() * bytes_each for t in self.tensors[:-1])
        other.array = _in_place(self.weights, list(accumulate(sizes, initial=flat.data_ptr())))
        return other

    def data_ptr(self) -> int:
        return ctypes.addressof(self.array)


def _in_place(w: Weights, addresses: list[int]) -> ctypes.Array[ctypes.c_void_p]:
    none, biases = [None] * w.g, 1 + w.has_bias
    first: list[int | None] = [None, None, *none] if w.Wxh is None else [*addresses[:biases], *[None] * (2 - biases)]
    rest = addresses if w.Wxh is None else addresses[biases:]
    places = [*first, *rest, *([] if w.has_bias else none)]
    return (_Pointer * len(places))(*places)


def _address(t: Tensor | _Pointers | None) -> int | None:
    return None if t is None else t.data_ptr()


def _plain(t: Tensor) -> Tensor:
    """The values as they lie in memory."""
    return t.resolve_neg().contiguous()


def _offsets(batch_sizes: Tensor | None, x: Tensor, m: Tensor) -> Tensor | None:  # (T,) -> (T + 1,)
    if batch_sizes is None:
        if x.dim() != 3 or x.shape[1] != m.shape[0]:
            raise ValueError(f"x must be (T, {m.shape[0]}, I), got {tuple(x.shape)}; or give batch_sizes")
        return None
    sizes = batch_sizes.to("cpu", torch.int64)
    grows = bool((sizes[1:] > sizes[:-1]).any())
    if (
        x.dim() != 2
        or len(sizes) == 0
        or grows
        or int(sizes[0]) != len(m)
        or int(sizes[-1]) < 1
        or int(sizes.sum()) != len(x)
    ):
        raise ValueError(
            f"batch_sizes must be positive, never grow, begin with the {len(m)} rows of m and add up to those of x, "
            f"{tuple(x.shape)}, got {sizes.tolist()[:8]}; take those of a PackedSequence"
        )
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


def _check(x: Tensor, m: Tensor, clock: Tensor, w: Weights) -> None:
    """What the kernels read must be there: they believe the sizes they are told."""
    shapes, sizes = _shapes(x.shape[-1], w.H, w.M, w.g, w.has_bias)
    flat = w.flat()
    if list(map(Tensor.numel, flat)) != sizes or set(map(_dtype, flat)) != {x.dtype}:
        for i, (t, shape) in enumerate(zip(flat, shapes, strict=False)):
            _expect(f"weight {i} of {len(shapes)}", t, shape, x.dtype)
        raise ValueError(f"expected {len(shapes)} weights, got {len(flat)}; build the layer anew")
    _expect("m", m, (len(m), w.g * w.M), x.dtype)
    _expect("clock", clock, (len(m),), torch.int64)


_dtype = attrgetter("dtype")


@lru_cache
def _shapes(I: int, H: int, M: int, g: int, bias: bool) -> tuple[list[tuple[int, ...]], list[int]]:
    """The shapes of the weights, as `Weights.flat` lists them, and how many values each has."""
    first: list[tuple[int, ...]] = [(H, I), *[(H,)] * bias] if H else []
    lists: list[tuple[int, ...]] = [*[(H, M)] * (g if H else 0), *[(M, H or I)] * g]
    shapes = [*first, *lists, *[(j * M, M) for j in range(1, g + 1)], *[(M,)] * (g * bias)]
    return shapes, [math.prod(shape) for shape in shapes]


def _expect(name: str, t: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    if tuple(t.shape) != tuple(shape) or t.dtype != dtype or t.device.type != "cpu":
        raise ValueError(
            f"{name} must be {tuple(shape)} {dtype} on the cpu, got {tuple(t.shape)} {t.dtype} on {t.device}; "
            "the tensors of one layer share dtype, device and sizes"
        )


def _problem(x: Tensor, m: Tensor, clock: Tensor, w: Weights, offsets: Tensor | None, reverse: bool) -> _Problem:
    steps = x.shape[0] if offsets is None else len(offsets) - 1
    sizes = (steps, m.shape[0], x.shape[-1], w.H, w.M, w.g)
    return _Problem(*sizes, reverse, torch.get_num_threads(), _address(offsets), _address(clock))


def _call(
    name: str,
    problem: _Problem,
    arguments: type[ctypes.Structure],
    tensors: Sequence[Tensor | _Pointers | None],
    dtype: torch.dtype,
) -> None:
    if _functions[name, dtype](_isa, ctypes.byref(problem), ctypes.byref(arguments(*map(_address, tensors)))):
        raise MemoryError(f"the {name} pass could not allocate its workspace; use smaller batches")
