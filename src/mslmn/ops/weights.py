"""The weights of one recurrence, under the same names for both networks, and as the flat list an operator takes.

The Clockwork RNN is the MS-LMN without h: its modules read x where the others read h, its ``Wxh[k]``, ``b_h[k]``
and ``Whh[k]`` stand in the places of ``Whm[k]``, ``b_m[k]`` and ``Wmm[k]``.
"""

from array import array
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from itertools import groupby
from math import prod
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Sizes(NamedTuple):
    I: int
    H: int  # Clockwork: 0
    M: int
    g: int
    bias: bool


class Weights(NamedTuple):
    Wxh: Tensor | None  # (H, I); Clockwork: None
    b_h: Tensor | None  # (H,)
    Wmh: Sequence[Tensor]  # g of (H, M); Clockwork: empty
    Whm: Sequence[Tensor]  # g of (M, H); Clockwork: (M, I)
    Wmm: Sequence[Tensor]  # module j of g: (jM, M), what it sends to modules 1..j
    b_m: Sequence[Tensor]  # g of (M,), or empty

    @property
    def g(self) -> int:
        return len(self.Wmm)

    @property
    def M(self) -> int:
        return self.Wmm[0].shape[1]

    @property
    def H(self) -> int:
        return 0 if self.Wxh is None else self.Wxh.shape[0]

    @property
    def has_bias(self) -> bool:
        return len(self.b_m) > 0

    @property
    def sizes(self) -> Sizes:
        H, I = (0, self.Whm[0].shape[1]) if self.Wxh is None else self.Wxh.shape
        return Sizes(I, H, self.M, self.g, self.has_bias)

    def flat(self) -> list[Tensor]:
        first = [w for w in (self.Wxh, self.b_h) if w is not None]
        return [*first, *self.Wmh, *self.Whm, *self.Wmm, *self.b_m]

    @property
    def plain(self) -> bool:
        """Whether these are tensors as kernels take them."""
        flat = self.flat()
        return are_plain(*flat) and have_memory(*flat)

    def version(self) -> int:
        """Another one after each change in place."""
        return sum(map(_version, self.flat()))

    def map(self, change: Callable[[Tensor], Tensor]) -> "Weights":
        return Weights.from_flat([change(w) for w in self.flat()], self.Wxh is None, self.has_bias)

    @classmethod
    def from_flat(cls, weights: Sequence[Tensor], clockwork: bool, bias: bool) -> "Weights":
        """The inverse of `flat`."""
        first = 0 if clockwork else 1 + bias
        lists = (2 if clockwork else 3) + bias
        g = (len(weights) - first) // lists
        parts = [weights[first + i * g : first + (i + 1) * g] for i in range(lists)]
        Wxh = None if clockwork else weights[0]
        b_h = weights[1] if bias and not clockwork else None
        b_m = parts.pop() if bias else []
        return cls(Wxh, b_h, [] if clockwork else parts[0], parts[-2], parts[-1], b_m)


class Fit(NamedTuple):
    """Where `fitting` found weights that fit."""

    dtype: torch.dtype
    device: torch.device
    addresses: list[int]  # of each weight
    nbytes: list[int]
    listed: "array[int]"  # the same as kernels take them


class KeptWeights(Weights):
    """Parameters of a cell that are kept from pass to pass because they are the same objects: what follows from that,
    and where they lay, is found out once. A small network's pass is a matter of microseconds."""

    fits: Fit | None = None

    def flat(self) -> list[Tensor]:
        return self._flat

    @cached_property
    def _flat(self) -> list[Tensor]:
        return super().flat()

    @cached_property
    def sizes(self) -> Sizes:
        return super().sizes

    @cached_property
    def plain(self) -> bool:
        return super().plain

    def holds(self) -> bool:
        """Whether it still does: the same objects may have other data, and after torch.utils.swap_tensors be others."""
        return self.sizes == super().sizes and are_plain(*self._flat)


_PLAIN = {Tensor, nn.Parameter, type(None)}
_version = attrgetter("_version")


def are_plain(*tensors: Tensor | None) -> bool:
    """Whether these are no subclasses of tensors."""
    return _PLAIN.issuperset(map(type, tensors))


def have_memory(*tensors: Tensor | None) -> bool:
    """Not so of what torch.func leaves behind."""
    return all(map(torch._C._has_storage, [t for t in tensors if t is not None]))


@lru_cache
def shapes(sizes: Sizes) -> list[tuple[int, ...]]:
    """The shapes of the weights, as `Weights.flat` lists them."""
    I, H, M, g, bias = sizes
    first: list[tuple[int, ...]] = [(H, I), *[(H,)] * bias] if H else []
    lists: list[tuple[int, ...]] = [*[(H, M)] * (g if H else 0), *[(M, H or I)] * g]
    return [*first, *lists, *[(j * M, M) for j in range(1, g + 1)], *[(M,)] * (g * bias)]


@lru_cache
def numels(sizes: Sizes) -> list[int]:
    """How many values each of the weights has."""
    return [prod(shape) for shape in shapes(sizes)]


def unflatten(flat: Tensor, sizes: Sizes) -> list[Tensor]:
    """The weights, as `Weights.flat` lists them, in the memory of a tensor that holds one after the other, and which
    nobody else changes.

    Neighbours of the same width are cut from one matrix, in one call: for a small network a call per weight takes as
    long as its backward pass. Autograd need not know that they lie together, so the cuts are unsafe ones, faster."""
    lengths, matrices = _matrices(sizes)
    parts: list[Tensor] = []
    for values, (shape, rows) in zip(flat.unsafe_split_with_sizes(lengths), matrices, strict=True):
        matrix = values.view(shape) if len(shape) > 1 else values
        parts += matrix.unsafe_split_with_sizes(rows) if len(rows) > 1 else (matrix,)
    return parts


@lru_cache
def _matrices(sizes: Sizes) -> tuple[list[int], list[tuple[tuple[int, ...], list[int]]]]:
    """Neighbouring weights of the same width as one matrix: how many values it has; its shape, the rows of each."""
    runs = [(width, [shape[0] for shape in run]) for width, run in groupby(shapes(sizes), lambda shape: shape[1:])]
    matrices = [((sum(rows), *width), rows) for width, rows in runs]
    return [prod(shape) for shape, _ in matrices], matrices
