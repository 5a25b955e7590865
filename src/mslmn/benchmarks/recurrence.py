"""MS-LMN against nn.LSTM and nn.RNN with as many parameters, and against the reference loop.

A layer is timed only where its outputs and gradients agree with the reference in the same run.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import mslmn

from .machine import machine
from .timing import Disagreement, alternate

TOLERANCE = 1e-4  # of the largest value, in float32


@dataclass(frozen=True)
class Size:
    """Dimensions of a benchmark, in the symbols of the paper."""

    name: str
    T: int
    B: int
    I: int
    H: int
    M: int
    g: int
    also_lstm: int | None = None  # units of a second LSTM to compare with

    def layer(self) -> mslmn.MSLMN:
        return mslmn.MSLMN(self.I, self.H, self.M, num_modules=self.g)

    def input(self) -> Tensor:
        return torch.randn(self.T, self.B, self.I)


PAPER = (
    Size("handwriting", T=600, B=32, I=4, H=144, M=16, g=9),
    Size("words", T=97, B=25, I=13, H=25, M=25, g=7, also_lstm=41),
    Size("generation", T=300, B=1, I=0, H=1, M=4, g=9, also_lstm=15),
)
BASE = PAPER[0]
SWEEPS: dict[str, tuple[int, ...]] = {
    "T": (75, 150, 300, 600, 1200),
    "B": (1, 2, 4, 8, 16, 32, 64),
    "M": (1, 2, 4, 8, 16, 32),
    "g": (1, 2, 3, 4, 6, 8, 10, 12),
}


@dataclass(frozen=True)
class Row:
    """One candidate at one size: seconds."""

    size: str
    dimensions: dict[str, int]
    threads: int
    candidate: str
    parameters: int
    forward: float
    training: float


def run(threads: tuple[int, ...], repeats: int, sweep: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Every measurement, ready for JSON; raises `Disagreement` before it times what is wrong."""
    before = torch.get_num_threads()
    torch.manual_seed(0)
    rows: list[Row] = []
    try:
        for count in threads:
            torch.set_num_threads(count)
            for size in PAPER:
                progress(f"{size.name}, {count} thread{'s' * (count > 1)}")
                rows += compare(size, count, repeats)
        torch.set_num_threads(1)
        swept = list(sweeps(max(5, repeats // 3), progress)) if sweep else []
        latency = [stream(size, repeats, progress) for size in PAPER]
    finally:
        torch.set_num_threads(before)
    return {
        "machine": machine(),
        "rows": [asdict(row) for row in rows],
        "sweeps": swept,
        "streaming": latency,
    }


def compare(size: Size, threads: int, repeats: int) -> list[Row]:
    """The layer, its peers of as many parameters and the reference loop, in turns."""
    layer, x = size.layer(), size.input()
    check_agreement(layer, x)
    candidates: dict[str, tuple[nn.Module, Tensor]] = {"MS-LMN": (layer, x)}
    for name, peer in peers(size, layer):
        candidates[name] = peer, x if size.I else torch.zeros(size.T, size.B, 1)
    forward = {name: inference(*pair) for name, pair in candidates.items()}
    training = {name: training_step(*pair) for name, pair in candidates.items()}
    times = alternate(forward, repeats), alternate(training, repeats)
    parameters = {name: count(module) for name, (module, _) in candidates.items()}
    with mslmn.set_backend("reference"):  # too slow to take turns with: a few rounds are enough
        slow = alternate({"f": inference(layer, x)}, 3)["f"], alternate({"t": training_step(layer, x)}, 3)["t"]
    dimensions = {symbol: getattr(size, symbol) for symbol in "TBIHMg"}
    rows = [
        Row(size.name, dimensions, threads, name, parameters[name], times[0][name], times[1][name])
        for name in candidates
    ]
    return [*rows, Row(size.name, dimensions, threads, "reference loop", parameters["MS-LMN"], *slow)]


def peers(size: Size, layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """nn.LSTM and nn.RNN nearest in parameters (without input they get a constant zero, its weights not counted)."""
    budget, I = count(layer), max(size.I, 1)

    def live(kind: type[nn.LSTM] | type[nn.RNN], gates: int) -> Callable[[int], int]:
        return lambda n: count(kind(I, n)) - (gates * n if size.I == 0 else 0)

    lstm = mslmn.nearest_size(live(nn.LSTM, 4), budget)
    rnn = mslmn.nearest_size(live(nn.RNN, 1), budget)
    for units in dict.fromkeys((lstm, size.also_lstm or lstm)):
        yield f"nn.LSTM({units})", nn.LSTM(I, units)
    yield f"nn.RNN({rnn})", nn.RNN(I, rnn)


def check_agreement(layer: mslmn.MSLMN, x: Tensor) -> None:
    """Outputs and gradients of the chosen backend are those of the reference, or `Disagreement`."""
    g = torch.randn(*x.shape[:-1], layer.output_size)
    ours = results(layer, x, g)
    with mslmn.set_backend("reference"):
        expected = results(layer, x, g)
    for name, value in ours.items():
        scale = max(expected[name].abs().max().item(), 1e-6) if value.numel() else 1.0
        error = (value - expected[name]).abs().max().item() / scale if value.numel() else 0.0
        if not error < TOLERANCE:
            raise Disagreement(
                f"{name} of {layer} is off by {error:.2g} of its largest value, {TOLERANCE:.0e} is allowed; "
                "no time is reported for a wrong result"
            )


def inference(layer: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with torch.no_grad():
            output: Tensor = layer(x)[0]
        return output

    return call


def training_step(layer: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    with torch.no_grad():
        like = layer(x)[0]
    g = torch.randn(like.shape).to(like)  # from the CPU's generator: a failed CUDA graph spoils the GPU's
    parameters = list(layer.parameters())

    def call() -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        output: Tensor = layer(x)[0]
        output.backward(g)
        return output

    return call


def sweeps(repeats: int, progress: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """How the layer, and the LSTM of as many parameters, grow with each dimension; one thread."""
    for symbol, values in SWEEPS.items():
        for value in values:
            progress(f"{symbol} = {value}")
            dimensions = {**{s: getattr(BASE, s) for s in "TBIHMg"}, symbol: value}
            size = Size(f"{symbol} = {value}", **dimensions)
            layer, x = size.layer(), size.input()
            check_agreement(layer, x)
            name, lstm = next(iter(peers(size, layer)))
            pairs: dict[str, nn.Module] = {"MS-LMN": layer, "nn.LSTM": lstm}
            forward = alternate({n: inference(module, x) for n, module in pairs.items()}, repeats)
            training = alternate({n: training_step(module, x) for n, module in pairs.items()}, repeats)
            yield {
                "swept": symbol,
                "dimensions": dimensions,
                "peer": name,
                "forward": forward,
                "training": training,
            }


def stream(size: Size, repeats: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Seconds per step of one sequence that comes in step by step; one thread."""
    progress(f"streaming, {size.name}")
    layer = size.layer()
    check_agreement(layer, torch.randn(1, 1, size.I))
    name, lstm = next(iter(peers(size, layer)))

    def stepper(module: nn.Module, x: Tensor) -> Callable[[], None]:
        held: list[Any] = [None]

        def call() -> None:
            with torch.no_grad():
                _, held[0] = module(x, held[0])

        return call

    steps = {
        "MS-LMN": stepper(layer, torch.randn(1, 1, size.I)),
        name: stepper(lstm, torch.randn(1, 1, max(size.I, 1))),
    }
    return {"size": size.name, "seconds": alternate(steps, repeats)}


def results(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    """The output, the final memory, and what the gradient ``g`` of the output makes of every other gradient."""
    x = x.clone().requires_grad_()
    output, state = layer(x)
    names = ["the input's gradient", *(f"the gradient of {name}" for name, _ in layer.named_parameters())]
    grads = torch.autograd.grad(output, [x, *layer.parameters()], g)
    return {"the output": output, "the final memory": state.memory, **dict(zip(names, grads, strict=True))}


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
