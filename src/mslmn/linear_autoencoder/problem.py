"""What a solver gets, and what it gives back."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .lanczos import Progress, largest
from .sequences import Bucket, Sequences

EXACT = 1000  # matrices up to this size are decomposed as a whole
SINGLE_TOL = 1e-6  # with a tolerance below it all is in float64
SINGLE_DEPTH = 1e-3  # float32 resolves singular values down to this part of the first
LOSSLESS = 0.999  # of the energy: what keeps more is expected to keep all, to rounding


@dataclass(frozen=True)
class Problem:
    """Find the p strongest right singular vectors of the prefix matrix of these sequences."""

    sequences: Sequences
    p: int
    horizon: int  # at most the longest sequence
    features: int
    steps: int  # L, of all sequences of all processes
    rows: int  # as many, if all were as long as the longest
    energy: float  # |Xi|^2
    device: torch.device
    tol: float
    max_memory: float  # bytes, beside the data
    seed: int
    progress: Progress | None = None

    @property
    def columns(self) -> int:
        return self.horizon * self.features

    @property
    def most(self) -> int:
        """No more components than this can exist."""
        return min(self.p, self.columns, self.steps)

    def whole(self) -> list[Bucket]:
        """All sequences in memory, in float64, for solvers that need them so."""
        if self.sequences.distributed:
            raise ValueError(
                "this solver needs all sequences in one process; use solver='gram', 'fft', 'pca' or 'auto' under "
                "torch.distributed, or distributed=False to fit each process's own share"
            )
        return list(self.sequences.buckets(torch.float64))

    def single_will_do(self, squares: Tensor) -> bool:
        """Whether these squared singular values, descending, were within the reach of float32."""
        deep = squares[-1] < SINGLE_DEPTH**2 * squares[0]
        return not deep and squares.sum().item() < LOSSLESS * self.energy

    def largest(self, multiply: Callable[[Tensor], Tensor], start: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """By block Lanczos, see there."""
        return largest(multiply, start, self.most, trace=self.energy, tol=self.tol, most=most, progress=self.progress)

    def random(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """The same on every device and process."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(self.device, dtype)


@dataclass(frozen=True)
class Solution:
    """Singular values, descending, (r,), and right singular vectors, (h, a, r), orthonormal, in float64."""

    s: Tensor
    U: Tensor
    AB: tuple[Tensor, Tensor] | None = None  # the encoder, where it was not found from U

    def encoder(self) -> tuple[Tensor, Tensor]:
        """A (r, a) and B (r, r)."""
        if self.AB is not None:
            return self.AB
        h, a, r = self.U.shape
        U = self.U.reshape(h * a, r)
        return U[:a].T, U[a:].T @ U[: (h - 1) * a]

    def fix_signs(self) -> None:
        """In place, the largest entry of each component positive: the same data give the same signs."""
        if not len(self.s):
            return
        sign = torch.where(self.U.amax((0, 1)) < -self.U.amin((0, 1)), -1.0, 1.0).to(self.U)
        self.U.mul_(sign)
        if self.AB is not None:
            A, B = self.AB
            A *= sign[:, None]
            B *= sign[:, None] * sign


def eigenvectors(matrix: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues of an explicit matrix, those above rounding, descending, and their vectors."""
    n, p = len(matrix), problem.most
    if n <= EXACT or 5 * p > n:
        values, vectors = _exact(matrix, p, problem)
    else:
        start = problem.random(n, block_width(p), matrix.dtype)
        values, vectors = problem.largest(matrix.__matmul__, start, most=8 * p)
    r = rank(values, n)
    return values[:r], vectors[:, :r]


def _exact(matrix: Tensor, p: int, problem: Problem) -> tuple[Tensor, Tensor]:
    if problem.tol >= SINGLE_TOL:
        V = torch.linalg.eigh(matrix.float())[1][:, -p:].double()
        V = torch.linalg.qr(V).Q
        values, rotation = torch.linalg.eigh(V.T @ matrix @ V)  # of what it spans, in float64
        if problem.single_will_do(values.flip(0)):
            return values.flip(0), V @ rotation.flip(1)
    values, V = torch.linalg.eigh(matrix)
    return values[-p:].flip(0), V[:, -p:].flip(1)


def block_width(p: int) -> int:
    """Of the blocks of the Lanczos iteration: small ones converge in fewer products."""
    return max(4, -(-p // 4))


def rank(squares: Tensor, n: int) -> int:
    """How many squared singular values, descending, are above the rounding errors of an n x n Gram matrix."""
    if not len(squares) or squares[0] <= 0:
        return 0
    return int((squares > 10 * n**0.5 * torch.finfo(torch.float64).eps * squares[0]).sum())
