"""SequenceModel: an encoder, an optional normalisation of its memory, a readout; they grow together.

Dimensions: see layers.py; O outputs. The memory is D * g blocks of M units: direction, then module, fastest first.
"""

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from . import checks, packing
from .cells import PerModule
from .layers import MSLMN, ClockedLayer, State

OUTPUTS = ("last", "all")


class Readout(nn.Module):
    """y = sum_i Wmy[i] m_i + b_y, the weights of each module, in each direction, a parameter of their own."""

    def __init__(self, D: int, g: int, M: int, O: int, bias: bool, like: Tensor) -> None:
        super().__init__()
        self.Wmy = nn.ModuleList([_blocks(g, lambda: like.new_empty(O, M)) for _ in range(D)])
        self.b_y = nn.Parameter(like.new_empty(O)) if bias else None
        bound = (D * g * M) ** -0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    @property
    def weight(self) -> Tensor:
        """(O, D*G), as the memory is laid out."""
        return torch.cat([block for direction in self.Wmy for block in direction.tensors()], 1)  # type: ignore[operator]

    @torch.no_grad()
    def set(self, weight: Tensor, bias: Tensor | None) -> None:
        """Take over weights (O, D*G) and bias (O,)."""
        blocks = [block for direction in self.Wmy for block in direction.tensors()]  # type: ignore[operator]
        for block, value in zip(blocks, weight.split(blocks[0].shape[1], 1), strict=True):
            block.copy_(value)
        if self.b_y is not None and bias is not None:
            self.b_y.copy_(bias)

    @torch.no_grad()
    def silence(self) -> None:
        """Zeros for all modules but the fastest."""
        for direction in self.Wmy:
            for block in direction.tensors()[1:]:  # type: ignore[operator]
                block.zero_()

    def grow(self) -> None:
        """Zeros for a new module in each direction: the output stays as it is."""
        for direction in self.Wmy:
            direction.append(nn.Parameter(torch.zeros_like(direction[0])))  # type: ignore[operator, index]

    def forward(self, memory: Tensor) -> Tensor:  # (.., D*G) -> (.., O)
        return F.linear(memory, self.weight, self.b_y)


class ModuleNorm(nn.Module):
    """Each module by itself, so that a new one changes nothing for the others:

        m_k <- gain_k * m_k / sqrt(mean(m_k^2) + floor^2)

    The floor bounds the gain where a module has not fired yet and is exactly zero.
    """

    FLOOR = 0.1

    def __init__(self, D: int, g: int, M: int, like: Tensor) -> None:
        super().__init__()
        self.gain = nn.ModuleList([_blocks(g, lambda: torch.ones_like(like.new_empty(M))) for _ in range(D)])

    def grow(self) -> None:
        for direction in self.gain:
            direction.append(nn.Parameter(torch.ones_like(direction[0])))  # type: ignore[operator, index]

    def forward(self, memory: Tensor) -> Tensor:
        gain = torch.stack([block for direction in self.gain for block in direction.tensors()])  # type: ignore[operator]
        blocks = memory.unflatten(-1, gain.shape)  # (.., D*g, M)
        scale = torch.rsqrt(self.power(blocks.square().mean(-1)) + self.FLOOR**2)
        normal: Tensor = (blocks * scale[..., None] * gain).flatten(-2)
        return normal

    def power(self, squares: Tensor) -> Tensor:  # (.., D*g), of each block: its mean square
        """What each block is divided by, squared."""
        return squares


class PrefixNorm(ModuleNorm):
    """Each module by itself and the faster ones, in both directions together:

        m_k <- gain_k * m_k / sqrt(mean_{i<=k}(m_i^2) + floor^2)

    A new, slower module changes nothing for the others, one that has not fired yet is not blown up, and how large
    modules are beside each other is not lost.
    """

    FLOOR = 0.05

    def power(self, squares: Tensor) -> Tensor:
        D, g = len(self.gain), squares.shape[-1] // len(self.gain)
        sums = squares.unflatten(-1, (D, g)).mean(-2).cumsum(-1)  # (.., g)
        means: Tensor = sums / torch.arange(1, g + 1, device=sums.device)
        return torch.cat([means] * D, -1)


class MemoryNorm(nn.LayerNorm):
    """All modules of both directions together, m the whole memory (Ba, Kiros and Hinton 2016):

        m <- gain * (m - mean(m)) / sqrt(var(m) + eps) + shift

    A new module would change what is read of the others, so a model with this norm does not grow.
    """

    def __init__(self, D: int, g: int, M: int, like: Tensor) -> None:
        super().__init__(D * g * M, device=like.device, dtype=like.dtype)


NORMS: dict[str, type[ModuleNorm | MemoryNorm]] = {"module": ModuleNorm, "prefix": PrefixNorm, "layer": MemoryNorm}


class SequenceModel(nn.Module):
    """An encoder, a readout of its memory, and growth.

    Args:
        encoder: a layer of this package, or `nn.RNN`, `nn.LSTM`, `nn.GRU` to compare with.
        output_size: O.
        output: ``"last"`` reads the final memory of each direction, at each sequence's own end, and gives ``(B, O)``;
            ``"all"`` reads the encoder's output at every step and gives its form: that of the input, with fewer steps
            where the encoder pools.
        norm: normalises the memory before it is read: ``"module"`` each module by itself, see `ModuleNorm`;
            ``"prefix"`` by itself and the faster ones, see `PrefixNorm`; ``"layer"`` all together, see `MemoryNorm`.
        dropout: probability of dropping a value that the readout reads, in training.
        bias: whether the readout has ``b_y``.

    Example:
        >>> model = SequenceModel(MSLMN(13, 25, 25, num_modules=1, bidirectional=True), 10)
        >>> model(torch.randn(97, 8, 13)).shape
        torch.Size([8, 10])
    """

    def __init__(
        self,
        encoder: nn.Module,
        output_size: int,
        *,
        output: str = "last",
        norm: str | None = None,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.output_size = checks.size("output_size", output_size)
        self.output = checks.choice("output", output, OUTPUTS)
        if norm is not None and norm not in NORMS:
            raise ValueError(f"norm must be None, 'module', 'prefix' or 'layer', got {norm!r}; choose one of them")
        self.dropout = checks.probability("dropout", dropout)
        self.kept: Tensor | None = None  # what is kept, and by how much larger, if dropout was drawn before
        self.bias = checks.flag("bias", bias)
        D, g, M = _layout(encoder)
        like = next(encoder.parameters()).detach()
        self.norm = None if norm is None else NORMS[norm](D, g, M, like)
        self.readout = Readout(D, g, M, self.output_size, bias, like)

    @property
    def config(self) -> dict[str, object]:
        """The constructor's arguments, less the encoder."""
        return {
            "output_size": self.output_size,
            "output": self.output,
            "norm": next((name for name, kind in NORMS.items() if type(self.norm) is kind), None),
            "dropout": self.dropout,
            "bias": self.bias,
        }

    @property
    def num_modules(self) -> int:
        return _layout(self.encoder)[1]

    def features(self, input: Tensor | PackedSequence) -> Tensor | PackedSequence:
        """What the readout reads: (B, D*G), or, with ``output="all"``, in the form of the input."""
        memory: Tensor | PackedSequence
        if isinstance(input, PackedSequence) and _is_slow(self.encoder, input):
            memory = _padded_lstm(cast(nn.LSTM, self.encoder), input, self.output == "last")
        else:
            memory, state = self.encoder(input)
            if self.output == "last":
                memory = _final(state, _layout(self.encoder)[0])
        return memory if self.norm is None else _map(self.norm, memory)

    def forward(self, input: Tensor | PackedSequence) -> Any:
        features = self.features(input)
        if self.dropout and self.training:
            features = _map(lambda x: F.dropout(x, self.dropout) if self.kept is None else x * self.kept, features)
        return _map(self.readout, features)

    def stream(self, input: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The output at every step of a chunk, and the state to go on from: for unidirectional encoders."""
        if _layout(self.encoder)[0] == 2:
            raise ValueError("a bidirectional encoder needs the whole sequence; build a unidirectional one to stream")
        memory, state = self.encoder(input, state)
        return self.readout(memory if self.norm is None else self.norm(memory)), state

    def silence(self) -> None:
        """Let no module but the fastest be heard, before training, see `MSLMN.silence`: the readout of the others is
        zero too. What is near is learnt first, as in a network that grows; what is far is there when it is needed."""
        if not isinstance(self.encoder, MSLMN):
            raise TypeError(
                f"only the modules of an MSLMN can be silenced, the encoder is {type(self.encoder).__name__}; "
                "build the model on one"
            )
        self.encoder.silence()
        self.readout.silence()

    def grow(self, A: Any, B: Any) -> None:
        """A new, slower module, see `MSLMN.grow`; its readout is zero, so the output stays what it was."""
        if not isinstance(self.encoder, MSLMN):
            raise TypeError(
                f"only an MSLMN grows, the encoder is {type(self.encoder).__name__}; build the model on one"
            )
        if isinstance(self.norm, MemoryNorm):
            raise ValueError(
                "norm='layer' normalises all modules together, so a new one would change what is read of the others; "
                "build the model with norm='prefix' or 'module' to grow it"
            )
        self.encoder.grow(A, B)
        if self.norm is not None:
            self.norm.grow()
        self.readout.grow()


def _layout(encoder: nn.Module) -> tuple[int, int, int]:
    """D directions, g modules, M units of each."""
    if isinstance(encoder, ClockedLayer):
        return encoder.num_directions, encoder.num_modules, encoder._module_size
    if isinstance(encoder, nn.RNNBase):
        return 2 if encoder.bidirectional else 1, 1, encoder.proj_size or encoder.hidden_size
    raise TypeError(
        f"encoder must be a layer of mslmn, nn.RNN, nn.LSTM or nn.GRU, got {type(encoder).__name__}; "
        "wrap another one yourself"
    )


def _final(state: Any, D: int) -> Tensor:
    """The memory of the last layer at each sequence's end: (B, D*G); unbatched (D*G,)."""
    memory = state[0] if isinstance(state, tuple) else state  # State, (h, c) or h: (L*D, B, G), or (L*D, G)
    return torch.cat(memory[-D:].unbind(), -1)


def _is_slow(encoder: nn.Module, input: PackedSequence) -> bool:
    """Torch's LSTM takes five times longer for packed sequences than for padded ones on the CPU, and so does cuDNN's in
    both directions; unless there is much more padding than there are steps."""
    if not isinstance(encoder, nn.LSTM) or (encoder.bidirectional and encoder.proj_size):
        return False
    rows = len(input.batch_sizes) * int(input.batch_sizes[0])
    return (encoder.bidirectional or not input.data.is_cuda) and rows <= 4 * len(input.data)


def _padded_lstm(lstm: nn.LSTM, input: PackedSequence, last: bool) -> Tensor | PackedSequence:
    """What the LSTM gives for a packed sequence: a direction never sees the padding before it is cut off again."""
    padded, lengths = packing.pad(input), packing.to_device(packing.lengths(input), input.data.device)
    if lstm.bidirectional:
        output = _padded_both(lstm, padded, lengths, last)
    else:
        output = lstm(padded.transpose(0, 1))[0].transpose(0, 1) if lstm.batch_first else lstm(padded)[0]
    if not last:
        return packing.pack_like(output, input)
    final = output[lengths - 1, torch.arange(len(lengths), device=lengths.device)]
    return final if input.unsorted_indices is None else final[input.unsorted_indices]


def _padded_both(lstm: nn.LSTM, padded: Tensor, lengths: Tensor, last: bool) -> Tensor:
    """Both directions, (T, B, I), the second one on every sequence turned round; for the ``last`` memories it is left
    so."""
    T, B = padded.shape[:2]
    zeros = padded.new_zeros(1, B, lstm.hidden_size)
    steps = torch.arange(T, device=lengths.device)[:, None]
    turn = torch.where(steps < lengths, lengths - 1 - steps, steps)[..., None]  # its own inverse
    each = len(lstm._flat_weights) // (2 * lstm.num_layers)
    parts = [lstm._flat_weights[i : i + each] for i in range(0, len(lstm._flat_weights), each)]  # by layer, direction
    x = padded
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RNN module weights are not part")  # some of them: cuDNN gathers them
        for layer in range(lstm.num_layers):
            if layer:
                x = F.dropout(x, lstm.dropout, lstm.training)
            y, turned = (
                torch._VF.lstm(given, (zeros, zeros), weights, lstm.bias, 1, 0.0, lstm.training, False, False)[0]  # type: ignore[arg-type]
                for given, weights in zip((x, _turned(x, turn)), parts[2 * layer :], strict=False)
            )
            x = torch.cat([y, turned if last and layer + 1 == lstm.num_layers else _turned(turned, turn)], -1)
    return x


def _turned(x: Tensor, turn: Tensor) -> Tensor:  # (T, B, n), (T, B, 1)
    return x.gather(0, turn.expand_as(x))


def _map(function: Callable[[Tensor], Tensor], x: Tensor | PackedSequence) -> Any:
    if isinstance(x, PackedSequence):
        return PackedSequence(function(x.data), *x[1:])
    return function(x)


def _blocks(g: int, make: Any) -> PerModule:
    return PerModule([nn.Parameter(make()) for _ in range(g)])
