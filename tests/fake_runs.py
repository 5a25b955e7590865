"""Results as the experiments leave them, made up: to develop and test the report.

python tests/fake_runs.py DIR
"""

import sys
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path

import numpy as np

from mslmn.data import writer
from mslmn.data.handwriting import Alphabet
from mslmn.experiments import paper, records

SUFFIXES = (
    "making walking cooking looking working",
    "biblical cyclical technical classical critical",
    "tradition addition audition recognition competition",
    "musicians discussions regulations accusations conditions",
    "subway leeway freeway highway hallway",
)
WORDS = [word for words in SUFFIXES for word in words.split()]
INCREMENTAL = "incremental MS-LMN"
PLAUSIBLE = {
    "generation": {
        "case": {"budget": 1000}, "sizes": {"hidden": 1, "memory": 4, "modules": 9}, "parameters": 1003,
        "metric": "NMSE", "value": 0.45e-3,
    },
    "words": {
        "case": {"split": 0}, "sizes": {"hidden": 25, "memory": 25, "modules": 7}, "parameters": 12345,
        "metric": "accuracy", "value": 0.78,
    },
    "handwriting": {
        "case": {"lines": 1000}, "sizes": {"hidden": 144, "memory": 16, "modules": 9}, "parameters": 98765,
        "metric": "accuracy", "value": 0.74,
    },
}  # fmt: skip


def put(folder, arrays=True, **changes):
    """One record in a folder of its own; what matters to a test is given, the rest is plausible."""
    experiment = changes.get("experiment", "generation")
    record = records.Record(
        **{
            "experiment": "generation",
            "preset": "quick",
            "data": "made up",
            "model": "MS-LMN",
            "seed": 0,
            "settings": {"learning_rate": 1e-3},
            "epochs": 60,
            "seconds": 12.5,
            "history": history(60, 0.5, grown=False),
            "reason": "all epochs done",
        }
        | PLAUSIBLE.get(experiment, PLAUSIBLE["generation"])
        | changes
    )
    name = f"{record.experiment}/{record.preset}/{record.model}/{next(iter(record.case.values()))}/{record.seed}"
    record = replace(record, folder=folder / name.replace(" ", "-"))
    record.folder.mkdir(parents=True)
    make = {"words": word_arrays, "handwriting": line_arrays}.get(experiment, signal_arrays)
    records.write(record, make(record) if arrays else {})
    if not arrays:
        (record.folder / records.ARRAYS).unlink()
    return record


def history(epochs, final, grown, seed=0):
    rng = np.random.default_rng(seed)
    losses = final + 2.5 * np.exp(-np.linspace(0, 6, epochs)) * np.exp(rng.normal(0, 0.06, epochs))
    modules = [1 + i * 7 // epochs if grown else 7 for i in range(epochs)]
    if grown:
        losses += 0.12 * np.array([i * 7 / epochs - i * 7 // epochs < 0.2 for i in range(epochs)])
    return [
        {"epoch": i + 1, "modules": modules[i], "train_loss": loss, "validation_loss": loss * 1.3 + 0.05}
        for i, loss in enumerate(losses.tolist())
    ]


def memory(steps, modules, units, seed=0):
    """Low-pass noise, held by module k for 2^(k-1) steps, zero before it first fires."""
    rng = np.random.default_rng(seed)
    found = np.zeros((steps, modules, units))
    for k in range(modules):
        every, now = 1 << k, np.zeros(units)
        for t in range(1, steps + 1):
            if t % every == 0:
                now = 0.8 * now + rng.normal(0, 1, units)
            found[t - 1, k] = now
    return found.astype(np.float32)


def signal_arrays(record, steps=300):
    t = np.arange(steps)
    target = 0.5 * np.sin(t / 23) + 0.25 * np.sin(t / 5.1) + 0.12 * np.sin(t / 1.7 + 1)
    noise = np.random.default_rng(record.seed).normal(size=steps)
    noise = np.convolve(noise, np.hanning(9), "same")
    error = noise / noise.std() * np.sqrt(record.value) * target.std() if np.isfinite(record.value) else noise
    arrays = {"target": target, "generated": target + error}
    sizes = record.sizes
    return arrays | {"memory": memory(steps, sizes.get("modules", 1), sizes.get("memory", sizes["hidden"]))}


def word_arrays(record):
    rng = np.random.default_rng([record.seed, *record.case.values()])
    expected = np.repeat(np.arange(25), 2)
    near = expected // 5 * 5 + rng.integers(0, 5, 50)
    guess = np.where(rng.random(50) < 0.6, near, rng.integers(0, 25, 50))
    arrays = {"expected": expected, "predicted": np.where(rng.random(50) < record.value, expected, guess)}
    arrays |= {"names": np.array(WORDS), "suffixes": np.arange(25) // 5}
    sizes = record.sizes
    return arrays | {"memory": memory(97, sizes.get("modules", 1), sizes.get("memory", sizes["hidden"]))}


@cache
def written(count=3):
    """Test lines of the synthetic writer: their points and texts."""
    lines = [line for line in writer.lines(5 * count, seed=2, words=(3, 5)) if line.split == "test"]
    return [line.points[:, 1:] for line in lines], [line.text for line in lines]


def line_arrays(record, lines=None):
    """Lines that are read as well as the record says, each character emitted about where it stands."""
    lines = lines or written()
    points, texts = lines
    rng = np.random.default_rng([record.seed, len(record.model)])
    alphabet = Alphabet()
    paths = [emitted(xy, alphabet.encode(misread(text, record.value, rng))) for xy, text in zip(*lines, strict=True)]
    sizes = record.sizes
    arrays = {
        "starts": np.cumsum([0, *map(len, points)]),
        "points": np.concatenate(points),
        "labels": np.concatenate(paths),
        "characters": np.array(["", alphabet.decode([1]), *alphabet.characters]),
        "expected": np.array(texts),
        "recognised": np.array([alphabet.decode(label for label, _ in groupby(path.tolist())) for path in paths]),
        "accuracies": 1 - np.minimum(rng.exponential(1 - min(record.value, 0.99), 200), 1.2),
    }
    units = sizes.get("memory", sizes["hidden"])
    return arrays | {"memory": memory(len(points[0]), sizes.get("modules", 1), units)}


def misread(text, accuracy, rng):
    """Some characters replaced, left out or doubled."""
    letters = "aeiouthrsnlm"
    found = []
    for letter in text:
        other = letters[rng.integers(len(letters))]
        found.append(letter if rng.random() < accuracy else ["", other, other, letter + other][rng.integers(4)])
    return "".join(found)


def emitted(points, labels):
    """A best path: blank but for one step per label, at the step that gets to its place in the line."""
    x = np.maximum.accumulate(points[:, 0] - points[0, 0])
    at = np.searchsorted(x, (np.arange(len(labels)) + 0.6) / max(1, len(labels)) * x[-1])
    apart = 2 * np.arange(len(labels))
    at = np.maximum.accumulate(at - apart) + apart if len(at) else at
    path = np.zeros(len(points), dtype=np.int64)
    path[at[at < len(path)]] = np.array(labels, dtype=np.int64)[at < len(path)]
    return path


def learning(epochs, final, leaves, modules, seed=0):
    """A plateau, where blanks are all there is, until half of the characters are read at ``leaves``, or never."""
    rng = np.random.default_rng(seed)
    t = np.arange(1, epochs + 1)
    accuracy = final / (1 + np.exp(-(t - leaves) / (0.06 * epochs))) if leaves else np.full(epochs, 0.12)
    accuracy = np.maximum(0, accuracy + rng.normal(0, 0.008, epochs)) * (t > 2)
    losses = 12 + 130 * (1 - accuracy) ** 1.5
    return [
        {
            "epoch": int(epoch),
            "modules": modules if isinstance(modules, int) else modules[i * len(modules) // epochs],
            "train_loss": float(losses[i] * 0.9),
            "validation_loss": float(losses[i]),
            "character_accuracy": float(accuracy[i]),
        }
        for i, epoch in enumerate(t)
    ]


def generation(folder, budgets=paper.BUDGETS, seeds=3, preset="quick"):
    rng = np.random.default_rng(1)
    for model, numbers in paper.GENERATION.items():
        for at, budget in enumerate(paper.BUDGETS):
            for seed in range(seeds if budget in budgets else 0):
                sizes = {"hidden": numbers.hidden[at]}
                sizes |= {"memory": numbers.memory[at]} if numbers.memory else {}
                sizes |= {"modules": 9} if model in ("CW-RNN", "MS-LMN") else {}
                put(
                    folder,
                    preset=preset,
                    data="BWV 846, bars 1 to 2, 300 samples (embedded)",
                    model=model,
                    case={"budget": budget},
                    seed=seed,
                    sizes=sizes,
                    parameters=budget + 7 * at + len(model),
                    settings={"learning_rate": numbers.learning_rate},
                    epochs=numbers.epochs,
                    seconds=float(rng.uniform(3, 30)),
                    value=float(numbers.nmse * (1000 / budget) ** 0.5 * np.exp(rng.normal(0, 0.4))),
                    history=history(numbers.epochs // 10, numbers.nmse, grown=False, seed=seed),
                )


def words(folder, splits=7, seeds=3, preset="quick"):
    rng = np.random.default_rng(2)
    for model, numbers in paper.WORDS.items():
        for split in range(splits):
            for seed in range(seeds):
                multiscale = model.endswith("MS-LMN")
                sizes = {"hidden": numbers.hidden}
                sizes |= {"memory": 25 if multiscale else 31} if "LMN" in model else {}
                sizes |= {"modules": 7} if multiscale or model == "CW-RNN" else {}
                put(
                    folder,
                    experiment="words",
                    preset=preset,
                    data="25 words, 7 synthetic voices (embedded)",
                    model=model,
                    case={"split": split},
                    seed=seed,
                    sizes=sizes,
                    parameters=9000 + 311 * len(model),
                    settings={"learning_rate": 1e-3, "train_clips": 125, "test_clips": 50},
                    epochs=140 + 10 * seed,
                    seconds=float(rng.uniform(8, 40)),
                    value=float(np.clip(numbers.accuracy + 0.03 * np.sin(split) + rng.normal(0, 0.02), 0, 1)),
                    history=history(140, 0.1 + 1 - numbers.accuracy, grown=model == INCREMENTAL, seed=seed),
                )


def handwriting(folder, seeds=2, preset="quick", lines=1000):
    rng = np.random.default_rng(3)
    accuracies = {"LSTM": 0.81, "LMN": 0.1, "CW-RNN": 0.62, "MS-LMN": 0.88, INCREMENTAL: 0.93}
    for model, accuracy in accuracies.items():
        for seed in range(seeds):
            published = paper.HANDWRITING.get(model, paper.HANDWRITING["MS-LMN"])
            sizes = {"hidden": published.hidden}
            sizes |= {"memory": published.memory} if "LMN" in model else {}
            sizes |= {"modules": 9} if model in ("CW-RNN", "MS-LMN", INCREMENTAL) else {}
            value = accuracy - 0.04 * seed * rng.random()
            leaves = None if model == "LMN" else 12 + 4 * seed + len(model)
            modules = list(range(1, 8)) if model == INCREMENTAL else sizes.get("modules", 1)
            rows = learning(60, value + 0.02, leaves, modules, seed)
            put(
                folder,
                experiment="handwriting",
                preset=preset,
                data="synthetic lines, seed 0, absolute coordinates",
                model=model,
                case={"lines": lines},
                seed=seed,
                sizes=sizes,
                parameters=96000 + 311 * len(model),
                settings={
                    "learning_rate": 1e-3,
                    "validation_loss": min(row["validation_loss"] for row in rows),
                    "validation_accuracy": max(row["character_accuracy"] for row in rows),
                    "train_lines": lines,
                    "validation_lines": lines // 5,
                    "test_lines": lines // 5,
                    "features": "absolute",
                },
                epochs=60,
                seconds=float(rng.uniform(200, 900)),
                value=value,
                history=rows,
            )


if __name__ == "__main__":
    generation(Path(sys.argv[1]))
    words(Path(sys.argv[1]))
    handwriting(Path(sys.argv[1]))
