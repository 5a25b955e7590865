"""The largest eigenvalues of a symmetric matrix that is only ever multiplied: block Lanczos.

Small blocks and full reorthogonalisation: spectra of prefix matrices are flat, where one big block (a randomised SVD)
converges slowly. A full basis is replaced by its best Ritz vectors, and grows again from there.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Progress = Callable[[int, float], None]  # passes so far, sum of the wanted eigenvalues so far


def largest(
    multiply: Callable[[Tensor], Tensor],
    start: Tensor,
    p: int,
    *,
    trace: float,
    tol: float,
    most: int,
    progress: Progress | None = None,
) -> tuple[Tensor, Tensor]:
    """The p largest eigenvalues, descending (p,), in float64, and their eigenvectors (n, p).

    ``multiply`` takes and gives (n, b) blocks; ``start`` is the first, of any full rank. The end is when a pass raises
    the sum of the p largest Ritz values by less than ``tol`` of what is still missing from the ``trace`` (the less is
    missing, the more the rest matters) and of a tenth of itself (of noise, p components explain next to nothing).
    ``most`` vectors are kept; 2p + 2b, if that is more; n, if that is hardly more.
    """
    n, b = start.shape
    most = max(most, 2 * p + 2 * b)
    most = most if most + b < n else n  # a full basis leaves room for one more block, or is all there is
    basis = start.new_empty(most, n)  # orthonormal rows
    H = start.new_zeros(most, most, dtype=torch.float64)  # basis @ matrix @ basis.T: block tridiagonal
    block = torch.linalg.qr(start).Q
    recent, size, passes, before = 0, 0, 0, -1.0
    rounding = 4 * torch.finfo(start.dtype).eps
    while True:
        end = size + block.shape[1]
        basis[size:end] = block.T
        image = multiply(block)
        seen = basis[recent:end] @ image  # earlier vectors are orthogonal to it
        H[recent:end, size:end] = seen
        H[size:end, recent:end] = seen.T
        image -= basis[recent:end].T @ seen
        recent, size, passes = size, end, passes + 1
        total = torch.linalg.eigvalsh(H[:size, :size])[-p:].clamp(min=0).sum().item()
        if progress is not None:
            progress(passes, total)
        least = max(tol * min(trace - total, total / 10), rounding * total)
        if size == n or (size >= p and total - before <= least):
            values, vectors = torch.linalg.eigh(H[:size, :size])
            return values[-p:].flip(0), basis[:size].T @ vectors[:, -p:].flip(1).to(start.dtype)
        before = total
        block = _orthonormal(image, basis[:size], H[:size, :size].diagonal().max())
        if size + b > most < n:  # go on from the best
            values, vectors = torch.linalg.eigh(H[:size, :size])
            recent, size = 0, p + b
            basis[:size] = vectors[:, -size:].T.to(start.dtype) @ basis[: len(vectors)]
            H.zero_()
            H[:size, :size] = values[-size:].diag()
        block = block[:, : n - size]


def _orthonormal(block: Tensor, basis: Tensor, scale: Tensor) -> Tensor:
    """Orthonormal columns, orthogonal to the basis, that span the block; random ones where it has none left."""
    Q, R = torch.linalg.qr(block)
    noise = torch.finfo(block.dtype).eps * block.shape[0] ** 0.5 * scale
    lost = R.diagonal().abs() <= noise  # an invariant subspace is complete
    if lost.any():
        generator = torch.Generator().manual_seed(basis.shape[0])
        random = torch.randn(block.shape, generator=generator, dtype=block.dtype).to(block.device)
        Q = torch.where(lost, random, Q)
        Q = torch.linalg.qr(Q - basis.T @ (basis @ Q)).Q
    orthonormal: Tensor = torch.linalg.qr(Q - basis.T @ (basis @ Q)).Q
    return orthonormal
