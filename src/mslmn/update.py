"""A step of the weights from their gradients: clip, Adam, contract.

    g <- g * min(1, clip / |g|)        weights by Adam with L2 decay        Wmm[k->k] <- Wmm[k->k] / max(1, |Wmm[k->k]|)

These are a hundred small kernels. A GPU needs less time for them than the host takes to launch them, so there they are
captured in a CUDA graph, once for a stage, and replayed on copies of the gradients. Those of the recurrence come past
autograd, see `ops.gradients_aside`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from . import ops
from .layers import MSLMN
from .model import SequenceModel

MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # of Adam


class Update:
    """
    Args:
        moments: of Adam, by the names of parameters, to go on from.
        contract: whether an MSLMN's memories are kept contractions, see `MSLMN.contract`.
        alone: whether gradients come from this process alone; if not, others wait for them in autograd, and no CUDA
            graph takes over.
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
        alone: bool = True,
    ) -> None:
        self.parameters = dict(model.named_parameters())
        self.encoder = model.encoder if contract and isinstance(model.encoder, MSLMN) else None
        self.clip = clip
        device = next(iter(self.parameters.values())).device
        gpu = device.type == "cuda"
        self.rate = learning_rate
        self.adam = torch.optim.Adam(
            self.parameters.values(),
            lr=torch.tensor(learning_rate, device=device) if gpu else learning_rate,
            weight_decay=weight_decay,
            fused=True,  # five times faster for many small parameters
            capturable=gpu,
        )
        for name, parameter in self.parameters.items():
            if name in moments:
                self.adam.state[parameter] = {k: v.clone().to(device) for k, v in moments[name].items()}
        self.skip = self.adam.found_inf = torch.zeros((), device=device)  # type: ignore[attr-defined]  # 1: no step
        self.alone = alone and not any(
            p._backward_hooks or p._post_accumulate_grad_hooks for p in self.parameters.values()
        )
        self.replay = self.alone and gpu
        self.graph: torch.cuda.CUDAGraph | None = None
        self.gradients: list[Tensor] = []  # what the graph reads
        self.layout: list[int] = []  # whose they are
        self.calls = 0

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
        return ops.gradients_aside() if self.alone else nullcontext([])

    def clear(self) -> None:
        """Before a backward pass: no gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def __call__(self, rate: float, fine: Tensor, aside: Sequence[ops.Gradients] = ()) -> None:
        """A step at a learning rate; none, where ``fine``, one truth value, is false."""
        self._set(rate)
        self.skip.copy_(~fine)
        self.calls += 1
        put = {id(w) for one in aside for w in one.weights}
        others = [p for p in self.parameters.values() if id(p) not in put]
        layout = [id(p) for p in (*(w for one in aside for w in one.weights), *others)]
        gradients = [*(one.flat for one in aside), *(p.grad for p in others if p.grad is not None)]
        whole = len(gradients) == len(aside) + len(others) and len(layout) == len(self.parameters)
        if not self.replay or self.calls == 1 or not whole:  # the first time Adam makes its moments
            self._collect(aside)
            self._compute()
            return
        if layout != self.layout:
            self._capture(gradients, aside, others)
            self.layout = layout
        else:
            torch._foreach_copy_(self.gradients, gradients)
        self.graph.replay()  # type: ignore[union-attr]

    def _collect(self, aside: Sequence[ops.Gradients]) -> None:
        """What was put aside, to the parameters; one that was used twice has two."""
        for one in aside:
            for weight, gradient in zip(one.weights, one.views(one.flat), strict=True):
                weight.grad = gradient if weight.grad is None else weight.grad + gradient

    def _set(self, rate: float) -> None:
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

    def _capture(self, gradients: list[Tensor], aside: Sequence[ops.Gradients], others: list[nn.Parameter]) -> None:
        self.gradients = [g.clone() for g in gradients]
        for one, flat in zip(aside, self.gradients, strict=False):
            for weight, gradient in zip(one.weights, one.views(flat), strict=True):
                weight.grad = gradient
        for parameter, gradient in zip(others, self.gradients[len(aside) :], strict=True):
            parameter.grad = gradient
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self._compute()
