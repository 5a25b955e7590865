"""Training, in one stage or growing from stage to stage, in a run folder that survives being killed.

A stage is an ordinary fit: Adam with L2 decay, clipped gradients, the best weights on validation restored at its end.
Between stages the model grows (growth.py). Order and noise of the data, and every other random number, depend on seed,
stage and epoch alone, and each epoch ends with a checkpoint, so a run that was killed ends like one that was not.
"""

import atexit
import csv
import gc
import hashlib
import io
import math
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence

from . import checkpoint, checks, clock, growth, packing
from .cells import widened
from .checkpoint import CheckpointError
from .data import buckets
from .layers import MSLMN
from .model import MemoryNorm, SequenceModel
from .objectives import Objective
from .step import Step
from .update import MOMENTS, Update

Pairs = Sequence[tuple[Any, Any]]  # (x (T, I), target) of each sequence
PARTING = 5.0  # seconds that a process waits for others when it ends
MIXED = 2**14  # numbers of mixtures that are drawn at once
LOOK = 15  # of 16 batches one at which the loss is looked at, on a GPU


class Diverged(RuntimeError):
    """The loss became NaN or infinite; the last good checkpoint is kept."""


@dataclass(frozen=True)
class Plan:
    """How to train. All of it is written to the run folder, and a run is resumed under the same plan only."""

    learning_rate: float = 1e-3
    weight_decay: float = 0.0  # L2, as Adam takes it
    clip: float = 1.0  # largest norm of the gradient
    average: float = 0.0  # d of an average of the weights, see update.py, which is what is validated and kept; 0: none
    contract: bool = False  # after each step, of an MSLMN: no module by itself may explode, see `MSLMN.contract`
    batch_size: int = 32
    noise: float = 0.0  # standard deviation of what is added to the inputs in training
    distort: float = 0.0  # training sequences are mixed, x_t (I + distort E), E ~ N(0, 1) drawn for each, in each pass
    balance: bool = False  # classes as evenly over the batches as they can be (targets are class numbers)
    buckets: bool = False  # batches of sequences that are about equally long; a batch takes as long as its longest
    passes: int = 1  # over the training data in an epoch; at its end are validation and checkpoint
    epochs: int = 50  # of a stage
    schedule: str = "constant"  # "cosine": the learning rate sinks to 0 within the epochs of each stage
    warmup: int = 0  # epochs of the first stage in which the learning rate rises to its value, batch by batch
    flat_start: int = 0  # epochs of the first stage that train for `Objective.first_loss`: of CTC, labels spread evenly
    select: str = "loss"  # which weights are better on validation; "metric": what one looks at, as CTC's accuracy
    patience: int = 50  # epochs without better weights, counted across stages, before all ends
    grow: str = "epochs"  # "epochs": after each stage's epochs; "plateau": when a stage no longer improves; "never"
    plateau: int = 10  # epochs without improvement that are a plateau
    max_modules: int | None = None  # as many as the longest sequence can use, if not given
    min_gain: float = 0.0  # by which a stage must be better than those before to be worth its module
    growth_patience: int = 1  # stages that are not worth it, one after the other, before growth ends
    first_module: str = "autoencoder"  # Algorithm 1 as printed; "given" trains the module as it is
    readout: str = "auto"  # of new modules, see `add_module`
    horizon: int | None = None  # of the autoencoder
    divergence: str = "raise"  # what a loss that is NaN or infinite does; "stop": the run ends with its best weights
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "clip"):
            checks.positive(name, getattr(self, name))
        for name in (
            "batch_size", "passes", "epochs", "patience", "plateau", "growth_patience", "max_modules", "horizon",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None or name not in ("max_modules", "horizon"):
                object.__setattr__(self, name, checks.size(name, value))
        for name in ("warmup", "flat_start"):
            object.__setattr__(self, name, checks.size(name, getattr(self, name), 0))
        for name in ("weight_decay", "noise", "distort", "min_gain"):
            checks.amount(name, getattr(self, name))
        checks.amount("average", self.average, below=1)
        for name in ("balance", "buckets", "contract"):
            object.__setattr__(self, name, checks.flag(name, getattr(self, name)))
        if self.flat_start >= self.epochs:
            raise ValueError(
                f"flat_start must be below epochs, {self.epochs}, got {self.flat_start}; train for the loss in the end"
            )
        if self.balance and self.buckets:
            raise ValueError("batches are balanced by class or bucketed by length, got both; leave one out")
        checks.choice("schedule", self.schedule, ("constant", "cosine"))
        checks.choice("grow", self.grow, ("epochs", "plateau", "never"))
        checks.choice("first_module", self.first_module, ("autoencoder", "given"))
        checks.choice("select", self.select, ("loss", "metric"))
        checks.choice("readout", self.readout, ("auto", "zeros"))
        checks.choice("divergence", self.divergence, ("raise", "stop"))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Plan":
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"a plan has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        return cls(**values)


@dataclass
class Progress:
    """Where a run stands: all that is not a tensor."""

    stage: int = 0
    epoch: int = 0  # epochs of this stage that are done
    phase: str = "train"  # "grow": the stage is over; "done": the run is
    best: dict[str, Any] = field(default_factory=dict)  # stage, epoch, loss, metric, modules of the best weights
    stage_best: dict[str, float] = field(default_factory=dict)  # their loss and metric
    since_best: int = 0  # epochs
    since_stage_best: int = 0
    epochs: int = 0  # of all stages; metrics.csv has a line for each
    stages: list[dict[str, Any]] = field(default_factory=list)
    reason: str = ""  # why the run ended


@dataclass(frozen=True)
class Result:
    """What a run found."""

    model: SequenceModel  # with the best weights on validation
    history: list[dict[str, Any]]  # one entry per epoch
    stages: list[dict[str, Any]]  # one entry per stage, with its GrowthReport
    best: dict[str, Any]
    reason: str


def fit(
    model: SequenceModel,
    train: Pairs,
    validation: Pairs,
    objective: Objective,
    folder: str | Path | None = None,
    *,
    plan: Plan | None = None,
    resume: bool = False,
    progress: bool = True,
    device: torch.device | str | None = None,
) -> Result:
    """Train a model, growing it from stage to stage as ``plan`` says.

    Args:
        model: grows, in place, if its encoder is an `MSLMN`; the best one is in the result.
        train, validation: ``(x, target)`` of each sequence; x is (T, I).
        objective: one of mslmn.objectives.
        folder: for checkpoints, metrics.csv, TensorBoard logs, the model of each stage and the best one.
        resume: go on with the run in ``folder``; without one there, start it.
        progress: show bars and a line for each stage.
        device: a GPU if there is one, by default.

    Under ``torchrun`` each process takes its part of each batch, and the result is that of one process, to rounding,
    but for dropout, and on GPUs noise, which draw their own numbers in each.
    """
    plan = plan or Plan()
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            return _Run(model, train, validation, objective, Path(temporary), plan, progress, device, True).go(False)
    return _Run(model, train, validation, objective, Path(folder), plan, progress, device, False).go(resume)


class _Run:
    """The stages, one after the other."""

    def __init__(
        self,
        model: SequenceModel,
        train: Pairs,
        validation: Pairs,
        objective: Objective,
        folder: Path,
        plan: Plan,
        progress: bool,
        device: torch.device | str | None,
        temporary: bool,
    ) -> None:
        if not isinstance(model, SequenceModel):
            raise TypeError(f"fit trains a SequenceModel, got {type(model).__name__}; wrap your encoder in one")
        if not len(train) or not len(validation):
            raise ValueError(f"there are {len(train)} training and {len(validation)} validation sequences; pass some")
        if plan.balance and any(torch.as_tensor(target).dim() for _, target in train):
            raise ValueError("balance needs a class number for each training sequence, got other targets; leave it out")
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError("no weight of the model requires a gradient, so none can be trained; requires_grad_(True)")
        self.model, self.objective, self.folder, self.plan = model, objective, folder, plan
        if self._grows and isinstance(model.norm, MemoryNorm):  # not after a whole stage
            raise ValueError(
                "norm='layer' normalises all modules together, so the model cannot grow; build it with norm='prefix' "
                "or 'module', or train it under Plan(grow='never')"
            )
        if self._grows and isinstance(model.encoder, MSLMN) and model.encoder._cannot_grow:
            raise ValueError(f"{model.encoder._cannot_grow}, or train the model under Plan(grow='never')")
        _connect(device)
        self.rank = distributed.get_rank() if _connected() else 0
        self.world = distributed.get_world_size() if _connected() else 1
        self.device = _device(device)
        self.temporary = temporary
        self.writes = self.rank == 0 or temporary  # each process has its own temporary folder
        self.show = progress and self.rank == 0
        self.train = _Data("training", train, objective, self.device, plan.buckets)
        self.validation = _Data("validation", validation, objective, self.device, plan.buckets)
        self.moments: dict[str, dict[str, Tensor]] = {}
        self.averages: dict[str, Tensor] = {}  # of the weights
        self.best: tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]] = ({}, {})
        self.state = Progress()
        self.history: list[dict[str, Any]] = []
        self.written = 0  # lines of metrics.csv

    def go(self, resume: bool) -> Result:
        gpus = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(gpus):  # the caller's random numbers go on
            return self._go(resume)

    def _go(self, resume: bool) -> Result:
        there = (self.folder / "run.json").exists()
        if there and not resume:
            raise ValueError(f"{self.folder} has a run already; pass resume=True to go on with it, or another folder")
        self.model.to(self.device)
        if there:
            self._resume()
        else:
            self.objective.prepare(self.train.batches(self.plan.batch_size))
            self._begin()
        while self.state.phase != "done":
            if self.state.phase == "train":
                try:
                    self._train_stage()
                except Diverged as error:
                    if self.plan.divergence == "raise":
                        raise
                    self.state.reason = str(error)
            self._end_stage()
        return self._result()

    def _begin(self) -> None:
        report = None
        if self._grows and self.plan.first_module == "autoencoder" and self.model.num_modules == 1:
            self._seed(-1)
            report = growth.initialise(
                self.model,
                self._my_train(),
                self.objective,
                readout=self.plan.readout,
                horizon=self.plan.horizon,
            )
        self._open_stage(report)
        self._save()

    def _open_stage(self, report: growth.GrowthReport | None) -> None:
        state = self.state
        state.epoch, state.phase, state.stage_best, state.since_stage_best = 0, "train", {}, 0
        state.stages.append(
            {
                "stage": state.stage,
                "modules": self.model.num_modules,
                "parameters": sum(p.numel() for p in self.model.parameters()),
                "seconds": 0.0,
                "growth": None if report is None else report.as_dict(),
            }
        )
        self._compare(*self._validate())  # what growth found may be better than what training makes of it

    def _validate(self) -> tuple[float, float]:
        batches = self.validation.batches(self.plan.batch_size, self.rank, self.world)
        loss, metric = growth.means(self.model, batches, self.objective.loss, self.objective.metric)
        if not math.isfinite(loss):
            self.diverged(f"the validation loss is {loss}")
        if self.plan.select == "metric" and not math.isfinite(metric):
            self.diverged(f"the validation {self.objective.metric_name} is {metric}")
        return loss, metric

    def _compare(self, loss: float, metric: float) -> None:
        """Keep the weights if they are the best of the stage, or of all."""
        state, found = self.state, {"loss": loss, "metric": metric}
        if self._order(found) < self._order(state.stage_best):
            state.stage_best, state.since_stage_best = found, 0
            self.best = (_copy(self.model.state_dict()), {n: _copy(m) for n, m in self.moments.items()})
        if self._order(found) < self._order(state.best):
            state.best = {"stage": state.stage, "epoch": state.epoch, **found, "modules": self.model.num_modules}
            state.since_best = 0

    def _order(self, found: dict[str, Any]) -> tuple[float, float]:
        """What is better comes first; of equal metrics, the lower loss."""
        return (self._cost(found), found["loss"]) if found else (math.inf, math.inf)

    def _cost(self, found: dict[str, Any]) -> float:
        """By which weights are compared."""
        if self.plan.select == "loss":
            return float(found["loss"])
        return -float(found["metric"]) if self.objective.higher_is_better else float(found["metric"])

    def _train_stage(self) -> None:
        step = self._step()
        loader = _EpochLoader(self)
        self.model.train()
        # A backward pass in this thread, not in another that has to wake up first, unless processes work together
        with self._log() as log, _bar(self.show) as bar, torch.autograd.set_multithreading_enabled(self.world > 1):
            while self.state.phase == "train":
                self._train_epoch(step, bar(loader, self._doing))
                log(self.history[-1])

    def _step(self) -> Step:
        return Step(
            DistributedDataParallel(self.model) if self.world > 1 else self.model,
            self.objective,
            self._update(),
            noise=self.plan.noise,
            world=self.world,
            longest=self.train.longest,
        )

    def _update(self) -> Update:
        plan = self.plan
        return Update(
            self.model,
            self.moments,
            learning_rate=plan.learning_rate,
            weight_decay=plan.weight_decay,
            clip=plan.clip,
            contract=plan.contract,
            average=plan.average,
            averages=self.averages,
            batches=self.state.epoch * len(_EpochLoader(self)),
            alone=self.world == 1,
            own=type(self.model) is SequenceModel
            and type(self.model.encoder).__module__ == MSLMN.__module__
            and type(self.objective).__module__ == Objective.__module__,
        )

    def _train_epoch(self, step: Step, batches: Iterable[tuple[Any, Any, float]]) -> None:
        self._seed(self.state.epoch)
        began = time.perf_counter()
        flat = self._starts_flat(self.state.epoch)
        step.begin()
        for number, (input, target, weight) in enumerate(batches):
            step(input, target, rate=self._learning_rate(number), weight=weight, flat=flat)
            if self.device.type == "cpu" or number & LOOK == LOOK:  # to look is to wait for the GPU
                self._check(step.total)
        self._check(step.total)
        self.moments, self.averages = step.update.moments, step.update.averages
        self.epoch_done((step.total[0] / step.total[1]).item(), time.perf_counter() - began)

    def _starts_flat(self, epoch: int) -> bool:
        return self.state.stage == 0 and epoch < self.plan.flat_start

    def _check(self, total: Tensor) -> None:
        """The loss of the epoch so far."""
        loss, items = total.tolist()
        if not (math.isfinite(loss) and math.isfinite(items)):
            self.diverged(f"the loss is {loss} of {items:g} items")

    def _learning_rate(self, batch: int) -> float:
        """Of a batch of the current epoch."""
        plan, epoch = self.plan, self.state.epoch
        rate = plan.learning_rate
        if plan.schedule == "cosine":
            rate *= (1 + math.cos(math.pi * epoch / plan.epochs)) / 2
        if self.state.stage == 0 and epoch < plan.warmup:
            count = len(_EpochLoader(self))
            rate *= (epoch * count + batch + 1) / (plan.warmup * count)
        return rate

    @property
    def _doing(self) -> str:
        state = self.state
        return f"stage {state.stage}, {self.model.num_modules} modules, epoch {state.epoch + 1}/{self.plan.epochs}"

    @contextmanager
    def _log(self) -> Iterator[Callable[[dict[str, Any]], None]]:
        """To TensorBoard, if it is installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            yield lambda record: None
            return
        if not self.writes or self.temporary:
            yield lambda record: None
            return
        with SummaryWriter(self.folder / "tensorboard" / f"stage-{self.state.stage}") as writer:

            def log(record: dict[str, Any]) -> None:
                for name, value in record.items():
                    if name not in ("stage", "epoch", "modules"):
                        writer.add_scalar(name, value, record["epoch"])

            yield log

    def epoch_done(self, train_loss: float, seconds: float) -> None:
        """Validate, remember the best, write the checkpoint; decides whether the stage is over."""
        state = self.state
        with self._averaged():
            loss, metric = self._validate()
            state.epoch += 1
            if not self._starts_flat(state.epoch - 1):  # validation does not ask yet for what is trained
                state.since_best += 1
                state.since_stage_best += 1
            self._compare(loss, metric)
        record = {
            "stage": state.stage,
            "epoch": state.epoch,
            "modules": self.model.num_modules,
            "train_loss": train_loss,
            "validation_loss": loss,
            self.objective.metric_name.replace(" ", "_"): metric,
        }
        self.history.append(record)
        state.epochs += 1
        state.stages[-1]["seconds"] += seconds
        plateau = self.plan.grow == "plateau" and state.since_stage_best >= self.plan.plateau
        if state.epoch >= self.plan.epochs or plateau or state.since_best >= self.plan.patience:
            state.phase = "grow"
        self._save()

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Within the block the model has the average of its weights, where there is one."""
        named = dict(self.model.named_parameters())
        parameters = [named[name].detach() for name in self.averages]
        own = [p.clone() for p in parameters]
        for p, average in zip(parameters, self.averages.values(), strict=True):
            p.copy_(average)
        try:
            yield
        finally:
            for p, weight in zip(parameters, own, strict=True):
                p.copy_(weight)

    def _end_stage(self) -> None:
        """The best weights of the stage are restored, with the moments of that epoch; then growth, or the end."""
        state = self.state
        weights, moments = self.best
        self.model.load_state_dict(weights)
        self.moments, self.averages = {n: _copy(m) for n, m in moments.items()}, {}
        summary = state.stages[-1]
        summary["validation_loss"], summary["validation_metric"] = (state.stage_best[k] for k in ("loss", "metric"))
        if self.writes:
            checkpoint.save(self.model, self.folder / f"stage-{state.stage}")
        self._say(summary)
        reason = self._reason_to_end()
        if reason:
            state.phase, state.reason = "done", reason
        else:
            old = {name: p.shape for name, p in self.model.named_parameters()}
            self._seed(-1)
            report = growth.add_module(
                self.model,
                self._my_train(),
                self.objective,
                readout=self.plan.readout,
                horizon=self.plan.horizon,
                random_state=self.plan.seed,
            )
            self._carry(old)
            state.stage += 1
            self._open_stage(report)
        self._save()

    def _reason_to_end(self) -> str:
        state, plan = self.state, self.plan
        if state.reason:  # it diverged
            return state.reason
        if not self._grows:
            return "trained"
        if state.since_best >= plan.patience:
            what = "loss" if plan.select == "loss" else self.objective.metric_name
            return f"no better validation {what} for {plan.patience} epochs"
        found = [self._order({k: stage[f"validation_{k}"] for k in ("loss", "metric")}) for stage in state.stages]
        worth = [
            i
            for i, (cost, loss) in enumerate(found)
            if i == 0 or (cost + plan.min_gain, 0 if plan.min_gain else loss) < min(found[:i])
        ]
        if len(found) - 1 - worth[-1] >= plan.growth_patience:
            what = "loss was not lowered" if plan.select == "loss" else f"{self.objective.metric_name} was not bettered"
            return f"the validation {what} beyond {state.stages[worth[-1]]['modules']} modules"
        if self.model.num_modules >= self._most:
            return f"{self._most} modules, as many as planned or as {self.train.longest} steps can use"
        return ""

    @property
    def _most(self) -> int:
        """Modules."""
        return min(self.plan.max_modules or clock.MAX_MODULES, clock.num_modules(self.train.longest))

    @property
    def _grows(self) -> bool:
        return self.plan.grow != "never" and type(self.model.encoder) is MSLMN

    def _carry(self, old: dict[str, torch.Size]) -> None:
        """Adam's moments of the old weights, with zeros for the new inputs of upper layers."""
        encoder = cast(MSLMN, self.model.encoder)
        for name, parameter in self.model.named_parameters():
            if name in self.moments and parameter.shape != old[name]:  # without, no epoch was better than none
                moments = self.moments[name]
                for kind in MOMENTS[1:]:
                    moments[kind] = widened(moments[kind], encoder.num_directions, encoder.memory_size)

    def _my_train(self) -> "_Batches":
        """The training data of this process, in order, without noise."""
        return self.train.batches(self.plan.batch_size, self.rank, self.world)

    def _seed(self, epoch: int) -> None:
        """Of an epoch, in which each process drops other values; of growth, epoch -1, which is the same in all."""
        own = [self.rank] if self.rank and epoch >= 0 else []
        torch.manual_seed(derive(self.plan.seed, self.state.stage, epoch, *own))

    def _result(self) -> Result:
        state = self.state
        best = self.model
        if state.best["stage"] != state.stage:  # growth went one stage too far
            if _connected():
                distributed.barrier()
            best = checkpoint.load(self.folder / f"stage-{state.best['stage']}", self.device)
        if self.writes:
            checkpoint.save(best, self.folder / "best")
        return Result(best, self.history, state.stages, state.best, state.reason)

    def diverged(self, what: str) -> None:
        kept = not self.temporary and (self.folder / "run.json").exists()
        raise Diverged(
            f"{what} in epoch {self.state.epoch + 1} of stage {self.state.stage}; "
            + (f"the checkpoint of the epoch before is in {self.folder}. Lower " if kept else "lower ")
            + "learning_rate or clip, or look for extreme values in the data"
        )

    # the run folder

    def _save(self) -> None:
        if self.writes:
            tensors = {f"model/{name}": value for name, value in self.model.state_dict().items()}
            tensors |= {f"best/{name}": value for name, value in self.best[0].items()}
            tensors |= {f"average/{name}": value for name, value in self.averages.items()}
            for label, moments in (("adam", self.moments), ("best_adam", self.best[1])):
                tensors |= {f"{label}/{name}/{kind}": v for name, m in moments.items() for kind, v in m.items()}
            layout, tensors = checkpoint.joined(tensors)
            content = {
                "plan": asdict(self.plan),
                "objective": self._objective(),
                "model": checkpoint.describe(self.model),
                "progress": asdict(self.state),
                "layout": layout,
            }
            self._write_metrics()
            checkpoint.write(self.folder, "run", content, tensors, indent=None)
        if _connected():
            distributed.barrier()

    def _write_metrics(self) -> None:
        """Append the new lines; should the process die before the checkpoint, resuming cuts them off."""
        file = self.folder / "metrics.csv"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self.written:
                checkpoint.write_text(file, _csv(self.history))
            else:
                with file.open("a") as lines:
                    lines.write(_csv(self.history[self.written :], header=False))
        except OSError as error:
            raise CheckpointError(f"cannot write {file}: {error}; make room, or choose another folder") from error
        self.written = len(self.history)

    def _read_metrics(self) -> None:
        file = self.folder / "metrics.csv"
        whole = ("stage", "epoch", "modules")
        try:
            with file.open() as lines:
                rows = [row for row, _ in zip(csv.DictReader(lines), range(self.state.epochs), strict=False)]
            self.history = [{k: int(v) if k in whole else float(v) for k, v in row.items()} for row in rows]
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"cannot read {file} ({error}); it was changed or damaged") from error
        if len(self.history) != self.state.epochs:
            raise CheckpointError(
                f"{file} has {len(self.history)} epochs, the checkpoint {self.state.epochs}; it was changed or damaged"
            )
        if self.writes:
            self._write_metrics()

    def _resume(self) -> None:
        content, tensors = checkpoint.read(self.folder, "run", self.device)
        if _connected():
            distributed.barrier()  # no process writes before all have read
        file = self.folder / "run.json"
        tensors = checkpoint.separated(content.get("layout"), tensors, file)
        try:
            then, state = Plan.from_dict(content["plan"]), Progress(**content["progress"])
            if not isinstance(state.stage_best, dict):
                raise ValueError(f"stage_best is {state.stage_best!r}, not a loss and a metric")
            found, trained_for = content["model"], content["objective"]
            self.objective.restore(trained_for["config"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{file}: {error}; it was changed, or is of another version") from error
        if then != self.plan:
            changed = [f.name for f in fields(Plan) if getattr(then, f.name) != getattr(self.plan, f.name)]
            raise ValueError(
                f"the run in {self.folder} was planned with other values of {', '.join(changed)}; "
                "resume it under the same plan, or start another in a new folder"
            )
        if trained_for != self._objective():
            raise ValueError(
                f"the run in {self.folder} was for {trained_for}, not {self._objective()}; pass the same objective"
            )
        mine = checkpoint.describe(self.model)
        if _without_modules(mine) != _without_modules(found):
            raise CheckpointError(f"{file}: the run is of another architecture, {found}; build the model it began with")
        while self.model.num_modules < found["encoder"]["config"].get("num_modules", 1):
            like, encoder = next(self.model.parameters()), cast(MSLMN, self.model.encoder)
            cells = len(encoder.cells)
            A = like.new_zeros(encoder.memory_size, encoder.hidden_size)
            B = like.new_zeros(encoder.memory_size, encoder.memory_size)
            self.model.grow([A] * cells, [B] * cells)
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "best": {}, "average": {}, "adam": {}, "best_adam": {}}
        for key, value in tensors.items():
            part, _, name = key.partition("/")
            if part not in parts:
                raise CheckpointError(f"{file}: a run has no tensor {key}; it was changed, or is of another version")
            parts[part][name] = value
        for part in ("best", "model"):  # both must fit
            checkpoint.fill(self.model, parts[part], file)
        self.best = (parts["best"], _nested(parts["best_adam"]))
        self.moments, self.state = _nested(parts["adam"]), state
        shapes = {name: p.shape for name, p in self.model.named_parameters()}
        for name, moments in [*self.moments.items(), *self.best[1].items()]:
            wrong = name not in shapes or set(moments) != set(MOMENTS)
            if wrong or any(moments[kind].shape != shapes[name] for kind in MOMENTS[1:]):
                raise CheckpointError(f"{file}: the moments of {name} do not fit the model; the files were changed")
        self.averages = parts["average"]
        trained = {name: p.shape for name, p in self.model.named_parameters() if p.requires_grad}
        expected = trained if self.plan.average and state.phase != "done" and state.epoch else {}
        if {name: value.shape for name, value in self.averages.items()} != expected:
            raise CheckpointError(
                f"{file}: the average of the weights does not fit those that are trained; "
                "train the same ones as before, or the files were changed"
            )
        self._read_metrics()

    def _objective(self) -> dict[str, Any]:
        return {"class": type(self.objective).__name__, "config": self.objective.config}

    def _say(self, stage: dict[str, Any]) -> None:
        if not self.show:
            return
        from rich.console import Console

        grown = stage["growth"]
        by = f", loss {grown['loss_before']:.4g} -> {grown['loss_after']:.4g} by growth" if grown else ""
        Console().print(
            f"stage {stage['stage']}: {stage['modules']} modules, {stage['parameters']:,} parameters{by}, "
            f"validation loss {stage['validation_loss']:.4g}, {self.state.epoch} epochs, {stage['seconds']:.1f} s",
            soft_wrap=True,  # one line
        )


@contextmanager
def _bar(show: bool) -> Iterator[Callable[["_EpochLoader", str], Iterable[tuple[Any, Any, float]]]]:
    """A function that shows how far an epoch is, while its batches are iterated."""
    if not show:
        yield lambda loader, doing: loader
        return
    from rich.progress import Progress as Bars

    with Bars(transient=True) as bars:
        task = bars.add_task("")

        def follow(loader: "_EpochLoader", doing: str) -> Iterable[tuple[Any, Any, float]]:
            bars.reset(task, total=len(loader), description=doing)
            return bars.track(loader, len(loader), task)

        yield follow


class _Data:
    """Sequences with their targets, and batches of them."""

    def __init__(
        self, name: str, pairs: Pairs, objective: Objective, device: torch.device, by_length: bool = False
    ) -> None:
        self.pairs, self.objective, self.device, self.by_length = pairs, objective, device, by_length
        self.lengths = [len(_checked(name, i, pairs[i][0])) for i in range(len(pairs))]
        self.longest = max(self.lengths)

    def batches(self, size: int, rank: int = 0, world: int = 1) -> "_Batches":
        order = list(range(len(self.pairs)))
        indices = (sorted(order, key=self.lengths.__getitem__) if self.by_length else order)[rank::world]
        return _Batches(self, [indices[i : i + size] for i in range(0, len(indices), size)])

    def collate(
        self, indices: Sequence[int], change: Callable[[int, Tensor], Tensor] | None = None
    ) -> tuple[PackedSequence, Any]:
        indices = sorted(indices, key=self.lengths.__getitem__, reverse=True)  # as a packed batch has them
        xs = [torch.as_tensor(self.pairs[i][0]) for i in indices]
        if change is not None:
            xs = [change(i, x) for i, x in zip(indices, xs, strict=True)]
        target = self.objective.collate([self.pairs[i][1] for i in indices])
        return self._there(packing.pack(xs)), target if self.objective.on_cpu else self._there(target)

    def _there(self, batch: Any) -> Any:
        """On the device, without waiting for it."""
        if isinstance(batch, list):
            return [self._there(one) for one in batch]
        if isinstance(batch, PackedSequence) and batch.sorted_indices is None:
            return PackedSequence(packing.to_device(batch.data, self.device), *batch[1:])
        return packing.to_device(batch, self.device) if isinstance(batch, Tensor) else batch.to(self.device)


def _checked(name: str, index: int, x: Any) -> Tensor:
    """A sequence that can be trained on, or an error that names it."""
    tensor = torch.as_tensor(x)
    if tensor.dim() != 2 or not len(tensor):
        raise ValueError(
            f"{name} sequence {index} must be (T, input_size) with at least one step, got {tuple(tensor.shape)}; "
            "add the missing dimension, or drop it"
        )
    if not torch.isfinite(tensor).all():
        step, feature = (~torch.isfinite(tensor)).nonzero()[0].tolist()
        raise ValueError(
            f"{name} sequence {index} has {tensor[step, feature].item()} at step {step}, feature {feature}; "
            "drop the sequence, or fill the gap"
        )
    return tensor


class _Batches:
    """Batches in order, as often as they are iterated."""

    def __init__(self, data: _Data, indices: list[list[int]]) -> None:
        self.data, self.indices = data, indices

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return (self.data.collate(batch) for batch in self.indices)


class _EpochLoader:
    """The batches of an epoch in an order, and with a noise, that depend on seed, stage and epoch alone.

    Each process takes its part of each batch; one that gets none takes a sequence with weight zero.
    """

    def __init__(self, run: _Run) -> None:
        self.run = run

    def __len__(self) -> int:
        return -(-len(self.run.train.pairs) // self.run.plan.batch_size) * self.run.plan.passes

    def __iter__(self) -> Iterator[tuple[Any, Any, float]]:
        plan, state = self.run.plan, self.run.state
        for number in range(plan.passes):
            seed = derive(plan.seed, state.stage, state.epoch, *([number] if number else []))
            yield from self._pass(seed)

    def _pass(self, seed: int) -> Iterator[tuple[Any, Any, float]]:
        run = self.run
        change = self._change(seed)
        for batch in self._cut(torch.Generator().manual_seed(seed)):
            mine = batch[run.rank :: run.world]
            input, target = run.train.collate(mine or batch[:1], change)
            yield input, target, float(bool(mine))

    def _change(self, seed: int) -> Callable[[int, Tensor], Tensor] | None:
        """What is done to a sequence, by its index: the same whichever process and batch it is in."""
        plan = self.run.plan
        noise = plan.noise if self.run.device.type == "cpu" else 0.0  # a GPU draws it itself
        if not noise and not plan.distort:
            return None

        I = torch.as_tensor(self.run.train.pairs[0][0]).shape[1]
        mixture = _mixtures(I, plan.distort, seed) if plan.distort else None

        def change(i: int, x: Tensor) -> Tensor:
            if mixture is not None:
                x = x @ mixture(i).to(x)
            return x + noise * _normal(x, seed, i) if noise else x

        return change

    def _cut(self, generator: torch.Generator) -> list[list[int]]:
        size = self.run.plan.batch_size
        if self.run.plan.buckets:
            return buckets.batches(self.run.train.lengths, size, generator)
        order = self._order(generator)
        return [order[start : start + size] for start in range(0, len(order), size)]

    def _order(self, generator: torch.Generator) -> list[int]:
        """At random; balanced: of each class the first at random, then the second, and so on."""
        pairs = self.run.train.pairs
        order: list[int] = torch.randperm(len(pairs), generator=generator).tolist()
        if not self.run.plan.balance:
            return order
        rank, seen = {}, Counter[int]()
        for i in order:
            label = int(pairs[i][1])
            rank[i] = seen[label]
            seen[label] += 1
        return sorted(order, key=rank.__getitem__)


def _mixtures(I: int, distort: float, seed: int) -> Callable[[int], Tensor]:
    """I + distort E of each sequence, drawn for as many at once as are not large: one by one takes longer than a small
    network's step."""
    most = max(1, MIXED // I**2)

    @lru_cache(maxsize=256)
    def drawn(block: int) -> Sequence[Tensor]:
        generator = torch.Generator().manual_seed(derive(seed, "distort", block))
        return (torch.eye(I) + distort * torch.randn(most, I, I, generator=generator)).unbind()

    return lambda i: drawn(i // most)[i - i // most * most]


def _normal(x: Tensor, seed: int, index: int) -> Tensor:
    """Random numbers of a sequence, the same whichever process and batch it is in."""
    generator = torch.Generator().manual_seed(derive(seed, index))
    return torch.randn(x.shape, generator=generator, dtype=x.dtype)


def derive(*parts: int | str) -> int:
    """A seed from several numbers or words, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")


def _connect(wish: torch.device | str | None) -> None:
    """Join the other processes, if torchrun started several."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not _connected():
        gpu = torch.cuda.is_available() if wish is None else torch.device(wish).type == "cuda"
        if gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("nccl" if gpu else "gloo")
        atexit.register(_disconnect)


def _disconnect() -> None:
    """Before Python ends: a thread of gloo that still lets go of its last task would abort the process. Threads end
    with the group, and the group with all that refers to it; but not those that wait for a process that is gone."""

    def leave() -> None:
        distributed.destroy_process_group()
        gc.collect()

    if _connected():
        leaving = threading.Thread(target=leave, daemon=True)
        leaving.start()
        leaving.join(PARTING)


def _connected() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _device(wish: torch.device | str | None) -> torch.device:
    if wish is not None and torch.device(wish) != torch.device("cuda"):
        return torch.device(wish)
    if wish is not None or torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in tensors.items()}


def _nested(flat: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """``name/kind`` -> name -> kind."""
    nested: dict[str, dict[str, Tensor]] = {}
    for key, value in flat.items():
        name, kind = key.rsplit("/", 1)
        nested.setdefault(name, {})[kind] = value
    return nested


def _without_modules(description: dict[str, Any]) -> dict[str, Any]:
    encoder = description["encoder"]
    config = {"layer_norm": False, "pool": 1, **encoder["config"]}  # runs from before they were there, as the next
    config.pop("num_modules", None)
    whole = {"dropout": 0.0, **description["config"]}
    return {**description, "config": whole, "encoder": {**encoder, "config": config}}


def _csv(history: list[dict[str, Any]], header: bool = True) -> str:
    text = io.StringIO()
    if history:
        writer = csv.DictWriter(text, list(history[0]), lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows(history)
    return text.getvalue()
