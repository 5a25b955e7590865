"""Under LinearAutoencoder: products with the prefix matrix, its Gram matrices, the Lanczos iteration, scans."""

import numpy as np
import pytest
import torch

from helpers import prefix_matrix
from helpers import walks as make
from mslmn.linear_autoencoder import gram, lanczos, prefixes, rows, scan
from mslmn.linear_autoencoder.problem import Problem
from mslmn.linear_autoencoder.sequences import Sequences

hypothesis = pytest.importorskip("hypothesis")  # bare GPU machines lack it
given, st = hypothesis.given, hypothesis.strategies

lengths = st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any)


def problem(X, h, p=3):
    return Problem(
        sequences=Sequences(X),
        p=p,
        horizon=h,
        features=X[0].shape[1],
        steps=sum(map(len, X)),
        rows=len(X) * max(map(len, X)),
        energy=1.0,
        device=torch.device("cpu"),
        tol=1e-12,
        max_memory=1e9,
        seed=0,
    )


@given(lengths, st.integers(1, 3), st.integers(1, 50), st.integers(1, 4), st.sampled_from([1, 2**12, 2**22]))
def test_products_with_the_prefix_matrix_are_exact(lengths, a, h, b, chunk):
    X = make(lengths, a)
    h = min(h, max(lengths))
    Xi = prefix_matrix(X, h)
    Q = torch.randn(h, a, b, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "CHUNK_BYTES", chunk)
        operator = prefixes.Prefixes(Sequences(X), h, torch.float64, b, keep_bytes=1e9)
        for _ in range(2):  # read, then kept
            expected = Xi.T @ (Xi @ Q.flatten(0, 1).numpy())
            np.testing.assert_allclose(operator.normal(Q).flatten(0, 1), expected, atol=1e-10)
        assert operator.kept
        assert operator.energy(Q).item() == pytest.approx(((Xi @ Q.flatten(0, 1).numpy()) ** 2).sum())
    assert prefixes.energy(Sequences(X), h).item() == pytest.approx((Xi**2).sum())


@given(lengths, st.integers(1, 3), st.integers(1, 50), st.sampled_from([0, 10**9]))
def test_the_adjoint_is_the_transpose(lengths, a, h, direct):
    X = make(lengths, a)
    h = min(h, max(lengths))
    total = torch.zeros(h, a, 2, dtype=torch.float64)
    expected = np.zeros((h * a, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "DIRECT", direct)
        for bucket in Sequences(X).buckets():
            n, T, _ = bucket.x.shape
            Y = torch.randn(n, T, 2, dtype=torch.float64)
            ended = bucket.ended()
            if ended is not None:
                Y[ended] = 0
            prefixes.adjoint(bucket, Y, total)
            for x, y, length in zip(bucket.x, Y, bucket.lengths, strict=True):
                expected += prefix_matrix([x[:length].numpy()], h).T @ y[:length].numpy()
    np.testing.assert_allclose(total.flatten(0, 1), expected, atol=1e-10)


@given(lengths, st.integers(1, 3), st.integers(1, 50))
def test_gram_matrices_are_those_of_the_prefix_matrix(lengths, a, h):
    X = make(lengths, a)
    h = min(h, max(lengths))
    Xi = prefix_matrix(X, h)
    np.testing.assert_allclose(gram.matrix(problem(X, h)), Xi.T @ Xi, atol=1e-10)
    bucket = rows.together(list(Sequences(X).buckets()), problem(X, h))
    K = rows.kernel(bucket, h)
    exists = torch.arange(bucket.x.shape[1]) < bucket.lengths[:, None]
    order = [x[:length].numpy() for x, length in zip(bucket.x, bucket.lengths, strict=True)]
    np.testing.assert_allclose(
        K[exists.flatten()][:, exists.flatten()], (Z := prefix_matrix(order, h)) @ Z.T, atol=1e-10
    )
    assert not K[~exists.flatten()].any() and not K[:, ~exists.flatten()].any()


@given(st.integers(1, 5), st.integers(1, 300), st.integers(1, 3), st.integers(1, 6), st.integers(1, 400))
def test_scans_are_loops(n, T, a, p, segment):
    x = torch.randn(n, T, a, dtype=torch.float64)
    A = torch.randn(p, a, dtype=torch.float64)
    B = torch.linalg.qr(torch.randn(p, p, dtype=torch.float64)).Q * 0.99
    lengths = torch.randint(1, T + 1, (n,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "SEGMENT", segment)
        states, ends = scan.encode(x, A, B), scan.last(x, lengths, A, B)
    m = torch.zeros(n, p, dtype=torch.float64)
    for t in range(T):
        m = x[:, t] @ A.T + m @ B.T
        torch.testing.assert_close(states[:, t], m)
    torch.testing.assert_close(ends, states[torch.arange(n), lengths - 1])
    decoded, m = scan.decode(ends, A, B, T), ends
    for t in range(T):
        torch.testing.assert_close(decoded[:, t], m @ A)
        m = m @ B


@given(lengths, st.integers(0, 3))
def test_every_sequence_is_in_one_bucket(lengths, seed):
    X = make(lengths, 2, seed=seed)
    seen = {}
    for bucket in Sequences(X).buckets():
        for i, x, length in zip(bucket.index, bucket.x, bucket.lengths.tolist(), strict=True):
            assert i not in seen and not x[length:].any()
            seen[i] = x[:length].numpy()
        assert bucket.lengths.max() <= 1.25 * bucket.lengths.min()
    assert set(seen) == {i for i, length in enumerate(lengths) if length}
    for i, x in seen.items():
        np.testing.assert_array_equal(x, X[i])


def spectrum(values):
    Q = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64)).Q
    return (Q * values) @ Q.T


SPECTRA = {
    "falling": torch.logspace(2, -8, 120, dtype=torch.float64),
    "flat": torch.linspace(2, 1, 120, dtype=torch.float64),
    "multiple": torch.tensor([5.0] * 30 + [3.0] * 30 + [1.0] * 60, dtype=torch.float64),
    "low rank": torch.tensor([4.0, 2.0, 1.0] + [0.0] * 117, dtype=torch.float64),
    "zero": torch.zeros(120, dtype=torch.float64),
    "one": torch.tensor([1.0] + [0.0] * 119, dtype=torch.float64),
}


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("p", [1, 3, 20, 100, 120])
@pytest.mark.parametrize("most", [1, 10**9])
def test_the_iteration_finds_the_largest_eigenvalues(name, p, most):
    """With restarts (a small basis) and without; multiple and vanishing eigenvalues included."""
    values = SPECTRA[name]
    matrix = spectrum(values)
    start = torch.randn(120, max(4, p // 4), dtype=torch.float64)
    found, V = lanczos.largest(matrix.__matmul__, start, p, trace=values.sum().item(), tol=1e-15, most=most)
    expected = values.sort(descending=True).values[:p]
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(V.T @ V, torch.eye(p, dtype=torch.float64), atol=1e-10, rtol=0)
    torch.testing.assert_close(matrix @ V, V * found, atol=1e-5, rtol=0)


@pytest.mark.parametrize("n", range(10, 20))
@pytest.mark.parametrize("p", [1, 2])
def test_a_basis_that_holds_nearly_all_is_right_too(n, p):
    """Between a full basis and the whole space there may be less room than a block takes."""
    values = torch.linspace(n, 1, n, dtype=torch.float64)
    matrix = spectrum(values)
    found, V = lanczos.largest(
        matrix.__matmul__,
        torch.randn(n, 4).double(),
        p,
        trace=values.sum().item(),
        tol=1e-15,
        most=1,
        progress=at_most(200),
    )
    torch.testing.assert_close(found, values[:p])
    torch.testing.assert_close(V.T @ V, torch.eye(p, dtype=torch.float64))


def at_most(most):
    """Progress that ends an iteration that does not."""

    def progress(passes, _):
        assert passes <= most

    return progress


def test_the_basis_stays_within_its_bound(monkeypatch):
    sizes = []
    original = lanczos._orthonormal
    monkeypatch.setattr(lanczos, "_orthonormal", lambda b, basis, s: sizes.append(len(basis)) or original(b, basis, s))
    matrix = spectrum(SPECTRA["flat"])
    lanczos.largest(matrix.__matmul__, torch.randn(120, 4).double(), 10, trace=180.0, tol=1e-15, most=32)
    assert max(sizes) <= 32 and len(sizes) > 10


def test_progress_is_reported_each_pass():
    seen = []
    matrix = spectrum(SPECTRA["flat"])
    found, _ = lanczos.largest(
        matrix.__matmul__,
        torch.randn(120, 4).double(),
        10,
        trace=180.0,
        tol=1e-4,
        most=99,
        progress=lambda *report: seen.append(report),
    )
    assert [passes for passes, _ in seen] == list(range(1, len(seen) + 1))
    assert seen[-1][1] == pytest.approx(found.sum().item()) and sorted(seen) == seen
