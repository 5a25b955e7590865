"""MS-LMN and LSTM at full size, each with a search of its own for the learning rate, over several seeds.

    mslmn prepare handwriting --features offsets --out words.npz
    python tools/compare_handwriting.py words.npz comparison --epochs 24 --rates 1e-3 2e-3 4e-3

Settings are those of the preset `best`, but for --set, and the epochs the same for all. A model's learning rate is the
one with the highest validation accuracy, the mean over seeds; only then the test lines are read, with that rate's
models. What is done is not done again, and what was interrupted goes on. Seconds are those of training, validation left
out: compare them only if nothing else ran (--jobs 1).
"""

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mslmn import checkpoint
from mslmn.data import handwriting as pen
from mslmn.experiments import handwriting
from mslmn.experiments.models import Settings, build


def run(data: Path, folder: Path, model: str, settings: Settings, seed: int, device: str | None) -> dict[str, float]:
    path = folder / "found.json"
    if path.exists():
        found: dict[str, float] = json.loads(path.read_text())
        return found
    torch.set_num_threads(1)
    result = handwriting.fitted(model, settings, pen.load(data), seed, folder, device)
    found = {
        "validation": handwriting.validation_accuracy(result),
        "seconds": sum(stage["seconds"] for stage in result.stages),
        "epochs": len(result.history),
        "parameters": sum(p.numel() for p in result.model.parameters()),
    }
    checkpoint.write_text(path, json.dumps(found))
    return found


def test(data: Path, folder: Path) -> float:
    best = checkpoint.load(folder / "best")
    pairs = pen.load(data).pairs("test")
    return float(np.mean(handwriting.accuracies(list(handwriting.read(best, [x for x, _ in pairs])), pairs)))


def change(text: str) -> tuple[str, Any]:
    """silent=false -> ("silent", False)"""
    name, _, value = text.partition("=")
    if name not in {field.name for field in fields(Settings)}:
        raise argparse.ArgumentTypeError(f"{name!r} is not a setting; see mslmn.experiments.models.Settings")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        raise argparse.ArgumentTypeError(f"expected {name}=VALUE, a number, true or false, got {text!r}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="what mslmn prepare handwriting wrote")
    parser.add_argument("out", type=Path, help="a folder for what is done")
    parser.add_argument("--models", nargs="+", default=["MS-LMN", "LSTM"], choices=handwriting.MODELS)
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-3, 2e-3, 4e-3])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--device")
    parser.add_argument("--set", nargs="+", default=[], type=change, help="not as the preset: silent=false noise=0")
    parser.add_argument("--no-test", action="store_true", help="leave the test lines alone")
    o = parser.parse_args()

    def folder(model: str, rate: float, seed: int) -> Path:
        return o.out / " ".join(
            [model, f"{rate:g}", str(o.epochs), str(seed), *(f"{name}={value}" for name, value in o.set)]
        )

    def settings(model: str, rate: float) -> Settings:
        return replace(handwriting.settings(model, "best", o.epochs, kind), learning_rate=rate, **dict(o.set))

    kind = pen.load(o.data).kind
    try:  # what cannot be is said before anything is trained
        for model, rate in product(o.models, o.rates):
            build(model, settings(model, rate), 4, 2, bidirectional=True)
    except ValueError as error:
        parser.error(str(error))

    with ProcessPoolExecutor(o.jobs, multiprocessing.get_context("spawn")) as pool:
        runs = {
            (model, rate, seed): pool.submit(
                run, o.data, folder(model, rate, seed), model, settings(model, rate), seed, o.device
            )
            for model, rate, seed in product(o.models, o.rates, range(o.seeds))
        }
        found = {key: future.result() for key, future in runs.items()}
    print(
        "| model | learning rate | validation % | by seed | test % | by seed | seconds |\n|---|---|---|---|---|---|---|"
    )
    for model in o.models:
        by_rate = {r: [found[model, r, seed]["validation"] for seed in range(o.seeds)] for r in o.rates}
        best = max(by_rate, key=lambda r: np.mean(by_rate[r]))
        for r, accuracies in by_rate.items():
            tested = []
            if r == best and not o.no_test:
                tested = [test(o.data, folder(model, r, seed)) for seed in range(o.seeds)]
            seconds = np.mean([found[model, r, seed]["seconds"] for seed in range(o.seeds)])
            columns = [_column(accuracies), _column(tested) if tested else " | "]
            print(f"| {model} | {r:g} | {' | '.join(columns)} | {seconds:.0f} |")


def _column(accuracies: list[float]) -> str:
    """The mean, and each."""
    return f"{100 * np.mean(accuracies):.2f} | {', '.join(f'{100 * a:.2f}' for a in accuracies)}"


if __name__ == "__main__":
    main()
