"""Online handwriting with CTC: bidirectional models of about 100,000 parameters (Table 4 of the paper)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from ..data import handwriting as pen
from ..data.handwriting import Handwriting
from ..growth import evaluation
from ..inputs import standardise
from ..layers import ClockedLayer
from ..model import SequenceModel
from ..objectives import CTC, character_accuracy, collapsed
from ..training import Result, derive, fit
from . import paper
from .jobs import Arrays, Job, Task
from .models import CLOCKED, INCREMENTAL, NAMES, Settings, build
from .records import Record

NAME = "handwriting"
MODELS = NAMES[1:]  # all but the RNN
SEEDS = {"quick": 1, "paper": 5, "best": 5}
LINES = {"quick": 1500, "paper": 5000, "best": 5000}  # that train, where they are synthetic
WORDS = {"quick": (1, 1), "paper": (3, 8), "best": (3, 8)}  # of such a line
FEATURES = {"quick": "offsets", "paper": "absolute", "best": "offsets"}
LMN_UNITS = 115  # of h and of m: with 58 outputs the nearest to 100,000 parameters
PATIENCE, STAGE, MOST = 50, 50, 1000  # epochs: without improvement, of a stage, of a model that does not grow
EXAMPLES = 6  # test lines whose reading is kept, to be looked at
AT_ONCE = 64  # test lines
TRAINING: dict[str, Any] = {  # the same for all, but for what stands below, see docs/results.md
    "dropout": 0.2, "noise": 0.1, "distort": 0.1, "learning_rate": 2e-3, "schedule": "cosine", "warmup": 2,
    "contract": True, "epochs": 40, "select": "metric",
}  # fmt: skip
OURS: dict[str, dict[str, Any]] = {
    "LSTM": {"hidden": 102, "norm": "layer", "learning_rate": 4e-3, "flat_start": 1},
    "LMN": {"hidden": 118, "memory": 118, "init": "fan-in", "norm": "layer"},
    "CW-RNN": {"hidden": 76, "modules": 3, "init": "fan-in", "norm": "layer"},
    "MS-LMN": {
        "hidden": 84, "memory": 24, "modules": 2, "layers": 3, "layer_norm": True, "init": "fan-in", "norm": "layer",
        "flat_start": 1, "learning_rate": 3e-3,
    },
    INCREMENTAL: {
        "hidden": 96, "memory": 48, "modules": 3, "init": "fan-in", "norm": "prefix", "first_module": "given",
        "epochs": 14,
    },
}  # fmt: skip
ABSOLUTE: dict[str, dict[str, Any]] = {"LSTM": {"flat_start": 0}, "MS-LMN": {"flat_start": 2}}  # coordinates
GAIN = 3.0  # of coordinates, which hide a stroke: a step moves the pen by a fraction of a percent of the line
QUICK: dict[str, dict[str, Any]] = {  # 15,000 to 25,000 parameters: minutes on two cores
    "LSTM": {"hidden": 44, "learning_rate": 2e-3},
    "LMN": {"hidden": 44, "memory": 44},
    "CW-RNN": {"hidden": 36, "modules": 2},
    "MS-LMN": {"hidden": 48, "memory": 30, "modules": 2, "layers": 1, "learning_rate": 2e-3},
    INCREMENTAL: {"hidden": 48, "memory": 30, "modules": 2, "epochs": 9},
}


def settings(model: str, preset: str, epochs: int | None = None, kind: str = "offsets") -> Settings:
    """The paper's sizes, with what its text leaves open chosen as simply as can be; or ours, for a kind of features."""
    line = paper.HANDWRITING.get(model)
    chosen = Settings(
        hidden=line.hidden if line else LMN_UNITS,
        memory=line.memory if line else None,
        modules=paper.HANDWRITING_MODULES if model in CLOCKED else 1,
        forget_gate=1.0,
        learning_rate=1e-3,
        batch_size=32,
        epochs=STAGE if model == INCREMENTAL else MOST,
        patience=PATIENCE,
    )
    if preset != "paper":
        chosen = replace(chosen, patience=None, **TRAINING | OURS[model])
    if preset != "paper" and kind == "absolute":
        chosen = replace(chosen, standardise=GAIN, **ABSOLUTE.get(model, {}))
    if preset == "quick":
        chosen = replace(
            chosen, **{"epochs": 18, "batch_size": 16, "dropout": 0.0, "noise": 0.0, "distort": 0.0} | QUICK[model]
        )
    return replace(chosen, epochs=epochs or chosen.epochs)


def tasks(
    out: Path,
    preset: str,
    data: Handwriting,
    *,
    models: tuple[str, ...] = MODELS,
    seed: int = 0,
    seeds: int | None = None,
    epochs: int | None = None,
) -> list[Task]:
    """All runs of the experiment, the longest first; their data are written to ``out``."""
    folder = out / NAME
    lines = {split: data.splits.count(split) for split in pen.SPLITS}
    if not all(lines.values()):
        raise ValueError(f"{data.name} must have lines of all splits, got {lines}; prepare it again")
    path = pen.keep(folder / "data.npz", data)
    found = []
    for model in models:
        for s in range(seed, seed + (seeds or SEEDS[preset])):
            job = Job(NAME, preset, model, {"lines": lines["train"]}, s, settings(model, preset, epochs, data.kind))
            stages = job.settings.modules if model == INCREMENTAL else 1
            found.append(Task(job, train, path, folder / job.name, stages * job.settings.checkpoints(1)))
    return sorted(found, key=lambda task: MODELS.index(task.job.model))  # the LSTM takes longest


def train(job: Job, data: Path, folder: Path, device: str | None) -> tuple[Record, Arrays]:
    written = pen.load(data)
    result = fitted(job.model, job.settings, written, job.seed, folder, device)
    best = result.model
    pairs = written.pairs("test")
    paths = list(read(best, [x for x, _ in pairs]))
    right = accuracies(paths, pairs)
    record = job.record(
        result,
        1,
        f"{written.name}, {'absolute coordinates' if written.kind == 'absolute' else 'offsets'}",
        "accuracy",
        float(np.mean(right)),
        folder,
        features=written.kind,
        best_modules=result.best["modules"],
        validation_loss=result.best["loss"],
        validation_accuracy=validation_accuracy(result),
        **{f"{split}_lines": written.splits.count(split) for split in pen.SPLITS},
    )
    return record, examples(best.cpu(), written, paths) | {"accuracies": np.array(right)}


def fitted(
    name: str, settings: Settings, data: Handwriting, seed: int, folder: Path | None, device: str | None
) -> Result:
    torch.manual_seed(derive(seed))
    model = build(name, settings, 4, data.alphabet.outputs, bidirectional=True, output="all")
    noise = settings.noise if data.kind == "offsets" else 0.0  # coordinates lie between 0 and 1, offsets are about 1
    distort = settings.distort if data.kind == "offsets" else 0.0  # mixed coordinates would leave the square
    plan = settings.plan(name, seed, 1, buckets=True, noise=noise, distort=distort)
    train, validation = data.pairs("train"), data.pairs("validation")
    if settings.standardise:
        standardise(model, [x for x, _ in train], settings.standardise)
    return fit(model, train, validation, CTC(), folder, plan=plan, resume=True, progress=False, device=device)


def validation_accuracy(result: Result) -> float:
    """Of the weights that were kept."""
    return float(result.best["metric"])


def read(model: SequenceModel, lines: Sequence[Tensor]) -> Iterator[NDArray[np.int64]]:
    """The likeliest label of each step, of each line (T, 4), in their order."""
    device = next(model.parameters()).device
    with evaluation(model):
        for start in range(0, len(lines), AT_ONCE):
            input = pack_sequence(list(lines[start : start + AT_ONCE]), enforce_sorted=False).to(device)  # type: ignore[arg-type]
            yield from _labels(model(input))


def _labels(output: Any) -> Iterator[NDArray[np.int64]]:
    return (logits.argmax(-1).cpu().numpy() for logits in unpack_sequence(output))


def accuracies(paths: Sequence[NDArray[np.int64]], pairs: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """Of what was `read`, line by line."""
    return [character_accuracy(collapsed(path), y.tolist()) for path, (_, y) in zip(paths, pairs, strict=True)]


def examples(model: SequenceModel, data: Handwriting, paths: Sequence[NDArray[np.int64]]) -> Arrays:
    """A few test lines, from the first to the last, with what was read at each step; see `Record`."""
    test = [i for i, split in enumerate(data.splits) if split == "test"]
    chosen = np.unique(np.linspace(0, len(test) - 1, EXAMPLES).round().astype(int)).tolist()
    features = [data.features[test[i]] for i in chosen]
    with evaluation(model):
        memory = model.encoder(torch.from_numpy(features[0]))[0]
    half = by_step(model, memory[:, : memory.shape[1] // 2].numpy(), len(features[0]))  # the forward direction
    points = [np.column_stack([pen.places(x, data.kind), x[:, 3]]) for x in features]
    alphabet = data.alphabet
    return {
        "starts": np.cumsum([0, *map(len, features)]),
        "points": np.concatenate(points),
        "labels": np.concatenate([by_step(model, paths[i], len(x)) for i, x in zip(chosen, features, strict=True)]),
        "characters": np.array([alphabet.decode([label]) for label in range(alphabet.outputs)]),
        "expected": np.array([alphabet.decode(alphabet.encode(data.texts[test[i]])) for i in chosen]),
        "recognised": np.array([alphabet.decode(collapsed(paths[i])) for i in chosen]),
        "memory": half.reshape(len(half), model.num_modules, -1),
    }


def by_step(model: SequenceModel, values: NDArray[Any], T: int) -> NDArray[Any]:
    """What a model that pools says of its windows, of each of their T steps."""
    window = model.encoder.window if isinstance(model.encoder, ClockedLayer) else 1
    return np.repeat(values, window, axis=0)[:T]
