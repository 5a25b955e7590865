"""The paper's experiments, made small: they run, fail, stop and resume as they should."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from typer.testing import CliRunner

from mslmn import SequenceModel, checkpoint, training
from mslmn.cli import app
from mslmn.data import handwriting as pen
from mslmn.data import writer
from mslmn.experiments import generation, handwriting, jobs, models, paper, records, words
from mslmn.model import _padded_lstm
from mslmn.objectives import NMSE, CrossEntropy, best_path, character_accuracy
from mslmn.training import Plan, fit
from test_words import made_up

THREE = ("RNN", "LMN", "MS-LMN")
EPOCHS = 3


@pytest.fixture(scope="module")
def music(tmp_path_factory):
    """A folder with three models that have hardly learnt to generate."""
    out = tmp_path_factory.mktemp("music")
    failed = jobs.execute(generation.tasks(out, "quick", models=THREE, epochs=EPOCHS), processes=1, device="cpu")
    assert failed == []
    return out


def results(out):
    """What was found, but for the time it took."""
    return {r.folder.relative_to(out): replace(r, seconds=0, folder=out) for r in records.find(out)}


def content(out):
    return {path.relative_to(out): path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}


# Runs


def test_generation_from_data_to_result(music):
    found = results(music)
    assert {str(path) for path in found} == {f"generation/{name}-budget1000-seed0" for name in ("rnn", "lmn", "ms-lmn")}
    for path, record in found.items():
        arrays = dataclasses.replace(record, folder=music / path).arrays()
        error = np.mean((arrays["generated"] - arrays["target"]) ** 2) / np.var(arrays["target"])
        assert record.metric == "NMSE" and record.value == pytest.approx(float(error), rel=1e-6)
        assert record.epochs == EPOCHS and [row["epoch"] for row in record.history] == [EPOCHS]
        assert abs(record.parameters - 1000) < 120 and record.data == "BWV 846, rendered, at 0.5 s"
        assert arrays["memory"].shape == (300, record.sizes.get("modules", 1), arrays["memory"].shape[2])
        best = checkpoint.load(music / path / "best")
        with torch.no_grad():
            again = best(torch.zeros(300, 0))[:, 0].numpy()
        np.testing.assert_array_equal(again, arrays["generated"])
    assert not list(music.rglob("*.tmp"))


@pytest.mark.parametrize("model", paper.GENERATION)
@pytest.mark.parametrize("budget", paper.BUDGETS)
def test_a_generator_is_about_as_large_as_its_budget(model, budget):
    """Weights that read an input, or what is in its place, are not counted: only the LSTM has them."""
    for preset in ("paper", "best"):
        chosen = generation.settings(model, preset, budget)
        net = models.build(model, chosen, 0, 1, output="all", bias=False)
        own = sum(p.numel() for name, p in net.named_parameters() if "_ih_l0" not in name and "initial" not in name)
        assert 0.6 * budget < own < 1.15 * budget, own


def test_words_from_data_to_result(tmp_path):
    """Every model, and one that grows."""
    data = made_up()
    tasks = words.tasks(tmp_path, "quick", data, splits=1, seeds=1, epochs=2)
    assert tasks[0].job.model == models.INCREMENTAL  # the longest first
    assert jobs.execute(tasks, processes=1, device="cpu") == []
    found = results(tmp_path)
    assert {r.model for r in found.values()} == set(paper.WORDS)
    for path, record in found.items():
        arrays = replace(record, folder=tmp_path / path).arrays()
        assert arrays["expected"].tolist() == [0, 0, 1, 1, 2, 2]
        assert record.value == np.mean(arrays["expected"] == arrays["predicted"])
        assert arrays["names"].tolist() == ["cat", "dog", "eel"] and arrays["suffixes"].tolist() == [-1] * 3
        assert record.settings["train_clips"] == 15 and record.settings["test_clips"] == 6
        assert record.sizes["modules"] == 4 if record.model in models.CLOCKED else "modules" not in record.sizes
        stages = 4 if record.model == models.INCREMENTAL else 1
        assert record.epochs == 2 * stages and len(record.history) == stages


def test_words_are_trained_with_noise_and_classes_balanced(tmp_path, monkeypatch):
    plans = []

    def stop(*arguments, plan, **options):
        plans.append(plan)
        raise training.Diverged("enough")

    monkeypatch.setattr(words, "fit", stop)
    (task,) = words.tasks(tmp_path, "paper", made_up(), models=("MS-LMN",), seeds=1)
    assert jobs.execute([task], processes=1) == [(task, "Diverged: enough")]
    (plan,) = plans
    assert plan.noise == 0.6 and plan.balance and plan.batch_size == 25
    assert plan.passes * plan.epochs <= 500 and task.checkpoints == plan.epochs


def written(lines=6, features="offsets"):
    return pen.prepare(writer.lines(lines, words=(1, 1)), "six lines", features=features)


def test_handwriting_from_data_to_result(tmp_path):
    """Every model, and one that grows."""
    tasks = handwriting.tasks(tmp_path, "quick", written(), epochs=1)
    assert jobs.execute(tasks, processes=1, device="cpu") == []
    found = results(tmp_path)
    assert {r.model for r in found.values()} == set(handwriting.MODELS) and len(found) == 5
    (test_line,) = written().pairs("test")
    for path, record in found.items():
        arrays = replace(record, folder=tmp_path / path).arrays()
        assert path.name.endswith("-lines6-seed0") and record.data == "six lines, offsets"
        (accuracy,) = arrays["accuracies"]
        assert record.value == accuracy and record.metric == "accuracy"
        best = checkpoint.load(tmp_path / path / "best").eval()
        with torch.no_grad():
            output = best(test_line[0][:, None])
        (labels,) = best_path(output)
        assert character_accuracy(labels, test_line[1].tolist()) == pytest.approx(accuracy)
        assert arrays["starts"].tolist() == [0, len(test_line[0])]
        assert arrays["labels"].tolist() == output[:, 0].argmax(-1).tolist()
        assert arrays["recognised"].tolist() == ["".join(arrays["characters"][labels])]
        assert arrays["expected"].tolist() == ["".join(arrays["characters"][test_line[1]])]
        assert arrays["points"].shape == (len(test_line[0]), 3) and arrays["points"][-1, 2] == 1
        assert arrays["memory"].shape[:2] == (len(test_line[0]), best.num_modules)
        counts = [record.settings[f"{split}_lines"] for split in ("train", "validation", "test")]
        assert counts == [6, 1, 1] and record.settings["features"] == "offsets"
        accuracies = [row["character_accuracy"] for row in record.history]
        assert record.settings["validation_accuracy"] >= max(accuracies)
        assert record.epochs == (record.sizes["modules"] if record.model == models.INCREMENTAL else 1)


def test_what_a_model_that_pools_reads_is_said_of_each_step():
    data = written()
    chosen = replace(handwriting.settings("MS-LMN", "quick"), layers=2, pool=2)
    model = models.build("MS-LMN", chosen, 4, data.alphabet.outputs, bidirectional=True, output="all")
    ((x, _),) = data.pairs("test")
    (path,) = handwriting.read(model, [x])
    assert len(path) == -(-len(x) // 4)
    found = handwriting.examples(model, data, [path])
    assert found["labels"].tolist() == [path[t // 4] for t in range(len(x))]
    assert found["memory"].shape == (len(x), 2, chosen.memory)
    assert (found["memory"][0] == found["memory"][3]).all() and (found["memory"][3] != found["memory"][4]).any()


@pytest.mark.parametrize(("preset", "kind"), [("paper", "absolute"), ("best", "absolute"), ("best", "offsets")])
@pytest.mark.parametrize("model", handwriting.MODELS)
def test_a_reader_has_about_a_hundred_thousand_parameters(model, preset, kind):
    chosen = handwriting.settings(model, preset, kind=kind)
    flat = {("best", "absolute", "MS-LMN"): 2, ("best", "offsets", "MS-LMN"): 1, ("best", "offsets", "LSTM"): 1}
    assert chosen.flat_start == flat.get((preset, kind, model), 0)
    whole = "MS-LMN" if model == models.INCREMENTAL else model
    net = models.build(whole, chosen, 4, 58, bidirectional=True, output="all")
    assert sum(p.numel() for p in net.parameters()) == pytest.approx(100_000, rel=0.37 if preset == "paper" else 0.06)


def test_the_paper_s_handwriting_is_as_it_says(tmp_path, monkeypatch):
    plans = []

    def stop(*arguments, plan, **options):
        plans.append(plan)
        raise training.Diverged("enough")

    monkeypatch.setattr(handwriting, "fit", stop)
    tasks = handwriting.tasks(tmp_path, "paper", written(), models=("MS-LMN", models.INCREMENTAL))
    assert len(tasks) == 10 and len(jobs.execute(tasks, processes=1)) == 10  # five seeds each
    for plan, grow in zip(plans, ["never"] * 5 + ["epochs"] * 5, strict=True):
        assert plan.patience == 50 and plan.max_modules == 9 and plan.grow == grow and plan.buckets
        assert plan.epochs == (50 if grow == "epochs" else 1000)
        assert plan.warmup == plan.flat_start == 0 and not plan.contract and plan.schedule == "constant"
        assert plan.select == "loss"
    assert tasks[0].job.settings.init == "xavier" and tasks[0].job.settings.norm is None


def test_handwriting_without_lines_of_a_split_is_refused_before_anything_is_written(tmp_path):
    data = written()
    with pytest.raises(ValueError, match=r"six lines must have lines of all splits, got \{'train': 6, 'validation': 0"):
        handwriting.tasks(tmp_path, "quick", replace(data, splits=["train"] * 6 + ["test"] * 2))
    assert not list(tmp_path.iterdir())


def test_metrics_are_told_as_they_come(tmp_path, capsys):
    tasks = handwriting.tasks(tmp_path, "quick", written(), models=("LMN",), epochs=2)
    assert jobs.execute(tasks, processes=1, device="cpu", follow=True) == []
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("lmn-lines6-seed0: ")]
    assert len(told) == 2 and "epoch 2, modules 1, train loss " in " ".join(told[1].split())
    jobs.execute(tasks, processes=1, device="cpu", follow=True)
    assert "epoch" not in capsys.readouterr().out  # nothing is new


def test_what_is_done_is_not_done_again(music):
    before = content(music)
    for processes in (1, 2):
        tasks = generation.tasks(music, "quick", models=THREE, epochs=EPOCHS)
        assert all(task.done for task in tasks) and jobs.execute(tasks, processes=processes, device="cpu") == []
    assert content(music) == before


def test_other_settings_or_data_in_the_same_folder_are_refused(music):
    before = content(music)
    for options in ({"preset": "paper"}, {"preset": "quick", "epochs": EPOCHS + 1}):
        tasks = generation.tasks(music, **{"models": THREE, "epochs": EPOCHS, **options})
        with pytest.raises(ValueError, match=r"has a result of preset 'quick' with other settings; choose another --"):
            jobs.execute(tasks, processes=1)
    with pytest.raises(ValueError, match=r"data\.npz has other data, BWV 846, rendered, at 0\.5 s; choose another --o"):
        generation.tasks(music, "quick", models=THREE, epochs=EPOCHS, offset=0.6)
    assert content(music) == before


def test_a_run_that_was_begun_with_other_settings_is_refused(tmp_path):
    begun = generation.tasks(tmp_path, "quick", models=("RNN",), epochs=2)
    assert jobs.execute(begun, processes=1, device="cpu") == []
    (begun[0].folder / records.RESULT).unlink()
    ((_, error),) = jobs.execute(generation.tasks(tmp_path, "quick", models=("RNN",), epochs=3), processes=1)
    assert "planned with other values of passes; resume it under the same plan, or start another in a new" in error


def test_a_damaged_result_is_named(tmp_path):
    tasks = generation.tasks(tmp_path, "quick", models=("RNN",), epochs=2)
    tasks[0].folder.mkdir()
    (tasks[0].folder / records.RESULT).write_text("{")
    with pytest.raises(ValueError, match=r"result\.json is damaged .*; delete its folder and run again"):
        jobs.execute(tasks, processes=1)


def test_words_that_cannot_be_split_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="'cat' was said by 1 speaker"):
        words.tasks(tmp_path / "out", "quick", made_up(speakers=1))
    assert not (tmp_path / "out").exists()


def fail(job, data, folder, device):
    raise OSError(28, "No space left on device")


def test_two_processes_give_what_one_gives_and_go_on_where_one_job_fails(music, tmp_path):
    tasks = generation.tasks(tmp_path, "quick", models=THREE, epochs=EPOCHS)
    broken = replace(tasks[0], train=fail, folder=tmp_path / "broken")
    failed = jobs.execute([broken, *tasks], processes=2, device="cpu")
    assert [(task.folder.name, error) for task, error in failed] == [
        ("broken", "OSError: [Errno 28] No space left on device")
    ]
    assert results(tmp_path) == {path: replace(r, folder=tmp_path) for path, r in results(music).items()}
    for path in results(music):
        ours, theirs = (records.read(out / path).arrays() for out in (tmp_path, music))
        assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def test_in_one_process_the_others_finish_too(tmp_path):
    tasks = generation.tasks(tmp_path, "quick", models=("RNN",), epochs=2)
    broken = replace(tasks[0], train=fail, folder=tmp_path / "broken")
    ((task, _),) = jobs.execute([broken, *tasks], processes=1, device="cpu")
    assert task is broken and tasks[0].done


def test_a_process_that_is_killed_is_reported(tmp_path, monkeypatch):
    class Broken(ThreadPoolExecutor):
        def __init__(self, *arguments):
            super().__init__(1)

        def submit(self, *arguments):
            future = Future()
            future.set_exception(BrokenProcessPool())
            return future

    (task,) = generation.tasks(tmp_path, "quick", models=("RNN",), epochs=2)
    tasks = [replace(task, folder=tmp_path / name) for name in "ab"]
    monkeypatch.setattr(jobs, "ProcessPoolExecutor", Broken)
    failed = jobs.execute(tasks, processes=2)
    assert sorted(task.folder.name for task, _ in failed) == ["a", "b"]
    assert all("its process was killed, for want of memory perhaps; try fewer --jobs" in error for _, error in failed)


def test_threads_of_a_run_do_not_depend_on_what_is_done(music, monkeypatch):
    """Or the last run, resumed alone, might round differently."""
    tasks = generation.tasks(music, "quick", models=THREE, epochs=EPOCHS)
    seen = []
    monkeypatch.setattr(jobs, "_work", lambda task, device: seen.append(torch.get_num_threads()) or "")
    monkeypatch.setattr(jobs, "_check_same", lambda task: None)
    alone = replace(tasks[0], folder=music / "nowhere")
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    try:
        jobs.execute([*tasks[1:], alone], processes=2)
        assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(before)
    assert seen == [3]


def test_ctrl_c_keeps_what_was_done_and_resume_ends_the_same(tmp_path):
    """Ctrl-C reaches every process of a terminal, so of the group."""
    options = ["generation", "--models", "MS-LMN,LMN", "--epochs", "600", "--device", "cpu", "--jobs", "2"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    code = "import torch; torch.set_num_threads(1); from mslmn.cli import app; app()"
    command = [sys.executable, "-c", code, "reproduce", *options, "--out", str(cut)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if any(len(path.read_text().splitlines()) > 1 for path in cut.rglob("metrics.csv")):
                break
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        output = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "stopped: " in output and f"go on with --resume --out {cut}" in output
    assert "Traceback" not in output
    begun = list(cut.rglob("run.json"))
    assert begun and len(list(cut.rglob(records.RESULT))) < 2 and not (cut / "report.html").exists()
    serial = [*options[:-1], "1"]
    resumed = CliRunner().invoke(app, ["reproduce", *serial, "--out", str(cut), "--resume"])
    again = CliRunner().invoke(app, ["reproduce", *serial, "--out", str(whole)])
    assert resumed.exit_code == again.exit_code == 0, resumed.output + again.output
    assert (cut / "report.html").exists()
    for name in ("ms-lmn", "lmn"):
        folder = f"generation/{name}-budget1000-seed0"
        a, b = (json.loads((out / folder / records.RESULT).read_text()) | {"seconds": 0} for out in (cut, whole))
        assert a == b and a["epochs"] == 600


# Models


def test_the_rnn_is_torch_s():
    """A Clockwork RNN with one module, here with an input so that nn.RNN can be asked."""
    net = models.build("RNN", models.Settings(hidden=5), 3, 2, output="all").double()
    rnn = nn.RNN(3, 5).double()
    cell = net.encoder.cells[0]
    with torch.no_grad():
        for theirs, ours in zip(rnn.all_weights[0], (cell.Wxh[0], cell.Whh[0], cell.b_h[0]), strict=False):
            ours.copy_(0.5 * torch.randn_like(ours))
            theirs.copy_(ours)
        rnn.bias_hh_l0.zero_()
    x = torch.randn(11, 4, 3, dtype=torch.float64)
    (ours, state), (theirs, h_n) = net.encoder(x), rnn(x)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    torch.testing.assert_close(state.memory, h_n, rtol=0, atol=1e-12)
    w = torch.randn_like(ours)
    mine = torch.autograd.grad((ours * w).sum(), [cell.Wxh[0], cell.Whh[0], cell.b_h[0]])
    other = torch.autograd.grad((theirs * w).sum(), list(rnn.all_weights[0][:3]))
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_an_unknown_model_is_named():
    with pytest.raises(ValueError, match=r"model must be one of 'RNN', 'LSTM', .*, got 'GRU'; choose one of them"):
        models.build("GRU", models.Settings(hidden=5), 3, 2)
    for option in ({"pool": 2}, {"layers": 2, "layer_norm": True}):
        with pytest.raises(
            ValueError, match=r"an LSTM has no pool and no layer_norm, .*, got pool=., layer_norm=.*; leave them out"
        ):
            models.build("LSTM", models.Settings(hidden=5, **option), 3, 2)


def test_fewer_epochs_than_between_two_checkpoints_are_that_many():
    plan = models.Settings(hidden=1, epochs=30).plan("RNN", 0, 100)
    assert (plan.passes, plan.epochs) == (30, 1)
    plan = models.Settings(hidden=1, epochs=300).plan("RNN", 0, 100)
    assert (plan.passes, plan.epochs) == (100, 3)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 2),
    st.sampled_from([0, 2]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_a_padded_lstm_is_the_packed_one(lengths, layers, proj, bias, batch_first, ordered, last, both):
    if both:
        proj = 0
    options = {"bias": bias, "batch_first": batch_first, "proj_size": proj, "bidirectional": both}
    lstm = nn.LSTM(2, 3, layers, **options).double()
    if ordered:
        lengths = sorted(lengths, reverse=True)
    xs = [torch.randn(n, 2, dtype=torch.float64, requires_grad=True) for n in lengths]
    packed = pack_sequence(xs, enforce_sorted=ordered)
    found = _padded_lstm(lstm, packed, last)
    output, (h, _) = lstm(packed)
    expected = (torch.cat([h[-2], h[-1]], -1) if both else h[-1]) if last else output.data
    if not last:
        assert torch.equal(found.batch_sizes, output.batch_sizes)
        assert (found.unsorted_indices is None) == ordered
        assert ordered or torch.equal(found.unsorted_indices, output.unsorted_indices)
        found = found.data
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    w = torch.randn_like(expected)
    wanted = [*xs, *lstm.parameters()]
    grads, expected_grads = (torch.autograd.grad((y * w).sum(), wanted, retain_graph=True) for y in (found, expected))
    for a, b in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_the_model_takes_the_padded_way_only_where_it_may(monkeypatch):
    from mslmn import model

    taken = []
    monkeypatch.setattr(model, "_padded_lstm", lambda lstm, *rest: taken.append(lstm) or _padded_lstm(lstm, *rest))
    packed = pack_sequence([torch.randn(n, 2) for n in (3, 5)], enforce_sorted=False)
    padded = [nn.LSTM(2, 3), nn.LSTM(2, 3, bidirectional=True), nn.LSTM(2, 3, 2, bidirectional=True)]
    for encoder in (*padded, nn.GRU(2, 3), nn.LSTM(2, 3, proj_size=2, bidirectional=True)):
        SequenceModel(encoder, 2)(packed)
    assert taken == padded
    mostly_padding = pack_sequence([torch.randn(n, 2) for n in (50, *[1] * 9)])
    SequenceModel(padded[0], 2)(mostly_padding)
    assert taken == padded


# Plans


def pairs(counts=(4, 4, 4)):
    generator = torch.Generator().manual_seed(0)
    labels = [label for label, n in enumerate(counts) for _ in range(n)]
    return [(torch.randn(5, 2, generator=generator), torch.tensor(label)) for label in labels]


def trained(folder=None, data=None, seen=None, stop=None, resume=False, **plan):
    """A run; ``seen`` gets (stage, epoch, learning rate, classes of the batch) of each step; stopped after epochs."""
    original = training._Run._train_epoch

    def watched(self, one, batches):
        targets = []

        def watch():
            for input, target, weight in batches:
                targets.append(target.tolist())
                yield input, target, weight

        def note(*_):
            if seen is not None:
                seen.append((self.state.stage, self.state.epoch, adam.param_groups[0]["lr"], targets[-1]))

        if self.state.epochs == stop:
            raise KeyboardInterrupt
        adam = one.update.adam
        hook = adam.register_step_pre_hook(note)
        original(self, one, watch())
        hook.remove()

    torch.manual_seed(0)
    net = models.build("incremental MS-LMN", models.Settings(hidden=3, memory=2), 2, 3)
    options = {"plan": Plan(**plan), "resume": resume, "progress": False, "device": "cpu"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training._Run, "_train_epoch", watched)
        return fit(net, data or pairs(), pairs(), CrossEntropy(), folder, **options)


def test_balanced_batches_have_each_class_once():
    seen = []
    trained(seen=seen, balance=True, batch_size=3, epochs=3, passes=2, grow="never")
    batches = [sorted(classes) for *_, classes in seen]
    assert batches == [[0, 1, 2]] * 24
    assert len({tuple(classes) for *_, classes in seen}) > 1  # in any order


def test_balance_is_as_even_as_it_can_be():
    seen = []
    trained(seen=seen, data=pairs((5, 2, 3)), balance=True, batch_size=3, epochs=1, grow="never")
    assert [Counter(classes) for *_, classes in seen] == [
        {0: 1, 1: 1, 2: 1},
        {0: 1, 1: 1, 2: 1},
        {0: 2, 2: 1},
        {0: 1},
    ]


def test_balance_needs_classes():
    data = [(x, x) for x, _ in pairs()]
    net = models.build("LMN", models.Settings(hidden=3, memory=2), 2, 2, output="all")
    with pytest.raises(ValueError, match="balance needs a class number for each training sequence, got other targets"):
        fit(net, data, data, NMSE(), plan=Plan(balance=True), progress=False)


def test_passes_are_counted_within_an_epoch_each_in_its_own_order():
    seen = []
    result = trained(seen=seen, passes=3, batch_size=12, epochs=2, grow="never")
    assert [epoch for _, epoch, *_ in seen] == [0, 0, 0, 1, 1, 1] and len(result.history) == 2
    assert len({tuple(classes) for *_, classes in seen}) == 6


def test_the_first_pass_is_that_of_an_epoch_without_others():
    one, three = [], []
    trained(seen=one, epochs=1, batch_size=4, grow="never")
    trained(seen=three, epochs=1, batch_size=4, passes=3, grow="never")
    assert three[:3] == one


def test_a_constant_learning_rate_is_constant():
    seen = []
    trained(seen=seen, learning_rate=0.01, epochs=3, batch_size=12, grow="never")
    assert [rate for *_, rate, _ in seen] == [0.01] * 3


@pytest.mark.parametrize("stop", [None, 1])
def test_the_learning_rate_rises_batch_by_batch_at_first_and_never_again(tmp_path, stop):
    plan = {"learning_rate": 0.01, "warmup": 2, "epochs": 3, "batch_size": 4, "max_modules": 2, "growth_patience": 9}
    seen = []
    if stop is not None:
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path / "run", seen=seen, stop=stop, **plan)
    trained(tmp_path / "run", seen=seen, resume=True, **plan)
    rates = [rate for *_, rate, _ in seen]
    assert rates == pytest.approx([0.01 * i / 6 for i in range(1, 7)] + [0.01] * 12)


@pytest.mark.parametrize("contract", [False, True])
def test_a_plan_that_contracts_keeps_memories_contractions(monkeypatch, contract):
    norms, original = [], training._Run.epoch_done

    def watched(self, *arguments):
        blocks = self.model.encoder.cells[0].own_blocks()
        norms.append(max(float(torch.linalg.matrix_norm(block.detach(), 2)) for block in blocks))
        original(self, *arguments)

    monkeypatch.setattr(training._Run, "epoch_done", watched)
    trained(contract=contract, learning_rate=0.3, epochs=3, batch_size=4, max_modules=2, growth_patience=9)
    assert len(norms) == 6 and (max(norms) <= 2 ** (1 / 512) + 1e-6) == contract, norms


def test_what_has_no_memory_to_contract_is_left_alone():
    net = models.build("LSTM", models.Settings(hidden=3), 2, 3)
    fit(net, pairs(), pairs(), CrossEntropy(), plan=Plan(epochs=1, contract=True), progress=False)  # has none to keep


@pytest.mark.parametrize("stop", [None, 1, 3, 4, 6])
def test_a_cosine_falls_within_each_stage_and_goes_on_where_it_was(tmp_path, stop):
    plan = {"learning_rate": 0.01, "schedule": "cosine", "epochs": 4, "passes": 2, "batch_size": 12, "max_modules": 2}
    plan |= {"growth_patience": 9, "noise": 0.1}
    whole, seen = [], []
    expected = trained(tmp_path / "whole", seen=whole, **plan)
    if stop is not None:
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path / "cut", seen=seen, stop=stop, **plan)
    found = trained(tmp_path / "cut", seen=seen, resume=True, **plan)
    assert seen == whole
    rates = {(stage, epoch): rate for stage, epoch, rate, _ in seen}
    wanted = [0.01, 0.005 * (1 + math.sqrt(0.5)), 0.005, 0.005 * (1 - math.sqrt(0.5))]
    for stage in (0, 1):
        assert [rates[stage, epoch] for epoch in range(4)] == pytest.approx(wanted)
    assert found.history == expected.history
    for a, b in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert {stage for stage, *_ in seen} == {0, 1}


def test_results_are_written_whole_and_last(tmp_path, monkeypatch):
    """Arrays first: a folder with a result has all of it."""
    (task,) = generation.tasks(tmp_path, "quick", models=("RNN",), epochs=1)

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(records.store, "save", full)
        ((_, error),) = jobs.execute([task], processes=1, device="cpu")
    assert "No space left" in error and not task.done
    assert jobs.execute([task], processes=1, device="cpu") == [] and task.done


@pytest.mark.parametrize("name", models.NAMES)
def test_layers_stand_on_each_other_in_every_model(name):
    settings = models.Settings(hidden=5, memory=3, modules=2, layers=2, layer_norm=name != "LSTM")
    encoder = models.build(name, settings, 4, 6, bidirectional=True, output="all").encoder
    assert encoder.num_layers == 2
    assert name == "LSTM" or len(encoder.norms) == 1
    assert settings.sizes(name)["layers"] == 2
    alone = models.build(name, replace(settings, layers=1), 4, 6, bidirectional=True, output="all").encoder
    assert alone.num_layers == 1
