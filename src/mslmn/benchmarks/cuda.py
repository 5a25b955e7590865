"""MS-LMN on a GPU against cuDNN's LSTM, as called from Python and as replayed from a CUDA graph.

A layer is timed only where its outputs and gradients agree with the reference in float64 in the same run. Beside the
times stand floors: the bytes that must move and the operations needed, at the rates of a copy and of a matrix product.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import mslmn

from ..clock import period
from ..layers import ClockedLayer
from .machine import machine
from .recurrence import PAPER, Size, count, inference, peers, results, training_step
from .timing import Clock, Disagreement, alternate, event_clock

FP32_BOUND = 1e-5  # of the norm of each tensor
BF16_BOUND = 3e-2
MANY = 100_000  # inputs
DRAWS = 10  # at most, to find one that float32 can compute
REPLAY_BOUND = 1e-2  # sums may be taken in another order; what is not captured is far off
LEAST_SECONDS = 5e-3  # of one measurement
DIRECT = "direct gradients"
SIDE = 8192  # of the square matrices that are copied and multiplied, 268 MB each


@dataclass(frozen=True)
class Case:
    """A size, what is measured there beside MS-LMN and LSTM, and what is required there."""

    size: Size
    bidirectional: bool = False
    family: bool = False  # LMN and ClockworkRNN of as many parameters
    loop: bool = False  # the reference
    direct: bool = False  # what is required of training is required within `direct_gradients`, too
    required: tuple[float, float] | None = None  # times faster than the last LSTM in fp32: forward, training

    @property
    def name(self) -> str:
        return f"{self.size.name}, bidirectional" if self.bidirectional else self.size.name


HANDWRITING = replace(PAPER[0], also_lstm=110)  # the paper's LSTM
CASES = (
    Case(HANDWRITING, family=True, loop=True, required=(3.0, 2.0)),
    Case(replace(HANDWRITING, B=128), required=(3.5, 2.5)),
    Case(replace(HANDWRITING, B=256), required=(4.5, 3.5)),
    Case(PAPER[0], bidirectional=True),
    Case(replace(PAPER[1], also_lstm=None), loop=True, direct=True, required=(1.0, 1.0)),
    Case(replace(PAPER[2], also_lstm=None), loop=True, direct=True, required=(1.0, 1.0)),
)


@dataclass(frozen=True)
class Candidate:
    """A module and its input."""

    name: str
    precision: str  # fp32, tf32, bf16; bf16 autocast
    module: nn.Module
    x: Tensor
    layer: ClockedLayer | None = None  # of ours: what the module is, or wraps
    error: float | None = None
    direct: bool = False  # training steps within `direct_gradients`: of an LSTM, backward passes in the same thread


@dataclass(frozen=True)
class Row:
    """One candidate at one size: seconds."""

    size: str
    dimensions: dict[str, int]
    candidate: str
    precision: str
    parameters: int
    forward: float | None  # None: it cannot run
    training: float | None
    forward_graph: float | None  # None: it cannot be captured
    training_graph: float | None
    latency: float | None  # of a step of the forward pass
    error: float | None  # the worst of outputs and gradients, of ours
    floors: dict[str, dict[str, float]] | None  # of MS-LMN and LMN


def run(
    repeats: int,
    progress: Callable[[str], None],
    device: str = "cuda",
    cases: Iterable[Case] = CASES,
    clock: Clock = event_clock,
) -> dict[str, Any]:
    """Every measurement, ready for JSON; raises `Disagreement` before it times what is wrong."""
    torch.manual_seed(0)
    rows: list[Row] = []
    required: list[dict[str, Any]] = []
    with float32("ieee", matmul=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RNN module weights are not part")  # where bfloat16 cannot be flattened
        progress("ceilings")
        limits = ceilings(repeats, device, clock)
        for case in cases:
            progress(f"{case.name}, B = {case.size.B}")
            found = compare(case, repeats, limits, device, clock)
            rows += found
            required += requirements(case, found)
    return {
        "machine": machine(device),
        "ceilings": limits,
        "rows": [asdict(row) for row in rows],
        "required": required,
    }


def compare(case: Case, repeats: int, limits: dict[str, float], device: str, clock: Clock) -> list[Row]:
    """All candidates in turn: forward and training, called and replayed. The reference loop apart."""
    candidates = list(entrants(case, device))
    times: dict[str, dict[str, float]] = {}
    for what, make in (("forward", inference), ("training", training_step)):
        calls, graphs = {}, {}
        for one in candidates:
            one.module.train(what == "training")  # cuDNN's LSTM keeps what backward needs unless in eval mode
            try:
                call = within(one.precision, make(one.module, one.x))
                call = directly(call) if one.direct and what == "training" else call
                call()
            except RuntimeError:
                if one.precision != "bf16":
                    raise
                continue  # cuDNN may not have an LSTM of that size in bfloat16
            calls[one.name] = call
            if (replay := captured(call, one.module, ours=one.layer is not None)) is not None:
                graphs[one.name] = replay
        times[what] = alternate(calls, repeats, clock, LEAST_SECONDS)
        times[f"{what}_graph"] = alternate(graphs, repeats, clock, LEAST_SECONDS)
    if case.loop:
        loop = replace(candidates[0], name="reference loop", error=None)
        candidates.append(loop)
        with mslmn.set_backend("reference"):
            for what, make in (("forward", inference), ("training", training_step)):
                call = make(loop.module, loop.x)
                call()
                times[what][loop.name] = clock(call, 1)  # it takes seconds
    return [row(case, one, {what: found.get(one.name) for what, found in times.items()}, limits) for one in candidates]


def row(case: Case, one: Candidate, times: dict[str, Any], limits: dict[str, float]) -> Row:
    dimensions = {symbol: getattr(case.size, symbol) for symbol in "TBIHMg"}
    floors = None
    if isinstance(one.layer, mslmn.MSLMN) and not one.direct:
        floors = {}
        for what, (moved, operations) in work(one.layer, one.x).items():
            seconds = max(moved / limits["bandwidth"], operations / limits["operations"])
            floors[what] = {
                "bytes": moved,
                "operations": operations,
                "seconds": seconds,
                "ratio": times[what] / seconds,
            }
    return Row(
        size=case.name,
        dimensions=dimensions,
        candidate=one.name,
        precision=one.precision,
        parameters=count(one.module),
        latency=times["forward"] and times["forward"] / case.size.T,
        error=one.error,
        floors=floors,
        **times,
    )


def entrants(case: Case, device: str) -> Iterator[Candidate]:
    """Who is compared, the MS-LMN first; ours are checked before they are handed out."""
    size = case.size
    x = size.input().to(device)
    layer = mslmn.MSLMN(size.I, size.H, size.M, num_modules=size.g, bidirectional=case.bidirectional)
    ours: list[tuple[str, ClockedLayer]] = [("MS-LMN", layer)]
    if case.family:
        budget = count(layer)
        n = mslmn.nearest_size(lambda n: mslmn.LMN(size.I, n, n), budget)
        ours.append((f"LMN({size.I}, {n}, {n})", mslmn.LMN(size.I, n, n)))
        n = mslmn.nearest_size(lambda n: mslmn.ClockworkRNN(size.I, n, size.g), budget)
        ours.append((f"ClockworkRNN({size.I}, {n}, {size.g})", mslmn.ClockworkRNN(size.I, n, size.g)))
    for name, one in ours:
        one.to(device)
        yield Candidate(name, "fp32", one, x, one, worst_error(one, one, x, FP32_BOUND))
    yield Candidate(f"MS-LMN, {DIRECT}", "fp32", layer, x, layer, direct=True)
    cast, low = Autocast(layer), x.bfloat16()
    yield Candidate(
        "MS-LMN, bf16 autocast", "bf16 autocast", cast, low, layer, worst_error(cast, layer, low, BF16_BOUND)
    )
    x = x if size.I else torch.zeros(size.T, size.B, 1, device=device)  # nn.LSTM wants an input
    for _, peer in peers(size, size.layer()):
        if isinstance(peer, nn.LSTM):
            I, n = peer.input_size, peer.hidden_size
            for precision in ("fp32", "tf32", "bf16"):
                lstm = nn.LSTM(I, n, bidirectional=case.bidirectional).to(device)
                name = f"nn.LSTM({I}, {n})" + ("" if precision == "fp32" else f", {precision}")
                if precision == "bf16":
                    yield Candidate(name, precision, flatten(lstm.bfloat16()), x.bfloat16())
                else:
                    yield Candidate(name, precision, lstm, x)
                if precision == "fp32":
                    yield Candidate(f"{name}, {DIRECT}", precision, lstm, x, direct=True)


@torch.no_grad()
def speak(layer: nn.Module) -> None:
    """Draw the biases: a network without input and biases is silent, and any two of its backends agree."""
    for parameter in layer.parameters():
        if parameter.dim() == 1:
            parameter.copy_(0.1 * torch.randn(parameter.shape))


class Autocast(nn.Module):
    """A layer under autocast; the input is bfloat16, as a layer below would hand it over."""

    def __init__(self, layer: ClockedLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.layer(x)


def flatten(lstm: nn.LSTM) -> nn.LSTM:
    """`nn.LSTM.flatten_parameters`, which leaves out bfloat16: else cuDNN gathers the weights at every call."""
    sizes = lstm.hidden_size, lstm.proj_size, lstm.num_layers, lstm.batch_first, lstm.bidirectional
    try:
        mode = torch.backends.cudnn.rnn.get_cudnn_mode("LSTM")
        with torch.no_grad():
            torch._cudnn_rnn_flatten_weight(lstm._flat_weights, 4, lstm.input_size, mode, *sizes)  # type: ignore[arg-type]
    except (RuntimeError, AttributeError):  # no cuDNN, or one without bfloat16
        pass
    return lstm


def worst_error(module: nn.Module, layer: ClockedLayer, like: Tensor, bound: float) -> float:
    """The largest ``|a - b| / |b|`` of outputs and gradients on a fresh draw, b the reference's in float64.

    `Disagreement` if it is above the bound. Of some draws it is the first on which a quarter of the bound is enough for
    the reference in the precision of the module, and a quarter of float32's for the reference in float64 with rounded
    weights, or else the one that comes nearest: in a tiny network a gradient can be all cancellation, and no backend
    would pass.
    """
    chosen: tuple[float, Any] = math.inf, None
    for _ in range(DRAWS):
        speak(layer)
        x = torch.randn(like.shape)
        g = torch.rand(*x.shape[:-1], layer.output_size)  # of one sign: long sums cancel less
        place = "cpu" if x.numel() < MANY else like.device  # where a loop of such steps is faster
        x, g, here = x.to(place), g.to(place), copy.deepcopy(module).to(place)
        exact = copy.deepcopy(here).double()
        with mslmn.set_backend("reference"):
            expected = results(exact, x.double(), g.double())
            narrow = results(here, x.to(like.dtype), g)
            near = results(rounded(exact), x.double(), g.double())
        off = max(
            relative(found[name], value) / allowed
            for found, allowed in ((narrow, bound), (near, FP32_BOUND))
            for name, value in expected.items()
        )
        if chosen[1] is None or off < chosen[0] or math.isnan(chosen[0]):
            chosen = off, (x, g, expected, copy.deepcopy(layer.state_dict()))
        if off <= 1 / 4:
            break
    x, g, expected, weights = chosen[1]
    layer.load_state_dict(weights)
    found = results(module, x.to(like), g.to(like.device))
    errors = {name: relative(value.to(x.device), expected[name]) for name, value in found.items()}
    for name, error in errors.items():
        if not error <= bound:
            raise Disagreement(
                f"{name} of {layer} is off by {error:.2g} of its norm, {bound:.0e} is allowed; "
                "no time is reported for a wrong result"
            )
    return max(errors.values())


@torch.no_grad()
def rounded(module: nn.Module) -> nn.Module:
    """The module with every weight off by about as much as float32 rounds it."""
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, dtype=parameter.dtype).to(parameter.device)
        parameter.mul_(1 + torch.finfo(torch.float32).eps / 4 * noise)
    return module


def relative(a: Tensor, b: Tensor) -> float:
    """``|a - b| / |b|``, and ``|a|`` where b is zero or empty."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm()) / (float(b.norm()) or 1.0)


def directly(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def within_block() -> Tensor:
        with mslmn.direct_gradients():
            return call()

    return within_block


def within(precision: str, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The call in tf32, if that is its precision: setting it takes a microsecond or two, an LSTM hundreds."""
    if precision != "tf32":
        return call

    def switched() -> Tensor:
        with float32("tf32"):
            return call()

    return switched


@contextmanager
def float32(precision: str, matmul: bool = False) -> Iterator[None]:
    """How cuDNN's LSTM computes in float32, ``"ieee"`` or ``"tf32"``, and matrix products too if ``matmul``."""
    cudnn: Any = torch.backends.cudnn
    value: str | bool = precision
    name = "fp32_precision"
    if hasattr(cudnn.rnn, name):  # from torch 2.9 on, where the older switch warns, and fails if both are used
        switches = [cudnn.rnn]
    else:
        name, value, switches = "allow_tf32", precision == "tf32", [cudnn]
    if matmul:
        switches.append(torch.backends.cuda.matmul)
    before = [getattr(switch, name) for switch in switches]
    try:
        for switch in switches:
            setattr(switch, name, value)
        yield
    finally:
        for switch, old in zip(switches, before, strict=True):
            setattr(switch, name, old)


def captured(call: Callable[[], Tensor], module: nn.Module, ours: bool) -> Callable[[], None] | None:
    """Replay the call from a CUDA graph; None where it cannot be captured, or gives something else when replayed, which
    is a `Disagreement` if the layer is ours."""
    try:
        here = torch.cuda.current_stream()
    except (RuntimeError, AssertionError):  # no GPU
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            replay = _capture(call, module)
    except Exception:  # whatever it was, it is no reason to report nothing of the rest
        return None
    finally:
        torch.cuda.set_stream(here)  # a failed capture leaves its own
    if replay is None and ours:
        raise Disagreement(
            f"{module} gives something else when it is replayed from a CUDA graph than when it is called"
        )
    return replay


def _capture(call: Callable[[], Tensor], module: nn.Module) -> Callable[[], None] | None:
    def found(output: Tensor) -> list[Tensor]:
        return [output, *(p.grad for p in module.parameters() if p.grad is not None)]

    expected = [value.clone() for value in found(call().detach())]
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(here)
    with torch.cuda.stream(side), no_synchronising():
        for _ in range(3):
            call()
    here.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    _graphs.append(graph)
    with torch.cuda.graph(graph):
        output = call().detach()
    _graphs.remove(graph)
    replayed = found(output)
    for value in replayed:
        value.fill_(float("nan"))
    graph.replay()
    same = all(relative(a, b) < REPLAY_BOUND for a, b in zip(replayed, expected, strict=True))
    return graph.replay if same else None


_graphs: list[Any] = []  # the allocator goes on asking graphs whose capture failed: they must not go


@contextmanager
def no_synchronising() -> Iterator[None]:
    """What waits for the GPU is an error: one that is harder to recover from in the midst of a capture."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def ceilings(repeats: int, device: str, clock: Clock) -> dict[str, float]:
    """What the GPU reaches a second: bytes, read and written, and operations in float32, two a multiply-add."""
    a = torch.randn(SIDE, SIDE).to(device)
    b = torch.empty_like(a)
    calls = {"copy": lambda: b.copy_(a), "product": lambda: torch.mm(a, a, out=b)}
    seconds = alternate(calls, repeats, clock, LEAST_SECONDS)
    return {"bandwidth": 2 * a.nbytes / seconds["copy"], "operations": 2 * SIDE**3 / seconds["product"]}


def work(layer: mslmn.MSLMN, x: Tensor) -> dict[str, tuple[float, float]]:
    """The fewest bytes that move, and the operations, of a forward pass and of a training step.

    Forward reads x and the weights and writes the memory. Training also writes h, reads x, h, the memory and the
    gradient of the output once more, and writes the gradients of the weights.
    """
    T, B, I = x.shape
    H, M, g, D = layer.hidden_size, layer.memory_size, layer.num_modules, layer.num_directions
    modules = sum((H * M + (H + k * M) * M) / period(k) for k in range(1, g + 1))  # Whm; Wmh and Wmm
    operations = 2 * T * B * D * (H * I + modules)
    hidden, memory, weights = 4 * T * B * D * H, 4 * T * B * D * g * M, 4 * count(layer)
    forward = x.nbytes + weights + memory
    training = forward + hidden + x.nbytes + hidden + memory + memory + weights
    return {"forward": (forward, operations), "training": (training, 3 * operations)}


def requirements(case: Case, rows: list[Row]) -> list[dict[str, Any]]:
    """How many times faster than the LSTM the MS-LMN is, where a ratio is required."""
    if case.required is None:
        return []
    forward, training = case.required
    wanted_of = [
        ("forward", False, forward),
        ("training", False, training),
        *[("training", True, training)] * case.direct,
    ]
    found = []
    for what, direct, wanted in wanted_of:
        alike = [row for row in rows if row.precision == "fp32" and row.candidate.endswith(DIRECT) == direct]
        ours, theirs = alike[0], [row for row in alike if row.candidate.startswith("nn.LSTM")][-1]
        found.append(
            {
                "size": ours.size,
                "B": ours.dimensions["B"],
                "pass": what,
                "against": theirs.candidate,
                "required": wanted,
                "ratio": getattr(theirs, what) / getattr(ours, what),
            }
        )
    return found


def missed(found: dict[str, Any]) -> list[str]:
    """A line for every required ratio that was not reached."""
    return [
        f"{one['size']}, B = {one['B']}, {one['pass']}: {one['ratio']:.2f} times as fast as {one['against']}, "
        f"{one['required']} required"
        for one in found["required"]
        if not one["ratio"] >= one["required"]
    ]
