"""The parameters of one layer in one direction, their initial values, and one pass over a batch.

Every parameter belongs to one module or to none, so a new module adds parameters and leaves the others
as they are. What would be a lower block of Wmm does not exist.
"""

import math
import operator
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from . import ops

INITS = ("leaky", "fan-in", "xavier")
LONGEST_LEAK = 30.0  # time constant of the slowest unit of a leaky module, in steps of its own clock
FEEDBACK_GAIN = 0.5  # of Wmh under "leaky": typically makes the loop m -> h -> m a contraction


class PerModule(nn.ParameterList):
    """A parameter for each module, fastest first. Reads as fast as a list: a small network's step is shorter than
    what `nn.ParameterList` takes to list nine parameters."""

    def tensors(self) -> list[Tensor]:
        parameters = self._parameters
        if len(parameters) == self._size and not self._buffers:
            return list(parameters.values())  # type: ignore[arg-type]
        return [self[j] for j in range(len(self))]  # parametrised, pruned, or a replica on another device


class Cell(nn.Module):
    """What both cells have: g modules of M units, and the memory they start from."""

    m_0: PerModule | None
    _kept: tuple[list[Tensor | None], ops.KeptWeights] | None = None  # parameters and what was made of them

    def __init__(self, M: int, g: int, init: str, learn_initial_state: bool, factory: dict[str, object]) -> None:
        super().__init__()
        self.M = M
        self.g = g
        self.init = init
        self.m_0 = _parameters(((M,) for _ in range(g)), factory) if learn_initial_state else None

    @property
    def weight(self) -> Tensor:
        """Any of the weights: they share dtype and device."""
        raise TypeError("only a cell with weights has one")

    def weights(self) -> ops.Weights:
        """As the operators take them."""
        raise TypeError("only a cell with weights has some")

    def kept_weights(self) -> ops.Weights:
        """The same; as long as the parameters are the same objects, the very same, which know what follows from it."""
        if torch.compiler.is_compiling():
            return self.weights()
        now = list(self._parameters.values())
        pruned = bool(self._buffers)  # torch.nn.utils.prune: the same objects under other names
        for part in self._modules.values():
            if part is not None:
                now += part._parameters.values()
                pruned = pruned or bool(part._buffers)
        if self._kept is not None and not pruned:
            before, kept = self._kept
            same = len(now) == len(before) and all(map(operator.is_, now, before))
            if same and kept.holds():
                return kept
        weights = self.weights()
        if not {id(p) for p in now if type(p) is nn.Parameter}.issuperset(map(id, weights.flat())):
            return weights  # parametrised, pruned, or not parameters: other tensors at the next pass
        kept = ops.KeptWeights(*weights)
        self.__dict__["_kept"] = now, kept
        return kept

    def __getstate__(self) -> dict[str, object]:
        """For copies, which have parameters of their own."""
        return {name: value for name, value in self.__dict__.items() if name != "_kept"}

    def _load_from_state_dict(self, *args: Any) -> None:
        self.__dict__.pop("_kept", None)  # parameters that are replaced need not stay alive
        super()._load_from_state_dict(*args)

    def initial_memory(self, batch: int) -> Tensor:  # (B, G)
        """The learnt initial memory for every row, or zeros, to be read only."""
        if self.m_0 is not None:
            return torch.cat(self.m_0.tensors()).expand(batch, -1)
        weight = self.weight
        return ops.zeros((batch, self.g * self.M), weight.dtype, weight.device)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights anew; biases and the learnt initial memory become zero."""
        for parameter in self.parameters():
            parameter.zero_()

    def heard(self) -> list[tuple[Tensor, Tensor | None]]:
        """The weights that read the input, with their biases."""
        raise TypeError("only a cell with weights reads an input")


class MSLMNCell(Cell):
    """Parameters of an MS-LMN: ``Wxh``, ``b_h``, and per module ``Wmh``, ``Whm``, ``Wmm``, ``b_m``."""

    def __init__(
        self,
        I: int,
        H: int,
        M: int,
        g: int,
        bias: bool,
        init: str,
        learn_initial_state: bool,
        factory: dict[str, object],
    ) -> None:
        super().__init__(M, g, init, learn_initial_state, factory)
        self.Wxh = _parameter((H, I), factory)
        self.b_h = _parameter((H,), factory) if bias else None
        self.Wmh = _parameters(((H, M) for _ in range(g)), factory)
        self.Whm = _parameters(((M, H) for _ in range(g)), factory)
        self.Wmm = _parameters(((j * M, M) for j in range(1, g + 1)), factory)
        self.b_m = _parameters(((M,) for _ in range(g)), factory) if bias else None
        self.reset_parameters()

    @property
    def weight(self) -> Tensor:
        return self.Wxh

    def heard(self) -> list[tuple[Tensor, Tensor | None]]:
        return [(self.Wxh, self.b_h)]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        (H, I), M, G = self.Wxh.shape, self.M, self.g * self.M
        _normal(self.Wxh, _fan_in(I) if self.init == "fan-in" else _xavier(H, I))
        if self.init == "xavier":  # of the whole matrices, as in the authors' code
            for j in range(self.g):
                _normal(self.Wmh[j], _xavier(H, G))
                _normal(self.Whm[j], _xavier(G, H))
                _normal(self.Wmm[j], _xavier(G, G))
            return
        d = leaks(self.Wxh.new_empty(M))
        for j in range(self.g):
            _normal(self.Wmh[j], FEEDBACK_GAIN * _xavier(H, G))
            _normal(self.Whm[j], _xavier(M, H)).mul_(1 - d[:, None])
            self.Wmm[j][-M:].copy_(d.diag())

    @torch.no_grad()
    def grow(self, A: Tensor, B: Tensor) -> None:
        """A new module, slower than all, that computes ``A h + B m`` and does not yet speak to anyone.

        Old parameters keep their names, places and values.
        """
        (H, _), M = self.Wxh.shape, self.M
        Wmm = self.Wxh.new_zeros((self.g + 1) * M, M)
        Wmm[-M:] = B
        self.Wmh.append(nn.Parameter(self.Wxh.new_zeros(H, M)))
        self.Whm.append(nn.Parameter(torch.empty_like(self.Whm[0]).copy_(A)))  # contiguous, as if it were loaded
        self.Wmm.append(nn.Parameter(Wmm))
        for vectors in (self.b_m, self.m_0):
            if vectors is not None:
                vectors.append(nn.Parameter(self.Wxh.new_zeros(M)))
        self.g += 1

    @torch.no_grad()
    def set_module(self, j: int, A: Tensor, B: Tensor) -> None:
        """Module j, from 0, computes ``A h + B m`` and does not speak to anyone: as if it had just grown."""
        self.Whm[j].copy_(A)
        self.Wmm[j].zero_()[-self.M :].copy_(B)
        self.Wmh[j].zero_()
        for vectors in (self.b_m, self.m_0):
            if vectors is not None:
                vectors[j].zero_()

    def own_blocks(self) -> list[Tensor]:
        """``Wmm[k->k]`` of each module."""
        return [W[-self.M :] for W in self.Wmm.tensors()]

    def widen(self, directions: int, extra: int) -> None:
        """Zero columns for ``extra`` new inputs at the end of each direction's."""
        self.Wxh = nn.Parameter(widened(self.Wxh.detach(), directions, extra))

    def forward(
        self,
        x: Tensor,
        m: Tensor,
        clock: Tensor,
        batch_sizes: Tensor | None = None,
        reverse: bool = False,
        need_hidden: bool = True,
    ) -> ops.Run:
        return ops.run(x, m, clock, self.kept_weights(), batch_sizes, reverse, need_hidden)

    def weights(self) -> ops.Weights:
        lists = self._modules  # faster than by attribute, which looks everywhere else first
        Wmh, Whm, Wmm = (cast(PerModule, lists[name]).tensors() for name in ("Wmh", "Whm", "Wmm"))
        b_m = [] if self.b_m is None else self.b_m.tensors()
        return ops.Weights(self.Wxh, self.b_h, Wmh, Whm, Wmm, b_m)


class ClockworkCell(Cell):
    """Parameters of a Clockwork RNN, per module: ``Wxh``, ``b_h``, ``Whh``."""

    def __init__(
        self,
        I: int,
        M: int,
        g: int,
        bias: bool,
        init: str,
        learn_initial_state: bool,
        factory: dict[str, object],
    ) -> None:
        super().__init__(M, g, init, learn_initial_state, factory)
        self.Wxh = _parameters(((M, I) for _ in range(g)), factory)
        self.b_h = _parameters(((M,) for _ in range(g)), factory) if bias else None
        self.Whh = _parameters(((j * M, M) for j in range(1, g + 1)), factory)
        self.reset_parameters()

    @property
    def weight(self) -> Tensor:
        return cast(Tensor, self.Wxh[0])

    def heard(self) -> list[tuple[Tensor, Tensor | None]]:
        biases = [None] * self.g if self.b_h is None else self.b_h.tensors()
        return list(zip(self.Wxh.tensors(), biases, strict=True))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        I, M, G = self.Wxh[0].shape[1], self.M, self.g * self.M
        if self.init == "xavier":
            for j in range(self.g):
                _normal(self.Wxh[j], _xavier(G, I))
                _normal(self.Whh[j], _xavier(G, G))
            return
        d = leaks(self.Wxh[0].new_empty(M))
        for j in range(self.g):
            _normal(self.Wxh[j], _fan_in(I) if self.init == "fan-in" else _xavier(M, I)).mul_(1 - d[:, None])
            self.Whh[j][-M:].copy_(d.diag())

    def forward(
        self,
        x: Tensor,
        m: Tensor,
        clock: Tensor,
        batch_sizes: Tensor | None = None,
        reverse: bool = False,
        need_hidden: bool = True,
    ) -> ops.Run:
        return ops.run(x, m, clock, self.kept_weights(), batch_sizes, reverse, need_hidden)

    def weights(self) -> ops.Weights:
        b_h = [] if self.b_h is None else self.b_h.tensors()
        return ops.Weights(None, None, [], self.Wxh.tensors(), self.Whh.tensors(), b_h)


def widened(columns: Tensor, directions: int, extra: int) -> Tensor:  # (.., D*G) -> (.., D*(G + extra))
    """With ``extra`` zeros after the columns of each direction."""
    blocks = columns.unflatten(-1, (directions, -1))
    return torch.cat([blocks, blocks.new_zeros(*blocks.shape[:-1], extra)], -1).flatten(-2)


SQUARINGS = 8


def largest_singular_values(W: Tensor) -> Tensor:  # (n, M, M) -> (n,)
    """Of each matrix, from below: at most M^(1/512) times, 1 % for M = 100, too small.

    The largest eigenvalue of A = W^T W is at least (trace(A^p) / M)^(1/p), which is near it for large p, here 2^8.
    These are only products of matrices: nothing iterates until it converges, and a GPU is never waited for.
    """
    A = W.mT @ W
    logarithm = A.new_zeros(len(A))
    for i in range(SQUARINGS + 1):
        trace = A.diagonal(dim1=-2, dim2=-1).sum(-1)
        logarithm = logarithm + trace.log() / 2**i
        A = A / trace.clamp_min(torch.finfo(A.dtype).tiny)[:, None, None]
        A = A @ A
    largest: Tensor = (logarithm / 2 - math.log(W.shape[-1]) / 2 ** (SQUARINGS + 1)).exp()
    return largest


def leaks(out: Tensor) -> Tensor:  # (M,)
    """Fill ``out`` with the decays of a leaky module: ``exp(-1/tau)``, ``tau`` log-spaced in 1..30 steps."""
    M = out.shape[0]
    tau = LONGEST_LEAK ** ((torch.arange(M, device="cpu", dtype=torch.float64) + 0.5) / M)
    return out.copy_(torch.exp(-1 / tau))


def _parameter(shape: tuple[int, ...], factory: dict[str, object]) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, **factory))  # type: ignore[call-overload]


def _parameters(shapes: Iterable[tuple[int, ...]], factory: dict[str, object]) -> PerModule:
    return PerModule([_parameter(shape, factory) for shape in shapes])


def _xavier(rows: int, columns: int) -> float:
    """Standard deviation of Glorot's normal initialisation of a rows x columns matrix."""
    return math.sqrt(2 / (rows + columns))


def _fan_in(columns: int) -> float:
    """Standard deviation of He's, which looks at what comes in alone."""
    return math.sqrt(2 / max(1, columns))


def _normal(weight: Tensor, std: float) -> Tensor:
    return weight.normal_(0, std)
