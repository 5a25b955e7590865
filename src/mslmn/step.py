"""A training step: the loss of a batch, its gradients, a step of the weights; on a GPU, where it can be, a CUDA graph.

A step of a small network is some hundred small kernels. A GPU is done with them before the host has launched them, but
a graph is launched at once. It is always of the same size, which batches of sequences are not. So it has room for so
many rows, one of a few sizes, and reads from tables on the device where sequences and labels lie (`ops.placed`); rows
of no step are zeros, and nothing depends on them. What is random is drawn before it, so that a batch which is replayed
and one which is not, the first of a size in a run that goes on, draw the same.

This is for transcription, by models of this package, in one process. All else is computed as it comes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from . import growth, ops, packing, pooling
from .cells import Cell, ClockworkCell, MSLMNCell, PerModule
from .layers import LMN, MSLMN, ClockedLayer, ClockworkRNN
from .model import NORMS, Readout, SequenceModel
from .objectives import CTC, Objective, PlacedCTC
from .update import Graph, Update, captured

ROOMS = 8  # sizes of graphs, up to twice as many rows
LEAST_LABELS = 15  # of a sequence that there is room for; or 31, 63, ...: what a warp of CTC's kernels has, less one
# Parts of a model in which rows do not see each other, and which wait for nothing.
LAYERS: tuple[type[nn.Module], ...] = (LMN, MSLMN, ClockworkRNN, MSLMNCell, ClockworkCell, nn.LayerNorm)
KNOWN = {*LAYERS, PerModule, nn.ModuleList, SequenceModel, Readout, *NORMS.values()}


class Step:
    """What is done with each batch.

    Args:
        model: or, where several processes work together, what wraps it.
        noise: standard deviation of what a GPU adds to the inputs.
        world: processes.
        longest: steps of a sequence in a graph, at most; None: no graphs.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        update: Update,
        *,
        noise: float = 0.0,
        world: int = 1,
        longest: int | None = None,
    ) -> None:
        self.model, self.objective, self.update = model, objective, update
        self.device, self.noise, self.world = update.device, noise, world
        self.total = torch.zeros(2, dtype=torch.float64, device=self.device)  # of the loss and its items, in this epoch
        self.longest = longest
        self.graphs = False
        self.rooms: dict[tuple[int, int, int, bool], Room] = {}
        self.pool: Any = None  # memory that the graphs share: one runs after the other

    def begin(self) -> None:
        """An epoch."""
        self.total.zero_()
        self.graphs = self.longest is not None and self._placeable()

    def __call__(
        self, input: PackedSequence, target: Any, *, rate: float, weight: float = 1.0, flat: bool = False
    ) -> None:
        """
        Args:
            rate: of learning.
            weight: 0.0 where the batch is another process's.
            flat: train for `Objective.first_loss`.
        """
        room = self._room(input, target, flat) if self.graphs else None
        if room is None:
            self._compute(input, target, rate, weight, flat)
            return
        room.take(self._noisy(input), target)
        self.update.set_rate(rate)
        if room.graph is None and room.used:  # Adam has its moments, and all that is compiled or kept is there
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
            room.graph = captured(lambda: self._compute_in(room), self.device, self.pool)
            self.update.clear()  # the graph's gradients are nobody else's
        if room.graph is None:
            self._compute_in(room)
        else:
            room.graph.replay()
        room.used = True

    def _compute(self, input: PackedSequence, target: Any, rate: float, weight: float, flat: bool) -> None:
        loss = self.objective.first_loss if flat else self.objective.loss
        with self.update.aside() as aside:
            score = loss(self.model(self._noisy(input)), target)
            sums = growth.all_reduce(torch.stack([score.total.detach(), score.items]).double() * weight)
            self.total += sums
            self.update.clear()
            aside.clear()  # of what was derived on the way here
            score.total.backward(weight * self.world / sums[1].to(score.total))  # processes' are averaged
        self.update(rate, self._fine(sums), aside)

    def _compute_in(self, room: "Room") -> None:
        """The same for what lies in a room; nothing waits, nothing depends on the batch but by its tables."""
        with ops.placed(room.packings[0], room.poolings()), self._kept(room.kept), self.update.aside() as aside:
            output = self.model(PackedSequence(room.x, room.batch_sizes[0]))
            score = room.objective.loss(output.data, room.target)
            sums = torch.stack([score.total.detach(), score.items]).double()
            self.total += sums
            self.update.clear()
            aside.clear()
            score.total.backward(1 / sums[1].to(score.total))
        self.update.within(self._fine(sums), aside)

    @contextmanager
    def _kept(self, kept: Tensor | None) -> Iterator[None]:
        """Within the block, of what the readout reads."""
        model = cast(SequenceModel, self.model)
        model.kept = kept
        try:
            yield
        finally:
            model.kept = None

    def _fine(self, sums: Tensor) -> Tensor:
        """Whether a step of the weights is taken."""
        return torch.isfinite(self.total).all() & (sums[1] > 0)

    def _noisy(self, input: PackedSequence) -> PackedSequence:
        """A GPU draws the noise itself, in an instant; on the CPU it is there already."""
        if not self.noise or self.device.type == "cpu":
            return input
        return PackedSequence(input.data + self.noise * torch.randn_like(input.data), *input[1:])

    def _placeable(self) -> bool:
        """Whether all that a step computes is known here, and can be in a graph."""
        model = self.model
        return (
            self.update.replay
            and self.update.past_autograd
            and isinstance(model, SequenceModel)
            and isinstance(model.encoder, ClockedLayer)
            and all(type(part) in KNOWN for part in model.modules())
            and not (model.encoder.dropout and model.encoder.num_layers > 1)  # it draws in the midst
            and model.output == "all"
            and type(self.objective) is CTC
            and not self.update.watched
            and not _watched(model)
            and not ops.autocast_enabled(self.device.type)
            and not torch.is_anomaly_enabled()
            and ops.ctc.has_kernels(self.device, self.longest or 0, 0)
            and all(ops.places(cast(Cell, cell).weights(), self.device) for cell in model.encoder.cells)
        )

    def _room(self, input: PackedSequence, target: Sequence[Tensor], flat: bool) -> "Room | None":
        """The one for such a batch, if there may be one: it depends on the batch alone, so that a run goes on as it
        would have gone on."""
        model, x, T, labels = cast(SequenceModel, self.model), input.data, self.longest or 0, LEAST_LABELS
        encoder = cast(ClockedLayer, model.encoder)
        while labels < max((t.numel() for t in target), default=0):
            labels = 2 * labels + 1
        if (
            input.sorted_indices is not None
            or len(input.batch_sizes) > T
            or labels > ops.ctc.LONGEST
            or x.shape[1:] != (encoder.input_size,)
            or x.dtype != encoder._weight.dtype
        ):
            return None
        B = int(input.batch_sizes[0])
        key = B, min(rounded(x.shape[0]), B * T), labels, flat
        if key not in self.rooms:
            poolings = encoder.num_layers if encoder.pool > 1 else 0
            kept = model.dropout, encoder.output_size
            self.rooms[key] = Room(*key, T, model.output_size, x, *kept, encoder.pool, poolings)
        return self.rooms[key]


class Room:
    """Where a batch lies that a graph computes: B sequences, N rows at most, so many labels each and steps at most."""

    def __init__(
        self,
        B: int,
        N: int,
        labels: int,
        flat: bool,
        longest: int,
        O: int,
        like: Tensor,
        dropout: float = 0.0,
        features: int = 0,  # of which some are dropped
        pool: int = 1,  # steps of a window,
        poolings: int = 0,  # and how often
    ) -> None:
        T = min(longest, N - B + 1)
        self.x = like.new_zeros(N, like.shape[1])
        self.pool = pool
        sizes = [(T, N)]  # steps and rows, before and after each pooling
        for _ in range(poolings):  # a step more, and a window more, where rows of no step go
            P = min(pool, T)
            T, N = -(-T // P) + 1, (N + B * (P - 1)) // P + 1
            sizes.append((T, N))
        self.objective = PlacedCTC(B, T, N, O, labels, flat)
        self.dropout = dropout
        self.kept = like.new_empty(N, features) if dropout else None
        parts = [*(t + 2 * B + 2 for t, _ in sizes), self.objective.size]
        self.tables = torch.zeros(sum(parts), dtype=torch.int64, device=like.device)
        *self.packings, self.target = self.tables.split(parts)
        self.batch_sizes = [torch.from_numpy(_sizes(B, t, n)) for t, n in sizes]
        self.used = False
        self.graph: Graph | None = None

    def take(self, input: PackedSequence, target: Sequence[Tensor]) -> None:
        """A batch, on its way while the one before is computed."""
        sizes = [input.batch_sizes.numpy()]
        for _ in self.packings[1:]:
            sizes.append(np.ascontiguousarray(sizes[-1][:: self.pool]))
        tables = [ops.packing_table(found, len(room)) for found, room in zip(sizes, self.batch_sizes, strict=True)]
        tables.append(self.objective.table(target, sizes[-1]))
        self.tables.copy_(packing.to_device(torch.from_numpy(np.concatenate(tables)), self.tables.device))
        self.x[: len(input.data)].copy_(input.data)
        self.x[len(input.data) :].zero_()  # products go over rows of no step: NaN of an earlier batch would stay
        if self.kept is not None:
            p = 1 - self.dropout
            self.kept.bernoulli_(p).mul_(1 / p if p else 0.0)

    def poolings(self) -> list[ops.Pooling]:
        """How layers pool what lies here."""
        found = []
        for (table, sizes), (below, fewer) in pairwise(zip(self.packings, self.batch_sizes, strict=True)):
            N, S = int(sizes.sum()), int(fewer.sum())
            P = min(self.pool, len(sizes))
            places, counts = pooling.placed_windows(table, len(sizes), N, below, len(fewer), S, P)
            found.append(ops.Pooling(places, counts, fewer, below))
        return found


def rounded(N: int) -> int:
    """Up, to one of ROOMS sizes in each octave."""
    step = 1 << max(0, (N - 1).bit_length() - 1 - (ROOMS - 1).bit_length())
    return -(-N // step) * step


def _sizes(B: int, T: int, N: int) -> NDArray[np.int64]:
    """Of a packed batch that fills a room."""
    full = (N - T) // (B - 1) if B > 1 else T  # steps of B rows; the next one has the rest
    found = np.ones(T, np.int64)
    found[:full] = B
    found[full : full + 1] += N - T - full * (B - 1)
    return found


def _watched(model: nn.Module) -> bool:
    """Whether somebody wants to see each call of a part of the model."""
    return bool(nn.modules.module._has_any_global_hook()) or any(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        for part in model.modules()
    )
