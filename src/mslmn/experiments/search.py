"""Random search over the paper's ranges, through Optuna: resumable, by any number of processes on one storage.

A trial trains on all but one of the training speakers and is judged on that one, for each in turn (where words have
speakers of their own: on one clip of each word). Test clips are never seen. What a trial is, is drawn from the seed and
its number alone, whoever runs it; trials that stay behind after the first speakers are pruned.
"""

import json
import multiprocessing
import os
import random
import warnings
from collections.abc import Sequence
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
from .models import INCREMENTAL, Settings

SPACES = ("paper", "best")
EPOCHS = {1: 15, 25: 150}  # of a batch size: about as many seconds
STAGE_EPOCHS = {1: 3, 25: 25}
STARTUP = 6  # trials that are never pruned


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
    names = [_study_name(model, which, split, seed) for model in models]
    for model, name in zip(models, names, strict=True):
        study = optuna.create_study(
            study_name=name, storage=_storage(storage), direction="maximize", load_if_exists=True
        )
        there = {trial.user_attrs.get("number") for trial in study.get_trials(deepcopy=False)}
        for number in range(trials):
            if number not in there:
                study.enqueue_trial({"number": number}, user_attrs={"number": number})
        study.set_user_attr("model", model)
    arguments = (data, storage, names, which, split, seed, epochs, device)
    if jobs == 1:
        _work(*arguments, threads=None)
    else:
        _in_parallel(arguments, jobs)
    return {model: _best(optuna, storage, name) for model, name in zip(models, names, strict=True)}


def export(found: dict[str, Any], path: Path) -> None:
    write_text(path, json.dumps(found, indent=1) + "\n")


def _in_parallel(arguments: tuple[Any, ...], jobs: int) -> None:
    context = multiprocessing.get_context("spawn")
    threads = max(1, (os.cpu_count() or 1) // jobs)
    processes = [context.Process(target=_work, args=arguments, kwargs={"threads": threads}) for _ in range(jobs)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join()
    except BaseException:
        for process in processes:
            process.kill()
        raise
    failed = [process for process in processes if process.exitcode]
    if failed:
        raise RuntimeError(f"{len(failed)} of {jobs} processes failed; what they finished is kept, search again")


def _work(
    data: Path,
    storage: str,
    names: list[str],
    which: str,
    split: int,
    seed: int,
    epochs: int | None,
    device: str | None,
    threads: int | None,
) -> None:
    """Take trials from the queues until they are empty."""
    if threads:
        torch.set_num_threads(threads)
    optuna = _optuna()
    words = spoken.load(data)
    waiting = (optuna.trial.TrialState.WAITING,)
    for name in names:
        pruner = optuna.pruners.MedianPruner(n_startup_trials=STARTUP)
        study = optuna.load_study(study_name=name, storage=_storage(storage), pruner=pruner)
        model = study.user_attrs["model"]

        def objective(trial: Any, model: str = model) -> float:
            return _trial(optuna, trial, model, words, which, split, seed, epochs, device)

        while study.get_trials(deepcopy=False, states=waiting):
            study.optimize(objective, n_trials=1)


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
    number = trial.suggest_int("number", 0, 2**31)
    drawn = draw(model, which, seed, number)
    trial.set_user_attr("settings", drawn)
    settings = chosen(model, drawn, words, epochs)
    accuracies: list[float] = []
    train, _ = spoken.split_indices(words, split)
    for fold, (inside, outside) in enumerate(folds(words, train)):
        fitting, judging = spoken.normalised(words, inside, outside)
        try:
            result = experiment.fitted(model, settings, words, fitting, fitting, seed, None, device)
        except Diverged as error:
            trial.set_user_attr("diverged", str(error))
            accuracies.append(0.0)
        else:
            best = result.model.cpu().eval()
            with torch.no_grad():
                right = [int(best(x).argmax()) == int(label) for x, label in judging]
            accuracies.append(sum(right) / len(right))
        trial.report(sum(accuracies) / len(accuracies), fold)
        if trial.should_prune():
            raise optuna.TrialPruned
    trial.set_user_attr("accuracies", accuracies)
    return sum(accuracies) / len(accuracies)


def _best(optuna: Any, storage: str, name: str) -> dict[str, Any]:
    study = optuna.load_study(study_name=name, storage=_storage(storage))
    trials = study.get_trials(deepcopy=False)
    done = [trial for trial in trials if trial.state == optuna.trial.TrialState.COMPLETE]
    if not done:
        raise RuntimeError(f"no trial of {name} was completed; look at the storage")
    best = max(done, key=lambda trial: trial.value)
    return {
        "settings": best.user_attrs["settings"],
        "accuracy": best.value,
        "trial": best.user_attrs["number"],
        "completed": len(done),
        "pruned": sum(trial.state == optuna.trial.TrialState.PRUNED for trial in trials),
        "trials": [
            {"accuracy": trial.value, "settings": trial.user_attrs["settings"]}
            for trial in sorted(done, key=lambda trial: -trial.value)
        ],
    }


def _study_name(model: str, which: str, split: int, seed: int) -> str:
    return f"words, {model}, {which}, split {split}, seed {seed}"


def _optuna() -> Any:
    optuna = need("optuna", "search")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _storage(url: str) -> Any:
    """A database (``sqlite:///search.db``, or any that SQLAlchemy speaks), or a file (``search.log``) as a journal."""
    optuna = _optuna()
    if "://" not in url:
        backend = optuna.storages.journal.JournalFileBackend(url)
        return optuna.storages.JournalStorage(backend)
    storages = optuna.storages
    retry = getattr(storages, "RetryHeartbeatStaleTrialCallback", None) or storages.RetryFailedTrialCallback
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # heartbeats are called experimental
        return storages.RDBStorage(url, heartbeat_interval=60, grace_period=180, failed_trial_callback=retry())
