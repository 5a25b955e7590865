"""Sequence generation: 300 samples of music, without any input (Tables 1 and 2 of the paper, and its figure)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..data import audio, store
from ..layers import ClockedLayer, State
from ..model import SequenceModel
from ..objectives import NMSE
from ..training import derive, fit
from . import paper
from .jobs import Arrays, Job, Task
from .models import CLOCKED, Settings, build
from .records import Record

NAME = "generation"
MODELS = tuple(paper.GENERATION)
BUDGETS = {"quick": (1000,), "paper": paper.BUDGETS, "best": (1000,)}
SEEDS = {"quick": 1, "paper": 1, "best": 5}
CHECK = 100  # epochs between two checkpoints
EXPLODED, DRAWS = 100.0, 100  # a memory that grows so much within the sequence is drawn again, so often at most
OURS: dict[str, dict[str, Any]] = {  # the best of a few learning rates and clippings, 8,000 epochs, see docs/results.md
    "RNN": {"learning_rate": 1e-3, "clip": 0.1, "epochs": 8000, "init": "leaky"},
    "LSTM": {"learning_rate": 1e-2, "epochs": 12000},
    "CW-RNN": {"learning_rate": 5e-2, "clip": 0.1, "epochs": 8000},
    "LMN": {"learning_rate": 5e-3, "clip": 0.1, "epochs": 8000, "init": "leaky"},
    "MS-LMN": {"learning_rate": 5e-2, "clip": 0.1, "epochs": 8000},
}


def settings(model: str, preset: str, budget: int, epochs: int | None = None) -> Settings:
    """The paper's for "paper", ours for the others; ``epochs`` in place of what they say."""
    column = paper.GENERATION[model]
    i = paper.BUDGETS.index(budget)
    chosen = Settings(
        hidden=column.hidden[i],
        memory=None if column.memory is None else column.memory[i],
        modules=paper.GENERATION_MODULES if model in CLOCKED else 1,
        learning_rate=column.learning_rate,
        epochs=column.epochs,
    )
    if preset != "paper":
        chosen = replace(chosen, learn_initial_state=True, schedule="cosine", **OURS[model])
    return replace(chosen, epochs=epochs or chosen.epochs)


def tasks(
    out: Path,
    preset: str,
    *,
    models: tuple[str, ...] = MODELS,
    budgets: tuple[int, ...] | None = None,
    seed: int = 0,
    seeds: int | None = None,
    epochs: int | None = None,
    recording: str | Path | None = None,
    offset: float = 0.5,
) -> list[Task]:
    """All runs of the experiment, the longest first; their data are written to ``out``."""
    folder = out / NAME
    signal = audio.excerpt(recording, offset).astype(np.float32)
    source = "BWV 846, rendered" if recording is None else Path(recording).name
    data = store.keep(folder / "data.npz", {"target": signal, "name": np.array(f"{source}, at {offset:g} s")})
    found = []
    for budget in budgets or BUDGETS[preset]:
        for model in models:
            for s in range(seed, seed + (seeds or SEEDS[preset])):
                job = Job(NAME, preset, model, {"budget": budget}, s, settings(model, preset, budget, epochs))
                found.append(Task(job, train, data, folder / job.name, job.settings.checkpoints(CHECK)))
    return sorted(found, key=lambda task: -task.checkpoints)


def train(job: Job, data: Path, folder: Path, device: str | None) -> tuple[Record, Arrays]:
    stored = store.load(data)
    y = torch.from_numpy(stored["target"])[:, None]  # (T, 1)
    torch.manual_seed(derive(job.seed))
    model = build(job.model, job.settings, 0, 1, output="all", bias=False)
    draws = 1
    while not amplification(model, len(y)) <= EXPLODED and draws < DRAWS:  # NaN is no number to compare with
        model = build(job.model, job.settings, 0, 1, output="all", bias=False)
        draws += 1
    x = torch.zeros(len(y), int(model.encoder.input_size))  # type: ignore[arg-type]
    if job.settings.learn_initial_state:
        x[:1] = 1  # the LSTM's only: an impulse does for it what a learnt initial state does for the others
    plan = job.settings.plan(job.model, job.seed, CHECK)
    result = fit(model, [(x, y)], [(x, y)], NMSE(), folder, plan=plan, resume=True, progress=False, device=device)
    best = result.model.cpu().eval()
    with torch.no_grad():
        memory, _ = best.encoder(x)
        generated = best(x)[:, 0].numpy()
    arrays: dict[str, NDArray[Any]] = {
        "target": stored["target"],
        "generated": generated,
        "memory": memory.unflatten(-1, (best.num_modules, -1)).numpy(),
    }
    error = np.mean((generated - stored["target"]) ** 2) / np.var(stored["target"])
    return job.record(result, CHECK, str(stored["name"]), "NMSE", float(error), folder, draws=draws), arrays


@torch.no_grad()
def amplification(model: SequenceModel, T: int) -> float:
    """How many times larger a memory of ones can get in T steps.

    A linear memory with Xavier's random weights may explode, and then does so as soon as training begins.
    """
    encoder = model.encoder
    if not isinstance(encoder, ClockedLayer):
        return 1.0
    state = State(torch.ones(1, encoder.output_size), torch.tensor(0))
    return float(encoder(torch.zeros(T, encoder.input_size), state)[0].abs().max())
