"""A step of the weights from their gradients: clip, Adam, contract; and their average.

    g <- g * min(1, clip / |g|)        W by Adam with L2 decay        Wmm[k->k] <- Wmm[k->k] / max(1, |Wmm[k->k]|)
    A <- A + (W - A) (1 - d) / (1 - d^n)        after n batches

A is the mean of all W so far, those of k batches ago with weight d^k (Polyak and Juditsky 1992, forgetting).

These are a hundred small kernels. A GPU needs less time for them than the host takes to launch them, so there they are
captured in a CUDA graph, once for a stage, and replayed on copies of the gradients, or are part of the graph of a whole
training step (`step.py`). Gradients of the recurrence come past autograd, see `ops.gradients_aside`.
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from . import ops
from .gradients import collect
from .layers import MSLMN
from .model import SequenceModel

MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # of Adam


class Update:
    """What follows a backward pass, for all that a model can learn.

    Args:
        moments: of Adam, by the names of parameters, to go on from.
        contract: whether an MSLMN's memories are kept contractions, see `MSLMN.contract`; also where no step is taken.
        average: d, the decay of the average; 0: none.
        averages: by the names of parameters, to go on from, after so many batches.
        alone: whether gradients come from this process alone; if not, others wait for them in autograd, and no CUDA
            graph takes over.
        own: whether model and loss are of this package, so that nobody derives by a weight on the way to the loss.
    """

    def __init__(
        self,
        model: SequenceModel,
        moments: dict[str, dict[str, Tensor]],
        *,
        learning_rate: float,
        weight_decay: float,
        clip: float,
        contract: bool,
        average: float = 0.0,
        averages: dict[str, Tensor] | None = None,
        batches: int = 0,
        alone: bool = True,
        own: bool = True,
    ) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.encoder = model.encoder if contract and isinstance(model.encoder, MSLMN) else None
        self.clip = clip
        self.device = next(model.parameters()).device
        gpu = self.device.type == "cuda"
        self.rate = learning_rate
        self.adam = torch.optim.Adam(
            self.parameters.values(),
            lr=torch.tensor(learning_rate, device=self.device) if gpu else learning_rate,
            weight_decay=weight_decay,
            fused=True,  # five times faster for many small parameters
            capturable=gpu,
        )
        for name, parameter in self.parameters.items():
            if name in moments:
                self.adam.state[parameter] = {k: v.clone().to(self.device) for k, v in moments[name].items()}
        self.average = average
        self.averages: dict[str, Tensor] = {}
        if average:
            start = {n: (averages or {}).get(n, p).detach() for n, p in self.parameters.items()}
            # 16 bits would round each way away
            self.averages = {n: a.to(torch.promote_types(a.dtype, torch.float32), copy=True) for n, a in start.items()}
        self.batches = torch.tensor(float(batches), dtype=torch.float64, device=self.device)
        self.skip = torch.zeros((), device=self.device)  # 1: no step
        self.adam.found_inf = self.skip  # type: ignore[attr-defined]
        self.past_autograd = alone and own
        self.replay = alone and gpu
        self.graph: Graph | None = None
        self.layout: list[int] = []  # whose gradients the graph reads
        self.gradients: list[Tensor] = []  # and where
        self.views: list[Tensor] = []  # of each parameter of the layout

    @property
    def moments(self) -> dict[str, dict[str, Tensor]]:
        """A copy, by the names of those parameters that have some."""
        state = self.adam.state
        return {
            name: {kind: state[parameter][kind].detach().clone() for kind in MOMENTS}
            for name, parameter in self.parameters.items()
            if parameter in state
        }

    def aside(self) -> AbstractContextManager[list[ops.Gradients]]:
        """Around a forward and a backward pass: where its gradients are, beside those that autograd finds."""
        return ops.gradients_aside() if self.past_autograd and not self.watched else nullcontext([])

    @property
    def watched(self) -> bool:
        """Whether somebody wants to see the gradient of a weight."""
        return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self.parameters.values())

    def clear(self) -> None:
        """Before a backward pass: no gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def within(self, fine: Tensor, aside: Sequence[ops.Gradients] = ()) -> None:
        """A step at the rate that is set, within a CUDA graph of the caller's."""
        self.skip.copy_(~fine)
        collect(aside)
        self._compute()

    def __call__(self, rate: float, fine: Tensor, aside: Sequence[ops.Gradients] = ()) -> None:
        """A step at a learning rate; none, where ``fine``, one truth value, is false."""
        self.set_rate(rate)
        self.skip.copy_(~fine)
        put = [w for one in aside for w in one.weights]
        there = {id(w) for w in put}
        others = [p for p in self.parameters.values() if id(p) not in there]
        found = [p.grad for p in others if p.grad is not None]
        simple = len(put) == len(there) and len(found) == len(others) and all(w.grad is None for w in put)
        if not (self.replay and simple):  # a weight has two gradients, or none
            collect(aside)
            self._compute()
            return
        gradients = [*(one.flat for one in aside), *found]
        layout = [id(p) for p in (*put, *others)]
        if layout == self.layout:
            torch._foreach_copy_(self.gradients, gradients)
        else:
            self.layout, self.graph = layout, None
            self.gradients = [g.clone() for g in gradients]
            parts = [view for one, flat in zip(aside, self.gradients, strict=False) for view in one.views(flat)]
            self.views = [*parts, *self.gradients[len(aside) :]]
        if self.graph is None:
            for parameter, view in zip((*put, *others), self.views, strict=True):
                parameter.grad = view
            if not all(p in self.adam.state for p in self.parameters.values()):
                self._compute()  # Adam makes its moments, which must not be of the graph
                return
            self.graph = captured(self._compute, self.device)
        self.graph.replay()

    def set_rate(self, rate: float) -> None:
        """Of learning."""
        if rate != self.rate:
            self.rate = rate
            for group in self.adam.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def _compute(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters.values(), self.clip)
        self.adam.step()
        if self.encoder is not None:
            self.encoder.contract()
        if self.average:
            self._follow()

    @torch.no_grad()
    def _follow(self) -> None:
        """The average, one batch further."""
        self.batches += 1
        averages = list(self.averages.values())
        ways = torch._foreach_sub([p.detach() for p in self.parameters.values()], averages)
        torch._foreach_mul_(ways, ((1 - self.average) / (1 - self.average**self.batches)).to(averages[0].dtype))
        torch._foreach_add_(averages, ways)


class Graph(Protocol):
    """What was captured."""

    def replay(self) -> None: ...


def captured(call: Callable[[], None], device: torch.device, pool: Any = None) -> Graph:
    """The call as a CUDA graph, with a pool of memory or with its own; it does not run yet.

    `torch.cuda.graph` would collect garbage and give memory back first, which takes as long as dozens of steps; but
    none must be collected in the midst of it.
    """
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    torch.cuda.synchronize(device)
    gc.disable()
    try:
        with torch.cuda.device(device), torch.cuda.stream(_capturing(device)):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                call()
            except BaseException:
                with suppress(RuntimeError):  # what the capture says of it would hide the cause
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        if collects:
            gc.enable()
    return graph


@lru_cache
def _capturing(device: torch.device) -> torch.cuda.Stream:
    """One for all graphs: cuBLAS keeps a workspace for each."""
    return torch.cuda.Stream(device)
