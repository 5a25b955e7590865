"""Random search over the paper's ranges, through Optuna: resumable, by any number of processes on one storage.

A trial trains on all but one of the training speakers and is judged on that one, for each in turn (where words have
speakers of their own: on one clip of each word). Test clips are never seen. What a trial is, is drawn from the seed and
its number alone, whoever runs it; trials that stay behind after the first speakers are pruned.
"""

import hashlib
import json
import multiprocessing
import random
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .. import checks
from ..checkpoint import write_text
from ..data import words as spoken
from ..data.words import Words
from ..extras import need
from ..training import Diverged, derive
from . import words as experiment
from .jobs import deaf
from .models import INCREMENTAL, Settings

SPACES = ("paper", "best")
EPOCHS = {1: 15, 25: 150}  # of a batch size: about as many seconds
STAGE_EPOCHS = {1: 3, 25: 25}
STARTUP = 6  # trials that are never pruned
GRACE = 20  # seconds to give up a trial


class Failed(RuntimeError):
    """A search without a result."""


def space(model: str, which: str) -> dict[str, tuple[Any, ...]]:
    """What each setting is drawn from. The paper's ranges; "best" adds what this package does."""
    checks.choice("space", which, SPACES)
    units = tuple(range(5, 61 if model in ("LSTM", "LMN") else 41))  # the paper's own 41 and 52 are beyond its 40
    found: dict[str, tuple[Any, ...]] = {
        "hidden": units,
        "batch_size": (1, 25),
        "weight_decay": (0.0, 1e-3, 1e-4, 1e-5),
        "learning_rate": (1e-3, 1e-4),
    }
    if model in ("LMN", "MS-LMN", INCREMENTAL):
        found["memory"] = units
    if which == "best":
        found["norm"] = (None, "module")
        if model != "LSTM":
            found["init"] = ("leaky", "xavier")
        if model == INCREMENTAL:
            found |= {"first_module": ("autoencoder", "given"), "readout": ("auto", "zeros"), "horizon": (None, 4)}
    return found


def draw(model: str, which: str, seed: int, number: int) -> dict[str, Any]:
    """The settings of a trial."""
    generator = random.Random(derive(seed, number))
    return {name: generator.choice(values) for name, values in space(model, which).items()}


def chosen(model: str, drawn: dict[str, Any], words: Words, epochs: int | None = None) -> Settings:
    epochs = epochs or (STAGE_EPOCHS if model == INCREMENTAL else EPOCHS)[drawn["batch_size"]]
    return replace(experiment.settings(model, "paper", words), epochs=epochs, **drawn)


def folds(words: Words, train: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """For each position among a word's training clips: the clips at the others, and those at it."""
    positions: dict[int, int] = {}
    seen = dict.fromkeys(words.labels, 0)
    for i in train:
        positions[i] = seen[words.labels[i]]
        seen[words.labels[i]] += 1
    fewest = min(count for count in seen.values())
    if fewest < 2:
        raise ValueError("a word has a single training clip, so none can be held out; search with more speakers")
    return [
        ([i for i in train if positions[i] != out], [i for i in train if positions[i] == out]) for out in range(fewest)
    ]


def search(
    data: Path,
    models: Sequence[str],
    storage: str,
    *,
    trials: int = 20,
    which: str = "best",
    split: int = 0,
    seed: int = 0,
    epochs: int | None = None,
    jobs: int = 1,
    device: str | None = None,
) -> dict[str, Any]:
    """Run the trials that are still open, and tell the best of each model."""
    optuna = _optuna()
    checks.choice("space", which, SPACES)
    words = spoken.load(data)
    folds(words, spoken.split_indices(words, split)[0])  # what is wrong with them is said before anything starts
    names = [_study_name(model, which, split, seed) for model in models]
    for model, name in zip(models, names, strict=True):
        study = optuna.create_study(
            study_name=name, storage=_storage(storage), direction="maximize", load_if_exists=True
        )
        _check_same(study, epochs, words)
        study.set_user_attr("model", model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # heartbeats are called experimental
            optuna.storages.fail_stale_trials(study)  # of processes that died; they are put back into the queue
        there = {trial.user_attrs.get("number") for trial in study.get_trials(deepcopy=False) if _counts(optuna, trial)}
        for number in range(trials):
            if number not in there:
                study.enqueue_trial({}, user_attrs={"number": number})
    arguments = (data, storage, names, which, split, seed, epochs, device)
    if jobs == 1:
        _work(*arguments)
    else:
        _in_parallel(arguments, jobs)
    return {model: _best(optuna, storage, name) for model, name in zip(models, names, strict=True)}


def export(found: dict[str, Any], path: Path) -> None:
    write_text(path, json.dumps(found, indent=1) + "\n")


def _check_same(study: Any, epochs: int | None, words: Words) -> None:
    """Trials are compared with each other, so they must have trained alike; features may differ in their last bits."""
    clips = [words.classes, words.labels, words.speakers, [len(x) for x in words.features]]
    about = {"epochs": epochs, "clips": hashlib.sha256(json.dumps(clips).encode()).hexdigest()}
    before = study.user_attrs.get("about", about)
    if before != about:
        other = "other words" if before["clips"] != about["clips"] else f"epochs {before['epochs']}, not {epochs}"
        raise ValueError(f"the storage has trials of {study.study_name} with {other}; choose another --storage")
    study.set_user_attr("about", about)


def _counts(optuna: Any, trial: Any) -> bool:
    """Whether a trial is done or will be: not failed, and not left to another process."""
    state = optuna.trial.TrialState
    return trial.state != state.FAIL and (trial.state != state.PRUNED or "settings" in trial.user_attrs)


def _in_parallel(arguments: tuple[Any, ...], jobs: int) -> None:
    context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // jobs)
    processes = [context.Process(target=_in_process, args=(threads, *arguments)) for _ in range(jobs)]
    with deaf():
        for process in processes:
            process.start()
    try:
        for process in processes:
            process.join()
    except BaseException:  # Ctrl-C, above all
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(GRACE)
            process.kill()
        raise
    failed = [process for process in processes if process.exitcode]
    if failed:
        raise Failed(f"{len(failed)} of {jobs} processes failed; what they finished is kept, search again")


def _in_process(threads: int, *arguments: Any) -> None:
    """Stopped, it marks its trial as failed, so that the next search does it again."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch.set_num_threads(threads)
    with suppress(KeyboardInterrupt):
        _work(*arguments)


def _work(
    data: Path,
    storage: str,
    names: list[str],
    which: str,
    split: int,
    seed: int,
    epochs: int | None,
    device: str | None,
) -> None:
    """Take trials from the queues until they are empty."""
    optuna = _optuna()
    words = spoken.load(data)
    waiting = (optuna.trial.TrialState.WAITING,)
    for name in names:
        pruner = optuna.pruners.MedianPruner(n_startup_trials=STARTUP)
        study = optuna.load_study(study_name=name, storage=_storage(storage), pruner=pruner)
        model = study.user_attrs["model"]

        with _Patience() as patience:

            def objective(trial: Any, model: str = model, patience: _Patience = patience) -> float:
                with patience.over():
                    return _trial(optuna, trial, model, words, which, split, seed, epochs, device)

            while study.get_trials(deepcopy=False, states=waiting):
                study.optimize(objective, n_trials=1)
                patience.check()


class _Patience:
    """Ctrl-C waits until the trial that is being asked for has begun, or the one that is over is told: in between it
    would stay a running one in the storage."""

    def __enter__(self) -> "_Patience":
        self.over_now = self.heard = False
        main = threading.current_thread() is threading.main_thread()
        kinds = (signal.SIGINT, signal.SIGTERM) if main else ()
        self.kinds = [kind for kind in kinds if signal.getsignal(kind) is signal.default_int_handler]
        for kind in self.kinds:
            signal.signal(kind, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for kind in self.kinds:
            signal.signal(kind, signal.default_int_handler)

    def _hear(self, *_: object) -> None:
        self.heard = True
        if self.over_now:
            raise KeyboardInterrupt

    def check(self) -> None:
        if self.heard:
            raise KeyboardInterrupt

    @contextmanager
    def over(self) -> Iterator[None]:
        """Within the block Ctrl-C is heard at once."""
        self.over_now = True
        try:
            self.check()
            yield
        finally:
            self.over_now = False


def _trial(
    optuna: Any,
    trial: Any,
    model: str,
    words: Words,
    which: str,
    split: int,
    seed: int,
    epochs: int | None,
    device: str | None,
) -> float:
    number = trial.user_attrs.get("number")
    if number is None or _is_taken(optuna, trial, number):
        raise optuna.TrialPruned
    drawn = draw(model, which, seed, number)
    trial.set_user_attr("settings", drawn)
    settings = chosen(model, drawn, words, epochs)
    accuracies: list[float] = []
    for fold, accuracy in enumerate(judged(model, settings, words, split, seed, device)):
        accuracies.append(accuracy)
        trial.report(sum(accuracies) / len(accuracies), fold)
        if trial.should_prune():
            raise optuna.TrialPruned
    trial.set_user_attr("accuracies", accuracies)
    return sum(accuracies) / len(accuracies)


def judged(model: str, settings: Settings, words: Words, split: int, seed: int, device: str | None) -> Iterator[float]:
    """The accuracy on each training speaker, after training on the others; 0 if training diverged at once."""
    train, _ = spoken.split_indices(words, split)
    for inside, outside in folds(words, train):
        fitting, judging = spoken.normalised(words, inside, outside)
        try:
            result = experiment.fitted(model, settings, words, fitting, fitting, seed, None, device)
        except Diverged:
            yield 0.0
            continue
        best = result.model.cpu().eval()
        with torch.no_grad():
            right = [int(best(x).argmax()) == int(label) for x, label in judging]
        yield sum(right) / len(right)


def _is_taken(optuna: Any, trial: Any, number: int) -> bool:
    """Two searches that start at once may both have queued a number; two that end at once, want the last one."""
    return any(
        other.number < trial.number and other.user_attrs.get("number") == number and _counts(optuna, other)
        for other in trial.study.get_trials(deepcopy=False)
    )


def _best(optuna: Any, storage: str, name: str) -> dict[str, Any]:
    study = optuna.load_study(study_name=name, storage=_storage(storage))
    trials = study.get_trials(deepcopy=False)
    done = [trial for trial in trials if trial.state == optuna.trial.TrialState.COMPLETE]
    if not done:
        raise Failed(f"no trial of {name} was completed yet; search again, when no other process has them")
    best = max(done, key=lambda trial: trial.value)
    return {
        "settings": best.user_attrs["settings"],
        "accuracy": best.value,
        "trial": best.user_attrs["number"],
        "completed": len(done),
        "pruned": sum(_counts(optuna, trial) and trial.state == optuna.trial.TrialState.PRUNED for trial in trials),
        "trials": [
            {"accuracy": trial.value, "settings": trial.user_attrs["settings"]}
            for trial in sorted(done, key=lambda trial: -trial.value)
        ],
    }


def _study_name(model: str, which: str, split: int, seed: int) -> str:
    return f"words, {model}, {which}, split {split}, seed {seed}"


def _optuna() -> Any:
    optuna = need("optuna", "search")
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # that a trial failed is for us to say
    return optuna


def _storage(url: str) -> Any:
    """A database (``sqlite:///search.db``, or any that SQLAlchemy speaks), or a file (``search.log``) as a journal."""
    storages = _optuna().storages
    try:
        if "://" not in url:
            _check_journal(Path(url))
            return storages.JournalStorage(storages.journal.JournalFileBackend(url))
        retry = getattr(storages, "RetryHeartbeatStaleTrialCallback", None) or storages.RetryFailedTrialCallback
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # heartbeats are called experimental
            found = storages.RDBStorage(url, heartbeat_interval=60, grace_period=180, failed_trial_callback=retry())
        if found.engine.dialect.name == "sqlite":
            _one_at_a_time(found.engine)
        return found
    except Exception as error:  # of SQLAlchemy, of the database's driver, of a file that is no journal
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"the storage cannot be opened ({why}); pass a URL like sqlite:///search.db, or a file for a journal"
        ) from None


def _one_at_a_time(engine: Any) -> None:
    """SQLite locks at the first write of a transaction, so that two processes could find the same trial waiting."""
    event = need("sqlalchemy.event", "search")

    def connected(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # transactions are begun below
        connection.execute("PRAGMA busy_timeout = 60000")

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    engine.dispose()  # connections that were made before


def _check_journal(path: Path) -> None:
    """Before anything is appended to a file that is something else."""
    if not path.exists():
        return
    with path.open("rb") as file:
        first = file.readline()
    if first and b'"op_code"' not in first:
        raise ValueError(f"{path} is no journal")
