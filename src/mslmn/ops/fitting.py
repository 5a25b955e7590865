"""What a fused backend is given: checked, because kernels believe the sizes they are told, and laid out plainly."""

from array import array
from operator import attrgetter
from typing import NoReturn

import torch
from torch import Tensor

from .weights import Fit, KeptWeights, Sizes, Weights, numels, shapes


def plain(t: Tensor) -> Tensor:
    """The values as they lie in memory."""
    return t.resolve_neg().contiguous()


def check_batch(batch_sizes: Tensor | None, x: Tensor, m: Tensor) -> None:
    """x is (T, B, I), or packed as batch_sizes say."""
    B, N = m.shape[0], x.shape[0]
    if batch_sizes is None:
        if x.dim() != 3 or x.shape[1] != B:
            raise ValueError(f"x must be (T, {B}, I), got {tuple(x.shape)}; or give batch_sizes")
        return
    global _right
    sizes = batch_sizes.to("cpu", torch.int64)
    found = sizes.numpy().tobytes(), B, N
    if x.dim() == 2 and found == _right:  # all layers, directions and passes ask the same
        return
    grows = bool((sizes[1:] > sizes[:-1]).any())
    if x.dim() != 2 or len(sizes) == 0 or grows or int(sizes[0]) != B or int(sizes[-1]) < 1 or int(sizes.sum()) != N:
        raise ValueError(
            f"batch_sizes must be positive, never grow, begin with the {B} rows of m and add up to those of x, "
            f"{tuple(x.shape)}, got {sizes.tolist()[:8]}; take those of a PackedSequence"
        )
    _right = found


_right: tuple[bytes, int, int] | None = None  # the last that was


def fitting(x: Tensor, m: Tensor, clock: Tensor, w: Weights) -> tuple[list[Tensor], "array[int]"]:
    """The weights, one by one, to be kept alive, and where they lie, as `Weights` of cpu.cpp and cuda.cu lists them, 0
    where there is none; if all that the kernels read is there. x may have another dtype than the rest."""
    B, device, sizes = m.shape[0], x.device, w.sizes
    if (
        x.shape[-1] != sizes.I
        or m.shape != (B, sizes.g * sizes.M)
        or m.device != device
        or clock.shape != (B,)
        or clock.dtype != torch.int64
        or clock.device != device
    ):
        expect("x", x, (*x.shape[:-1], sizes.I), x.dtype, x)
        expect("m", m, (B, sizes.g * sizes.M), m.dtype, x)
        expect("clock", clock, (B,), torch.int64, x)
    flat = w.flat()
    fits, addresses = _fits(w, m), list(map(Tensor.data_ptr, flat))
    known = fits is not None and (fits.addresses, fits.nbytes) == (addresses, list(map(_nbytes, flat)))
    if known and fits is not None and all(map(Tensor.is_contiguous, flat)):
        return flat, fits.listed
    if list(map(Tensor.numel, flat)) != numels(sizes) or any(t.dtype != m.dtype or t.device != device for t in flat):
        _refuse(flat, sizes, m, x)
    if not all(map(Tensor.is_contiguous, flat)) or any(map(Tensor.is_neg, flat)):
        flat = list(map(plain, flat))
        if isinstance(w, KeptWeights):
            w.fits = None  # a backward pass must not take what lies there for what was read
        return flat, _listed(list(map(Tensor.data_ptr, flat)), sizes)
    found = _listed(addresses, sizes)
    if isinstance(w, KeptWeights):
        w.fits = Fit(m.dtype, device, addresses, list(map(_nbytes, flat)), found)
    return flat, found


def _fits(w: Weights, m: Tensor) -> Fit | None:
    """Where the last pass found the weights fitting, if that was in this dtype and on this device: an address is one
    device's."""
    fits = w.fits if isinstance(w, KeptWeights) else None
    return fits if fits is not None and fits.dtype == m.dtype and fits.device == m.device else None


def unmoved(w: Weights, x: Tensor, m: Tensor, clock: Tensor, memory: Tensor) -> "array[int] | None":
    """Where the weights lie, if they do so where the last pass found them fitting, and what was checked then still has
    its sizes: data can be changed behind autograd's back. At gradients it has looked itself."""
    fits = _fits(w, m)
    if fits is None:
        return None
    (*steps, I), B = x.shape, m.shape[0]
    if (*steps, m.shape[1]) != memory.shape or I != w.sizes.I or x.dtype != memory.dtype or clock.shape != (B,):
        return None
    flat = w.flat()
    if fits.addresses != list(map(Tensor.data_ptr, flat)) or fits.nbytes != list(map(_nbytes, flat)):
        return None
    return fits.listed


_nbytes = attrgetter("nbytes")  # numbers and dtype in one


def _listed(addresses: list[int], sizes: Sizes) -> "array[int]":
    none = [0] * sizes.g
    if sizes.H == 0:
        addresses = [0, 0, *none, *addresses]
    elif not sizes.bias:
        addresses = [addresses[0], 0, *addresses[1:]]
    return array("Q", addresses if sizes.bias else addresses + none)


def _refuse(flat: list[Tensor], sizes: Sizes, m: Tensor, x: Tensor) -> NoReturn:
    expected = shapes(sizes)
    for i, (t, shape) in enumerate(zip(flat, expected, strict=False)):
        expect(f"weight {i} of {len(expected)}", t, shape, m.dtype, x)
    raise ValueError(f"expected {len(expected)} weights, got {len(flat)}; build the layer anew")


def check_results(
    x: Tensor,
    m: Tensor,
    H: int,
    memory: Tensor,
    hidden: Tensor | None,
    gmemory: Tensor | None,
    ghidden: Tensor | None,
    glast: Tensor | None,
) -> None:
    """What the forward pass left, and its gradients."""
    if H and hidden is None:
        raise ValueError("hidden must be the hidden states of the forward pass, got None; pass need_hidden=True to it")
    steps = x.shape[:-1]
    for name, t, shape, like in (
        ("memory", memory, (*steps, m.shape[1]), x),
        ("hidden", hidden if H else None, (*steps, H), x),
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
