"""Spoken words with common suffixes: 25 words by 7 speakers (Table 3 of the paper)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from .. import clock
from ..data import words as spoken
from ..data.words import Pair, Words
from ..model import SequenceModel
from ..objectives import CrossEntropy
from ..training import Result, derive, fit
from . import paper
from .jobs import Arrays, Job, Task
from .models import CLOCKED, INCREMENTAL, Settings, build
from .records import Record

NAME = "words"
MODELS = tuple(paper.WORDS)
SEEDS = {"quick": 2, "paper": 5, "best": 5}
CHECK = 1250  # clips trained on between two checkpoints
OURS: dict[str, dict[str, Any]] = {  # by searches on the training speakers of split 0, see docs/results.md
    "LSTM": {"hidden": 58, "epochs": 200},
    "LMN": {"hidden": 46, "memory": 33, "init": "leaky", "norm": "module", "epochs": 200},
    "CW-RNN": {"hidden": 29, "init": "leaky", "norm": "module", "weight_decay": 1e-4, "epochs": 200},
    "MS-LMN": {
        "hidden": 17, "memory": 32, "init": "leaky", "norm": "module", "weight_decay": 1e-5, "epochs": 200,
    },
    INCREMENTAL: {
        "hidden": 17, "memory": 32, "init": "leaky", "norm": "module", "weight_decay": 1e-5, "epochs": 30,
        "first_module": "given", "readout": "zeros", "horizon": 4,
    },
}  # fmt: skip
SHORT = 3  # quick trains for a third of the epochs


def settings(model: str, preset: str, words: Words, epochs: int | None = None) -> Settings:
    """The paper's sizes, with what its text leaves open chosen as simply as can be, or ours; fewer epochs for quick."""
    line = paper.WORDS[model]
    chosen = Settings(
        hidden=line.hidden,
        memory=line.memory,
        modules=clock.num_modules(words.longest) if model in CLOCKED else 1,
        learning_rate=1e-3,
        batch_size=25,
        epochs=100 if model == INCREMENTAL else 500,
    )
    if preset != "paper":
        chosen = replace(chosen, **OURS[model])
    if preset == "quick":
        chosen = replace(chosen, epochs=chosen.epochs // SHORT)
    return replace(chosen, epochs=epochs or chosen.epochs)


def tasks(
    out: Path,
    preset: str,
    words: Words,
    *,
    models: tuple[str, ...] = MODELS,
    splits: int = 1,
    seed: int = 0,
    seeds: int | None = None,
    epochs: int | None = None,
) -> list[Task]:
    """All runs of the experiment, the longest first; their data are written to ``out``."""
    folder = out / NAME
    clips = [len(spoken.split_indices(words, split)[0]) for split in range(splits)]  # train; before any file is written
    data = spoken.keep(folder / "data.npz", words)
    found = []
    for split in range(splits):
        for model in models:
            for s in range(seed, seed + (seeds or SEEDS[preset])):
                job = Job(NAME, preset, model, {"split": split}, s, settings(model, preset, words, epochs))
                stages = job.settings.modules if model == INCREMENTAL else 1
                checkpoints = stages * job.settings.checkpoints(passes(clips[split]))
                found.append(Task(job, train, data, folder / job.name, checkpoints))
    return sorted(found, key=lambda task: -task.checkpoints)


def passes(clips: int) -> int:
    """Over so many clips, between two checkpoints."""
    return max(1, CHECK // clips)


def train(job: Job, data: Path, folder: Path, device: str | None) -> tuple[Record, Arrays]:
    words = spoken.load(data)
    chosen, held_out = spoken.split_indices(words, job.case["split"])
    train_clips, test_clips = spoken.normalised(words, chosen, held_out)
    result = fitted(job.model, job.settings, words, train_clips, train_clips, job.seed, folder, device)
    best = result.model.cpu().eval()
    with torch.no_grad():
        predicted = torch.stack([best(x).argmax() for x, _ in test_clips])
        memory, _ = best.encoder(test_clips[0][0])
    expected = torch.stack([label for _, label in test_clips])
    arrays: dict[str, NDArray[Any]] = spoken.labels(words) | {
        "expected": expected.numpy(),
        "predicted": predicted.numpy(),
        "memory": memory.unflatten(-1, (best.num_modules, -1)).numpy(),
    }
    accuracy = (predicted == expected).double().mean().item()
    counts = {"train_clips": len(train_clips), "test_clips": len(test_clips)}
    record = job.record(result, passes(len(train_clips)), words.name, "accuracy", accuracy, folder, **counts)
    return record, arrays


def fitted(
    name: str,
    settings: Settings,
    words: Words,
    train: Sequence[Pair],
    validation: Sequence[Pair],
    seed: int,
    folder: Path | None,
    device: str | None,
) -> Result:
    """Trained with noise, classes balanced over the batches. The paper validates on the training clips, clean."""
    torch.manual_seed(derive(seed))
    model: SequenceModel = build(name, settings, train[0][0].shape[1], len(words.classes))
    between = passes(len(train))
    plan = settings.plan(name, seed, between, noise=paper.NOISE, balance=settings.batch_size > 1)
    return fit(model, train, validation, CrossEntropy(), folder, plan=plan, resume=True, progress=False, device=device)
