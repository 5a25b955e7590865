"""Growth (Algorithm 1 of the paper): a new, slower module, initialised by the linear autoencoder of the hidden states.

    h_t at the steps at which the new module will fire  ->  LinearAutoencoder  ->  Whm[new] = A, Wmm[new->new] = B

All else of the new module starts at zero, so the model computes what it computed; then the readout is solved for.
"""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, distributed
from torch.nn.utils.rnn import PackedSequence

from . import checks, clock
from .cells import MSLMNCell, leaks
from .layers import MSLMN
from .linear_autoencoder import LinearAutoencoder
from .model import SequenceModel
from .objectives import Objective, Score

Batches = Iterable[tuple[Any, Any]]  # (input, target), as often as it is iterated
CUT = 1e-4  # of the least-squares readout: squared singular values below this part of the largest
RIDGE = 1e-4  # of the convex readout problem
ITERATIONS = 100  # of L-BFGS, at most


@dataclass(frozen=True)
class GrowthReport:
    """What growing did; lists have an entry for each layer and direction, in the order of ``encoder.cells``."""

    modules: int  # there are now
    loss_before: float
    loss_after: float
    readout: str  # "least squares", "convex" or "zeros"
    rank: list[int]  # of the hidden states; missing components of the module are leaky integrators
    error: list[list[float]]  # of the hidden states as the module remembers them at each sequence's end, by lag
    solver: list[str]
    steps: int  # hidden states that were used
    stored: bool  # False: they exceeded the memory allowed and were computed again in each pass
    seconds: float = field(compare=False)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.modules} modules: loss {self.loss_before:.4g} -> {self.loss_after:.4g} ({self.readout}), "
            f"rank {', '.join(map(str, self.rank))}, {self.seconds:.1f} s"
        )


def add_module(
    model: SequenceModel,
    batches: Batches,
    objective: Objective,
    *,
    readout: str = "auto",
    horizon: int | None = None,
    max_memory: float = 2**29,
    random_state: int = 0,
) -> GrowthReport:
    """Add a module to the model, in place, as Algorithm 1 does.

    Args:
        model: its encoder is an `MSLMN`.
        batches: the training data, ``(input, target)`` pairs, iterable more than once; under torch.distributed the
            share of this process. All processes end with the same model.
        objective: what the model is trained for.
        readout: ``"auto"`` solves for the readout as the objective knows how: least squares for real targets, a convex
            problem for classes; ``"zeros"`` leaves it to training. Zeros too if the loss would be higher than before.
        horizon: of the autoencoder, in steps of the new module's clock.
        max_memory: bytes of hidden states to store; if there are more, they are computed again in each pass.
        random_state: for the autoencoder's iteration and for what the data leave open.
    """
    layer = _layer(model)
    checks.choice("readout", readout, ("auto", "zeros"))
    start = time.perf_counter()
    with evaluation(model):
        hidden = _Hidden(layer, batches, layer.num_modules + 1, range(len(layer.cells)), max_memory)
        fits = [_fit(hidden, cell, layer, horizon, random_state) for cell in range(len(layer.cells))]
        before = evaluate(model, batches, objective)
        model.grow([A for A, _, _ in fits], [B for _, B, _ in fits])
        after, how = _solve_readout(model, batches, objective, readout, before)
    return _report(layer, fits, hidden, before, after, how, start)


def initialise(
    model: SequenceModel,
    batches: Batches,
    objective: Objective,
    *,
    readout: str = "auto",
    horizon: int | None = None,
    max_memory: float = 2**29,
    random_state: int = 0,
) -> GrowthReport:
    """The first module, in place, as Algorithm 1 prints it: by the autoencoder of h = tanh(Wxh x + b_h).

    Arguments are those of `add_module`. The memory starts without feedback: ``Wmh`` is zero.
    """
    layer = _layer(model)
    checks.choice("readout", readout, ("auto", "zeros"))
    if layer.num_modules != 1:
        raise ValueError(
            f"only a model with one module can be initialised, this has {layer.num_modules}; use add_module"
        )
    start = time.perf_counter()
    with evaluation(model):
        before = evaluate(model, batches, objective)
        fits = []
        D = layer.num_directions
        for first in range(0, len(layer.cells), D):  # a layer hears the memory of the one below
            cells = range(first, first + D)
            for i in cells:
                cast(MSLMNCell, layer.cells[i]).Wmh[0].zero_()
            hidden = _Hidden(layer, batches, 1, cells, max_memory)
            for i in cells:
                fits.append(_fit(hidden, i, layer, horizon, random_state))
                cast(MSLMNCell, layer.cells[i]).set_module(0, *fits[-1][:2])
        after, how = _solve_readout(model, batches, objective, readout, None)
    return _report(layer, fits, hidden, before, after, how, start)


def evaluate(model: SequenceModel, batches: Batches, objective: Objective) -> float:
    """The mean loss over all batches of all processes."""
    return means(model, batches, objective.loss)[0]


def means(model: SequenceModel, batches: Batches, *measures: Callable[[Any, Any], Score]) -> list[float]:
    """The mean of each measure of outputs and targets over all batches of all processes; of no data, an error."""
    sums = torch.zeros(len(measures), 2, dtype=torch.float64)
    with evaluation(model):
        for input, target in batches:
            output = model(input)
            sums += torch.stack([torch.stack(measure(output, target)) for measure in measures]).double().cpu()
    total, items = all_reduce(sums).unbind(1)
    if not items.all():
        raise ValueError("there is no data: the batches are empty, or can be iterated only once; pass a list")
    return [float(mean) for mean in (total / items).tolist()]


class _Hidden:
    """Hidden states of some cells at the steps at which module k fires: stored, or computed again each time."""

    def __init__(self, layer: MSLMN, batches: Batches, k: int, cells: range, max_memory: float) -> None:
        self.layer, self.batches, self.k = layer, batches, k
        self.kept: dict[int, list[Tensor]] = {i: [] for i in cells}
        self.stored, size, self.steps = True, 0, 0
        for batch in self._batches():
            self.steps += sum(map(len, batch[cells[0]]))
            size += sum(x.nbytes for i in cells for x in batch[i])
            self.stored = self.stored and size <= max_memory
            for i in cells:
                if self.stored:
                    self.kept[i] += batch[i]
                else:
                    self.kept[i].clear()
        steps, exceeded = all_reduce(torch.tensor([self.steps, not self.stored], dtype=torch.float64)).tolist()
        self.steps, self.stored = int(steps), not exceeded  # in all processes, or in none
        if not self.steps:
            raise ValueError(
                f"no sequence is as long as the period of module {k}, {clock.period(k)} steps, so it would never fire; "
                "do not grow further"
            )

    def of(self, cell: int) -> Any:
        """The sequences of a cell, as LinearAutoencoder takes them."""
        return self.kept[cell] if self.stored else _Again(lambda: (batch[cell] for batch in self._batches()))

    def _batches(self) -> Iterator[list[list[Tensor]]]:
        backward = range(1, len(self.layer.cells), 2) if self.layer.bidirectional else ()
        for input, _ in self.batches:
            yield [subsample(h, input, self.k, i in backward) for i, h in enumerate(self.layer.hidden_states(input))]


class _Again:
    """An iterable that can be iterated again."""

    def __init__(self, make: Callable[[], Iterator[list[Tensor]]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[list[Tensor]]:
        return self.make()


def subsample(h: Tensor, input: Tensor | PackedSequence, k: int, reverse: bool) -> list[Tensor]:
    """What module k sees of the hidden states of a batch: for each sequence (steps, H), in the order it sees them."""
    if isinstance(input, PackedSequence):
        sizes = input.batch_sizes
        starts = sizes.cumsum(0) - sizes
        lengths = (sizes[:, None] > torch.arange(int(sizes[0]))).sum(0).tolist()
        sequences = [(starts[:length] + i, length) for i, length in enumerate(lengths)]
    else:
        T, B = h.shape[:2]
        h = h.flatten(0, 1)
        sequences = [(torch.arange(T) * B + i, T) for i in range(B)]
    seen = []
    for rows, length in sequences:
        steps = torch.tensor(clock.firing_steps(k, length), dtype=torch.int64)
        seen.append(h[(rows.flip(0) if reverse else rows)[steps].to(h.device)])
    return seen


def _fit(
    hidden: _Hidden, cell: int, layer: MSLMN, horizon: int | None, random_state: int
) -> tuple[Tensor, Tensor, tuple[int, list[float], str]]:
    """A, B, and rank, error by lag, solver."""
    M, H = layer.memory_size, layer.hidden_size
    autoencoder = LinearAutoencoder(M, horizon=horizon, random_state=random_state)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="n_components is")  # told by the rank
        autoencoder.fit(hidden.of(cell))
    A, B = (torch.as_tensor(X).clone() for X in (autoencoder.A_, autoencoder.B_))  # arrays, of an empty share
    r = autoencoder.n_components_
    wrong, whole = all_reduce(autoencoder._errors(hidden.of(cell), "last")[0]).unbind(1)
    lags = int(whole.count_nonzero())  # no sequence of any process has more
    error = (wrong[:lags] / whole[:lags]).sqrt().tolist()
    if r < M:  # units that are zero would never get a gradient
        d = leaks(A.new_empty(M))[r:]
        generator = torch.Generator().manual_seed(random_state)
        rows = torch.randn(M - r, H, generator=generator, dtype=torch.float64) * (2 / (M + H)) ** 0.5
        A[r:] = rows.to(A) * (1 - d[:, None])
        B[r:, r:] = d.diag()
    return A, B, (r, error, autoencoder.solver_)


def _solve_readout(
    model: SequenceModel, batches: Batches, objective: Objective, wish: str, before: float | None
) -> tuple[float, str]:
    """Solve for the whole readout; back to what it was if the loss got higher. The loss after, and how."""
    old = [p.detach().clone() for p in model.readout.parameters()]

    def restore() -> None:
        for parameter, value in zip(model.readout.parameters(), old, strict=True):
            parameter.copy_(value)

    how = objective.readout if wish == "auto" else "zeros"
    unsolved = evaluate(model, batches, objective)
    if how == "zeros":
        return unsolved, how
    try:
        (_least_squares if how == "least squares" else _convex)(model, batches)
        after = evaluate(model, batches, objective)
    except BaseException:
        restore()
        raise
    if after <= (unsolved if before is None else min(before, unsolved)):
        return after, how
    restore()
    return unsolved, "zeros"


def _least_squares(model: SequenceModel, batches: Batches) -> None:
    """Wmy and b_y by least squares, from the whole memory to the targets.

    Modules repeat each other, so the plain pseudoinverse gives weights that are huge and cancel, and the first step of
    training destroys what they do: small singular values are cut, relative to the largest.
    """
    G, C = None, None
    for input, target in batches:
        x, y = (_rows(value).double() for value in (model.features(input), target))
        if model.readout.b_y is not None:
            x = torch.cat([x, x.new_ones(len(x), 1)], 1)
        G, C = (x.T @ x, x.T @ y) if G is None or C is None else (G + x.T @ x, C + x.T @ y)
    O, width = model.readout.weight.shape
    size = width + (model.readout.b_y is not None)
    like = next(model.parameters())
    sums = torch.zeros(size, size + O, dtype=torch.float64, device=like.device)
    if G is not None and C is not None:
        sums += torch.cat([G, C], 1)
    all_reduce(sums)
    solution = (torch.linalg.pinv(sums[:, :size], hermitian=True, rtol=CUT) @ sums[:, size:]).T  # (O, size)
    model.readout.set(solution[:, :width].to(like), solution[:, width].to(like) if size > width else None)


def _convex(model: SequenceModel, batches: Batches) -> None:
    """Wmy and b_y by L-BFGS on the cross-entropy of the frozen memory, with a small ridge."""
    pairs = [(_rows(model.features(input)).double(), _classes(target)) for input, target in batches]
    like = next(model.parameters())
    x = torch.cat([x for x, _ in pairs]) if pairs else like.new_zeros(0, model.readout.weight.shape[1]).double()
    y = torch.cat([y for _, y in pairs]) if pairs else torch.zeros(0, dtype=torch.int64, device=like.device)
    count = all_reduce(torch.tensor([float(len(x))], dtype=torch.float64)).item()
    bias = model.readout.b_y
    W = torch.cat([model.readout.weight, (like.new_zeros(model.output_size) if bias is None else bias)[:, None]], 1)
    W = W.detach().double().requires_grad_()
    solver = torch.optim.LBFGS([W], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

    @torch.enable_grad()
    def closure() -> Tensor:
        offset = 0 if bias is None else W[:, -1]
        loss = F.cross_entropy(x @ W[:, :-1].T + offset, y, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, W)
        sums = all_reduce(torch.cat([gradient.flatten(), loss.detach()[None]]))
        W.grad = sums[:-1].view_as(W) / count + RIDGE * W.detach()
        return sums[-1] / count + RIDGE / 2 * W.detach().square().sum()

    solver.step(closure)
    model.readout.set(W[:, :-1].to(like), W[:, -1].to(like))


def _report(
    layer: MSLMN,
    fits: list[tuple[Tensor, Tensor, tuple[int, list[float], str]]],
    hidden: _Hidden,
    before: float,
    after: float,
    how: str,
    start: float,
) -> GrowthReport:
    ranks, errors, solvers = zip(*(found for _, _, found in fits), strict=True)
    seconds = time.perf_counter() - start
    return GrowthReport(
        layer.num_modules, before, after, how, [*ranks], [*errors], [*solvers], hidden.steps, hidden.stored, seconds
    )


def _layer(model: SequenceModel) -> MSLMN:
    if not isinstance(model, SequenceModel) or not isinstance(model.encoder, MSLMN):
        raise TypeError(f"only a SequenceModel on an MSLMN grows, got {type(model).__name__}; build one")
    if model.encoder.pool > 1:  # before anything is fitted, or, by `initialise`, changed
        raise ValueError(model.encoder._cannot_grow)
    return model.encoder


@contextmanager
def evaluation(model: SequenceModel) -> Iterator[None]:
    """Without gradients and dropout; the modes of all parts as they were afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def all_reduce(value: Tensor) -> Tensor:
    """In place, the sum over all processes, if there are several."""
    if distributed.is_available() and distributed.is_initialized():
        if distributed.get_backend() == "nccl" and value.device.type == "cpu":
            moved = value.to(torch.device("cuda", torch.cuda.current_device()))
            distributed.all_reduce(moved)
            return value.copy_(moved)
        distributed.all_reduce(value)
    return value


def _rows(x: Any) -> Tensor:
    """(N, width)."""
    data = x.data if isinstance(x, PackedSequence) else x
    return cast(Tensor, data).flatten(0, -2)


def _classes(target: Any) -> Tensor:
    data = target.data if isinstance(target, PackedSequence) else target
    return cast(Tensor, data).flatten()
