"""Who computes the recurrence: the choice, the user's wish, and why.

    reference   plain loops under autograd: the definition; any device and dtype, second derivatives
    cpu         fused C++ kernels (cpu.cpp); float32 and float64 on the CPU
    torch       the same algorithm in torch operations (clocked.py); any device, no compiler

``auto`` takes ``cpu`` for CPU tensors where the kernels were built, and ``torch`` otherwise; for derivatives that only
the reference has (forward mode, and the transforms of torch.func but for vmap) it takes the reference. A wish that
cannot be granted is an error, never another backend.
"""

import os
from types import TracebackType

import torch
from torch.autograd import forward_ad

from . import cpu

NAMES = ("auto", "reference", "cpu", "torch")


class set_backend:
    """Choose who computes the recurrence from now on, or inside a ``with`` block.

    ``"auto"`` (the default, or what the environment variable ``MSLMN_BACKEND`` says), ``"reference"``, ``"cpu"`` or
    ``"torch"``; ``mslmn doctor`` tells what each device gets and why.

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


def choose(device: torch.device) -> str:
    """The fused backend for tensors on a device; an error if the user wants one that cannot run them."""
    name = _wish
    if name in ("auto", "reference"):  # the reference has no operator: what was fused stays so
        return "cpu" if device.type == "cpu" and cpu.why_not() is None else "torch"
    if name == "cpu" and device.type != "cpu":
        raise RuntimeError(
            f"backend 'cpu' computes CPU tensors, these are on {device}; "
            "move the layer and its input, or mslmn.set_backend('auto')"
        )
    return name


def chosen(device: torch.device) -> str:
    """Who computes for tensors on a device, the reference included."""
    return "reference" if _wish == "reference" else choose(device)


def explain(device_type: str) -> str:
    """Why `choose` takes what it takes for tensors on such a device."""
    if _wish != "auto":
        return "you asked for it (mslmn.set_backend or MSLMN_BACKEND)"
    if device_type != "cpu":
        return "there are no fused kernels for this device yet"
    reason = cpu.why_not()
    return f"no fused kernels: {reason}" if reason else f"fused kernels, {cpu.instruction_set()}"


def _checked(name: str) -> str:
    if name not in NAMES:
        raise ValueError(f"backend must be one of {', '.join(map(repr, NAMES))}, got {name!r}")
    reason = cpu.why_not() if name == "cpu" else None
    if reason:
        raise RuntimeError(f"backend 'cpu' cannot be had: {reason}, or take 'auto'")
    return name


_wish = _checked(os.environ.get("MSLMN_BACKEND", "auto"))
