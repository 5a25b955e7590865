"""Who computes the recurrence: the choice, the user's wish, and why.

    reference   plain loops under autograd: the definition; any device and dtype, second derivatives
    cpu         fused C++ kernels (cpu.cpp); float32 and float64 on the CPU
    torch       the same algorithm in torch operations (clocked.py); any device, no compiler

``auto`` takes ``cpu`` for CPU tensors where the kernels were built, and ``torch`` otherwise. A wish that cannot be
granted is an error, never another backend.
"""

import os
from types import TracebackType

import torch

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
        self.previous = _wish
        _wish = _checked(name)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _wish
        _wish = self.previous


def wish() -> str:
    """What the user wants: ``"auto"``, or the name of a backend."""
    return _wish


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
