"""LinearAutoencoder: it finds what the SVD of the prefix matrix finds, however it is computed and fed."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline

import mslmn
from helpers import prefix_matrix
from helpers import walks as make
from mslmn import LinearAutoencoder
from mslmn.linear_autoencoder import choice, prefixes, scan, sequences

EXACT = ("dense", "rows", "gram", "fft")
ALL = (*EXACT, "pca", "slices", "auto")


def low_rank(n, T, a=6, k=2, seed=0):
    """Sequences in k dimensions of a: the prefix matrix has rank T * k, if there are rows enough."""
    mixture = np.random.default_rng(seed).normal(size=(k, a))
    return [z @ mixture for z in make([T] * n, k, seed=seed + 1, noise=1.0)]


def projector(autoencoder):
    U = np.asarray(autoencoder.components_).reshape(len(autoencoder.components_), -1)
    return U.T @ U


def decoded(autoencoder, X):
    return np.asarray(autoencoder.inverse_transform(autoencoder.transform(X), autoencoder.horizon_))


def fit(X, p, **options):
    options = {"random_state": 0, **options}
    return LinearAutoencoder(p, **options).fit(X)


SIZES = {
    "one sequence": (make([60], 3), 10, None),
    "many lengths": (make([30, 7, 1, 22, 30, 12]), 12, None),
    "short horizon": (make([40, 33, 5]), 6, 7),
    "long, short horizon": (make([500], 1), 4, 9),
    "very short horizon": (make([90, 80], 4), 5, 2),
    "horizon of one": (make([20, 30], 4), 3, 1),
    "more columns than rows": (make([9, 8], 6), 5, None),
    "one feature": (make([40], 1), 7, None),
    "short": (make([1, 2, 3, 3], 3), 4, None),
}


@pytest.fixture(params=SIZES, ids=SIZES)
def size(request):
    return SIZES[request.param]


def test_dense_is_the_svd_of_the_prefix_matrix(size):
    X, p, horizon = size
    h = min(horizon or 10**9, max(map(len, X)))
    Xi = prefix_matrix(X, h)
    _, s, Uh = np.linalg.svd(Xi, full_matrices=False)
    found = fit(X, p, horizon=horizon, solver="dense")
    np.testing.assert_allclose(found.singular_values_, s[:p], rtol=1e-10)
    np.testing.assert_allclose(projector(found), Uh[:p].T @ Uh[:p], atol=1e-8)
    U, a = Uh[:p].T, X[0].shape[1]
    signs = np.sign((found.components_.reshape(p, -1).T * U).sum(0))
    U = U * signs
    np.testing.assert_allclose(found.A_, U[:a].T, atol=1e-8)  # A = U^T P
    np.testing.assert_allclose(found.B_, U[a:].T @ U[: len(U) - a], atol=1e-8)  # B = U^T R U
    assert found.energy_ == pytest.approx((Xi**2).sum())
    assert found.score(X) == pytest.approx((s[:p] ** 2).sum() / (s**2).sum())


@pytest.mark.parametrize("solver", ["rows", "gram", "fft"])
def test_solvers_equal_dense_to_rounding(size, solver):
    X, p, horizon = size
    expected = fit(X, p, horizon=horizon, solver="dense")
    found = fit(X, p, horizon=horizon, solver=solver, tol=1e-14)
    scale = expected.singular_values_[0]
    np.testing.assert_allclose(found.singular_values_, expected.singular_values_, atol=1e-6 * scale)
    more = fit(X, p + 1, horizon=horizon, solver="dense") if p < len(prefix_matrix(X, found.horizon_)[0]) else expected
    gap = (more.singular_values_[p - 1] - more.singular_values_[-1]) / scale if more is not expected else 1.0
    assert gap > 1e-3  # the sizes are chosen so
    np.testing.assert_allclose(projector(found), projector(expected), atol=1e-6)  # the largest angle's sine
    np.testing.assert_allclose(decoded(found, X), decoded(expected, X), atol=1e-6 * np.abs(X[0]).max())
    assert found.solver_ == solver


@pytest.mark.parametrize("solver", ["rows", "gram", "fft"])
def test_a_large_problem_equals_dense(solver):
    """Large enough for the iteration, pieces, restarts, float64 after float32."""
    X = make([400, 380, 120], 4)
    horizon = {"rows": 400, "gram": 300, "fft": 40}[solver]
    expected = fit(X, 8, horizon=horizon, solver="dense")
    found = fit(X, 8, horizon=horizon, solver=solver, tol=1e-14, max_memory=2**22)
    np.testing.assert_allclose(found.singular_values_, expected.singular_values_, rtol=1e-9)
    np.testing.assert_allclose(projector(found), projector(expected), atol=1e-6)


@pytest.mark.parametrize("solver", ALL)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_at_the_default_tolerance_hardly_any_energy_is_lost(size, solver, dtype):
    X, p, horizon = size
    X = [x.astype(dtype) for x in X]
    best = fit([x.astype(np.float64) for x in X], p, horizon=horizon, solver="dense").score(X)
    found = fit(X, p, horizon=horizon, solver=solver)
    share = {"pca": 0.99, "slices": 0.9}.get(solver, 0.999)
    assert found.score(X) >= share * best
    assert found.A_.dtype == found.B_.dtype == found.singular_values_.dtype == dtype


@pytest.mark.parametrize("solver", ["fft", "pca", "auto"])
def test_at_the_default_tolerance_a_flat_spectrum_loses_hardly_any_energy(solver):
    X = make([300] * 4, 24, noise=1.0)
    best = fit(X, 20, solver="dense").score(X)
    assert fit(X, 20, solver=solver).score(X) >= (0.99 if solver == "pca" else 0.999) * best


@pytest.mark.parametrize(("a", "p", "horizon"), [(4, 1, 1200), (8, 2, 700), (8, 8, 600)])
def test_at_the_default_tolerance_the_little_that_noise_has_is_found(a, p, horizon):
    X = [np.random.default_rng(0).normal(size=(8000, a))]
    found, best = (fit(X, p, horizon=horizon, solver="fft", tol=tol) for tol in (1e-4, 1e-9))
    assert (found.singular_values_**2).sum() >= 0.999 * (best.singular_values_**2).sum()


@pytest.mark.parametrize("horizon", [40, 41, 42, 43, 44])
def test_a_few_more_columns_than_the_basis_holds(horizon):
    X = [np.random.default_rng(0).normal(size=(500, 1))]
    found, expected = (fit(X, 4, horizon=horizon, solver=s, tol=1e-14) for s in ("fft", "dense"))
    np.testing.assert_allclose(found.singular_values_, expected.singular_values_, rtol=1e-9)


@pytest.mark.parametrize("tol", [1e-2, 1e-4])
def test_components_are_orthonormal_where_the_iteration_stops_early(tol):
    X = make([400, 380, 350, 120], 5, noise=3.0)  # of different lengths: the row kernel is padded
    U = fit(X, 8, solver="rows", tol=tol).components_.reshape(8, -1)
    np.testing.assert_allclose(U @ U.T, np.eye(8), atol=1e-12)


@pytest.mark.parametrize("solver", ALL)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_B_is_a_contraction(size, solver, dtype):
    X, p, horizon = size
    B = fit([x.astype(dtype) for x in X], p, horizon=horizon, solver=solver).B_
    assert np.linalg.norm(B.astype(np.float64), 2) <= 1 + 1e-15


@pytest.mark.parametrize("solver", [s for s in ALL if s != "pca"])
def test_at_full_rank_nothing_is_lost(solver):
    X = make([12, 12, 12], 3, noise=1.0)
    found = fit(X, 36, solver=solver)
    assert found.n_components_ == 36 and np.linalg.norm(found.B_, 2) <= 1
    np.testing.assert_allclose(decoded(found, X), X, atol=1e-10)


@pytest.mark.parametrize("solver", [s for s in ALL if s != "pca"])
def test_the_rank_of_the_data_is_enough(solver):
    X = low_rank(5, 12)
    found = fit(X, 24, solver=solver)
    assert found.n_components_ == 24 and found.score(X) == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(decoded(found, X), X, atol=1e-10)


@pytest.mark.parametrize("solver", ["rows", "gram", "fft"])
def test_the_iteration_too_loses_nothing_that_fits(solver):
    """It notices that float32 and a loose tolerance would spoil what can be lossless."""
    X = low_rank(40, 30, a=40, k=1)  # 1,200 rows and columns: too many to decompose as a whole
    found = fit(X, 30, solver=solver)
    np.testing.assert_allclose(decoded(found, X), X, atol=1e-9)


@pytest.mark.parametrize("noise", [1e-4, 1e-6, 1e-8])
@pytest.mark.parametrize("streamed", [False, True])
def test_what_is_small_beside_a_constant_is_kept_at_full_rank(noise, streamed):
    X = [1 + noise * x for x in make([12] * 6, 3, noise=1.0)]
    found = fit(Batches([X[:4], X[4:]]) if streamed else X, 36)
    assert found.n_components_ == 36
    np.testing.assert_allclose(decoded(found, X), X, atol=1e-10)


def test_auto_does_not_cut_channels_that_the_components_could_keep():
    rng = np.random.default_rng(0)
    mixture = rng.normal(size=(3, 100)) * np.array([[1], [1], [0.05]])  # the third has less than 1 % of the energy
    X = [z @ mixture for z in make([50] * 100, 3, noise=1.0)]
    found = fit(X, 150)  # the rank
    assert found.n_components_ == 150
    np.testing.assert_allclose(decoded(found, X), X, atol=1e-9)
    with pytest.warns(UserWarning, match="the channels that were kept have only 100 independent"):
        fit(X, 150, solver="pca")


@pytest.mark.parametrize("solver", ["gram", "fft"])
def test_a_strong_constant_does_not_hide_the_rest(solver):
    X = [x + 30 for x in make([300] * 3, 5, noise=1.0)]
    best, found = (fit(X, 10, horizon=250, solver=s) for s in ("dense", solver))
    assert 1 - found.score(X) <= 1.01 * (1 - best.score(X))


@pytest.mark.parametrize("p", [24, 27])
def test_slices_reach_the_singular_values_of_dense_at_low_rank(p):
    X = low_rank(5, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if p == 24 else "ignore")
        found, expected = (fit(X, p, solver=solver).singular_values_ for solver in ("slices", "dense"))
    np.testing.assert_allclose(found[:24], expected[:24], rtol=1e-8)  # the published code loses the 24th


def test_slices_lose_what_they_cut():
    """It is the published algorithm, not a slow way to the optimum."""
    X = make([60], 3)
    slices, dense = (fit(X, 10, solver=solver) for solver in ("slices", "dense"))
    assert 0.9 * dense.score(X) < slices.score(X) < dense.score(X)


EDGES = {
    "more components than rows": ([np.eye(3)[:2]], 5, 2),
    "more components than columns": (make([4] * 9, 1), 7, 4),
    "constant": ([np.ones((6, 1))] * 3, 8, 6),
    "all zero": ([np.zeros((5, 2))] * 2, 3, 0),
    "length one": (make([1, 1, 1], 2), 4, 2),
    "some empty": ([np.zeros((0, 2)), *make([3], 2), np.zeros((0, 2))], 5, 3),
    "all empty": ([np.zeros((0, 2))], 2, 0),
    "one step, one feature": ([np.array([[2.0]])], 2, 1),
}


@pytest.mark.parametrize("solver", ALL)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("edge", EDGES)
def test_the_rank_is_found_and_the_rest_is_zero(edge, solver, dtype):
    X, p, rank = EDGES[edge]
    X = [x.astype(dtype) for x in X]
    with pytest.warns(UserWarning, match=f"n_components is {p}, but .* only {rank} independent"):
        found = fit(X, p, solver=solver)
    a = X[0].shape[1]
    assert found.n_components_ == rank
    assert found.A_.shape == (p, a) and found.B_.shape == (p, p) and found.singular_values_.shape == (p,)
    assert not found.A_[rank:].any() and not found.B_[rank:].any() and not found.B_[:, rank:].any()
    assert (found.singular_values_[:rank] > 0).all() and not found.singular_values_[rank:].any()
    assert all(np.isfinite(v).all() for v in (found.A_, found.B_, found.components_))
    atol = 1e-10 if dtype == np.float64 else 1e-5
    states = found.transform(X)
    assert states.shape == (len(X), p)
    for x, state in zip(X, states, strict=True):
        if len(x):
            np.testing.assert_allclose(found.inverse_transform(state[None], len(x))[0], x, atol=atol)
        else:
            assert not state.any()


@pytest.mark.parametrize("scale", [1e-150, 1e-30, 1e30, 1e150])
@pytest.mark.parametrize("solver", ALL)
def test_the_scale_of_the_data_does_not_matter(solver, scale):
    X = make([30, 20])
    a, b = fit(X, 5, solver=solver), fit([x * scale for x in X], 5, solver=solver)
    np.testing.assert_allclose(b.singular_values_, a.singular_values_ * scale, rtol=1e-5)
    np.testing.assert_allclose(projector(b), projector(a), atol=1e-5)


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e160, 1e300])
def test_scores_and_singular_values_are_right_at_any_scale(scale):
    X = make([30, 20])
    found, huge = fit(X, 5), fit([x * scale for x in X], 5)
    np.testing.assert_allclose(huge.singular_values_, found.singular_values_ * scale, rtol=1e-5)
    assert huge.score([x * scale for x in X]) == pytest.approx(found.score(X))


@pytest.mark.parametrize("scale", [1e-35, 1e-25, 1e25, 1e38])
def test_float32_at_any_scale(scale):
    X = [(x / 20).astype(np.float32) for x in make([30, 20])]
    Y = [x * np.float32(scale) for x in X]
    found, scaled = fit(X, 5), fit(Y, 5)
    np.testing.assert_allclose(projector(scaled), projector(found), atol=1e-4)
    assert scaled.score(Y) == pytest.approx(found.score(X), rel=1e-4)
    np.testing.assert_allclose(scaled.reconstruction_error(Y), found.reconstruction_error(X), rtol=1e-2)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 12345.678])
def test_a_constant_without_its_mean_is_nothing(value, dtype):
    with pytest.warns(UserWarning, match="only 0 independent"):
        found = fit([np.full((7, 2), value, dtype=dtype)] * 3, 4, center=True)
    assert found.n_components_ == 0 and found.energy_ == 0


# encoding and decoding


def test_states_follow_the_recurrence(size):
    X, p, horizon = size
    found = fit(X, p, horizon=horizon)
    encoded = found.encode(X)
    assert isinstance(encoded, list)
    for x, states in zip(X, encoded, strict=True):
        m = np.zeros(p)
        for t, x_t in enumerate(x):
            m = found.A_ @ x_t + found.B_ @ m
            np.testing.assert_allclose(states[t], m, atol=1e-12)
        assert len(states) == len(x)
    np.testing.assert_allclose(found.transform(X), [states[-1] for states in encoded], atol=1e-12)


def test_a_long_sequence_is_encoded_in_segments(monkeypatch):
    X = make([1000, 17, 640])
    found = fit(X, 5, horizon=20)
    whole, ends = found.encode(X), found.transform(X)
    monkeypatch.setattr("mslmn.linear_autoencoder.scan.SEGMENT", 100)
    for a, b in zip(found.encode(X), whole, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)
    np.testing.assert_allclose(found.transform(X), ends, atol=1e-12)


@pytest.mark.parametrize("form", [list, np.stack])
def test_few_sequences_are_encoded_at_a_time(monkeypatch, form):
    """States may take much more memory than the steps that they come from."""
    X = form(make([20] * 50, 1))
    found = fit(X, 10, decoder="fitted")
    expected = found.transform(X), found.reconstruction_error(X), found.decoder_
    monkeypatch.setattr(sequences, "BUCKET_BYTES", 2**14)
    original, sizes = scan._segment, []
    monkeypatch.setattr(scan, "_segment", lambda x, m, A, B: sizes.append(x[..., 0].numel()) or original(x, m, A, B))
    found.fit(X)
    np.testing.assert_allclose(found.transform(X), expected[0], atol=1e-10)
    np.testing.assert_allclose(found.reconstruction_error(X), expected[1], atol=1e-10)
    np.testing.assert_allclose(found.decoder_, expected[2], atol=1e-10)
    found.encode(X)
    assert 20 < max(sizes) * 10 * 8 <= 2**14


def test_no_sequences_have_no_states():
    found = fit(make([9]), 3)
    assert found.transform([]).shape == (0, 3) and found.encode([]) == []
    assert found.transform(np.zeros((0, 5, 2))).shape == (0, 3)
    assert found.transform(Batches([])).shape == (0, 3)


def test_decoding_walks_back_with_the_transposes():
    X = make([30, 20])
    found = fit(X, 6)
    states = found.transform(X)
    decoded = found.inverse_transform(states, 33)
    assert decoded.shape == (2, 33, 2)
    for state, x in zip(states, decoded, strict=True):
        m = state
        for t in range(32, -1, -1):
            np.testing.assert_allclose(x[t], found.A_.T @ m, atol=1e-12)
            m = found.B_.T @ m


def test_without_a_length_the_horizon_is_decoded():
    X = make([30, 20])
    found = fit(X, 6, horizon=7)
    states = found.transform(X)
    np.testing.assert_array_equal(found.inverse_transform(states), found.inverse_transform(states, 7))


def test_the_fitted_decoder_is_least_squares_over_all_prefixes():
    X = make([30, 12, 45])
    found = fit(X, 6, horizon=8, decoder="fitted")
    Xi, M = prefix_matrix(X, 8), np.concatenate(found.encode(X))
    D = np.linalg.lstsq(M, Xi, rcond=None)[0]  # (p, h * a)
    np.testing.assert_allclose(found.decoder_.reshape(16, 6), D.T, atol=1e-10)
    state = found.transform(X)
    expected = (state @ D).reshape(3, 8, 2)[:, ::-1]
    np.testing.assert_allclose(found.inverse_transform(state, 8), expected, atol=1e-10)
    np.testing.assert_allclose(found.inverse_transform(state, 3), expected[:, -3:], atol=1e-10)
    with pytest.raises(ValueError, match=r"at most the horizon, 8, .* got 9; fit with a longer"):
        found.inverse_transform(state, 9)


def test_the_fitted_decoder_is_better_where_sequences_are_longer_than_the_horizon():
    X = make([400], 3)
    tied, fitted = (fit(X, 6, horizon=10, decoder=d).reconstruction_error(X, states="all") for d in ("tied", "fitted"))
    assert (fitted < tied).all()


@pytest.mark.parametrize("decoder", ["tied", "fitted"])
def test_errors_are_told_by_lag(decoder):
    X = make([30, 12, 45, 1])
    found = fit(X, 5, horizon=20, decoder=decoder)
    states, ends = found.encode(X), found.transform(X)
    for how in ("last", "all"):
        wrong, whole = np.zeros(20), np.zeros(20)
        for x, ms, end in zip(X, states, ends, strict=True):
            for t in [len(x) - 1] if how == "last" else range(len(x)):
                m = end if how == "last" else ms[t]
                remembered = found.inverse_transform(m[None], 20)[0][::-1]
                for lag in range(min(20, t + 1)):
                    wrong[lag] += ((remembered[lag] - x[t - lag]) ** 2).sum()
                    whole[lag] += (x[t - lag] ** 2).sum()
        np.testing.assert_allclose(found.reconstruction_error(X, states=how), np.sqrt(wrong / whole), rtol=1e-9)
    assert len(found.reconstruction_error([X[1]])) == 12


def test_the_mean_is_taken_away_and_given_back():
    X = [x + np.array([3.0, -5.0]) for x in make([30, 20])]
    mean = np.concatenate(X).mean(0)
    centred = fit(X, 6, center=True)
    plain = fit([x - mean for x in X], 6)
    np.testing.assert_allclose(centred.mean_, mean)
    np.testing.assert_allclose(centred.A_, plain.A_, atol=1e-10)
    np.testing.assert_allclose(centred.transform(X), plain.transform([x - mean for x in X]), atol=1e-10)
    np.testing.assert_allclose(decoded(centred, X), decoded(plain, [x - mean for x in X]) + mean, atol=1e-10)
    assert centred.score(X) == pytest.approx(plain.score([x - mean for x in X]))
    assert not fit(X, 6).mean_.any()


def test_a_short_horizon_remembers_the_recent_past_better():
    X = make([500], 1)
    short, long = (fit(X, 6, horizon=h).reconstruction_error(X, states="all") for h in (10, 500))
    assert short[0] < long[0]


# what sequences may be


class Batches:
    """Data larger than memory: read again for each pass, never kept."""

    def __init__(self, batches):
        self.batches = batches
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        yield from self.batches


@pytest.mark.parametrize("solver", ["gram", "fft", "pca", "auto", "rows", "dense", "slices"])
@pytest.mark.parametrize("decoder", ["tied", "fitted"])
def test_batches_in_any_order_are_the_whole(solver, decoder):
    X = make([30, 7, 22, 30, 12, 41], 3)
    options = {"solver": solver, "decoder": decoder, "tol": 1e-14, "center": True}
    whole = fit(X, 6, **options)
    for batches in ([X[:2], X[2:]], [X[3:], X[:1], [], X[1:3]], [[x] for x in X[::-1]]):
        found = fit(Batches(batches), 6, **options)
        np.testing.assert_allclose(projector(found), projector(whole), atol=1e-8)
        np.testing.assert_allclose(decoded(found, X), decoded(whole, X), atol=1e-8)
        assert found.energy_ == pytest.approx(whole.energy_)
        states = found.transform(Batches(batches))
        np.testing.assert_allclose(states, found.transform([x for b in batches for x in b]))
        assert found.score(Batches(batches)) == pytest.approx(whole.score(X))
        assert len(found.encode(Batches(batches))) == 6


def test_streamed_batches_are_read_in_each_pass_and_not_kept():
    batches = Batches([np.stack(make([50] * 3, 8, seed=seed)) for seed in range(4)])
    seen = []
    original = prefixes.Prefixes.normal
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes.Prefixes, "normal", lambda self, Q: seen.append(self.kept) or original(self, Q))
        fit(batches, 5, solver="fft")
    assert len(seen) > 2 and seen == [None] * len(seen) and batches.passes > len(seen)


def test_a_first_batch_without_sequences_decides_nothing():
    X = torch.randn(5, 10, 3)
    for empty in ([], torch.zeros(0, 100, 3)):
        found = fit(Batches([empty, X]), 2)
        assert found.horizon_ == 10 and isinstance(found.A_, torch.Tensor)
        assert isinstance(found.transform(Batches([empty, X])), torch.Tensor)


@pytest.mark.parametrize("first", [0, 1])
def test_the_most_precise_of_mixed_types_counts(first):
    X = make([20, 20, 25])
    X[first] = X[first].astype(np.float32)
    for data in (X, Batches([X[:1], X[1:]])):
        found = fit(data, 45)
        assert found.A_.dtype == np.float64
        np.testing.assert_allclose(decoded(found, X)[2], X[2], atol=1e-10)


class Table:
    """As a data frame: an array, but not to those who iterate over it."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return self.values

    def __iter__(self):
        return iter(["column"])


@pytest.mark.parametrize("convert", [Table, lambda x: x.tolist()])
def test_sequences_need_not_be_arrays(convert):
    X = make([20, 12])
    found = fit([convert(x) for x in X], 4)
    np.testing.assert_allclose(found.transform([convert(x) for x in X]), fit(X, 4).transform(X), atol=1e-12)
    states = found.transform(X)
    np.testing.assert_array_equal(
        found.inverse_transform(Table(states[::-1]), 3), found.inverse_transform(states, 3)[::-1]
    )


def test_fields_of_records_are_welcome():
    records = np.zeros(20, dtype=[("flag", "i1"), ("value", "f8")])  # not aligned
    records["value"] = make([20], 1)[0][:, 0]
    x = records["value"][:, None]
    np.testing.assert_allclose(fit([x], 4).A_, fit([x.copy()], 4).A_)


def test_an_iterable_that_can_be_read_only_once_is_named():
    class Once(Batches):
        def __iter__(self):
            self.left = getattr(self, "left", iter(self.batches))
            return self.left

    with pytest.raises(ValueError, match=r"gave 3 sequences when it was read first, and 0 later; .* start anew"):
        fit(Once([make([9, 8]), make([7])]), 2)


def test_an_array_is_a_list_of_its_sequences():
    X = np.stack(make([20] * 5))
    a, b = fit(X, 4), fit(list(X), 4)
    np.testing.assert_allclose(a.A_, b.A_, atol=1e-12)
    np.testing.assert_allclose(a.transform(X), b.transform(list(X)), atol=1e-12)
    assert isinstance(a.encode(X), list) and a.encode(X)[0].shape == (20, 4)


@pytest.mark.parametrize("convert", [np.asfortranarray, lambda x: x[::-1][::-1], lambda x: x.astype(">f8"), list])
def test_unusual_arrays_are_welcome(convert):
    X = make([20, 12])
    np.testing.assert_allclose(fit([convert(x) for x in X], 4).A_, fit(X, 4).A_, atol=1e-12)


def test_read_only_arrays_are_read_where_they_are(tmp_path):
    np.save(tmp_path / "x.npy", np.stack(make([20] * 3)))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    (batch,) = sequences.Sequences(mapped).batches()
    assert batch.data_ptr() == mapped.ctypes.data
    np.testing.assert_array_equal(fit(mapped, 3).A_, fit(np.array(mapped), 3).A_)


def test_read_only_and_integer_arrays_are_welcome():
    X = [np.arange(12).reshape(6, 2), np.ones((3, 2), dtype=bool)]
    for x in X:
        x.flags.writeable = False
    assert fit(X, 2).A_.dtype == np.float64
    assert fit([x.astype(np.float16) for x in X], 2).A_.dtype == np.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tensors_stay_tensors_on_their_device(device, dtype):
    X = [torch.from_numpy(x).to(device, dtype) for x in make([30, 12, 22])]
    for solver in ALL:
        found = fit(X, 4, solver=solver, decoder="fitted", tol=1e-14)
        states = found.transform(X)
        values = (found.A_, found.B_, found.mean_, found.singular_values_, found.components_, found.decoder_, states)
        for value in (*values, *found.encode(X), found.inverse_transform(states, 3)):
            assert value.device.type == device and value.dtype == dtype
        assert found.reconstruction_error(X).device.type == device
        expected = fit([x.cpu().numpy() for x in X], 4, solver=solver, tol=1e-14)
        tolerance = 1e-6 if dtype == torch.float64 else 1e-2
        found.components_ = found.components_.cpu()
        np.testing.assert_allclose(projector(found), projector(expected), atol=tolerance)


def test_gradients_are_not_followed():
    X = [torch.randn(9, 2, requires_grad=True)]
    assert not fit(X, 2).transform(X).requires_grad


def test_a_model_of_arrays_takes_tensors_and_the_other_way_round():
    X = make([30, 12])
    T = [torch.from_numpy(x) for x in X]
    arrays, tensors = fit(X, 3), fit(T, 3)
    assert isinstance(arrays.transform(T), torch.Tensor) and isinstance(tensors.transform(X), np.ndarray)
    np.testing.assert_allclose(arrays.transform(T), tensors.transform(X), atol=1e-10)
    assert arrays.transform([x.astype(np.float32) for x in X]).dtype == np.float64


WRONG = [
    (lambda: fit([np.ones((50000, 1))], 2, solver="rows"), ValueError, "matrix of 50,000 x 50,000 .* use 'gram'"),
    (lambda: fit(make([5]), 0), ValueError, "n_components must be at least 1, got 0"),
    (lambda: fit(make([5]), 2.0), TypeError, "n_components must be an int"),
    (lambda: fit(make([5]), 2, horizon=0), ValueError, "horizon must be at least 1"),
    (lambda: fit(make([5]), 2, solver="svd"), ValueError, "solver must be one of 'auto', 'dense'"),
    (lambda: fit(make([5]), 2, decoder="best"), ValueError, "decoder must be one of 'tied', 'fitted'"),
    (lambda: fit(make([5]), 2, tol=0), ValueError, "tol must be a number above 0, got 0"),
    (lambda: fit(make([5]), 2, max_memory=-1), ValueError, "max_memory must be a number above 0"),
    (lambda: fit(make([5]), 2, center=1), TypeError, "center must be True or False"),
    (lambda: fit(make([5]), 2, distributed="yes"), TypeError, "distributed must be True or False, got 'yes'"),
    (lambda: fit(make([5]), 2, distributed=True), RuntimeError, "call init_process_group first"),
    (lambda: fit([], 2), ValueError, "there is no sequence; pass at least one"),
    (lambda: fit(np.ones((5, 2)), 2), ValueError, r"\(n, T, a\), got \(5, 2\); put a single sequence in a list"),
    (lambda: fit([np.ones(5)], 2), ValueError, r"sequence 0 .* got \(5,\); add a feature dimension"),
    (lambda: fit([np.ones((2, 5, 1))], 2), ValueError, "pass the array itself"),
    (lambda: fit([np.ones((5, 0))], 2), ValueError, "at least one feature"),
    (lambda: fit([np.ones((5, 2)), np.ones((5, 3))], 2), ValueError, "got 2 in sequence 0 and 3 in sequence 1"),
    (lambda: fit([np.array([["a"]])], 2), TypeError, "sequence 0 must hold real numbers"),
    (lambda: fit([torch.ones(2, 2, dtype=torch.complex64)], 2), TypeError, "sequence 0 must be dense and real"),
    (lambda: fit((x for x in make([5])), 2), TypeError, "can be read more than once, got generator; put"),
    (lambda: fit("abc", 2), TypeError, "sequences come as a list"),
    (lambda: fit(7, 2), TypeError, "sequences come as a list"),
    (lambda: fit({1: 2}, 2), TypeError, "sequences come as a list"),
    (lambda: fit(Batches([7]), 2), TypeError, "a batch is a list of .* got int; let the iterable yield sequences"),
    (lambda: fit(make([5]), 2).transform(make([5], 3)), ValueError, "must have 2 features, .* got 3"),
    (lambda: fit(make([5]), 2).score(make([5], 3)), ValueError, "must have 2 features, .* got 3"),
    (lambda: fit(make([5]), 2).inverse_transform(np.ones((3, 4)), 2), ValueError, r"\(n, 2\), got \(3, 4\)"),
    (lambda: fit(make([5]), 2).inverse_transform(np.ones((3, 2)), 0), ValueError, "length must be at least 1"),
    (lambda: fit(make([5]), 2).reconstruction_error(make([5]), states="x"), ValueError, "one of 'last', 'all'"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG, ids=[message[:40] for *_, message in WRONG])
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("method", ["fit", "transform", "encode", "score", "reconstruction_error"])
@pytest.mark.parametrize("form", ["list", "array", "batches"])
def test_what_is_not_finite_is_named_by_sequence_and_step(value, method, form):
    X = make([20] * 4)
    found = fit(X, 3)
    X[2][7, 1] = value
    data = {"list": X, "array": np.stack(X), "batches": Batches([X[:1], X[1:]])}[form]
    with pytest.raises(ValueError, match=rf"sequence 2 has {value} at step 7, feature 1; every value must be finite"):
        getattr(found, method)(data)


# scikit-learn


def test_it_is_a_scikit_learn_estimator():
    X = make([30, 25, 40, 33], 3)
    model = LinearAutoencoder(4, horizon=9, center=True, random_state=3)
    copy = clone(model)
    assert copy.get_params() == model.get_params() and copy is not model
    with pytest.raises(NotFittedError):
        model.transform(X)
    with pytest.raises(NotFittedError):
        model.reconstruction_error(X)
    np.testing.assert_allclose(model.fit_transform(X), copy.fit(X).transform(X))
    assert list(model.get_feature_names_out()) == [f"linearautoencoder{i}" for i in range(4)]
    assert model.n_features_in_ == 3
    assert "LinearAutoencoder(center=True" in repr(model)


def test_it_works_in_a_pipeline():
    X = make([30] * 20, 2)
    y = [x[-5:].mean() for x in X]
    pipeline = make_pipeline(LinearAutoencoder(6, horizon=8), Ridge(1e-3)).fit(X, y)
    assert pipeline.score(X, y) > 0.9


def test_refitting_forgets_everything():
    model = fit(make([30], 3), 4, decoder="fitted", horizon=5)
    model.set_params(decoder="tied", horizon=None, n_components=2).fit(make([20], 1))
    fresh = fit(make([20], 1), 2)
    assert vars(model).keys() == vars(fresh).keys() and model.decoder_ is None
    np.testing.assert_array_equal(model.A_, fresh.A_)


def test_the_random_state_decides_the_start():
    X = make([60] * 4, 4)
    a, b, c = (fit(X, 5, solver="fft", random_state=seed).components_ for seed in (1, 1, 2))
    np.testing.assert_array_equal(a, b)
    assert (a != c).any()


def test_signs_do_not_depend_on_the_solver():
    X = make([40, 30], 2)
    A = [fit(X, 3, solver=solver, tol=1e-14).A_ for solver in EXACT]
    for other in A[1:]:
        np.testing.assert_allclose(other, A[0], atol=1e-8)


def test_progress_is_shown_on_demand(capsys):
    fit(make([200], 8), 5, solver="fft", verbose=True)
    shown = capsys.readouterr()
    fit(make([200], 8), 5, solver="fft")
    silent = capsys.readouterr()
    assert shown.out == silent.out == silent.err == ""
    assert shown.err.startswith("linear autoencoder: pass 1, ") and "pass 2" in shown.err


# which solver


@pytest.mark.parametrize(
    ("lengths", "a", "options", "solver"),
    [
        ([300], 13, {}, "rows"),
        ([90] * 175, 13, {}, "gram"),
        ([4000], 8, {}, "fft"),
        ([4000], 8, {"horizon": 50}, "gram"),
        ([300], 13, {"max_memory": 10**6}, "fft"),
    ],
)
def test_auto_chooses_by_size(lengths, a, options, solver):
    assert fit(make(lengths, a), 5, **options).solver_ == solver


def test_auto_reduces_channels_where_it_pays():
    rng = np.random.default_rng(0)
    few = [x @ rng.normal(size=(3, 40)) for x in make([500] * 8, 3)]
    assert fit(few, 5).solver_.startswith("pca + ")
    assert fit([rng.normal(size=(500, 40)) for _ in range(8)], 5).solver_ == "fft"


def test_pca_keeps_the_share_of_energy_it_promises():
    X = make([50, 40], 20)
    data = sequences.Sequences(X)
    P = mslmn.linear_autoencoder.channels.principal(data, 50, 20).numpy()
    Xi = prefix_matrix(X, 50).reshape(-1, 50, 20)
    kept = ((Xi @ P) ** 2).sum() / (Xi**2).sum()
    fewer = ((Xi @ P[:, :-1]) ** 2).sum() / (Xi**2).sum()
    np.testing.assert_allclose(P.T @ P, np.eye(P.shape[1]), atol=1e-12)
    assert fewer < 0.99 <= kept


def test_names_of_solvers_are_those_of_the_docstring():
    for name in choice.NAMES:
        assert f'``"{name}"``' in LinearAutoencoder.__doc__


# several processes

WORKER = """
import json, sys
import numpy as np
import torch
import torch.distributed as dist
sys.path.insert(0, {tests!r})
from test_linear_autoencoder import fit, make
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torch.set_num_threads(1)
X = make([30, 7, 22, 30, 12, 41], 3)
results = {{}}
reduces = 0
original = dist.all_reduce
def counted(*arguments, **options):
    global reduces
    reduces += 1
    return original(*arguments, **options)
dist.all_reduce = counted
passes = 0
from mslmn.linear_autoencoder.prefixes import Prefixes
normal = Prefixes.normal
def counted_normal(self, Q):
    global passes
    passes += 1
    return normal(self, Q)
Prefixes.normal = counted_normal
for name, mine in {{"halves": X[:2] if rank == 0 else X[2:], "nothing": X if rank == 0 else []}}.items():
    for solver in ("auto", "gram", "fft", "pca"):
        for decoder in ("tied", "fitted"):
            reduces = passes = 0
            m = fit(mine, 6, solver=solver, tol=1e-14, center=True, decoder=decoder, random_state=rank)
            assert m.energy_ > 0
            if solver == "fft":
                assert reduces <= passes + 6, (reduces, passes)
            found = [m.components_, m.A_, m.B_, m.mean_, m.singular_values_]
            found += [m.decoder_] * (decoder == "fitted")
            results[f"{{name}} {{solver}} {{decoder}}"] = [value.tolist() for value in found]
alone = fit(X[:2 + rank], 3, distributed=False)
results["alone"] = [alone.A_.tolist()]
errors = []
bad = [x.copy() for x in X]
if rank == 0:
    bad[1][3, 0] = np.nan
wrong = [(bad, "auto"), (make([9], 2 + rank), "auto"), ([], "auto"), (X, "rows")]
for data, solver in wrong:
    try:
        fit(data, 3, solver=solver)
    except ValueError as error:
        errors.append(str(error))
results["errors"] = errors
json.dump(results, open(sys.argv[3], "w"))
dist.destroy_process_group()
"""


def test_two_processes_find_what_one_finds(tmp_path):
    code = WORKER.format(tests=str(Path(__file__).parent))
    arguments = [[str(rank), str(tmp_path / "meet"), str(tmp_path / f"{rank}.json")] for rank in (0, 1)]
    workers = [subprocess.Popen([sys.executable, "-c", code, *a], stderr=subprocess.PIPE) for a in arguments]
    for worker in workers:
        _, stderr = worker.communicate(timeout=300)
        assert worker.returncode == 0, stderr.decode()
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    errors = first.pop("errors"), second.pop("errors")
    assert first.pop("alone") != second.pop("alone")
    assert first == second  # bit for bit
    X = make([30, 7, 22, 30, 12, 41], 3)
    for name, (components, A, B, mean, s, *decoder) in first.items():
        whole = fit(X, 6, solver=name.split()[1], tol=1e-14, center=True, decoder=name.split()[2])
        U = np.array(components).reshape(6, -1)
        np.testing.assert_allclose(U.T @ U, projector(whole), atol=1e-8)
        for found, expected in ((A, whole.A_), (B, whole.B_), (mean, whole.mean_), (s, whole.singular_values_)):
            np.testing.assert_allclose(found, expected, atol=1e-8)
        if decoder:
            np.testing.assert_allclose(decoder[0], whole.decoder_, atol=1e-8)
    for mine in errors:
        assert len(mine) == 4
        assert "as many features, got 2 in one and 3 in another" in mine[1]
        assert "there is no sequence" in mine[2] and "all sequences in one process" in mine[3]
    assert "sequence 1 has nan at step 3" in errors[0][0] and "of another process are wrong" in errors[1][0]
