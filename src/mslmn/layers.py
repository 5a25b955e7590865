"""LMN, MSLMN and ClockworkRNN: recurrent layers with the manners of `torch.nn.LSTM`.

Dimensions: T steps, B batch, I input size, H hidden size, M memory size per module, g modules (fastest
first), G = g*M, D directions, L layers, N steps of all sequences of a packed batch together, P steps that are pooled.
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from . import checks, ops, packing, pooling
from .cells import INITS, Cell, ClockworkCell, MSLMNCell, largest_singular_values
from .clock import MAX_MODULES

Device = torch.device | str | int | None


class State(NamedTuple):
    """Where a layer stands in its sequences; hand it back to go on from there."""

    memory: Tensor  # (L*D, B, G); unbatched (L*D, G)
    clock: Tensor  # (B,) int64; unbatched (): steps already consumed

    def detach(self) -> "State":
        """The same state cut from its graph, for truncated backpropagation through time."""
        return State(self.memory.detach(), self.clock)


class ClockedLayer(nn.Module):
    """What the layers share: cells stacked, in one or two directions, and every form of input.

    Attributes:
        cells: the parameters, one cell per layer and direction; layer l in direction d is
            ``cells[l * num_directions + d]``.
        norms: where ``layer_norm``, what layer l + 1 reads goes through ``norms[l]``.
    """

    cells: nn.ModuleList
    norms: nn.ModuleList | None

    def __init__(
        self,
        make_cell: Callable[[int], Cell],  # from the width of its input
        input_size: int,
        module_size: int,
        num_modules: int,
        num_layers: int,
        bias: bool,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
        init: str,
        learn_initial_state: bool,
        layer_norm: bool,
        pool: int,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.input_size = checks.size("input_size", input_size, least=0)
        self.num_modules = checks.size("num_modules", num_modules, most=MAX_MODULES)
        self.num_layers = checks.size("num_layers", num_layers)
        self.bias = checks.flag("bias", bias)
        self.batch_first = checks.flag("batch_first", batch_first)
        self.dropout = checks.probability("dropout", dropout)
        self.bidirectional = checks.flag("bidirectional", bidirectional)
        self.init = checks.choice("init", init, INITS)
        self.learn_initial_state = checks.flag("learn_initial_state", learn_initial_state)
        self.layer_norm = checks.flag("layer_norm", layer_norm)
        self.pool = checks.size("pool", pool)
        checks.float_type("dtype", dtype)
        if self.num_layers == 1 and (self.dropout > 0 or self.layer_norm):
            option, module = (
                (f"dropout={dropout}", "nn.Dropout") if self.dropout > 0 else ("layer_norm", "nn.LayerNorm")
            )
            warnings.warn(
                f"{option} acts between layers, and num_layers is 1; add layers, or put {module} on the output",
                stacklevel=_depth(),
            )
        self._module_size = module_size
        widths = [self.input_size] + [self.output_size] * (self.num_layers - 1)
        self.cells = nn.ModuleList([make_cell(I) for I in widths for _ in range(self.num_directions)])
        norms = [nn.LayerNorm(I, device=device, dtype=dtype) for I in widths[1:] if self.layer_norm]
        self.norms = nn.ModuleList(norms) if norms else None

    @property
    def num_directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def output_size(self) -> int:
        """Last dimension of the output, D*G: the memory of all modules in all directions."""
        return self.num_directions * self.num_modules * self._module_size

    @property
    def window(self) -> int:
        """Steps of the input that one of the output stands for."""
        return int(self.pool**self.num_layers)

    @property
    def config(self) -> dict[str, object]:
        """The constructor's arguments, less device and dtype: with them the class builds its like."""
        return {name: getattr(self, name) for name in self._signature() if name not in ("device", "dtype")}

    def _signature(self) -> Mapping[str, inspect.Parameter]:
        """The constructor's parameters: of the layer of this file, where a user's class is derived from it."""
        layer = next(kind for kind in type(self).__mro__ if kind.__module__ == __name__)
        return inspect.signature(layer).parameters

    def reset_parameters(self) -> None:
        """Initialise every weight anew, as ``init`` says (after `to_empty`, for instance)."""
        for part in (*self.cells, *(self.norms or [])):
            cast(Cell | nn.LayerNorm, part).reset_parameters()

    def forward(
        self, input: Tensor | PackedSequence, state: State | None = None
    ) -> tuple[Tensor | PackedSequence, State]:
        """Run over a batch of sequences: ``output, state = layer(input, state)``.

        Args:
            input: ``(T, B, I)``, ``(B, T, I)`` if ``batch_first``, unbatched ``(T, I)``, or a
                `PackedSequence`.
            state: what an earlier call returned, to go on from there; ``None`` starts anew.

        Returns:
            The memory after every step, or its means where the layer pools, in the form of the input, last
            dimension D*G (modules fastest first; forward direction, then backward), and the `State` at each
            sequence's own end.
        """
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, state)
        checks.check_input(input, self.input_size, self.batch_first, self._weight)
        batched = input.dim() == 3
        x = input if batched else input.unsqueeze(1)
        if batched and self.batch_first:
            x = x.transpose(0, 1)
        T, B, _ = x.shape
        if state is not None:
            self._check_state(state, (B,) if batched else ())
            if not batched:
                state = State(state[0].unsqueeze(1), state[1].unsqueeze(0))
        output, _, memory, clock = self._run(x, state, B)
        clock = ops.filled(T, B, x.device) if state is None and x.is_cuda else clock + T
        if not batched:
            return output.squeeze(1), State(memory.squeeze(1), clock.squeeze(0))
        return output.transpose(0, 1) if self.batch_first else output, State(memory, clock)

    def _forward_packed(self, input: PackedSequence, state: State | None) -> tuple[PackedSequence, State]:
        """A packed batch is sorted, longest sequence first; states keep the caller's order."""
        x, batch_sizes, to_packed, to_caller = input
        checks.check_packed(x, batch_sizes, self.input_size, self._weight)
        B = int(batch_sizes[0])
        if state is not None:
            self._check_state(state, (B,))
            if to_packed is not None:
                state = State(state[0].index_select(1, to_packed), state[1].index_select(0, to_packed))
        lengths = ops.lengths(batch_sizes, B, x.device)
        output, pooled_sizes, memory, clock = self._run(x, state, B, batch_sizes)
        clock = clock + lengths
        if to_caller is not None:
            memory, clock = memory.index_select(1, to_caller), clock.index_select(0, to_caller)
        return PackedSequence(output, pooled_sizes, to_packed, to_caller), State(memory, clock)

    def _run(
        self,
        x: Tensor,  # (T, B, I), or packed (N, I)
        state: State | None,
        B: int,
        batch_sizes: Tensor | None = None,
        hidden: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Every layer and direction: the output and its batch sizes, the last memories (L*D, B, G), the clock at the
        start.

        A list for the hidden states gets those of each cell.
        """
        start = ops.zeros((B,), torch.int64, x.device)
        clock = own = start if state is None else state[1]  # the layer's own, in its steps
        last: list[Tensor] = []
        all_cells = list(self._cells.values())  # a third of the time that iteration takes
        D = self.num_directions
        for layer in range(self.num_layers):
            if layer > 0 and self.norms is not None:
                x = self.norms[layer - 1](x)
            if layer > 0 and self.dropout:
                x = F.dropout(x, self.dropout, self.training)
            i = layer * D
            cells = all_cells[i : i + D]
            ms = [
                cast(Cell, cell).initial_memory(B) if state is None else state[0][i + d] for d, cell in enumerate(cells)
            ]
            # The backward direction begins at each sequence's last step, so its clock begins too.
            runs = self._run_layer(cells, x, ms, [own, start], batch_sizes, hidden is not None)
            if hidden is not None:
                hidden += [cast(Tensor, r.hidden) for r in runs]
            last += [r.last for r in runs]
            x = torch.cat([r.memory for r in runs], dim=-1) if self.bidirectional else runs[0].memory
            if self.pool > 1:
                x, batch_sizes = self._pooled(x, batch_sizes)
                own = own if state is None else own // self.pool
        return x, batch_sizes, torch.stack(last) if len(last) > 1 else last[0].unsqueeze(0), clock

    def _run_layer(
        self,
        cells: list[nn.Module],  # one for each direction
        x: Tensor,
        ms: list[Tensor],
        clocks: list[Tensor],
        batch_sizes: Tensor | None,
        need_hidden: bool,
    ) -> tuple[ops.Run, ...]:
        if x.is_cuda and not _watched(cells):
            weights = [cast(Cell, cell).kept_weights() for cell in cells]
            if not self.bidirectional:
                return (ops.run(x, ms[0], clocks[0], weights[0], batch_sizes, False, need_hidden),)
            first, second = zip(ms, clocks, weights, strict=True)
            return ops.run_both(x, first, second, batch_sizes, need_hidden)
        return tuple(
            [cell(x, ms[d], clocks[d], batch_sizes, d == 1, need_hidden=need_hidden) for d, cell in enumerate(cells)]
        )

    def _pooled(self, x: Tensor, batch_sizes: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What a layer hands on, and its batch sizes."""
        if batch_sizes is None:
            return pooling.pooled(x, self.pool), None
        P = min(self.pool, len(batch_sizes))
        if (placed := ops.next_pooling()) is not None:
            return pooling.pooled_rows(x, placed.places, placed.counts, P), placed.batch_sizes
        checks.check_not_captured(x)
        sizes, places, counts = map(torch.from_numpy, packing.windows(batch_sizes.numpy(), P))
        places, counts = packing.to_device(places, x.device), packing.to_device(counts, x.device)
        return pooling.pooled_rows(x, places, counts, P), sizes

    def _check_state(self, state: State, batch: tuple[int, ...]) -> None:
        units = self.num_modules * self._module_size
        checks.check_state(state, len(self.cells), batch, units, self._weight)
        if self.pool > 1:
            checks.check_clock(state[1], self.window)

    @property
    def _weight(self) -> Tensor:
        return cast(Cell, self._cells["0"]).weight

    @property
    def _cells(self) -> dict[str, nn.Module]:
        return cast(Any, self)._modules["cells"]._modules  # type: ignore[no-any-return]  # in half the time

    def extra_repr(self) -> str:
        defaults = self._signature()
        return ", ".join(f"{name}={value!r}" for name, value in self.config.items() if value != defaults[name].default)

    def __repr__(self) -> str:
        """The configuration on one line, as `nn.LSTM` has it, not the tree of parameters."""
        return f"{type(self).__name__}({self.extra_repr()})"


def _watched(cells: list[nn.Module]) -> bool:
    """Whether someone waits for calls of the cells: hooks, wrappers, another `forward`."""
    for cell in cells:
        hooks = cell._forward_hooks or cell._forward_pre_hooks or cell._backward_hooks or cell._backward_pre_hooks
        if hooks or type(cell) not in (MSLMNCell, ClockworkCell) or "forward" in cell.__dict__:
            return True
    return bool(nn.modules.module._has_any_global_hook())


def _depth() -> int:
    """How many callers up the code lies that builds a layer, whichever class of this file it names."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame, depth = frame.f_back, depth + 1
    return depth


class MSLMN(ClockedLayer):
    """MultiScale Linear Memory Network (Carta, Sperduti, Bacciu 2020).

    A nonlinear hidden state h reads the input and a linear memory m of g modules; module k is updated
    every 2^(k-1) steps, from h and from itself and the slower modules:

        h_t   = tanh(Wxh x_t + b_h + sum_i Wmh[i] m_i,t-1)
        m_k,t = Whm[k] h_t + b_m[k] + sum_{i>=k} Wmm[i->k] m_i,t-1    if t mod 2^(k-1) == 0, else m_k,t-1

    t = 1 is the first step. The output is m. Fed in chunks, of any sizes, a unidirectional layer gives
    what it gives fed whole, if each chunk gets the state of the one before: the state carries the clock.

    Parameters, of each ``cells[i]``, in the paper's symbols: ``Wxh`` (H, I) and ``b_h`` (H,); per module
    j, from 0: ``Wmh[j]`` (H, M), ``Whm[j]`` (M, H), ``b_m[j]`` (M,), and ``Wmm[j]`` (jM + M, M), what
    module j sends to itself and the faster ones, fastest first. Where ``learn_initial_state``, ``m_0[j]``
    (M,) too.

    Initial values. ``"leaky"``: each module is a bank of M leaky integrators, with time constants
    log-spaced between 1 and 30 steps of its own clock, d_i = exp(-1 / 30^((i - 1/2) / M)):

        Wmm[k->k] = diag(d), other blocks 0          Whm[k] = (1 - d) * N(0, 2 / (M + H)), by rows
        Wxh = N(0, 2 / (H + I))                      Wmh = N(0, 1/4 * 2 / (H + G))

    so that no unit explodes and every module remembers. ``"fan-in"``: the same, but Wxh = N(0, 2 / I): where
    inputs are few, hidden states are not near zero, where tanh is a straight line. ``"xavier"``, as in the
    authors' code: every weight N(0, 2 / (rows + columns)) of the matrix of all modules, for Wmm G x G; this is
    what the paper reports, and it often does not learn. Biases and the learnt initial memory start at zero.

    Args:
        input_size: features per step (I); 0 for a network without input, fed with ``(T, B, 0)``.
        hidden_size: units of h (H).
        memory_size: units of each module (M).
        num_modules: modules (g); ``mslmn.clock.num_modules(T)`` is the most that T steps can use.
        num_layers: layers stacked on each other, each reading the memory of the one below.
        bias: whether ``b_h`` and ``b_m`` exist.
        batch_first: batched tensors are ``(B, T, ...)`` instead of ``(T, B, ...)``.
        dropout: probability of dropping a value between layers, in training.
        bidirectional: run a second network from each sequence's end to its start.
        init: ``"leaky"``, ``"fan-in"`` or ``"xavier"``.
        learn_initial_state: the initial memory is a parameter instead of zero.
        layer_norm: upper layers read the memory below them through a `nn.LayerNorm`, before ``dropout``:

                m <- gain * (m - mean(m)) / sqrt(var(m) + eps) + shift

            over all modules and directions; so a stack cannot grow then.
        pool: each layer hands on the mean of every P = ``pool`` steps, counted from a sequence's first in both
            directions; the last mean is of the steps that are left:

                y_s = 1/P (m_{P(s-1)+1} + .. + m_{Ps})

            So layer l has P^(l-1) times fewer steps than the input, the output P^L times fewer, rounded up. The clock
            counts steps of the input; chunks, the last one excepted, must be multiples of P^L long. Such a layer cannot
            grow.

    Example:
        >>> layer = MSLMN(13, 25, 25, num_modules=7)
        >>> output, state = layer(torch.randn(97, 8, 13))
        >>> output.shape, state.memory.shape, state.clock[0].item()
        (torch.Size([97, 8, 175]), torch.Size([1, 8, 175]), 97)
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        memory_size: int,
        num_modules: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        init: str = "leaky",
        learn_initial_state: bool = False,
        layer_norm: bool = False,
        pool: int = 1,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        hidden_size = checks.size("hidden_size", hidden_size)
        memory_size = checks.size("memory_size", memory_size)

        def make_cell(I: int) -> MSLMNCell:
            factory: dict[str, object] = {"device": device, "dtype": dtype}
            return MSLMNCell(I, hidden_size, memory_size, num_modules, bias, init, learn_initial_state, factory)

        super().__init__(
            make_cell,
            input_size,
            memory_size,
            num_modules,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            init,
            learn_initial_state,
            layer_norm,
            pool,
            device,
            dtype,
        )
        self.hidden_size = hidden_size
        self.memory_size = memory_size

    def hidden_states(self, input: Tensor | PackedSequence) -> list[Tensor]:
        """h at every step of its layer, of each of ``cells``: (T, B, H), or (N, H) in the order of a packed input."""
        hidden: list[Tensor] = []
        if isinstance(input, PackedSequence):
            checks.check_packed(input.data, input.batch_sizes, self.input_size, self._weight)
            self._run(input.data, None, int(input.batch_sizes[0]), input.batch_sizes, hidden)
            return hidden
        checks.check_input(input, self.input_size, self.batch_first, self._weight)
        x = input if input.dim() == 3 else input.unsqueeze(1)
        x = x.transpose(0, 1) if input.dim() == 3 and self.batch_first else x
        self._run(x, None, x.shape[1], hidden=hidden)
        return hidden

    @torch.no_grad()
    def contract(self) -> None:
        """Divide ``Wmm[k->k]`` of each module by its largest singular value, where that is above 1.

        Then a module by itself does not explode: ``|Wmm[k->k] m| <= |m|``, to a percent, as of the autoencoder's B.
        Training may break that at any step; call this after each. Where no singular value is above 1, nothing changes.
        """
        blocks = [block for cell in cast(Iterable[MSLMNCell], self.cells) for block in cell.own_blocks()]
        factors = largest_singular_values(torch.stack(blocks)).clamp_min(1)
        for block, factor in zip(blocks, factors.unbind(), strict=True):
            block.div_(factor)

    @torch.no_grad()
    def silence(self) -> None:
        """Let no module but the fastest speak, as if the others had just grown: of each slower module k

            Wmh[k] = 0        Wmm[k->i] = 0 for i < k        b_m[k] = 0        and 0 where upper layers read it

        while ``Whm[k]`` and ``Wmm[k->k]`` stay, so that it remembers what it hears. The rest of the network then
        computes what it would with one module (but for ``layer_norm``, which sees all), and learns first what can be
        learnt from nearby.
        """
        D, g, M = self.num_directions, self.num_modules, self.memory_size
        for i, cell in enumerate(cast(Iterable[MSLMNCell], self.cells)):
            for j, block in list(enumerate(cell.own_blocks()))[1:]:
                cell.set_module(j, cell.Whm[j].clone(), block.clone())
            if i >= D:
                cell.Wxh.unflatten(1, (D, g, M))[:, :, 1:] = 0

    @property
    def _cannot_grow(self) -> str:
        """Why not, and what to do; empty if it can."""
        if self.norms is not None:
            return (
                "layer_norm normalises all modules together between layers, so a new one would change what is read of "
                "the others; build the layer without it to grow it"
            )
        if self.pool > 1:
            return (
                f"pool={self.pool} lets hidden states of the layers, and the output, go at different clocks, so no new "
                "module can be fitted to them; build the layer without it to grow it"
            )
        return ""

    def grow(self, A: Tensor | Sequence[Tensor], B: Tensor | Sequence[Tensor]) -> None:
        """Add a module, slower than all others, to every layer and direction.

        The new module computes ``A h + B m`` and speaks to no one: ``Whm[new] = A``, ``Wmm[new->new] = B``, all its
        other weights are zero. So hidden states and the memory of the old modules stay what they were, bit for bit.
        Upper layers of a stack get zero columns for their new inputs; every other parameter stays as it is.

        Args:
            A: (M, H); for several cells a list, one for each of ``cells``.
            B: (M, M), likewise.
        """
        if self._cannot_grow:
            raise ValueError(self._cannot_grow)
        As, Bs = ([X] if isinstance(X, Tensor) else list(X) for X in (A, B))
        checks.check_module(As, Bs, len(self.cells), self.memory_size, self.hidden_size, self.num_modules)
        for i, (cell, A_i, B_i) in enumerate(zip(cast(Iterable[MSLMNCell], self.cells), As, Bs, strict=True)):
            cell.grow(A_i, B_i)
            if i >= self.num_directions:
                cell.widen(self.num_directions, self.memory_size)
        self.num_modules += 1


class LMN(MSLMN):
    """Linear Memory Network (Bacciu, Carta, Sperduti 2019): the `MSLMN` with one module.

        h_t = tanh(Wxh x_t + b_h + Wmh m_t-1)
        m_t = Whm h_t + b_m + Wmm m_t-1

    With ``Whm = I``, ``Wmm = 0`` and ``b_m = 0`` it is `nn.RNN`. Arguments, parameters (``Wmh[0]``, ...)
    and initial values are those of `MSLMN`.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        memory_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        init: str = "leaky",
        learn_initial_state: bool = False,
        layer_norm: bool = False,
        pool: int = 1,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            memory_size,
            1,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            init,
            learn_initial_state,
            layer_norm,
            pool,
            device,
            dtype,
        )

    def grow(self, A: Tensor | Sequence[Tensor], B: Tensor | Sequence[Tensor]) -> None:
        """An LMN has one module: build ``MSLMN(..., num_modules=1)`` to grow."""
        raise TypeError("an LMN has one module and cannot grow; build MSLMN(..., num_modules=1), which can")


class ClockworkRNN(ClockedLayer):
    """Clockwork RNN (Koutnik, Greff, Gomez, Schmidhuber 2014), with tanh units.

    The hidden state is split into g modules, module k updated every 2^(k-1) steps, from the input and
    from itself and the slower modules:

        m_k,t = tanh(Wxh[k] x_t + b_h[k] + sum_{i>=k} Whh[i->k] m_i,t-1)   if t mod 2^(k-1) == 0, else m_k,t-1

    Parameters, of each ``cells[i]``, per module j from 0: ``Wxh[j]`` (M, I), ``b_h[j]`` (M,) and
    ``Whh[j]`` (jM + M, M), what module j sends to itself and the faster ones; M is ``hidden_size``.
    Initial values are those of `MSLMN`, Whh in the place of Wmm and Wxh in the place of Whm.

    Args:
        input_size: features per step (I); 0 for a network without input.
        hidden_size: units of each module (M).
        num_modules: modules (g).
        num_layers, bias, batch_first, dropout, bidirectional, init, learn_initial_state, layer_norm, pool: see `MSLMN`.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_modules: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        init: str = "leaky",
        learn_initial_state: bool = False,
        layer_norm: bool = False,
        pool: int = 1,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        hidden_size = checks.size("hidden_size", hidden_size)

        def make_cell(I: int) -> ClockworkCell:
            factory: dict[str, object] = {"device": device, "dtype": dtype}
            return ClockworkCell(I, hidden_size, num_modules, bias, init, learn_initial_state, factory)

        super().__init__(
            make_cell,
            input_size,
            hidden_size,
            num_modules,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            init,
            learn_initial_state,
            layer_norm,
            pool,
            device,
            dtype,
        )
        self.hidden_size = hidden_size
