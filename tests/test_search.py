"""Random search: what is drawn, what it is judged on, who does the trials, and what is left for the next time."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mslmn.data import words as spoken
from mslmn.experiments import models, search, words
from mslmn.experiments.paper import WORDS
from mslmn.training import Diverged
from test_words import made_up

optuna = pytest.importorskip("optuna")
sqlalchemy = pytest.importorskip("sqlalchemy")
State = optuna.trial.TrialState
TINY = {"trials": 2, "epochs": 1, "device": "cpu"}


@pytest.fixture
def data(tmp_path):
    return spoken.keep(tmp_path / "words.npz", made_up())


@pytest.fixture
def storage(tmp_path):
    return f"sqlite:///{tmp_path}/search.db"


@pytest.fixture
def no_training(monkeypatch):
    """A trial takes no time: the accuracy is that of an untrained model."""

    def untrained(model, settings, clips, train, validation, seed, folder, device):
        class Result:
            pass

        result = Result()
        result.model = models.build(model, settings, 13, len(clips.classes))
        return result

    monkeypatch.setattr(words, "fitted", untrained)


def load(storage, model="LMN", which="best"):
    name = f"words, {model}, {which}, split 0, seed 0"
    return optuna.load_study(study_name=name, storage=search._storage(storage))


def trials(storage, *which):
    return load(storage, *which).get_trials()


# What is drawn


@given(st.sampled_from(list(WORDS)), st.sampled_from(search.SPACES), st.integers(0, 99), st.integers(0, 999))
def test_a_draw_depends_on_seed_and_number_and_stays_in_range(model, which, seed, number):
    drawn = search.draw(model, which, seed, number)
    assert drawn == search.draw(model, which, seed, number)
    assert drawn["learning_rate"] in (1e-3, 1e-4) and drawn["batch_size"] in (1, 25)
    assert drawn["weight_decay"] in (0, 1e-3, 1e-4, 1e-5)
    most = 60 if model in ("LSTM", "LMN") else 40
    assert 5 <= drawn["hidden"] <= most and 5 <= drawn.get("memory", 5) <= most
    assert ("memory" in drawn) == (model not in ("LSTM", "CW-RNN"))
    ours = {"norm", "init", "first_module", "readout", "horizon"} & drawn.keys()
    assert not ours or which == "best"
    chosen = search.chosen(model, drawn, made_up())
    assert all(getattr(chosen, name) == value for name, value in drawn.items())


def test_draws_differ_from_number_to_number_and_seed_to_seed():
    drawn = {json.dumps(search.draw("MS-LMN", "best", seed, number)) for seed in range(5) for number in range(20)}
    assert len(drawn) > 95


# What it is judged on


@given(st.lists(st.integers(3, 9), min_size=2, max_size=5), st.integers(0, 9))
def test_folds_hold_each_training_clip_out_once_and_never_see_a_test_clip(counts, split):
    parts = [made_up(speakers=n, classes=(f"w{i}",), lengths=(2, 3)) for i, n in enumerate(counts)]
    labels = [i for i, n in enumerate(counts) for _ in range(n)]
    clips = spoken.Words(
        "",
        [x for part in parts for x in part.features],
        labels,
        [s for part in parts for s in part.speakers],
        [f"w{i}" for i in range(len(counts))],
        [-1] * len(counts),
    )
    train, test = spoken.split_indices(clips, split)
    if min(Counter(labels[i] for i in train).values()) < 2:
        with pytest.raises(ValueError, match="a word has a single training clip, so none can be held out"):
            search.folds(clips, train)
        return
    folds = search.folds(clips, train)
    for inside, outside in folds:
        assert sorted(inside + outside) == train and not set(inside) & set(outside)
        assert not (set(inside) | set(outside)) & set(test)
        assert Counter(labels[i] for i in outside) == dict.fromkeys(range(len(counts)), 1)
    held_out = [i for _, outside in folds for i in outside]
    assert len(held_out) == len(set(held_out))
    if len(set(counts)) == 1:
        assert sorted(held_out) == train


def test_the_same_speakers_are_held_out_together():
    clips = made_up()
    train, _ = spoken.split_indices(clips, 0)
    held_out = [{clips.speakers[i] for i in outside} for _, outside in search.folds(clips, train)]
    assert held_out == [{"S0"}, {"S2"}, {"S3"}, {"S4"}, {"S5"}]


def test_test_clips_have_no_say(data, storage, tmp_path):
    """Whatever they sound like, the search finds the same."""
    clips = made_up()
    for i in spoken.split_indices(clips, 0)[1]:
        clips.features[i][:] = 1e3
    other = spoken.keep(tmp_path / "other.npz", clips)
    first, second = (
        search.search(path, ["LMN"], f"{storage}{i}", **{**TINY, "trials": 1}) for i, path in enumerate((data, other))
    )
    assert first == second


# Who does the trials


def test_a_search_is_done_and_more_trials_do_only_the_new_ones(data, storage, tmp_path):
    found = search.search(data, ["LSTM", "MS-LMN"], storage, **TINY)
    assert list(found) == ["LSTM", "MS-LMN"]
    before = {model: trials(storage, model) for model in found}
    for model, best in found.items():
        assert best["completed"] == 2 and best["pruned"] == 0 and len(best["trials"]) == 2
        assert best["accuracy"] == max(trial["accuracy"] for trial in best["trials"])
        assert best["settings"] == search.draw(model, "best", 0, best["trial"])
        assert [trial.user_attrs["number"] for trial in before[model]] == [0, 1]
    more = search.search(data, ["MS-LMN"], storage, **{**TINY, "trials": 3})
    after = trials(storage, "MS-LMN")
    assert more["MS-LMN"]["completed"] == 3 and [trial.user_attrs["number"] for trial in after] == [0, 1, 2]
    assert [t.datetime_complete for t in after[:2]] == [t.datetime_complete for t in before["MS-LMN"]]
    search.export(found, tmp_path / "search.json")
    assert json.loads((tmp_path / "search.json").read_text()) == found
    assert not list(tmp_path.glob("*.tmp"))


def test_a_journal_file_does_as_well_and_finds_the_same(data, storage, tmp_path, no_training):
    in_file = search.search(data, ["LMN"], str(tmp_path / "search.log"), **TINY)
    assert (tmp_path / "search.log").exists() and in_file["LMN"]["completed"] == 2
    search.search(data, ["LMN"], storage, **TINY)
    first, second = ([t.user_attrs["settings"] for t in trials(s)] for s in (storage, str(tmp_path / "search.log")))
    assert first == second


def test_two_processes_share_the_trials(data, storage):
    found = search.search(data, ["LMN"], storage, **{**TINY, "trials": 3}, jobs=2)
    done = [trial for trial in trials(storage) if trial.state == State.COMPLETE or "settings" in trial.user_attrs]
    assert sorted(trial.user_attrs["number"] for trial in done) == list(range(3))
    assert found["LMN"]["completed"] == 3
    for trial in done:
        assert trial.user_attrs["settings"] == search.draw("LMN", "best", 0, trial.user_attrs["number"])


def test_a_process_that_comes_too_late_makes_no_trial_up(data, storage, no_training):
    search.search(data, ["LMN"], storage, **TINY)
    study = load(storage)
    study.optimize(
        lambda trial: search._trial(optuna, trial, "LMN", made_up(), "best", 0, 0, 1, "cpu"), n_trials=1
    )  # the queue is empty
    assert study.trials[-1].state == State.PRUNED and "settings" not in study.trials[-1].user_attrs
    again = search.search(data, ["LMN"], storage, **TINY)
    assert again["LMN"]["completed"] == 2 and again["LMN"]["pruned"] == 0


def test_a_number_that_was_queued_twice_is_done_once(data, storage, no_training):
    search.search(data, ["LMN"], storage, **{**TINY, "trials": 1})
    study = load(storage)
    for number in (0, 1, 1):
        study.enqueue_trial({}, user_attrs={"number": number})
    found = search.search(data, ["LMN"], storage, **TINY)
    assert found["LMN"]["completed"] == 2 and found["LMN"]["pruned"] == 0


def test_trials_that_were_interrupted_are_done_again(data, storage, monkeypatch, no_training):
    untrained = words.fitted

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(words, "fitted", interrupted)
    with pytest.raises(KeyboardInterrupt):
        search.search(data, ["LMN"], storage, **TINY)
    assert [trial.state for trial in trials(storage)] == [State.FAIL, State.WAITING]
    monkeypatch.setattr(words, "fitted", untrained)
    found = search.search(data, ["LMN"], storage, **TINY)
    assert found["LMN"]["completed"] == 2
    done = [trial.user_attrs["number"] for trial in trials(storage) if trial.state == State.COMPLETE]
    assert sorted(done) == [0, 1]


def test_trials_of_a_process_that_died_are_done_again(data, storage, no_training):
    """Once their heartbeat has been missing long enough."""
    search.search(data, ["LMN"], storage, **{**TINY, "trials": 1})
    study = load(storage)
    study.enqueue_trial({}, user_attrs={"number": 1})
    with warnings.catch_warnings(action="ignore"):  # outside optimize nothing beats
        dead = study.ask()
    study._storage.record_heartbeat(dead._trial_id)
    engine = sqlalchemy.create_engine(storage)
    with engine.begin() as connection:
        long_ago = datetime.now() - timedelta(days=2)
        connection.execute(sqlalchemy.text("UPDATE trial_heartbeats SET heartbeat = :t"), {"t": str(long_ago)})
    engine.dispose()
    found = search.search(data, ["LMN"], storage, **TINY)
    assert found["LMN"]["completed"] == 2
    assert sum(trial.state == State.FAIL for trial in trials(storage)) == 1


def test_what_diverges_is_worth_nothing(data, storage, monkeypatch):
    def diverge(*arguments):
        raise Diverged("the loss is nan in epoch 1 of stage 0")

    monkeypatch.setattr(words, "fitted", diverge)
    found = search.search(data, ["LMN"], storage, **TINY)
    assert found["LMN"]["accuracy"] == 0


def test_ctrl_c_stops_every_process_and_the_next_search_goes_on(data, tmp_path):
    storage, options = f"sqlite:///{tmp_path}/search.db", ["--models", "LMN", "--trials", "2", "--space", "paper"]
    code = "from mslmn.cli import app; app()"
    command = [sys.executable, "-c", code, "search", "words", "--prepared", data, "--storage", storage, *options]
    with subprocess.Popen(
        [*command, "--jobs", "2", "--epochs", "100000"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if (tmp_path / "search.db").exists() and b"settings" in (tmp_path / "search.db").read_bytes():
                break  # a trial has begun
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        output = process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    assert "stopped: finished trials are kept; the same command goes on" in output and "Traceback" not in output
    states = Counter(trial.state for trial in trials(storage, "LMN", "paper"))
    assert states[State.FAIL] >= 1 and not states[State.RUNNING]


def test_ctrl_c_waits_until_a_trial_can_fail_by_it():
    with search._Patience() as patience:
        signal.raise_signal(signal.SIGINT)  # while a trial is asked for
        with pytest.raises(KeyboardInterrupt), patience.over():
            raise AssertionError("the trial began")
        with pytest.raises(KeyboardInterrupt):
            patience.check()
    with search._Patience() as patience, pytest.raises(KeyboardInterrupt), patience.over():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# What can go wrong


def test_other_words_or_epochs_in_one_storage_are_refused(data, storage, tmp_path, no_training):
    search.search(data, ["LMN"], storage, **TINY)
    with pytest.raises(
        ValueError, match=r"has trials of words, LMN, .* with epochs 1, not 2; choose another --storage"
    ):
        search.search(data, ["LMN"], storage, **{**TINY, "epochs": 2})
    other = spoken.keep(tmp_path / "other.npz", made_up(classes=("ant", "bee")))
    with pytest.raises(ValueError, match=r"with other words; choose another --storage"):
        search.search(other, ["LMN"], storage, **TINY)


def test_a_wrong_space_or_too_few_speakers_stop_the_search_before_it_starts(data, tmp_path):
    storage = str(tmp_path / "search.log")
    with pytest.raises(ValueError, match="space must be one of 'paper', 'best', got 'all'"):
        search.search(data, ["LMN"], storage, which="all")
    few = spoken.keep(tmp_path / "few.npz", made_up(speakers=2))
    with pytest.raises(ValueError, match="a single training clip, so none can be held out; search with more speakers"):
        search.search(few, ["LMN"], storage)
    assert not (tmp_path / "search.log").exists()


@pytest.mark.parametrize(
    "url", ["nonsense://x", "sqlite:////nowhere/at/all.db", "/nowhere/at/all.log", "{folder}/text"]
)
def test_a_storage_that_cannot_be_opened_says_so(url, data, tmp_path):
    (tmp_path / "text").write_text("no journal\n")
    with pytest.raises(ValueError, match=r"the storage cannot be opened \(.+\); pass a URL like sqlite:///search\.db"):
        search.search(data, ["LMN"], url.format(folder=tmp_path), **TINY)
    assert (tmp_path / "text").read_text() == "no journal\n"


def test_optuna_is_named_where_it_is_missing(data, storage, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"this needs optuna: pip install 'mslmn\[search\]'"):
        search.search(data, ["LMN"], storage)
