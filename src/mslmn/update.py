"""A step of the weights from their gradients: clip, Adam, contract.

    g <- g * min(1, clip / |g|)        weights by Adam with L2 decay        Wmm[k->k] <- Wmm[k->k] / max(1, |Wmm[k->k]|)

These are a hundred small kernels. A GPU needs less time for them than the host takes to launch them, so there they are
captured in a CUDA graph, once for a stage, and replayed on copies of the gradients.
"""

import torch
from torch import Tensor, nn

from .layers import MSLMN
from .model import SequenceModel

MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # of Adam


class Update:
    """
    Args:
        moments: of Adam, by the names of parameters, to go on from.
        contract: whether an MSLMN's memories are kept contractions, see `MSLMN.contract`.
        replay: whether a CUDA graph may take over; gradients must come from this process alone.
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
        replay: bool = True,
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
        self.replay = replay and gpu
        self.graph: torch.cuda.CUDAGraph | None = None
        self.gradients: list[Tensor] = []  # what the graph reads
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

    def clear(self) -> None:
        """Before a backward pass: no gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def __call__(self, rate: float, fine: Tensor) -> None:
        """A step at a learning rate; none, where ``fine``, one truth value, is false."""
        self._set(rate)
        self.skip.copy_(~fine)
        self.calls += 1
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if not self.replay or self.calls == 1 or len(gradients) < len(self.parameters):
            self._compute()  # the first time Adam makes its moments
            return
        if self.graph is None:
            self._capture(gradients)
        else:
            torch._foreach_copy_(self.gradients, gradients)
        self.graph.replay()  # type: ignore[union-attr]

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

    def _capture(self, gradients: list[Tensor]) -> None:
        self.gradients = [g.clone() for g in gradients]
        for parameter, gradient in zip(self.parameters.values(), self.gradients, strict=True):
            parameter.grad = gradient
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self._compute()
