"""What each option brings in the handwriting experiment: one thing left out or changed at a time, over several seeds.

    mslmn prepare handwriting --pendigits DIR --lines 1500 --features offsets --out digits.npz
    python tools/ablate_handwriting.py digits.npz ablation

Each run is an ordinary one, of 20,000 parameters and a minute or so on a core; the test lines are never read. What is
done is not done again. Prints a table: validation accuracy at the end, the epoch at which half of the characters were
right, and seconds.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from mslmn import checkpoint
from mslmn.data import handwriting as pen
from mslmn.experiments.handwriting import fitted
from mslmn.experiments.models import INCREMENTAL, Settings

BASE = Settings(
    hidden=48,
    memory=20,
    modules=3,
    init="fan-in",
    norm="layer",
    forget_gate=1.0,
    learning_rate=2e-3,
    schedule="cosine",
    warmup=2,
    contract=True,
    batch_size=16,
    epochs=12,
)
GROWN = replace(BASE, norm="prefix", first_module="given", epochs=4)
PAPER = replace(BASE, init="xavier", norm=None, warmup=0, contract=False, schedule="constant", memory=8, modules=8)
VARIANTS: dict[str, tuple[str, Settings]] = {
    "MS-LMN, 3 modules of 20": ("MS-LMN", BASE),
    "as in the paper: 8 of 8": ("MS-LMN", PAPER),
    "as in the paper, grown": (INCREMENTAL, replace(PAPER, epochs=3)),
    "without warm-up": ("MS-LMN", replace(BASE, warmup=0)),
    "without contraction": ("MS-LMN", replace(BASE, contract=False)),
    "without either": ("MS-LMN", replace(BASE, warmup=0, contract=False)),
    "without norm": ("MS-LMN", replace(BASE, norm=None)),
    "norm of each module": ("MS-LMN", replace(BASE, norm="module")),
    "norm of each and the faster": ("MS-LMN", replace(BASE, norm="prefix")),
    'init "leaky"': ("MS-LMN", replace(BASE, init="leaky")),
    'init "xavier"': ("MS-LMN", replace(BASE, init="xavier")),
    "constant learning rate": ("MS-LMN", replace(BASE, schedule="constant")),
    "weight decay 1e-5": ("MS-LMN", replace(BASE, weight_decay=1e-5)),
    "dropout 0.3": ("MS-LMN", replace(BASE, dropout=0.3)),
    "30 epochs": ("MS-LMN", replace(BASE, epochs=30)),
    "30 epochs, dropout 0.3": ("MS-LMN", replace(BASE, epochs=30, dropout=0.3)),
    "30 epochs, dropout 0.3, decay 1e-5": ("MS-LMN", replace(BASE, epochs=30, dropout=0.3, weight_decay=1e-5)),
    "1 module of 56": ("MS-LMN", replace(BASE, memory=56, modules=1)),
    "2 modules of 30": ("MS-LMN", replace(BASE, memory=30, modules=2)),
    "4 modules of 16": ("MS-LMN", replace(BASE, memory=16, modules=4)),
    "8 modules of 8": ("MS-LMN", replace(BASE, memory=8, modules=8)),
    "grown, 4 epochs a module": (INCREMENTAL, GROWN),
    "grown, first by the autoencoder too": (INCREMENTAL, replace(GROWN, first_module="autoencoder")),
    "grown, norm of each module": (INCREMENTAL, replace(GROWN, norm="module")),
    "grown, 10 epochs a module": (INCREMENTAL, replace(GROWN, epochs=10)),
    "CW-RNN, 3 modules of 36": ("CW-RNN", replace(BASE, hidden=36)),
    "LSTM, 44 units": ("LSTM", replace(BASE, hidden=44)),
    "LSTM, dropout 0.3": ("LSTM", replace(BASE, hidden=44, dropout=0.3)),
    "silent: 3 modules of 20": ("MS-LMN", replace(BASE, silent=True)),
    "silent: 4 modules of 16": ("MS-LMN", replace(BASE, silent=True, memory=16, modules=4)),
    "silent: 8 modules of 8": ("MS-LMN", replace(BASE, silent=True, memory=8, modules=8)),
    "silent, dropout 0.3": ("MS-LMN", replace(BASE, silent=True, dropout=0.3)),
    "flat start: 3 modules of 20": ("MS-LMN", replace(BASE, flat_start=1)),
    "flat start of 2 epochs": ("MS-LMN", replace(BASE, flat_start=2)),
    "flat start: as in the paper": ("MS-LMN", replace(PAPER, flat_start=1)),
    "flat start: without warm-up": ("MS-LMN", replace(BASE, flat_start=1, warmup=0)),
    "flat start: without norm": ("MS-LMN", replace(BASE, flat_start=1, norm=None)),
    "flat start: 4 modules of 16": ("MS-LMN", replace(BASE, flat_start=1, memory=16, modules=4)),
    "flat start: 8 modules of 8": ("MS-LMN", replace(BASE, flat_start=1, memory=8, modules=8)),
    "flat start: CW-RNN, 3 modules of 36": ("CW-RNN", replace(BASE, flat_start=1, hidden=36)),
    "flat start: LSTM, 44 units": ("LSTM", replace(BASE, flat_start=1, hidden=44)),
    "flat start: grown": (INCREMENTAL, replace(GROWN, flat_start=1, epochs=10)),
    "flat start: three layers, 2 modules of 12": (
        "MS-LMN",
        replace(BASE, flat_start=1, layers=3, hidden=30, memory=12, modules=2),
    ),
    "three layers, 2 modules of 12": ("MS-LMN", replace(BASE, layers=3, hidden=30, memory=12, modules=2)),
    "flat start of 2 epochs, three layers": (
        "MS-LMN",
        replace(BASE, flat_start=2, layers=3, hidden=30, memory=12, modules=2),
    ),
    "flat start of 2 epochs, LSTM": ("LSTM", replace(BASE, flat_start=2, hidden=44)),
    "flat start: three layers, norms between": (
        "MS-LMN",
        replace(BASE, flat_start=1, layers=3, hidden=30, memory=12, modules=2, layer_norm=True),
    ),
    "flat start: four layers, 2 modules of 10": (
        "MS-LMN",
        replace(BASE, flat_start=1, layers=4, hidden=26, memory=10, modules=2),
    ),
    "flat start: four layers, norms between": (
        "MS-LMN",
        replace(BASE, flat_start=1, layers=4, hidden=26, memory=10, modules=2, layer_norm=True),
    ),
    "norms between, three layers": (
        "MS-LMN",
        replace(BASE, layers=3, hidden=30, memory=12, modules=2, layer_norm=True),
    ),
    "standardised: 3 modules of 20": ("MS-LMN", replace(BASE, standardise=3.0)),
    "standardised: as in the paper": ("MS-LMN", replace(PAPER, standardise=3.0)),
    "standardised: grown, 10 epochs a module": (INCREMENTAL, replace(GROWN, epochs=10, standardise=3.0)),
    "standardised: CW-RNN, 3 modules of 36": ("CW-RNN", replace(BASE, hidden=36, standardise=3.0)),
    "standardised: LSTM, 44 units": ("LSTM", replace(BASE, hidden=44, standardise=3.0)),
    "standardised, flat start: 3 modules of 20": ("MS-LMN", replace(BASE, flat_start=1, standardise=3.0)),
    "standardised, flat start: LSTM, 44 units": ("LSTM", replace(BASE, flat_start=1, hidden=44, standardise=3.0)),
    "standardised, flat start: three layers, norms between": (
        "MS-LMN",
        replace(BASE, flat_start=1, layers=3, hidden=30, memory=12, modules=2, layer_norm=True, standardise=3.0),
    ),
}


def run(data: Path, folder: Path, name: str, seed: int, epochs: int | None) -> dict[str, object]:
    path = folder / f"{list(VARIANTS).index(name):02}-{seed}.json"
    if path.exists():
        found: dict[str, object] = json.loads(path.read_text())
        return found
    torch.set_num_threads(1)
    model, settings = VARIANTS[name]
    if epochs is not None and settings.epochs == BASE.epochs:
        settings = replace(settings, epochs=epochs)
    result = fitted(model, settings, pen.load(data), seed, None, None)
    accuracies = [row["character_accuracy"] for row in result.history]
    found = {
        "accuracy": accuracies[-1] if accuracies else 0.0,
        "half": next((i for i, accuracy in enumerate(accuracies, 1) if accuracy >= 0.5), None),
        "seconds": sum(stage["seconds"] for stage in result.stages),
        "parameters": sum(p.numel() for p in result.model.parameters()),
        "reason": result.reason,
    }
    checkpoint.write_text(path, json.dumps(found))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="what mslmn prepare handwriting wrote")
    parser.add_argument("out", type=Path, help="a folder for what is done")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", action="append", help="variants whose name has this; repeat the option")
    parser.add_argument("--epochs", type=int, help="in place of 12, for those that have 12")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    names = [name for name in VARIANTS if not options.only or any(part in name for part in options.only)]
    with ProcessPoolExecutor(options.jobs) as pool:
        runs = {
            (name, seed): pool.submit(run, options.data, options.out, name, seed, options.epochs)
            for seed in range(options.seeds)
            for name in names
        }
        print(
            "| variant | parameters | accuracy % | by seed | half right at epoch | seconds |\n|---|---|---|---|---|---|"
        )
        for name in names:
            found = [runs[name, seed].result() for seed in range(options.seeds)]
            accuracies = [100 * float(str(one["accuracy"])) for one in found]
            diverged = sum("loss is" in str(one["reason"]) for one in found)
            print(
                f"| {name} | {found[0]['parameters']:,} | {np.mean(accuracies):.1f} | "
                f"{', '.join(f'{a:.1f}' for a in accuracies)}{f' ({diverged} diverged)' if diverged else ''} | "
                f"{', '.join(str(one['half'] or '-') for one in found)} | "
                f"{np.mean([float(str(one['seconds'])) for one in found]):.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
