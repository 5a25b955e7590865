"""What a caller can get wrong, and what to do about it: every message says expected, got, remedy."""

import math
import operator
from itertools import pairwise

import torch
from torch import Tensor

from . import ops
from .clock import MAX_MODULES


def size(name: str, value: int, least: int = 1, most: float = math.inf) -> int:
    """The value as an int (NumPy's integers are welcome), if it is one within the bounds."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be an int, got {value!r} ({type(value).__name__}); convert it with int()"
        ) from None
    if not least <= number <= most:
        bounds = f"at least {least}" if math.isinf(most) else f"between {least} and {most}"
        raise ValueError(f"{name} must be {bounds}, got {number}; choose another size")
    return number


def flag(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}; pass options by keyword")
    return value


def probability(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"{name} must be a number in [0, 1], got {value!r} ({type(value).__name__}); convert it with float()"
        )
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be a probability in [0, 1], got {value}; 0 switches it off")
    return float(value)


def choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}; choose one of them")
    return value


def float_type(name: str, dtype: torch.dtype | None) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"{name} must be a real floating type, got {dtype!r}; use torch.float32, for instance")


def check_input(x: Tensor, input_size: int, batch_first: bool, weight: Tensor) -> None:
    """A tensor of sequences: (T, B, I), (B, T, I) if ``batch_first``, or unbatched (T, I)."""
    if (
        isinstance(x, Tensor)
        and len(shape := x.shape) == 3
        and shape[2] == input_size
        and shape[batch_first] > 0
        and x.dtype == weight.dtype
        and x.device == weight.device
    ):
        return  # nothing is wrong: small networks run in the time that it takes to look at each thing by itself
    form = "(B, T, input_size)" if batch_first else "(T, B, input_size)"
    if not isinstance(x, Tensor):
        raise TypeError(
            f"input must be a tensor {form}, (T, input_size) unbatched, or a PackedSequence, "
            f"got {type(x).__name__}; convert it with torch.as_tensor, or pack sequences of different lengths"
        )
    if x.dim() not in (2, 3):
        raise ValueError(
            f"input must be {form}, or (T, input_size) unbatched, got {x.dim()} dimensions, "
            f"{tuple(x.shape)}; reshape it"
        )
    check_features(x, input_size, form if x.dim() == 3 else "(T, input_size)", weight)
    if x.shape[1 if batch_first and x.dim() == 3 else 0] == 0:
        raise ValueError(f"input must have at least one step, got {tuple(x.shape)}; drop empty sequences")


def check_packed(x: Tensor, batch_sizes: Tensor, input_size: int, weight: Tensor) -> None:
    """The parts of a PackedSequence: data (N, I), and how many sequences have a step t."""
    form = "a PackedSequence of (N, input_size)"
    if x.dim() != 2:
        raise ValueError(
            f"input must be {form} with input_size {input_size}, got data {tuple(x.shape)}; "
            "pack sequences of shape (T, input_size)"
        )
    check_features(x, input_size, form, weight)
    sizes = batch_sizes.tolist()
    if not sizes or sizes[-1] < 1 or sum(sizes) != len(x) or any(a < b for a, b in pairwise(sizes)):
        raise ValueError(
            f"batch_sizes of a PackedSequence must be positive, never grow and add up to its {len(x)} rows, "
            f"got {sizes if len(sizes) < 10 else [*sizes[:8], '...']}; "
            "make it with pack_sequence or pack_padded_sequence"
        )


def check_features(x: Tensor, input_size: int, form: str, weight: Tensor) -> None:
    if x.shape[-1] != input_size:
        raise ValueError(
            f"input must be {form} with input_size {input_size}, got {tuple(x.shape)}; "
            f"pass sequences with {input_size} features, or build the layer for {x.shape[-1]}"
        )
    check_device("input", x, weight)
    check_dtype("input", x, weight)


def check_state(state: object, cells: int, batch: tuple[int, ...], units: int, weight: Tensor) -> None:
    """A state must be one that the layer could have returned: memory (cells, *batch, units), clock batch."""
    remedy = "pass a state that this layer returned for the same batch, or None"
    if not isinstance(state, (tuple, list)) or len(state) != 2 or not all(isinstance(s, Tensor) for s in state):
        got = type(state).__name__
        if isinstance(state, (tuple, list)):
            got = f"{got} of ({', '.join(type(s).__name__ for s in state)})"
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
        raise ValueError("; ".join([f"state.memory must be {expected}, got {tuple(memory.shape)}", *differ, remedy]))
    if tuple(clock.shape) != batch:
        raise ValueError(
            f"state.clock must be {batch}, one count of steps per sequence, got {tuple(clock.shape)}; {remedy}"
        )
    if clock.dtype != torch.int64:
        raise TypeError(f"state.clock must count steps in torch.int64, got {clock.dtype}; {remedy}")
    check_device("state.clock", clock, weight)
    check_device("state.memory", memory, weight)
    check_dtype("state.memory", memory, weight)


def check_clock(clock: Tensor, period: int) -> None:
    """Where layers pool, no window may have been left open. Tracers and CUDA graphs cannot wait for the answer."""
    if not ops.backends.eager() or clock.is_meta or capturing(clock):
        return
    period = min(period, torch.iinfo(torch.int64).max)
    wrong = clock[clock // period * period != clock]
    if wrong.numel():
        raise ValueError(
            f"state.clock must be a multiple of {period}, pool to the power of num_layers, got {wrong[0].item()}; feed "
            f"chunks whose lengths are multiples of {period}, the last one excepted"
        )


def check_not_captured(x: Tensor) -> None:
    """A graph would read the tables of windows where they lay on the host, long after they are gone."""
    if ops.backends.eager() and capturing(x):
        raise RuntimeError(
            "a packed batch cannot be pooled in a CUDA graph, and one is being captured; capture a layer without pool, "
            "or pass a plain tensor"
        )


def capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def check_dtype(name: str, tensor: Tensor, weight: Tensor) -> None:
    """The dtype of the weights, unless autocast is there to convert (it never converts float64)."""
    if tensor.dtype == weight.dtype:
        return
    if (
        tensor.is_floating_point()
        and torch.float64 not in (tensor.dtype, weight.dtype)
        and ops.autocast_enabled(weight.device.type)
    ):
        return
    message = f"{name} is {tensor.dtype}, the layer {weight.dtype}; convert"
    if name == "input" and tensor.is_floating_point():
        raise TypeError(f"{message} one: input.to({weight.dtype}), or layer.to({tensor.dtype})")
    raise TypeError(f"{message} it: {_moved(name, weight.dtype)}")


def check_device(name: str, tensor: Tensor, weight: Tensor) -> None:
    if tensor.device == weight.device:
        return
    message = f"{name} is on {tensor.device}, the layer on {weight.device}; "
    if weight.is_meta:
        message += f"give the layer memory: layer.to_empty(device={str(tensor.device)!r}).reset_parameters()"
    elif name == "input" and not tensor.is_meta:
        message += f"move one: input.to({str(weight.device)!r}), or layer.to({str(tensor.device)!r})"
    else:
        message += f"move it: {_moved(name, repr(str(weight.device)))}"
    raise ValueError(message)


def _moved(name: str, where: object) -> str:
    if "." not in name:
        return f"{name}.to({where})"
    state, part = name.split(".")
    return f"{state}._replace({part}={name}.to({where}))"


def positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a number above 0, got {value!r}; the default is a good start")


def amount(name: str, value: float, below: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < below:
        bound = "" if math.isinf(below) else f" and below {below:g}"
        raise ValueError(f"{name} must be a number of at least 0{bound}, got {value!r}; 0 switches it off")


def check_module(As: list[Tensor], Bs: list[Tensor], cells: int, M: int, H: int, modules: int) -> None:
    """Weights of a new module, one pair for each cell."""
    if modules >= MAX_MODULES:
        raise ValueError(f"there are {modules} modules already, the most that the clock allows; do not grow further")
    if not len(As) == len(Bs) == cells:
        raise ValueError(
            f"A and B must be lists of {cells}, one for each layer and direction, got {len(As)} and {len(Bs)}; "
            "pass a pair for each of layer.cells"
        )
    for name, tensors, expected in (("A", As, (M, H)), ("B", Bs, (M, M))):
        for i, tensor in enumerate(tensors):
            if not isinstance(tensor, Tensor) or tuple(tensor.shape) != expected:
                got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ValueError(
                    f"{name} of cell {i} must be a tensor {expected}, got {got}; fit it with n_components={M}"
                )
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name} of cell {i} is not finite; look for NaN in the hidden states")
