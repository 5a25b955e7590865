"""The second round of the words search: the best trial of each model, its memory normalised or not, with two seeds.

    mslmn search words --trials 20 --jobs 2 --out search.json
    python tools/refine_words.py search.json

Judged like the trials, on the training speakers of split 0, each by the others. Learning rate 1e-3 for all.
"""

import itertools
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from mslmn.data import words as spoken
from mslmn.experiments import search

SEEDS = (0, 1)
Case = tuple[str, dict, str | None]


def judge(case: Case) -> list[float]:
    torch.set_num_threads(1)
    words = spoken.embedded()
    name, drawn, norm = case
    settings = search.chosen(name, drawn | {"norm": norm, "learning_rate": 1e-3}, words)
    means = []
    for seed in SEEDS:
        accuracies = list(search.judged(name, settings, words, 0, seed, "cpu"))
        means.append(sum(accuracies) / len(accuracies))
    return means


def main() -> None:
    with open(sys.argv[1]) as file:
        found = json.load(file)
    cases = [(name, found[name]["settings"], norm) for name, norm in itertools.product(found, (None, "module"))]
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        for (name, _, norm), means in zip(cases, pool.map(judge, cases), strict=True):
            shown = ", ".join(f"{mean:.3f}" for mean in means)
            print(f"{name:20} norm {norm!s:7} {sum(means) / len(means):.3f} ({shown})", flush=True)


if __name__ == "__main__":
    main()
