"""Runs grow, stop, survive being killed, and come out the same in several processes."""

import csv
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from mslmn import MSLMN, SequenceModel, checkpoint, growth, training
from mslmn.checkpoint import CheckpointError
from mslmn.objectives import CTC, NMSE, CrossEntropy
from mslmn.training import Diverged, Plan, fit
from mslmn.update import Update

QUICK = {"epochs": 3, "batch_size": 8, "learning_rate": 1e-2, "noise": 0.1}


def pairs(n, seed=0, lengths=(12, 33)):
    """Which sign had the first number?"""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(n):
        x = torch.randn(int(torch.randint(*lengths, (1,), generator=generator)), 2, generator=generator)
        result.append((x, (x[0, 0] > 0).long()))
    return result


def model(seed=0, **options):
    torch.manual_seed(seed)
    return SequenceModel(MSLMN(2, 6, 4, num_modules=1, **options), 2)


def run(folder=None, resume=False, data=(20, 12), net=None, **plan):
    options = {"plan": Plan(**{**QUICK, **plan}), "resume": resume, "progress": False, "device": "cpu"}
    net = net or model()
    train, validation = (
        [(x.to(next(net.parameters()).dtype), y) for x, y in pairs(n, seed)] for seed, n in enumerate(data)
    )
    return fit(net, train, validation, CrossEntropy(), folder, **options)


def weights(result):
    return {name: value.clone() for name, value in result.model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_trains_grows_and_writes_everything_down(tmp_path):
    result = run(tmp_path / "run", growth_patience=9)
    folder = tmp_path / "run"
    assert [stage["modules"] for stage in result.stages] == [1, 2, 3, 4, 5, 6]  # 32 steps at most
    assert "as 32 steps can use" in result.reason
    assert len(result.history) == 18
    assert result.best["loss"] <= min(record["validation_loss"] for record in result.history)
    for i, stage in enumerate(result.stages):
        assert stage["growth"]["loss_after"] <= stage["growth"]["loss_before"] + 1e-6 or i == 0
        saved = checkpoint.load(folder / f"stage-{i}")
        assert saved.num_modules == i + 1
        assert stage["parameters"] == sum(p.numel() for p in saved.parameters())
    lines = (folder / "metrics.csv").read_text().splitlines()
    assert lines[0] == "stage,epoch,modules,train_loss,validation_loss,accuracy" and len(lines) == 19
    best = checkpoint.load(folder / "best")
    assert same(weights(result), best.state_dict())
    assert list(folder.glob("tensorboard/stage-*/events*"))
    assert not list(folder.rglob("*.tmp"))
    assert len(list(folder.glob("run-*.safetensors"))) == 1


def test_the_best_weights_come_back():
    result = run(grow="never", epochs=12, learning_rate=0.3)
    from mslmn.growth import evaluate
    from mslmn.training import _Data

    data = _Data("", pairs(12, 1), CrossEntropy(), torch.device("cpu"))
    loss = evaluate(result.model, data.batches(8), CrossEntropy())
    assert loss == pytest.approx(result.best["loss"], abs=1e-6)
    assert result.reason == "trained"


def test_the_caller_s_random_numbers_go_on():
    """Or every model that is made after a run would begin with the same weights."""
    net = model()
    before = torch.get_rng_state()
    run(net=net, epochs=1, max_modules=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_growth_stops_where_it_does_not_help_and_the_better_model_is_kept(tmp_path):
    result = run(tmp_path, min_gain=10.0)
    assert [stage["modules"] for stage in result.stages] == [1, 2]
    assert result.reason == "the validation loss was not lowered beyond 1 modules"
    assert result.model.num_modules == result.best["modules"]


def test_patience_counts_across_stages():
    result = run(learning_rate=1e-9, noise=0.0, patience=5, growth_patience=9, min_gain=0.0, readout="zeros")
    best = result.best["stage"], result.best["epoch"]
    after = [r["stage"] for r in result.history if (r["stage"], r["epoch"]) > best]
    assert result.reason == "no better validation loss for 5 epochs" and len(after) == 5 and len(set(after)) > 1


def test_a_plateau_ends_a_stage():
    result = run(grow="plateau", plateau=2, epochs=50, learning_rate=1e-30, max_modules=2, readout="zeros", noise=0.0)
    assert [(r["stage"], r["epoch"]) for r in result.history] == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_moments_are_carried_over():
    """Adam goes on where it was for old weights; new ones start fresh."""
    from mslmn import training

    runs = []
    original = training._Run._carry
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training._Run, "_carry", lambda self, old: (original(self, old), runs.append(self.moments))[0])
        run(net=model(num_layers=2), growth_patience=9, max_modules=2, epochs=2)
    (moments,) = runs
    assert moments["encoder.cells.0.Wmm.0"]["step"] > 0 and "encoder.cells.0.Wmm.1" not in moments
    wide = moments["encoder.cells.1.Wxh"]["exp_avg"]
    assert wide.shape == (6, 8) and wide[:, :4].any() and not wide[:, 4:].any()


def test_a_stage_that_training_only_made_worse_grows_too():
    """Its best weights are those it began with, and have no moments yet; upper layers get new inputs all the same."""
    result = run(net=model(num_layers=2), learning_rate=1.0, epochs=1, growth_patience=9, max_modules=2)
    assert result.best["epoch"] == 0 and result.stages[-1]["modules"] == 2


@pytest.mark.parametrize(
    ("stop", "changed"),
    [(1, {}), (3, {}), (4, {}), (7, {}), (4, {"buckets": True}), (2, {"average": 0.9}), (3, {"average": 0.9})],
)
def test_a_run_that_was_stopped_ends_like_one_that_was_not(tmp_path, stop, changed):
    """After any epoch, within a stage or at its end; with dropout and noise."""
    options = {"growth_patience": 9, "max_modules": 3, "distort": 0.1, "select": "metric", **changed}
    whole = run(tmp_path / "whole", net=model(num_layers=2, dropout=0.3), **options)

    class Stop(Exception):
        pass

    from mslmn import training

    original, done = training._Run.epoch_done, []

    def epoch_done(self, *arguments):
        original(self, *arguments)
        done.append(1)
        if len(done) == stop:
            raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training._Run, "epoch_done", epoch_done)
        with pytest.raises(Stop):
            run(tmp_path / "cut", net=model(num_layers=2, dropout=0.3), **options)
    resumed = run(tmp_path / "cut", resume=True, net=model(num_layers=2, dropout=0.3), **options)
    assert same(weights(resumed), weights(whole))
    assert resumed.history == whole.history
    again = run(tmp_path / "cut", resume=True, net=model(num_layers=2, dropout=0.3), **options)  # it is done
    assert same(weights(again), weights(whole))


def test_the_average_of_the_weights_is_validated_and_kept(monkeypatch):
    seen, compute = [], Update._compute

    def recorded(self):
        compute(self)
        seen.append({name: p.detach().clone() for name, p in self.parameters.items()})

    monkeypatch.setattr(Update, "_compute", recorded)
    result = run(average=0.5, epochs=2, grow="never")
    kept = len(seen) * result.best["epoch"] // 2
    parts = [0.5**k / sum(0.5**i for i in range(kept)) for k in reversed(range(kept))]
    for name, value in weights(result).items():
        torch.testing.assert_close(value, sum(part * w[name] for part, w in zip(parts, seen, strict=False)))
    batch = [(pack_sequence([x]), y[None]) for x, y in pairs(12, 1)]
    assert growth.evaluate(result.model, batch, CrossEntropy()) == pytest.approx(result.best["loss"], rel=1e-5)


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from test_training import model, run
result = run(sys.argv[1], resume=True, growth_patience=9, max_modules=4, epochs=5, net=model(num_layers=2, dropout=0.2))
sys.stdout.write(str(result.best) + "\\n")  # one write: two processes print into one pipe
"""


def start(folder, *prefix):
    code = SCRIPT.format(tests=str(Path(__file__).parent))
    return subprocess.Popen([*(prefix or [sys.executable]), "-c", code, str(folder)], stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("seed", range(int(os.environ.get("MSLMN_KILLS", "3"))))
def test_a_run_that_is_killed_at_any_moment_ends_the_same(tmp_path_factory, seed):
    shared = tmp_path_factory.getbasetemp() / "uninterrupted"
    began = time.monotonic()
    if not (shared / "best" / "model.json").exists():
        assert start(shared).wait() == 0
    folder = tmp_path_factory.mktemp("killed")
    seconds = random.Random(seed)
    process = start(folder)
    deadline = time.monotonic() + 120
    while not (folder / "run.json").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)  # the first checkpoint: from here on there is something to lose
    time.sleep(seconds.uniform(0, 0.8))
    process.send_signal(signal.SIGKILL)
    process.wait()
    content, _ = checkpoint.read(folder, "run")  # whole, whenever it was
    lines = (folder / "metrics.csv").read_text().splitlines() if (folder / "metrics.csv").exists() else []
    assert 0 <= max(len(lines) - 1, 0) - content["progress"]["epochs"] <= 1
    assert start(folder).wait() == 0
    for name in ("best", "stage-0", "stage-1", "stage-2", "stage-3"):
        assert same(checkpoint.load(folder / name).state_dict(), checkpoint.load(shared / name).state_dict()), name
    assert (folder / "metrics.csv").read_text() == (shared / "metrics.csv").read_text()
    assert not list(folder.rglob("*.tmp")) and time.monotonic() - began < 600


def test_buckets_put_similar_lengths_into_a_batch_and_every_sequence_into_one(monkeypatch):
    from mslmn import training

    batches, collate = [], training._Data.collate
    monkeypatch.setattr(
        training._Data,
        "collate",
        lambda self, indices, *rest: batches.append(list(indices)) or collate(self, indices, *rest),
    )
    result = run(data=(20, 12), grow="never", epochs=2, buckets=True)
    lengths = [[len(x) for x, _ in pairs(n, seed)] for seed, n in enumerate((20, 12))]
    assert result.reason == "trained"
    epochs = [batches[2:5], batches[7:10]]  # validation has two batches, before training and after each epoch
    for epoch in epochs:
        assert sorted(i for batch in epoch for i in batch) == list(range(20))
        spans = sorted((min(lengths[0][i] for i in batch), max(lengths[0][i] for i in batch)) for batch in epoch)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert epochs[0] != epochs[1]
    assert [lengths[1][i] for batch in batches[:2] for i in batch] == sorted(lengths[1])


def test_buckets_measure_the_same_validation_loss():
    a, b = (run(grow="never", epochs=1, learning_rate=1e-30, noise=0.0, buckets=buckets) for buckets in (False, True))
    assert a.history[0]["validation_loss"] == pytest.approx(b.history[0]["validation_loss"], rel=1e-5)
    assert a.history[0]["train_loss"] == pytest.approx(b.history[0]["train_loss"], rel=1e-5)


def test_batches_are_balanced_or_bucketed():
    with pytest.raises(ValueError, match="balanced by class or bucketed by length, got both; leave one out"):
        Plan(balance=True, buckets=True)
    with pytest.raises(TypeError, match="buckets must be True or False, got 1"):
        Plan(buckets=1)


def test_ctrl_c_is_a_keyboard_interrupt_and_what_was_done_is_kept(tmp_path, monkeypatch):
    from mslmn import training

    original = training._EpochLoader.__iter__

    def interrupted(self):
        if self.run.state.epoch == 2:
            signal.raise_signal(signal.SIGINT)
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(training._EpochLoader, "__iter__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "cut", grow="never")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = run(tmp_path / "cut", grow="never", resume=True)
    assert same(weights(resumed), weights(run(tmp_path / "whole", grow="never")))


def test_two_processes_train_like_one(tmp_path):
    """The whole incremental run under torchrun: same modules and, to rounding, losses; batches that do not divide."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = tmp_path / "script.py"
    code = SCRIPT.format(tests=str(Path(__file__).parent))
    script.write_text(code.replace("dropout=0.2", "dtype=torch.float64"))  # dropout would draw other numbers
    one = subprocess.run([sys.executable, script, tmp_path / "single"], capture_output=True, text=True, check=False)
    two = subprocess.run([*torchrun, script, tmp_path / "double"], capture_output=True, text=True, check=False)
    assert one.returncode == 0 and two.returncode == 0, one.stderr + two.stderr
    single, double = (
        list(csv.reader((tmp_path / name / "metrics.csv").read_text().splitlines())) for name in ("single", "double")
    )
    assert single[0] == double[0] and len(single) == 21
    for a, b in zip(single[1:], double[1:], strict=True):
        assert a[:3] == b[:3]  # stage, epoch, modules
        assert [float(x) for x in a[3:]] == pytest.approx([float(x) for x in b[3:]], rel=1e-9)
    losses = two.stdout.splitlines()
    assert len(losses) == 2 and losses[0] == losses[1]  # both processes found the same


ALONE = """
import sys, time
import torch
from torch import distributed
from mslmn import training
training._connect("cpu")
if sys.argv[1] == "0":
    pending = distributed.all_reduce(torch.ones(1), async_op=True)
    sys.exit(3)
time.sleep(600)
"""


def test_a_process_ends_though_another_does_not_answer():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    one, two = (
        subprocess.Popen([sys.executable, "-c", ALONE, str(i)], env={**where, "RANK": str(i), "LOCAL_RANK": str(i)})
        for i in range(2)
    )
    try:
        assert one.wait(120) == 3 and two.poll() is None
    finally:
        for process in (one, two):
            process.kill()
            process.wait()


FEW = """
import json, sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from test_training import model, run
plan = {{"growth_patience": 9, "max_modules": 2, "epochs": 1, "batch_size": 3}}
result = run(sys.argv[1], data=(2, 1), net=model(num_layers=2), **plan)
growth = [(stage["growth"] | {{"seconds": 0}}) for stage in result.stages]
sums = [float(p.detach().double().sum()) for p in result.model.parameters()]
sys.stdout.write(json.dumps([growth, sums]) + "\\n")
"""


def test_fewer_sequences_than_processes(tmp_path):
    """One of three has nothing to train on, two nothing to validate on; all find the same, growth reports included."""
    script = tmp_path / "script.py"
    script.write_text(FEW.format(tests=str(Path(__file__).parent)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    done = subprocess.run([*torchrun, script, tmp_path / "run"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and len(set(lines)) == 1
    alone = subprocess.run([sys.executable, script, tmp_path / "one"], capture_output=True, text=True, check=True)
    (growth, sums), (expected, expected_sums) = (json.loads(text) for text in (lines[0], alone.stdout))
    assert sums == pytest.approx(expected_sums, rel=1e-3, abs=1e-3)
    for found, wanted in zip(growth, expected, strict=True):
        assert found["steps"] == wanted["steps"] and found["rank"] == wanted["rank"]
        for a, b in zip(found["error"], wanted["error"], strict=True):
            assert a == pytest.approx(b, abs=1e-3)


CONTRARY = """
import test_training
honest = test_training.pairs
test_training.pairs = lambda n, *seed: [(x, 1 - y if n == 1 else y) for x, y in honest(n, *seed)]
"""


def test_several_processes_without_a_folder(tmp_path):
    """The best model is that of an earlier stage, and every process gets it."""
    script = tmp_path / "script.py"
    few = FEW.replace("sys.argv[1]", "None").replace('"max_modules": 2', '"min_gain": 9.0')
    few = few.replace("plan =", CONTRARY + "plan =")  # what fits the training data better is worse in validation
    script.write_text(few.format(tests=str(Path(__file__).parent)).replace('"growth_patience": 9, ', ""))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*torchrun, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and lines[0] == lines[1]
    growth, sums = json.loads(lines[0])
    assert len(growth) == 2 and len(sums) == len(list(model(num_layers=2).parameters()))


def recall(n, seed):
    """What was the input 16 steps before the end?"""
    x = 0.5 * torch.randn(n, 256, 6, generator=torch.Generator().manual_seed(seed))
    return [(a, a[-17]) for a in x]


def test_growth_remembers_what_training_from_scratch_does_not_find():
    plan = {"batch_size": 50, "learning_rate": 5e-4}
    data = recall(1000, 0), recall(300, 1), NMSE()
    torch.manual_seed(0)
    grown = fit(
        SequenceModel(MSLMN(6, 6, 12, num_modules=1), 6),
        *data,
        plan=Plan(**plan, epochs=1, horizon=2, min_gain=0.02, growth_patience=3),
        progress=False,
        device="cpu",
    )
    torch.manual_seed(0)
    scratch = fit(
        SequenceModel(MSLMN(6, 6, 12, num_modules=grown.stages[-1]["modules"]), 6),
        *data,
        plan=Plan(**plan, epochs=2 * len(grown.history), grow="never"),  # about the time that growing took
        progress=False,
        device="cpu",
    )
    assert grown.best["loss"] < 0.1 and scratch.best["loss"] > 0.2
    assert grown.reason == "the validation loss was not lowered beyond 5 modules"  # module 5 hears every 16th step
    assert grown.stages[-1]["modules"] == 8  # three more were tried; 256 steps could use 9


@pytest.mark.parametrize(("objective", "output", "O"), [(NMSE, "all", 1), (CTC, "all", 4), (NMSE, "last", 1)])
def test_every_objective_trains(objective, output, O, device):
    torch.manual_seed(0)
    net = SequenceModel(MSLMN(2, 6, 4, num_modules=1, bidirectional=True), O, output=output, norm="module")
    data = []
    for x, _ in pairs(20):
        target = {
            (NMSE, "all"): x.cumsum(0)[:, :1],
            (NMSE, "last"): x.sum(0)[:1],
            (CTC, "all"): torch.tensor([1, 2, 3, 3]),
        }[objective, output]
        data.append((x, target))
    result = fit(net, data, data[:6], objective(), plan=Plan(**QUICK, max_modules=2), progress=False, device=device)
    assert next(result.model.parameters()).device.type == device
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]


def test_a_network_without_input_trains():
    torch.manual_seed(0)
    net = SequenceModel(MSLMN(0, 1, 4, num_modules=5, learn_initial_state=True), 1, output="all")
    data = [(torch.zeros(T, 0), torch.sin(torch.arange(T) / 3)[:, None]) for T in (30, 20)]
    result = fit(
        net, data, data, NMSE(), plan=Plan(**{**QUICK, "noise": 0.0}, grow="never"), progress=False, device="cpu"
    )
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]


def test_baselines_train_too():
    torch.manual_seed(0)
    net = SequenceModel(nn.LSTM(2, 6, bidirectional=True), 2)
    assert run(net=net).reason == "trained"


def test_sequences_are_mixed_anew_in_each_epoch_whatever_batch_they_are_in(monkeypatch):
    from mslmn import training

    def seen(batch_size, **plan):
        found = []
        collate = training._Data.collate

        def watched(self, indices, change=None):
            if change is not None:
                for i in indices:
                    x = torch.as_tensor(self.pairs[i][0])
                    found.append((i, torch.linalg.lstsq(x, change(i, x)).solution))
            return collate(self, indices, change)

        with monkeypatch.context() as patch:
            patch.setattr(training._Data, "collate", watched)
            run(grow="never", epochs=2, batch_size=batch_size, noise=0.0, **plan)
        epochs = found[:20], found[20:]
        return [[mixture for _, mixture in sorted(epoch, key=lambda one: one[0])] for epoch in epochs]

    first, second = seen(8, distort=0.2)
    again, _ = seen(5, distort=0.2)
    for a, b, other in zip(first, again, second, strict=True):
        torch.testing.assert_close(a, b)
        assert not torch.allclose(a, other)
    off = torch.stack(first + second) - torch.eye(2)
    assert 0.15 < off.std() < 0.25 and off.mean().abs() < 0.05
    assert seen(8, distort=0.0) == [[], []]


def test_the_first_epochs_of_the_first_stage_start_flat(tmp_path, monkeypatch):
    asked = []
    for name in ("first_loss", "loss"):
        original = getattr(CTC, name)

        def watched(self, output, target, original=original, name=name):
            if output.data.requires_grad:  # not validation
                asked.append(name)
            return original(self, output, target)

        monkeypatch.setattr(CTC, name, watched)
    data = [(x, torch.tensor([1, 2, 3])) for x, _ in pairs(8)]

    def trained(folder, epochs=None):
        torch.manual_seed(0)
        net = SequenceModel(MSLMN(2, 6, 4, num_modules=1), 4, output="all")
        plan = Plan(epochs=3, batch_size=8, flat_start=2, max_modules=2, growth_patience=9, patience=2)
        with monkeypatch.context() as patch:
            if epochs is not None:
                original = training._Run.epoch_done

                def epoch_done(self, *arguments):
                    original(self, *arguments)
                    if self.state.epochs == epochs:
                        raise KeyboardInterrupt

                patch.setattr(training._Run, "epoch_done", epoch_done)
            return fit(net, data, data, CTC(), folder, plan=plan, resume=True, progress=False, device="cpu")

    result = trained(tmp_path / "whole")
    assert asked == ["first_loss", "first_loss", *["loss"] * 4] and len(result.stages) == 2
    for epochs in (1, 2, 3):  # within the flat start, at its end, after it
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path / f"{epochs}", epochs)
        assert same(weights(trained(tmp_path / f"{epochs}")), weights(result))


def test_a_flat_start_does_not_cost_patience(monkeypatch):
    losses = iter([1.0, 5.0, 5.0, 5.0, 4.0, 4.0, 4.0])  # validation does not like it, nor what comes after it
    monkeypatch.setattr(training._Run, "_validate", lambda self: (next(losses), 0.0))
    result = run(grow="never", epochs=30, flat_start=3, patience=2)
    assert len(result.history) == 5


def test_weights_are_selected_by_the_metric_if_so_planned(monkeypatch):
    """Accuracies and losses that disagree; of equal accuracies, the lower loss."""
    found = [(1.0, 0.1), (0.5, 0.3), (0.8, 0.9), (0.7, 0.9), (0.4, 0.2)]  # before training and after each epoch
    for select, best in (("loss", 4), ("metric", 3)):
        values = iter(found)
        monkeypatch.setattr(training._Run, "_validate", lambda self, values=values: next(values))
        result = run(grow="never", epochs=4, select=select)
        assert result.best["epoch"] == best
        assert (result.best["loss"], result.best["metric"]) == found[best]
        assert result.stages[0]["validation_loss"] == found[best][0]
        values = iter(found)
        monkeypatch.setattr(training._Run, "_validate", lambda self, values=values: next(values))
        ended = run(grow="never", epochs=4, patience=1, select=select)
        assert len(ended.history) == {"loss": 2, "metric": 4}[select]


def test_growth_ends_when_modules_no_longer_better_the_metric(monkeypatch):
    found = iter([(1.0, 0.1), (0.9, 0.5), (0.8, 0.4), (0.7, 0.3)])  # losses sink on
    monkeypatch.setattr(training._Run, "_validate", lambda self: next(found))
    result = run(epochs=1, select="metric", max_modules=4)
    assert result.reason == "the validation accuracy was not bettered beyond 1 modules"
    assert len(result.stages) == 2


def test_a_metric_that_is_no_number_selects_nothing(monkeypatch):
    monkeypatch.setattr(training._Run, "_validate", training._Run._validate)
    monkeypatch.setattr(training.growth, "means", lambda *arguments: [0.5, math.nan])
    with pytest.raises(Diverged, match="the validation accuracy is nan"):
        run(select="metric")


def test_a_run_of_an_older_version_is_named(tmp_path):
    run(tmp_path, grow="never", epochs=1)
    file = tmp_path / "run.json"
    content = json.loads(file.read_text())
    content["progress"]["stage_best"] = 0.5
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"stage_best is 0.5.*of another version"):
        run(tmp_path, grow="never", epochs=1, resume=True)


# what can go wrong


def test_a_model_without_anything_to_train_is_refused():
    with pytest.raises(ValueError, match=r"no weight of the model requires a gradient.*requires_grad_"):
        run(net=model().requires_grad_(False))


def test_labels_that_are_no_whole_numbers_are_refused():
    for loss in (CTC().loss, CTC().first_loss):
        with pytest.raises(ValueError, match=r"labels must be whole numbers, got torch.float32.*long"):
            loss(torch.randn(5, 1, 4), [torch.tensor([1.0, 2.0])])


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path):
    with pytest.raises(Diverged, match=r"in epoch \d+ of stage 0; the checkpoint of the epoch before is in"):
        run(tmp_path, grow="never", learning_rate=1e6, clip=1e9, epochs=200, net=model(init="xavier"), patience=200)
    _, tensors = checkpoint.read(tmp_path, "run")
    assert all(torch.isfinite(value).all() for value in tensors.values())


def test_no_step_is_taken_on_a_loss_that_is_not_a_number(monkeypatch):
    """Also where nobody looks before the epoch is over, as on a GPU."""
    monkeypatch.setattr(training._Run, "_check", lambda self, total: None)
    model = SequenceModel(MSLMN(1, 3, 2, 1), 1, output="all")
    good = [(torch.randn(5, 1), torch.randn(5, 1)) for _ in range(4)]
    bad = [(torch.randn(5, 1), torch.full((5, 1), math.nan))]
    for pairs in (good, bad):
        before = [p.clone() for p in model.parameters()]
        fit(model, pairs, good, NMSE(1.0), plan=Plan(epochs=1, grow="never"), progress=False)
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert moved == (pairs is good)
        assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    run(tmp_path, grow="never")
    before = (tmp_path / "run.json").read_text()
    with pytest.raises(ValueError, match="has a run already; pass resume=True"):
        run(tmp_path, grow="never")
    with pytest.raises(ValueError, match="planned with other values of learning_rate, seed; resume it under the same"):
        run(tmp_path, resume=True, grow="never", learning_rate=1.0, seed=3)
    with pytest.raises(CheckpointError, match="of another architecture"):
        run(tmp_path, resume=True, grow="never", net=SequenceModel(MSLMN(2, 7, 4, num_modules=1), 2))
    assert (tmp_path / "run.json").read_text() == before


def test_an_unknown_key_in_the_plan_is_named(tmp_path):
    run(tmp_path, grow="never")
    content = json.loads((tmp_path / "run.json").read_text())
    content["plan"]["momentum"] = 0.9
    (tmp_path / "run.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="a plan has no momentum; it has average, balance"):
        run(tmp_path, resume=True, grow="never")


def test_a_run_from_before_an_option_was_there_goes_on(tmp_path):
    result = run(tmp_path, grow="never")
    content = json.loads((tmp_path / "run.json").read_text())
    del content["model"]["config"]["dropout"], content["model"]["encoder"]["config"]["layer_norm"]
    del content["model"]["encoder"]["config"]["pool"]
    del content["plan"]["average"]
    (tmp_path / "run.json").write_text(json.dumps(content))
    assert run(tmp_path, resume=True, grow="never").best == result.best


def test_a_run_goes_on_with_its_objective(tmp_path):
    data = [(x, x[:, :1]) for x, _ in pairs(8)]
    plan = Plan(**QUICK, grow="never")

    def go(objective, resume=True):
        net = SequenceModel(MSLMN(2, 6, 4, num_modules=1), 1, output="all")
        return fit(net, data, data, objective, tmp_path, plan=plan, resume=resume, progress=False)

    go(NMSE(), resume=False)
    again = NMSE()
    go(again)
    assert again.variance == json.loads((tmp_path / "run.json").read_text())["objective"]["config"]["variance"]
    for other in (NMSE(variance=2.0), CrossEntropy()):
        with pytest.raises(ValueError, match="pass the same objective"):
            go(other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"velocity/a": torch.zeros(1)}), "a run has no tensor velocity/a"),
        (lambda t: t.update({"adam/readout.b_y/exp_avg": torch.zeros(7)}), "moments of readout.b_y do not fit"),
        (lambda t: t.pop("best/readout.b_y"), "of another architecture: readout.b_y is not there"),
        (
            lambda t: t.update({"average/readout.b_y": torch.zeros(2)}),
            "the average of the weights does not fit those that are",
        ),
    ],
)
def test_tensors_that_do_not_belong_are_named(tmp_path, change, message):
    run(tmp_path, grow="never")
    content, long = checkpoint.read(tmp_path, "run")
    tensors = checkpoint.separated(content["layout"], long, tmp_path)
    change(tensors)
    content["layout"], long = checkpoint.joined(tensors)
    checkpoint.write(tmp_path, "run", content, long)
    with pytest.raises(CheckpointError, match=message):
        run(tmp_path, resume=True, grow="never")


def test_a_layout_that_does_not_fit_its_tensors_is_named(tmp_path):
    run(tmp_path, grow="never")
    content = json.loads((tmp_path / "run.json").read_text())
    content["layout"][0][2] = [9999, 9999]
    (tmp_path / "run.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="its layout does not fit its tensors"):
        run(tmp_path, resume=True, grow="never")


def test_lost_metrics_are_named(tmp_path):
    run(tmp_path, grow="never")
    (tmp_path / "metrics.csv").write_text("stage,epoch\n")
    with pytest.raises(CheckpointError, match=r"metrics.csv has 0 epochs, the checkpoint 3"):
        run(tmp_path, resume=True, grow="never")


def test_a_stage_is_one_line(capsys):
    fit(model(), pairs(8), pairs(4, 1), CrossEntropy(), plan=Plan(**QUICK, max_modules=2, growth_patience=9))
    lines = [line for line in capsys.readouterr().out.splitlines() if "parameters" in line]
    assert len(lines) == 2 and all(line.startswith("stage ") and line.endswith(" s") for line in lines)


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    run(tmp_path, grow="never")
    before = {path: path.read_bytes() for path in tmp_path.glob("run*")}

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*What was there is as it was"):
        checkpoint.write(tmp_path, "run", {}, {"a": torch.zeros(1)})
    assert {path: path.read_bytes() for path in tmp_path.glob("run*")} == before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rate": 0}, "learning_rate must be a number above 0"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"max_modules": 0}, "max_modules must be at least 1"),
        ({"horizon": 0}, "horizon must be at least 1"),
        ({"noise": -1}, "noise must be a number of at least 0, got -1"),
        ({"distort": "0.1"}, "distort must be a number of at least 0, got '0.1'; 0 switches it off"),
        ({"average": 1}, "average must be a number of at least 0 and below 1, got 1; 0 switches it off"),
        ({"flat_start": -1}, "flat_start must be at least 0"),
        ({"flat_start": 3, "epochs": 3}, "flat_start must be below epochs, 3, got 3; train for the loss in the end"),
        ({"select": "accuracy"}, "select must be one of 'loss', 'metric'"),
        ({"grow": "often"}, "grow must be one of 'epochs', 'plateau', 'never'"),
    ],
)
def test_wrong_plans_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        Plan(**values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x[:, 0], y), r"training sequence 3 must be \(T, input_size\) .* got \(\d+,\)"),
        (lambda x, y: (x[:0], y), r"with at least one step, got \(0, 2\); add the missing dimension, or drop it"),
        (
            lambda x, y: (x.index_fill(0, torch.tensor(4), torch.nan), y),
            "training sequence 3 has nan at step 4, feature 0",
        ),
        (lambda x, y: (x, y + 7), "class numbers must be between 0 and 1, got 0 to .*; renumber them"),
    ],
)
def test_wrong_sequences_are_named(change, message):
    data = pairs(8)
    data[3] = change(*data[3])
    with pytest.raises(ValueError, match=message):
        fit(model(), data, pairs(4, 1), CrossEntropy(), plan=Plan(**QUICK), progress=False, device="cpu")


def test_no_data_is_an_error():
    with pytest.raises(ValueError, match="0 training and 12 validation"):
        run(data=(0, 12))
    with pytest.raises(TypeError, match="wrap your encoder"):
        run(net=nn.LSTM(2, 3))


def test_a_norm_of_all_modules_is_refused_before_a_stage_is_trained():
    model = SequenceModel(MSLMN(2, 4, 3, num_modules=1), 2, norm="layer")
    data = [(torch.randn(5, 2), torch.tensor(0))]
    with pytest.raises(
        ValueError, match=r"norm='layer' .* cannot grow; build it with norm='prefix' or 'module', or train"
    ):
        fit(model, data, data, CrossEntropy(), plan=Plan(epochs=1), progress=False)
    fit(model, data, data, CrossEntropy(), plan=Plan(epochs=1, grow="never"), progress=False)
    stack = SequenceModel(MSLMN(2, 4, 3, num_modules=1, num_layers=2, layer_norm=True), 2)
    with pytest.raises(
        ValueError, match=r"layer_norm normalises all modules.*without it to grow it, or train the model"
    ):
        fit(stack, data, data, CrossEntropy(), plan=Plan(epochs=1), progress=False)
    before = [weight.clone() for weight in stack.state_dict().values()]
    with pytest.raises(ValueError, match="layer_norm normalises all modules"):
        stack.grow([torch.zeros(3, 4)] * 2, [torch.zeros(3, 3)] * 2)
    assert stack.num_modules == 1 and all(map(torch.equal, stack.state_dict().values(), before))
    fit(stack, data, data, CrossEntropy(), plan=Plan(epochs=1, grow="never"), progress=False)
