"""What a fused backend is given: checked, because kernels believe the sizes they are told, and laid out plainly."""

from operator import attrgetter

import torch
from torch import Tensor

from .weights import Sizes, Weights, numels, shapes


def plain(t: Tensor) -> Tensor:
    """The values as they lie in memory."""
    return t.resolve_neg().contiguous()


def check_batch(batch_sizes: Tensor | None, x: Tensor, m: Tensor) -> None:
    """x is (T, B, I), or packed as batch_sizes say."""
    if batch_sizes is None:
        if x.dim() != 3 or x.shape[1] != m.shape[0]:
            raise ValueError(f"x must be (T, {m.shape[0]}, I), got {tuple(x.shape)}; or give batch_sizes")
        return
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


def fitting(x: Tensor, m: Tensor, clock: Tensor, w: Weights, sizes: Sizes) -> list[Tensor]:
    """The weights, one by one, where all that the kernels read is there. x may have another dtype than the rest."""
    flat = w.flat()
    n = len(flat)
    if (  # lists compare much faster than sets are made
        list(map(Tensor.numel, flat)) != numels(sizes)
        or list(map(_dtype, flat)) != [m.dtype] * n
        or list(map(_device, flat)) != [m.device] * n
    ):
        expected = shapes(sizes)
        for i, (t, shape) in enumerate(zip(flat, expected, strict=False)):
            expect(f"weight {i} of {len(expected)}", t, shape, m.dtype, x)
        raise ValueError(f"expected {len(expected)} weights, got {len(flat)}; build the layer anew")
    expect("x", x, (*x.shape[:-1], sizes.I), x.dtype, x)
    expect("m", m, (len(m), sizes.g * sizes.M), m.dtype, x)
    expect("clock", clock, (len(m),), torch.int64, x)
    return flat if all(map(Tensor.is_contiguous, flat)) else list(map(Tensor.contiguous, flat))


def check_results(
    x: Tensor,
    m: Tensor,
    H: int,
    memory: Tensor,
    hidden: Tensor,
    gmemory: Tensor | None,
    ghidden: Tensor | None,
    glast: Tensor | None,
) -> None:
    """What the forward pass left, and its gradients."""
    steps = x.shape[:-1]
    for name, t, shape, like in (
        ("memory", memory, (*steps, m.shape[1]), x),
        ("hidden", hidden, (*steps, H) if H else hidden.shape, x),
        ("the gradient of memory", gmemory, (*steps, m.shape[1]), x),
        ("the gradient of hidden", ghidden if H else None, (*steps, H), x),
        ("the gradient of last", glast, m.shape, m),
    ):
        if t is not None:
            expect(name, t, shape, like.dtype, x)


def expect(name: str, t: Tensor, shape: tuple[int, ...], dtype: torch.dtype, beside: Tensor) -> None:
    if t.shape != shape or t.dtype != dtype or t.device != beside.device:
        raise ValueError(
            f"{name} must be {tuple(shape)} {dtype} on {_place(beside)}, got {tuple(t.shape)} {t.dtype} on {t.device}; "
            "the tensors of one layer share dtype, device and sizes"
        )


def _place(t: Tensor) -> str:
    return "the cpu" if t.device.type == "cpu" else str(t.device)


_dtype, _device = attrgetter("dtype"), attrgetter("device")
