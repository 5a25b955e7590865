"""LinearAutoencoder: the optimal linear memory of sequences, as a scikit-learn estimator."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from rich.console import Console
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, distributed

from .. import checks
from . import choice, lags, scan
from .lanczos import Progress
from .prefixes import Prefixes, energy
from .problem import Problem, Solution
from .sequences import Bucket, Sequences, Survey, are_torch, check_batch

Array = Any  # numpy.ndarray or torch.Tensor: what came in decides


class LinearAutoencoder(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A linear memory that keeps as much of a sequence's past as p numbers can.

        encoder:   m_t = A x_t + B m_t-1
        decoder:   x_t = A^T m_t,   m_t-1 = B^T m_t

    Let Xi have a row [x_t, x_t-1, .., x_t-h+1] for every step t of every sequence, zeros before its start, and let U be
    its p strongest right singular vectors. Then A = U[:a]^T and B = U[a:]^T U[:-a], a contraction: the closed-form
    solution of Sperduti (2006), found here without forming Xi. With p = rank(Xi) nothing is lost.

    Sequences are a list of (T, a) arrays of any lengths, one (n, T, a) array, or an iterable of such batches that can
    be read again, for data larger than memory. NumPy in gives NumPy out; torch tensors stay on their device.

    Parameters
    ----------
    n_components : int
        p, the size of the memory.
    horizon : int, optional
        h, how many steps back the memory should reach; all, if not given. With few components a long horizon spreads
        them thin: a short one remembers the recent past better.
    solver : str
        ``"auto"`` chooses by size. ``"dense"``: the SVD of Xi itself. ``"rows"``, ``"gram"``: an eigendecomposition of
        Xi Xi^T, Xi^T Xi. ``"fft"``: block Lanczos, products by FFT. ``"pca"``: channels are reduced first, to 99 % of
        the energy (``"auto"`` does so where it pays). ``"slices"``: Pasa and Sperduti (2014), as in the MS-LMN paper.
    center : bool
        Subtract the mean of each feature first.
    random_state : int, RandomState or None
        For the start of the Lanczos iteration.
    decoder : str
        ``"tied"``: the decoder above, the paper's. ``"fitted"``: least squares from the states to every lag of the
        past, over all steps, up to the horizon. It costs one more pass and h * a * p numbers, and is best where
        sequences are longer than the horizon.
    tol : float
        Stop when a pass raises the explained energy by less than this part of what is missing, and of a tenth of what
        is explained. Below 1e-6 all is in float64.
    max_memory : float
        Bytes that the solver may use beside the data, about; a few vectors per component are kept in any case.
    distributed : bool or "auto"
        Whether each process of torch.distributed has its share of the sequences, and all get the same fit. "auto": if
        it is initialised.
    verbose : bool
        Show the progress of the Lanczos iteration, on stderr.

    Attributes
    ----------
    A_, B_ : (p, a) and (p, p)
    singular_values_ : (p,), of Xi
    components_ : (p, h, a), U: what each component takes from each lag
    n_components_ : the rank that was found; components from there on are zero
    mean_ : (a,)
    decoder_ : (h, a, p), if fitted
    horizon_, energy_, solver_, n_features_in_ : steps, squared norm of Xi, who solved it, a

    Examples
    --------
    >>> import numpy as np
    >>> t = np.arange(200)[:, None]
    >>> signal = np.sin(t / 7) + np.sin(t / 3)
    >>> memory = LinearAutoencoder(16, horizon=50).fit([signal])  # sixteen numbers for fifty steps
    >>> state = memory.transform([signal])
    >>> state.shape
    (1, 16)
    >>> past = memory.inverse_transform(state, 20)  # (1, 20, 1), oldest first
    >>> bool(np.abs(past[0] - signal[-20:]).max() < 0.01)
    True
    """

    def __init__(
        self,
        n_components: int,
        *,
        horizon: int | None = None,
        solver: str = "auto",
        center: bool = False,
        random_state: Any = None,
        decoder: str = "tied",
        tol: float = 1e-4,
        max_memory: float = 2**28,
        distributed: bool | str = "auto",
        verbose: bool = False,
    ) -> None:
        self.n_components = n_components
        self.horizon = horizon
        self.solver = solver
        self.center = center
        self.random_state = random_state
        self.decoder = decoder
        self.tol = tol
        self.max_memory = max_memory
        self.distributed = distributed
        self.verbose = verbose

    @torch.no_grad()
    def fit(self, X: Any, y: None = None) -> Self:
        """Find A and B for these sequences; empty ones are skipped."""
        p = self._check_parameters()
        sequences = Sequences(X, distributed=self._is_distributed())
        survey = sequences.survey()
        a, device, dtype = survey.features, sequences.device, torch.float64 if survey.double else torch.float32
        if not a:
            raise ValueError("sequences must have at least one feature, got the shape (T, 0); drop them")
        mean = survey.total / max(survey.steps, 1) if self.center else torch.zeros_like(survey.total)
        scale = _scale(survey)
        prepared = sequences
        if self.center or scale != 1:
            prepared = sequences.prepared(lambda x: (x - mean.to(x)) / scale)
        horizon = max(1, min(self.horizon or survey.longest, survey.longest))
        whole = sequences.reduce(energy(prepared, horizon)).item()
        if self.center and whole <= survey.steps * horizon * a * (_rounding(dtype) * survey.largest / scale) ** 2:
            whole = 0.0  # nothing but the rounding errors of the mean
        with self._progress(whole) as progress:
            problem = Problem(
                sequences=prepared,
                p=p,
                horizon=horizon,
                features=a,
                steps=survey.steps,
                rows=survey.sequences * survey.longest,
                energy=whole,
                device=device,
                tol=float(self.tol),
                max_memory=float(self.max_memory),
                seed=_seed(self.random_state, sequences),
                progress=progress,
            )
            solution, solver = choice.solve(problem, self.solver) if whole else (_nothing(problem), "none")
            solution.fix_signs()
            r = len(solution.s)
            A, B = _encoder(solution, p, dtype)
            U = _padded(solution.U.permute(2, 0, 1), p).to(dtype)
            s = _padded(solution.s * scale, p).to(dtype)
            for tensor in (A, B, U, s):
                sequences.from_first(tensor)
            D = lags.fit(prepared, A.double(), B.double(), horizon) if self.decoder == "fitted" else None
        if r < p:
            whose = "the channels that were kept" if solver.startswith("pca") else "these sequences"
            warnings.warn(
                f"n_components is {p}, but within {horizon} steps {whose} have only {r} independent "
                f"components; the others are zero. Choose n_components={max(r, 1)}",
                stacklevel=3,  # torch.no_grad stands between
            )
        give = _giver(are_torch(X))
        self.A_, self.B_, self.components_ = give(A), give(B), give(U)
        self.singular_values_, self.mean_ = give(s), give(mean.to(dtype))
        self.decoder_ = None if D is None else give(D.to(dtype))
        self.n_components_, self.n_features_in_, self.horizon_ = r, a, horizon
        self.energy_, self.solver_ = whole * scale * scale, solver
        return self

    @torch.no_grad()
    def transform(self, X: Any) -> Array:
        """The state at the end of each sequence, (n, p); zero for an empty one."""
        ends = []
        for n, buckets, A, B in self._read(X):
            states = A.new_zeros(n, len(A))
            for bucket in buckets:
                states[bucket.index] = scan.last(bucket.x, bucket.lengths, A, B)
            ends.append(states)
        return _giver(are_torch(X))(torch.cat(ends) if ends else torch.zeros(0, len(self.A_)))

    @torch.no_grad()
    def encode(self, X: Any) -> list[Array]:
        """The state after every step: a list of (T, p), one for each sequence."""
        encoded: list[Tensor] = []
        for n, buckets, A, B in self._read(X):
            states = [A.new_zeros(0, len(A))] * n
            for bucket in buckets:
                ms = scan.encode(bucket.x, A, B)
                for i, m, length in zip(bucket.index, ms, bucket.lengths.tolist(), strict=True):
                    states[i] = m[:length]
            encoded += states
        return [_giver(are_torch(X))(m) for m in encoded]

    @torch.no_grad()
    def inverse_transform(self, states: Array, length: int | None = None) -> Array:
        """What states (n, p) remember of their last steps, by default the horizon: (n, length, a), oldest first."""
        check_is_fitted(self)
        length = self.horizon_ if length is None else checks.size("length", length)
        if self.decoder_ is not None and length > self.horizon_:
            raise ValueError(
                f"length must be at most the horizon, {self.horizon_}, with decoder='fitted', got {length}; "
                "fit with a longer horizon, or with decoder='tied'"
            )
        m = states if isinstance(states, Tensor) else torch.from_numpy(np.array(np.asarray(states), order="C"))
        p = len(self.A_)
        if m.ndim != 2 or m.shape[1] != p:
            raise ValueError(f"states must have the shape (n, {p}), got {tuple(m.shape)}; pass what transform returns")
        (mean,) = self._fitted(m, self.mean_)
        return _giver(isinstance(states, Tensor))(self._decode(m.to(mean), length).flip(1) + mean)

    @torch.no_grad()
    def score(self, X: Any, y: None = None) -> float:
        """The share of |Xi|^2, the energy of all prefixes of X, that lies in the components; 1 is all of it."""
        check_is_fitted(self)
        sequences = Sequences(X)
        survey = sequences.survey()
        self._check_features(survey.features)
        device = sequences.device
        U, mean = (torch.as_tensor(value).to(device, torch.float64) for value in (self.components_, self.mean_))
        scale = _scale(survey)
        centred = sequences.prepared(lambda x: (x.double() - mean) / scale)
        whole = energy(centred, self.horizon_).item()
        kept = Prefixes(centred, self.horizon_, torch.float64, len(U)).energy(U.permute(1, 2, 0)).item()
        return kept / whole if whole else 1.0

    @torch.no_grad()
    def reconstruction_error(self, X: Any, *, states: str = "last") -> Array:
        """How wrong the memory is, by lag: sqrt(sum |x_t-j - remembered|^2 / sum |x_t-j|^2) for j = 0, 1, ..

        The sums are over sequences, t being the last step of each (``states="last"``), or over all steps t that have a
        past of j steps (``"all"``: slower, less noisy where sequences are few). The mean, if it was subtracted, is in
        neither. One number per lag of the horizon, or of the longest sequence, if that is shorter; NaN where the past
        itself is zero.
        """
        checks.choice("states", states, ("last", "all"))
        check_is_fitted(self)
        sums, longest, device = self._errors(X, states)
        wrong, whole = sums[:longest].to(device).unbind(1)
        return _giver(are_torch(X))((wrong / whole).sqrt())

    @torch.no_grad()
    def _errors(self, X: Any, states: str) -> tuple[Tensor, int, torch.device]:
        """The two sums of each lag (horizon, 2), on the CPU; the longest of X; where its numbers are."""
        sums = torch.zeros(self.horizon_, 2, dtype=torch.float64)
        longest, device = 0, sums.device
        for _, buckets, A, B in self._read(X):
            for bucket in buckets:
                steps = min(self.horizon_, bucket.x.shape[1])
                longest = max(longest, steps)
                if states == "last":
                    m = scan.last(bucket.x, bucket.lengths, A, B)
                    found = lags.errors_at_ends(bucket, self._decode(m, steps))
                else:
                    D = self._decode(torch.eye(len(A)).to(A), steps)
                    found = lags.errors_everywhere(bucket, scan.encode(bucket.x, A, B), D)
                sums[:steps] += found.cpu()
                device = found.device
        return sums, longest, device

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.three_d_array = False, True
        return tags

    @property
    def _n_features_out(self) -> int:
        return len(self.A_)

    def _check_parameters(self) -> int:
        p = checks.size("n_components", self.n_components)
        if self.horizon is not None:
            checks.size("horizon", self.horizon)
        checks.choice("solver", self.solver, choice.NAMES)
        checks.choice("decoder", self.decoder, ("tied", "fitted"))
        if not isinstance(self.distributed, str) or self.distributed != "auto":
            checks.flag("distributed", self.distributed)  # type: ignore[arg-type]
        checks.flag("center", self.center)
        checks.flag("verbose", self.verbose)
        checks.positive("tol", self.tol)
        checks.positive("max_memory", self.max_memory)
        return p

    def _check_features(self, a: int) -> None:
        if a != self.n_features_in_:
            raise ValueError(
                f"sequences must have {self.n_features_in_} features, as those of fit had, got {a}; "
                "fit another autoencoder for these"
            )

    def _is_distributed(self) -> bool:
        ready = distributed.is_available() and distributed.is_initialized()
        if self.distributed is True and not ready:
            raise RuntimeError(
                "distributed=True needs torch.distributed, which is not initialised; call init_process_group first"
            )
        return ready if self.distributed == "auto" else bool(self.distributed)

    @contextmanager
    def _progress(self, whole: float) -> Iterator[Progress | None]:
        if not self.verbose:
            yield None
            return
        console = Console(stderr=True)

        def message(passes: int, kept: float) -> str:
            return f"linear autoencoder: pass {passes}, {kept / whole:.2%} of the energy"

        if not console.is_terminal:  # a log
            yield lambda passes, kept: console.print(message(passes, kept))
            return
        with console.status("linear autoencoder") as status:
            yield lambda passes, kept: status.update(message(passes, kept))

    def _read(self, X: Any) -> Iterator[tuple[int, Iterator[Bucket], Tensor, Tensor]]:
        """For each batch how many sequences it has, their buckets (without the mean), A and B to go with them."""
        check_is_fitted(self)
        sequences = Sequences(X)
        first = 0
        for batch in sequences.batches():
            check_batch(batch, first, self._check_features)
            first += len(batch)
            A, B, mean = self._fitted(next(iter(batch), None), self.A_, self.B_, self.mean_)
            centred = sequences.prepared(lambda x, mean=mean: x.to(mean) - mean)  # type: ignore[misc]
            yield len(batch), centred.batch_buckets(batch, width=len(A)), A, B

    def _fitted(self, like: Tensor | None, *values: Array) -> list[Tensor]:
        """Fitted arrays as tensors on the device of another, in the more precise of both dtypes."""
        tensors = [torch.as_tensor(value) for value in values]
        if like is None:
            return tensors
        return [value.to(like.device, torch.promote_types(like.dtype, value.dtype)) for value in tensors]

    def _decode(self, m: Tensor, steps: int) -> Tensor:
        """What the states, (n, p), remember, without the mean: (n, steps, a), newest first."""
        if self.decoder_ is None:
            A, B = self._fitted(m, self.A_, self.B_)
            return scan.decode(m, A, B, steps)
        (D,) = self._fitted(m, self.decoder_[:steps])
        return torch.einsum("jap,np->nja", D, m)


def _encoder(solution: Solution, p: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A (p, a) and B (p, p), padded with zeros; B a contraction also after rounding."""
    A, B = solution.encoder()
    B = _padded(_padded(B, p).T, p).T.to(dtype)
    most = 1 - 4 * torch.finfo(dtype).eps - 4 * p**0.5 * torch.finfo(torch.float64).eps  # that rounding cannot exceed 1
    if torch.linalg.eigvalsh(B.T.double() @ B.double())[-1] > most**2:  # or inexact: the nearest contraction
        W, norms, Zh = torch.linalg.svd(B.double())
        B = (W * norms.clamp(max=most) @ Zh).to(dtype)
    return _padded(A, p).to(dtype), B.contiguous()


def _padded(x: Tensor, p: int) -> Tensor:
    """The first dimension with zeros up to p."""
    return x if len(x) == p else torch.cat([x, x.new_zeros(p - len(x), *x.shape[1:])])


def _nothing(problem: Problem) -> Solution:
    """All is zero: no component."""
    zeros = torch.zeros(problem.horizon, problem.features, 0, dtype=torch.float64, device=problem.device)
    return Solution(zeros.new_zeros(0), zeros)


def _scale(survey: Survey) -> float:
    """A power of two by which to divide, so that squares neither overflow nor vanish; usually 1."""
    exponent = min(math.frexp(survey.largest)[1], 1023 if survey.double else 127)  # 2**128 is too large for float32
    return 2.0**exponent if abs(exponent) > 30 else 1.0


def _rounding(dtype: torch.dtype) -> float:
    """How wrong a value may be from which the mean was subtracted, as a part of the largest."""
    return 16 * torch.finfo(dtype).eps


def _giver(torch_wanted: bool) -> Callable[[Tensor], Array]:
    return (lambda x: x) if torch_wanted else (lambda x: x.cpu().numpy())


def _seed(random_state: Any, sequences: Sequences) -> int:
    """The first process's, for all."""
    seed = torch.tensor(int(check_random_state(random_state).randint(2**31)), device=sequences.device)
    return int(sequences.from_first(seed))
