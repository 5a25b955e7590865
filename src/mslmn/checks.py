"""What a caller can get wrong, and what to do about it: every message says expected, got, remedy."""

import math

import torch
from torch import Tensor

from . import ops


def check_size(name: str, value: int, least: int = 1, most: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    if not least <= value <= most:
        bounds = f"at least {least}" if math.isinf(most) else f"between {least} and {most}"
        raise ValueError(f"{name} must be {bounds}, got {value}")


def check_flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}; pass options by keyword")


def check_probability(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number in [0, 1], got {value!r} ({type(value).__name__})")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be a probability in [0, 1], got {value}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_float(name: str, dtype: torch.dtype | None) -> None:
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"{name} must be a real floating type, got {dtype}; use torch.float32, for instance")


def check_input(x: Tensor, input_size: int, batch_first: bool, weight: Tensor) -> None:
    """A tensor of sequences: (T, B, I), (B, T, I) if ``batch_first``, or unbatched (T, I)."""
    form = "(B, T, input_size)" if batch_first else "(T, B, input_size)"
    if not isinstance(x, Tensor):
        raise TypeError(
            f"input must be a tensor {form}, (T, input_size) unbatched, or a PackedSequence, "
            f"got {type(x).__name__}"
        )
    if x.dim() not in (2, 3):
        raise ValueError(
            f"input must be {form}, or (T, input_size) unbatched, got {x.dim()} dimensions, "
            f"{tuple(x.shape)}; reshape it"
        )
    check_features(x, x.dim(), input_size, form if x.dim() == 3 else "(T, input_size)", weight)
    if x.shape[1 if batch_first and x.dim() == 3 else 0] == 0:
        raise ValueError(f"input must have at least one step, got {tuple(x.shape)}; drop empty sequences")


def check_packed(x: Tensor, input_size: int, weight: Tensor) -> None:
    """The data of a PackedSequence, (N, I); the steps are its own business."""
    check_features(x, 2, input_size, "a PackedSequence of (N, input_size)", weight)


def check_features(x: Tensor, dim: int, input_size: int, form: str, weight: Tensor) -> None:
    if x.dim() != dim or x.shape[-1] != input_size:
        raise ValueError(
            f"input must be {form} with input_size {input_size}, got {tuple(x.shape)}; "
            f"pass sequences with {input_size} features, or build the layer for {x.shape[-1]}"
        )
    check_kin("input", x, weight)


def check_state(state: object, cells: int, batch: tuple[int, ...], units: int, weight: Tensor) -> None:
    """A state must be one that the layer could have returned: memory (cells, *batch, units), clock batch."""
    remedy = "pass a state that this layer returned for the same batch, or None"
    if not isinstance(state, tuple) or len(state) != 2 or not all(isinstance(s, Tensor) for s in state):
        got = f"{type(state).__name__} of {len(state)}" if isinstance(state, tuple) else type(state).__name__
        raise TypeError(f"state must be mslmn.State(memory, clock), two tensors, got {got}; {remedy}")
    memory, clock = state
    expected = (cells, *batch, units)
    if tuple(memory.shape) != expected:
        names = ("num_layers * num_directions", *("batch size" for _ in batch), "memory of all modules")
        differ = [
            f"{name} is {got} in the state, {want} here"
            for name, got, want in zip(names, memory.shape, expected, strict=False)
            if got != want and memory.dim() == len(expected)
        ]
        raise ValueError(
            "; ".join([f"state.memory must be {expected}, got {tuple(memory.shape)}", *differ, remedy])
        )
    if tuple(clock.shape) != batch:
        raise ValueError(
            f"state.clock must be {batch}, one count of steps per sequence, "
            f"got {tuple(clock.shape)}; {remedy}"
        )
    if clock.dtype != torch.int64:
        raise TypeError(f"state.clock must count steps in torch.int64, got {clock.dtype}; {remedy}")
    check_device("state.clock", clock, weight)
    check_kin("state.memory", memory, weight)


def check_kin(name: str, tensor: Tensor, weight: Tensor) -> None:
    """Same device as the weights, and the same dtype unless autocast is there to convert."""
    check_device(name, tensor, weight)
    if tensor.dtype == weight.dtype:
        return
    convert = f"{name} is {tensor.dtype}, the layer {weight.dtype}; convert"
    if not tensor.is_floating_point():
        raise TypeError(f"{convert} it: {name}.to({weight.dtype})")
    if not ops.autocast_enabled(weight.device.type):
        raise TypeError(f"{convert} one: {name}.to({weight.dtype}), or layer.to({tensor.dtype})")


def check_device(name: str, tensor: Tensor, weight: Tensor) -> None:
    if tensor.device != weight.device:
        raise ValueError(
            f"{name} is on {tensor.device}, the layer on {weight.device}; "
            f"move one: {name}.to({str(weight.device)!r}), or layer.to({str(tensor.device)!r})"
        )
