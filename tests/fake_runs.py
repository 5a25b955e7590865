"""Results as the experiments leave them, made up: to develop and test the report.

python tests/fake_runs.py DIR
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

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


def put(folder, arrays=True, **changes):
    """One record in a folder of its own; what matters to a test is given, the rest is plausible."""
    words = changes.get("experiment") == "words"
    record = records.Record(
        **{
            "experiment": "generation",
            "preset": "quick",
            "data": "made up",
            "model": "MS-LMN",
            "case": {"split": 0} if words else {"budget": 1000},
            "seed": 0,
            "sizes": {"hidden": 25, "memory": 25, "modules": 7} if words else {"hidden": 1, "memory": 4, "modules": 9},
            "parameters": 12345 if words else 1003,
            "settings": {"learning_rate": 1e-3},
            "epochs": 60,
            "seconds": 12.5,
            "metric": "accuracy" if words else "NMSE",
            "value": 0.78 if words else 0.45e-3,
            "history": history(60, 0.5, grown=False),
            "reason": "all epochs done",
        }
        | changes
    )
    name = f"{record.experiment}/{record.preset}/{record.model}/{next(iter(record.case.values()))}/{record.seed}"
    record = replace(record, folder=folder / name.replace(" ", "-"))
    record.folder.mkdir(parents=True)
    made = word_arrays(record) if words else signal_arrays(record)
    records.write(record, made if arrays else {})
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


if __name__ == "__main__":
    generation(Path(sys.argv[1]))
    words(Path(sys.argv[1]))
