"""Who computes the recurrence: the choice, the user's wish, and why.

    reference   plain loops under autograd: the definition; any device and dtype, second derivatives
    cpu         fused C++ kernels (cpu.cpp); float32 and float64 on the CPU
    cuda        fused CUDA kernels (cuda.cu), compiled when a layer first runs; compute capability 8.0 and above
    torch       the same algorithm in torch operations (clocked.py); any device, no compiler

``auto`` takes ``cpu`` for CPU tensors where the kernels were built, ``cuda`` for CUDA tensors where they can be
compiled, and ``torch`` otherwise, or where a layer is too large for a device, with a warning; for derivatives that only
the reference has (forward mode, and the transforms of torch.func but for vmap) it takes the reference. A wish that
cannot be granted is an error, never another backend.

CTC's kernels (ctc.cu) are taken for ``auto`` and ``cuda`` where they can be, torch's otherwise.
"""

import os
import warnings
from types import TracebackType

import torch
from torch.autograd import forward_ad

from . import cpu, cuda
from .weights import Sizes

NAMES = ("auto", "reference", "cpu", "cuda", "torch")


class set_backend:
    """Choose who computes the recurrence from now on, or inside a ``with`` block.

    ``"auto"`` (the default, or what the environment variable ``MSLMN_BACKEND`` says), ``"reference"``, ``"cpu"``,
    ``"cuda"`` or ``"torch"``; ``mslmn doctor`` tells what each device gets and why.

    >>> with set_backend("reference"):
    ...     wish()
    'reference'
    """

    def __init__(self, name: str) -> None:
        global _wish
        self.name, self.previous = _checked(name), _wish
        _wish = self.name

    def __enter__(self) -> None:
        global _wish
        _wish = self.name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _wish
        _wish = self.previous


def wish() -> str:
    """What the user wants: ``"auto"``, or the name of a backend."""
    return _wish


def needs_reference() -> bool:
    """Whether the reference computes: the user wants it, or what autograd is asked for needs it."""
    if _wish == "reference":
        return True
    if torch.compiler.is_compiling():
        return False
    transform = torch._C._functorch.peek_interpreter_stack()
    special = transform is not None and transform.key() != torch._C._functorch.TransformType.Vmap
    if not special and forward_ad._current_level < 0:
        return False
    if _wish != "auto":
        raise RuntimeError(
            f"backend {_wish!r} has reverse-mode gradients only, not those of torch.func or of forward mode; "
            "use mslmn.set_backend('auto') or 'reference'"
        )
    return True


def eager() -> bool:
    """Whether nobody is tracing, transforming or watching operators."""
    return (
        not torch.compiler.is_compiling()  # first: the rest is not for tracers to see
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def choose(device: torch.device) -> str:
    """The fused backend for tensors on a device; an error if the user wants one that cannot run them."""
    name = _wish
    if name in ("auto", "reference"):  # the reference has no operator: what was fused stays so
        return device.type if device.type in ("cpu", "cuda") and why_not(device) is None else "torch"
    if name in ("cpu", "cuda") and device.type != name:
        raise RuntimeError(
            f"backend {name!r} computes {name.upper()} tensors, these are on {device}; "
            "move the layer and its input, or mslmn.set_backend('auto')"
        )
    if reason := why_not(device) if name == "cuda" else None:
        raise RuntimeError(f"backend 'cuda' cannot compute on {device}: {reason}; mslmn.set_backend('auto')")
    return name


def choose_for(device: torch.device, sizes: Sizes, real: torch.dtype, value: torch.dtype, steps: int) -> str:
    """The same for a layer: where it does not fit the CUDA kernels, ``torch`` takes over, and says so once."""
    name = choose(device)
    if name != "cuda":
        return name
    reason = cuda.why_not_these(sizes, real, value, device.index)
    if steps > cuda.LONGEST:
        reason = f"they take {cuda.LONGEST} steps of all sequences together at most, here are {steps}"
    if reason is None:
        return name
    if _wish == "cuda":
        raise RuntimeError(f"the CUDA kernels cannot compute this layer: {reason}; mslmn.set_backend('auto')")
    warnings.warn(
        f"no fused CUDA kernels for a layer of {sizes}: {reason}; the torch backend computes it, more slowly",
        stacklevel=2,
    )
    return "torch"


def why_not(device: torch.device) -> str | None:
    """Why there are no fused kernels for tensors on a device, or None if there are."""
    if device.type == "cpu":
        return cpu.why_not()
    if device.type == "cuda":
        return cuda.why_not(torch.cuda.current_device() if device.index is None else device.index)
    return f"there are none for {device.type}"


def chosen(device: torch.device) -> str:
    """Who computes for tensors on a device, the reference included."""
    return "reference" if _wish == "reference" else choose(device)


def explain(device: torch.device) -> str:
    """Why `choose` takes what it takes for tensors on a device."""
    if _wish != "auto":
        return "you asked for it (mslmn.set_backend or MSLMN_BACKEND)"
    if reason := why_not(device):
        return f"no fused kernels: {reason}"
    if device.type == "cpu":
        return f"fused kernels, {cpu.instruction_set()}"
    return f"fused kernels, compiled by NVRTC {cuda.compiler()} when a layer first runs, {cuda.where_kept()}"


def _checked(name: str) -> str:
    if name not in NAMES:
        raise ValueError(f"backend must be one of {', '.join(map(repr, NAMES))}, got {name!r}")
    reason = cpu.why_not() if name == "cpu" else None
    if name == "cuda" and not torch.cuda.is_available():
        reason = "there is no CUDA device"
    if reason:
        raise RuntimeError(f"backend {name!r} cannot be had: {reason}, or take 'auto'")
    return name


_wish = _checked(os.environ.get("MSLMN_BACKEND", "auto"))
