"""Runs, in parallel on the cores there are. Each leaves a result in its folder; one that has it is not run again.

Each run writes checkpoints (training.py), so whatever stops the program, a crash or Ctrl-C, what was done is kept.
"""

import csv
import io
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..training import Result
from . import records
from .models import Settings
from .records import Record

Arrays = dict[str, NDArray[Any]]
POLL = 0.5  # seconds


@dataclass(frozen=True)
class Job:
    """A model to be trained once."""

    experiment: str
    preset: str
    model: str
    case: dict[str, int]
    seed: int
    settings: Settings

    @property
    def name(self) -> str:
        """Of its folder."""
        case = "-".join(f"{key}{value}" for key, value in self.case.items())
        return f"{self.model.lower().replace(' ', '-')}-{case}-seed{self.seed}"

    def record(
        self, result: Result, passes: int, data: str, metric: str, value: float, folder: Path, **settings: Any
    ) -> Record:
        """What came of it; ``passes`` as in the plan."""
        passes = self.settings.passes(passes)
        return Record(
            experiment=self.experiment,
            preset=self.preset,
            data=data,
            model=self.model,
            case=self.case,
            seed=self.seed,
            sizes=self.settings.sizes(self.model),
            parameters=sum(p.numel() for p in result.model.parameters()),
            settings=self.settings.as_dict() | settings,
            epochs=len(result.history) * passes,
            seconds=sum(stage["seconds"] for stage in result.stages),
            metric=metric,
            value=value,
            history=[
                {**{k: v for k, v in row.items() if k != "stage"}, "epoch": (i + 1) * passes}
                for i, row in enumerate(result.history)
            ],
            reason=result.reason,
            folder=folder,
        )


@dataclass(frozen=True)
class Task:
    """A job, what does it, and on what."""

    job: Job
    train: Callable[[Job, Path, Path, str | None], tuple[Record, Arrays]]  # job, data, folder, device
    data: Path
    folder: Path
    checkpoints: int  # at most, for the progress bar

    @property
    def done(self) -> bool:
        return (self.folder / records.RESULT).exists()


def execute(
    tasks: Sequence[Task],
    *,
    processes: int | None = None,
    device: str | None = None,
    console: Console | None = None,
    follow: bool = False,
) -> list[tuple[Task, str]]:
    """Do what is not done yet; those that failed, and why. ``follow``: a line for every epoch, as it ends.

    How many threads a run has does not depend on what is done already: numbers of threads may round differently.
    """
    for task in tasks:
        _check_same(task)
    todo = [task for task in tasks if not task.done]
    processes = max(1, min(processes or cores(), len(tasks)))
    before = torch.get_num_threads()
    threads = max(1, before // processes)
    with _progress(tasks, console or Console(), follow):
        if min(processes, len(todo)) > 1:
            return list(_in_parallel(todo, min(processes, len(todo)), threads, device))
        torch.set_num_threads(threads)
        try:
            return [(task, error) for task in todo if (error := _work(task, device))]
        finally:
            torch.set_num_threads(before)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def deaf() -> Iterator[None]:
    """Processes that are started in here never hear Ctrl-C, not even while they start: it is for their parent."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _check_same(task: Task) -> None:
    """A result that is there must be of this job."""
    if not task.done:
        return
    found, job = records.read(task.folder), task.job
    defaults = {field.name: field.default for field in fields(Settings)}  # of what came later than the result
    settings = {key: found.settings.get(key, defaults[key]) for key in job.settings.as_dict()}
    if (found.preset, found.model, settings) != (job.preset, job.model, job.settings.as_dict()):
        raise ValueError(
            f"{task.folder} has a result of preset {found.preset!r} with other settings; choose another --out"
        )


def _in_parallel(todo: list[Task], processes: int, threads: int, device: str | None) -> Iterator[tuple[Task, str]]:
    context = multiprocessing.get_context("spawn")
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(processes, context, torch.set_num_threads, (threads,)) as pool:
        with deaf():
            futures: dict[Future[str], Task] = {pool.submit(_work, task, device): task for task in todo}
        try:
            for future in as_completed(futures):
                try:
                    error = future.result()
                except BrokenProcessPool:
                    error = "its process was killed, for want of memory perhaps; try fewer --jobs, and --resume"
                if error:
                    yield futures[future], error
        except BaseException:  # Ctrl-C, above all: what runs has its checkpoints
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                if process not in others:
                    process.kill()
            raise


def _work(task: Task, device: str | None) -> str:
    """Train and write the result; what went wrong, or nothing."""
    try:
        record, arrays = task.train(task.job, task.data, task.folder, device)
        records.write(record, arrays)
    except Exception as error:  # of one run: the others go on, and it is told at the end
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def _progress(tasks: Sequence[Task], console: Console, follow: bool) -> Iterator[None]:
    """A bar that follows the checkpoints of all runs."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("runs"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    stop = threading.Event()
    with Progress(*columns, console=console, transient=True) as bar:
        experiments = {
            name: [t for t in tasks if t.job.experiment == name]
            for name in dict.fromkeys(t.job.experiment for t in tasks)
        }
        rows = {name: bar.add_task(name, total=len(mine)) for name, mine in experiments.items()}
        told = {task.folder: len(_metrics(task)) for task in tasks}

        def tell() -> None:
            for name, mine in experiments.items():
                bar.update(rows[name], completed=sum(map(_part, mine)))
            for task in tasks if follow else ():
                found = _metrics(task)
                for row in found[told[task.folder] :]:
                    bar.console.print(f"{task.folder.name}: {_epoch(row)}", markup=False, highlight=False)
                told[task.folder] = len(found)

        def watch() -> None:
            while not stop.wait(POLL):
                tell()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            tell()


def _part(task: Task) -> float:
    """Of a run that is done."""
    return 1.0 if task.done else min(1.0, len(_metrics(task)) / task.checkpoints)


def _metrics(task: Task) -> list[dict[str, str]]:
    """What the run has written down so far, a row for each checkpoint; a last line that is not whole is left out."""
    try:
        text = (task.folder / "metrics.csv").read_text()
    except OSError:
        return []
    return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))


def _epoch(row: dict[str, str]) -> str:
    """A row of metrics.csv on one line."""
    whole = ("stage", "epoch", "modules")
    return ", ".join(
        f"{name.replace('_', ' ')} {value if name in whole else f'{float(value):.4g}'}" for name, value in row.items()
    )
