"""The matrix of reversed prefixes, never formed: products with it are convolutions, done by FFT.

Row (i, t) of Xi is what sequence i was at step t, newest first: [x_t, x_t-1, .., x_t-h+1], zeros before its start. It
has L rows and n = h*a columns; a block of b columns is kept as (h, a, b).

    (Xi Q)[t]  = sum_j x_t-j Q_j             a convolution over time
    (Xi^T Y)_j = sum_t x_t-j^T Y_t           a correlation

Long sequences are cut into pieces of rows, each with the h - 1 steps before it (overlap-save).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import scipy.fft
import torch
from torch import Tensor
from torch.nn.functional import pad

from .sequences import Bucket, Sequences

CHUNK_BYTES = 2**22  # of one intermediate result: it should stay in a core's cache
DIRECT = 10**8  # multiply-adds that are done sooner without FFT
PIECE = 4  # steps of a piece, in horizons, where sequences are much longer


@dataclass(frozen=True)
class Pieces:
    """Rows of Xi, in the frequency domain."""

    spectrum: Tensor  # (F, P, a), complex
    steps: int  # of a piece: its context and its rows
    horizon: int  # of these pieces: later lags are zero
    missing: Tensor | None  # (rows, P): which rows do not exist; None if all do

    def project(self, Q: Tensor) -> Tensor:
        """Xi Q, (rows, P, b), zero where there is no row; Q in the frequency domain, see `Block`."""
        Y: Tensor = torch.fft.irfft(self.spectrum @ Q, n=self.steps, dim=0)[self.horizon - 1 :]
        return Y if self.missing is None else Y.masked_fill_(self.missing[..., None], 0)

    def correlate(self, Y: Tensor) -> Tensor:
        """Xi^T Y of (rows, P, b); in the frequency domain and conjugate, (F, a, b): see `Sum`."""
        Y = torch.fft.rfft(pad(Y, (0, 0, 0, 0, self.horizon - 1, 0)), dim=0).conj().resolve_conj()
        return self.spectrum.mT * Y if Y.shape[1] == 1 else self.spectrum.mT @ Y  # many outer products: faster so


class Block:
    """A block of columns, (h, a, b), transformed as pieces need it; pieces of one kind share the transform."""

    def __init__(self, Q: Tensor) -> None:
        self.Q = Q
        self.kind = (0, 0)
        self.spectrum = Q

    def for_(self, pieces: Pieces) -> Tensor:
        if self.kind != (pieces.steps, pieces.horizon):
            self.kind = (pieces.steps, pieces.horizon)
            self.spectrum = torch.fft.rfft(self.Q[: pieces.horizon], n=pieces.steps, dim=0)  # (F, a, b)
        return self.spectrum


class Sum:
    """Adds up what `Pieces.correlate` gives; pieces of one kind share the transform back."""

    def __init__(self, total: Tensor) -> None:
        self.total = total  # (h, a, b)
        self.kind = (0, 0)
        self.spectrum: Tensor | None = None

    def add(self, pieces: Pieces, spectrum: Tensor) -> None:
        if self.spectrum is None or self.kind != (pieces.steps, pieces.horizon):
            self.result()
            self.kind, self.spectrum = (pieces.steps, pieces.horizon), spectrum
        else:
            self.spectrum += spectrum

    def result(self) -> Tensor:
        if self.spectrum is not None:
            steps, horizon = self.kind
            self.total[:horizon] += torch.fft.irfft(self.spectrum.conj(), n=steps, dim=0)[:horizon]
            self.spectrum = None
        return self.total


class Prefixes:
    """Xi of all sequences, multiplied in ``dtype`` with blocks about ``width`` wide.

    Spectra are kept for the next pass if they fit ``keep_bytes``; streamed sequences are read again.
    """

    def __init__(
        self, sequences: Sequences, horizon: int, dtype: torch.dtype, width: int, keep_bytes: float = 0
    ) -> None:
        self.sequences = sequences
        self.horizon = horizon
        self.dtype = dtype
        self.width = width
        self.keep_bytes = 0 if sequences.streamed else keep_bytes
        self.kept: list[Pieces] | None = None

    def __iter__(self) -> Iterator[Pieces]:
        if self.kept is not None:
            yield from self.kept
            return
        keep: list[Pieces] = []
        used = 0
        for bucket in self.sequences.buckets(self.dtype):
            for pieces, _ in cut(bucket, self.horizon, self.width):
                used += pieces.spectrum.nbytes
                if used <= self.keep_bytes:
                    keep.append(pieces)
                else:
                    keep.clear()
                yield pieces
        if used <= self.keep_bytes:
            self.kept = keep

    def normal(self, Q: Tensor) -> Tensor:
        """Xi^T Xi Q of (h, a, b), over the sequences of this process."""
        block, total = Block(Q), Sum(torch.zeros_like(Q))
        for pieces in self:
            total.add(pieces, pieces.correlate(pieces.project(block.for_(pieces))))
        return total.result()

    def energy(self, Q: Tensor) -> Tensor:
        """|Xi Q|^2, (), in float64, over the sequences of this process."""
        block, total = Block(Q), Q.new_zeros((), dtype=torch.float64)
        for pieces in self:
            total += pieces.project(block.for_(pieces)).square().sum(dtype=torch.float64)
        return total


def energy(sequences: Sequences, horizon: int) -> Tensor:
    """|Xi|^2, (), in float64, over the sequences of this process: a step counts once for each prefix that has it."""
    total = torch.zeros((), dtype=torch.float64, device=sequences.device)
    for bucket in sequences.buckets():
        left = bucket.lengths[:, None] - torch.arange(bucket.x.shape[1], device=total.device)
        squares = torch.linalg.vector_norm(bucket.x, dim=2, dtype=torch.float64).square()
        total += (squares * left.clamp(0, horizon)).sum()
    return total


def adjoint(bucket: Bucket, Y: Tensor, total: Tensor) -> None:
    """Add Xi^T Y of a bucket's rows, (n, T, b), zero past each end, to the total, (h, a, b)."""
    (n, T, a), (h, _, b) = bucket.x.shape, total.shape
    if n * T * min(h, T) * a * b < DIRECT:
        _adjoint_directly(bucket.x, Y, total)
        return
    result, laid = Sum(total), Y
    for pieces, part in cut(bucket, h, b):
        rows = pieces.steps - pieces.horizon + 1  # of every piece
        if laid is Y:
            laid = pad(Y, (0, 0, 0, -(-T // rows) * rows - T)).view(-1, rows, b)  # (n * pieces, rows, b)
        result.add(pieces, pieces.correlate(laid[part].transpose(0, 1)))
    result.result()


def _adjoint_directly(x: Tensor, Y: Tensor, total: Tensor) -> None:
    """Without FFT: a few lags at a time, as one product."""
    (n, T, a), (h, _, b) = x.shape, total.shape
    q = min(h, T, max(1, 256 // a))
    recent = x.new_zeros(n, T, q, a)  # the last q steps at each step
    for i in range(q):
        recent[:, i:, i] = x[:, : T - i]
    for j in range(0, min(h, T), q):
        product = recent[:, : T - j].flatten(0, 1).flatten(1).T @ Y[:, j:].flatten(0, 1)
        total[j : j + q] += product.view(q, a, b)[: h - j]


def cut(bucket: Bucket, horizon: int, width: int) -> Iterator[tuple[Pieces, slice]]:
    """The rows of a bucket in chunks that suit blocks of that width, and which pieces each chunk has."""
    n, T, a = bucket.x.shape
    h = min(horizon, T)
    steps = T + h - 1
    if steps > 2 * PIECE * h:
        steps = max(PIECE * h, 256)
    steps = scipy.fft.next_fast_len(steps, real=True)
    rows = steps - h + 1
    count = -(-T // rows)  # pieces of a sequence
    x = pad(bucket.x, (0, 0, h - 1, count * rows - T))
    missing: Tensor | None = None
    if count * rows > T or bucket.ended() is not None:
        missing = torch.arange(count * rows, device=x.device) >= bucket.lengths[:, None]
        missing = missing.view(n * count, rows).T  # (rows, n * count)
    size = max(1, CHUNK_BYTES // (steps * max(a, width) * x.element_size()))
    for start in range(0, n * count, size):
        part = slice(start, min(start + size, n * count))
        windows = x[part] if count == 1 else _windows(x, steps, rows, part)  # (P, steps, a)
        spectrum = torch.fft.rfft(windows.transpose(0, 1), dim=0).contiguous()
        yield Pieces(spectrum, steps, h, None if missing is None else missing[:, part].contiguous()), part


def _windows(x: Tensor, steps: int, rows: int, part: slice) -> Tensor:
    """(P, steps, a), windows of the padded sequences (n, .., a), every ``rows`` steps: those of the part."""
    count = (x.shape[1] - steps) // rows + 1
    first, last = part.start // count, (part.stop - 1) // count
    views = x[first : last + 1].unfold(1, steps, rows).transpose(2, 3)  # (sequences, count, steps, a), nothing copied
    if first == last:
        return views[0, part.start - first * count : part.stop - first * count]
    return views.flatten(0, 1)[part.start - first * count : part.stop - first * count]
