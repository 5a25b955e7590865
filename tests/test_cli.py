"""The command line, as a user types it."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import fake_runs
import mslmn
from mslmn import cli
from mslmn.benchmarks import autoencoder, cuda, recurrence, report, timing
from mslmn.cli import app
from mslmn.data import handwriting
from mslmn.data import words as spoken
from mslmn.experiments import generation, jobs, search
from mslmn.experiments import handwriting as reading
from mslmn.ops import backends, cpu
from test_iam_ondb import line_file, put_corpus
from test_pendigits import unipen
from test_timit import utter
from test_words import made_up


def run(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_help_names_the_commands():
    result = run("--help")
    assert result.exit_code == 0
    assert all(command in result.output for command in ("doctor", "bench", "reproduce", "report", "prepare", "search"))


@pytest.mark.parametrize("command", ["bench", "reproduce", "report", "prepare", "search"])
def test_the_help_of_a_command_has_examples(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Example" in result.output and f"mslmn {command} " in result.output.split("Example")[1]


def test_doctor_tells_versions_backends_and_reasons():
    result = run("doctor")
    assert result.exit_code == 0
    assert mslmn.__version__ in result.output and torch.__version__ in result.output
    assert backends.explain(torch.device("cpu")) in result.output
    if cpu.why_not() is None:
        assert cpu.instruction_set() in result.output
    if "not installed" in result.output:
        assert "pip install 'mslmn[" in result.output


def test_doctor_says_why_there_are_no_kernels(monkeypatch):
    monkeypatch.setattr(cpu, "_why_not", "they were not built: no C++ compiler")
    output = run("doctor").output
    assert "no fused kernels: they were not built: no C++ compiler" in output
    assert "│ torch   │" in output


def test_doctor_tells_of_a_wish():
    with mslmn.set_backend("reference"):
        output = run("doctor").output
    assert "you asked for it" in output and "│ reference │" in output


@pytest.fixture
def small(monkeypatch):
    sizes = (
        recurrence.Size("small", T=7, B=3, I=2, H=4, M=3, g=3, also_lstm=5),
        recurrence.Size("no input", T=5, B=1, I=0, H=1, M=2, g=3),
    )
    monkeypatch.setattr(recurrence, "PAPER", sizes)
    monkeypatch.setattr(recurrence, "BASE", sizes[0])
    monkeypatch.setattr(recurrence, "SWEEPS", {"T": (2, 4), "B": (1, 2), "M": (1, 2), "g": (1, 2)})
    monkeypatch.setattr(timing, "LEAST_SECONDS", 0.0)


def test_bench_prints_tables_writes_json_and_draws(small, tmp_path):
    result = run("bench", "--threads", "1", "--repeats", "2", "--out", str(tmp_path / "new" / "folder"))
    assert result.exit_code == 0, result.output
    for word in ("nn.LSTM(5)", "nn.RNN", "reference loop", "streaming", "g = 2", "parameters"):
        assert word in result.output
    found = json.loads((tmp_path / "new" / "folder" / "bench.json").read_text())
    assert {row["size"] for row in found["rows"]} == {"small", "no input"}
    assert all(row["forward"] > 0 and row["training"] > 0 for row in found["rows"])
    assert len(found["sweeps"]) == 8 and found["machine"]["torch"] == torch.__version__
    picture = (tmp_path / "new" / "folder" / "scaling.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert not list((tmp_path / "new" / "folder").glob("*.tmp"))


def test_bench_prints_no_time_for_a_wrong_result(small, tmp_path, monkeypatch):
    right = recurrence.results

    def wrong(layer, x, g):
        results = right(layer, x, g)
        if backends.wish() != "reference":
            results["the gradient of cells.0.Wmm.1"] = results["the gradient of cells.0.Wmm.1"] + 1e-2
        return results

    monkeypatch.setattr(recurrence, "results", wrong)
    result = run("bench", "--threads", "1", "--repeats", "1", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "the gradient of cells.0.Wmm.1" in result.output and "no time is reported" in result.output
    assert "forward + backward" not in result.output
    assert not list(tmp_path.iterdir())


def test_bench_refuses_a_folder_it_cannot_make_before_it_measures(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    result = run("bench", "--out", str(tmp_path / "file" / "bench"))
    assert result.exit_code == 2
    assert "cannot make" in result.output and "choose a folder you can write to" in result.output


def test_bench_leaves_the_number_of_threads_as_it_was(small, tmp_path):
    before = torch.get_num_threads()
    run("bench", "--threads", "3", "--repeats", "1", "--no-sweep", "--out", str(tmp_path))
    assert torch.get_num_threads() == before


def measured(**changes):
    """A row of the benchmark of the GPU, made up."""
    floor = {"bytes": 1e6, "operations": 1e9, "seconds": 2e-5, "ratio": 50.0}
    row = {
        "size": "handwriting", "candidate": "MS-LMN", "precision": "fp32",
        "dimensions": {"T": 600, "B": 32, "I": 4, "H": 144, "M": 16, "g": 9},
        "parameters": 53856, "forward": 1e-3, "training": 3e-3, "forward_graph": None,
        "training_graph": None, "latency": 1e-3 / 600, "error": 3.4e-7, "floors": {"forward": floor, "training": floor},
    }  # fmt: skip
    return {**row, **changes}


@pytest.fixture
def made_up_gpu(monkeypatch):
    lstm = {"candidate": "nn.LSTM(4, 110)", "error": None, "floors": None}
    missed = {"size": "handwriting", "B": 32, "pass": "forward", "against": "nn.LSTM(4, 110)", "required": 3.0}
    found = {
        "machine": {"gpu": "a GPU", "processor": "a CPU", "torch": "2", "mslmn": "1", "backend": "cuda"},
        "ceilings": {"bandwidth": 4.3e12, "operations": 5.1e13},
        "rows": [measured(), measured(**lstm, forward=2.5e-3, training=9e-3, forward_graph=2e-3)],
        "required": [{**missed, "ratio": 2.5}, {**missed, "pass": "training", "ratio": 3.0}],
    }
    monkeypatch.setattr(cuda, "run", lambda repeats, progress, device: found)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr("mslmn.cli._check_device", lambda device: None)


def test_bench_on_a_gpu_prints_tables_and_writes_json(made_up_gpu, tmp_path):
    result = run("bench", "--device", "cuda", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    for words in ("a GPU, torch 2", "handwriting (T=600, B=32", "2.500 ( 2.50x)", "9.000 ( 3.00x)", "2.000", "3.4e-07",
                  "1.667", "0.0200", "50.0x", "4.30 TB/s"):  # fmt: skip
        assert words in result.output
    assert "missed" not in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["cuda.json"]
    assert json.loads((tmp_path / "cuda.json").read_text())["rows"][1]["training_graph"] is None


def test_bench_fails_where_a_required_ratio_is_missed(made_up_gpu, tmp_path):
    result = run("bench", "--device", "cuda", "--require", "--out", str(tmp_path))
    assert result.exit_code == 1 and result.output.count("missed:") == 1
    assert "handwriting, B = 32, forward: 2.50 times as fast as nn.LSTM(4, 110), 3.0 required" in lines(result)
    assert (tmp_path / "cuda.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--device cuda:99", "there is no device 'cuda:99' here"),
        ("--device tpu", "the recurrence is not measured on 'tpu'; layers are on cpu and cuda"),
        ("autoencoder --device cuda", "the autoencoder is not measured on 'cuda'"),
        ("--require", "add --device cuda"),
    ],
)
def test_bench_says_which_device_it_cannot_use(options, message, tmp_path):
    result = run("bench", *options.split(), "--out", str(tmp_path / "out"))
    assert result.exit_code == 2 and message in lines(result), result.output
    assert not (tmp_path / "out").exists()


@pytest.fixture
def few_sequences(monkeypatch):
    cases = (
        autoencoder.Case(1, 40, 3, 5, wanted=2),
        autoencoder.Case(3, 30, 2, 4, wanted=9, minutes=True),
        autoencoder.Case(1, 200, 2, 4, horizon=9),
    )
    monkeypatch.setattr(autoencoder, "CASES", cases)


def test_bench_autoencoder_prints_a_table_and_writes_json(few_sequences, tmp_path):
    for full in ((), ("--full",)):
        result = run("bench", "autoencoder", *full, "--repeats", "3", "--out", str(tmp_path))
        assert result.exit_code == 0, result.output
        assert "1x40x3 p5" in result.output and "1x200x2 p4 h9" in result.output and "faster" in result.output
        rows = json.loads((tmp_path / "autoencoder.json").read_text())["rows"]
        assert [row["ratio"] is None for row in rows] == [False, not full, True]
        assert all(row["seconds"] > 0 and 0 < row["error"] < 1 for row in rows)
        assert rows[0]["error"] <= rows[0]["slices_error"]
        assert [path.name for path in tmp_path.iterdir()] == ["autoencoder.json"]


@pytest.mark.parametrize("worse", ["slices", "energy"])
def test_bench_autoencoder_prints_no_time_for_a_worse_result(few_sequences, tmp_path, monkeypatch, worse):
    right = autoencoder.fit

    def wrong(case, X, solver):
        if solver == "auto" and (worse == "slices") == (case.horizon is None):
            case = autoencoder.Case(case.n, case.T, case.a, 1, case.horizon)
        return right(case, X, solver)

    monkeypatch.setattr(autoencoder, "fit", wrong)
    result = run("bench", "autoencoder", "--repeats", "1", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "no time is reported for a worse result" in result.output and "faster" not in result.output
    assert not list(tmp_path.iterdir())


def test_extra_memory_is_what_a_call_takes_for_a_while():
    result, extra = timing.extra_memory(lambda: torch.ones(10**7).sum().item())
    assert result == 10**7
    assert extra is None or 30e6 < extra < 100e6  # None but on Linux


def test_peers_have_as_many_parameters(monkeypatch):
    for size in recurrence.PAPER:
        layer = size.layer()
        budget = sum(p.numel() for p in layer.parameters())
        name, lstm = next(iter(recurrence.peers(size, layer)))
        dead = 4 * lstm.hidden_size if size.I == 0 else 0
        count = sum(p.numel() for p in lstm.parameters()) - dead
        assert abs(count - budget) / budget < 0.1, name  # whole units


@pytest.mark.filterwarnings("default")
def test_file_names_of_any_bytes_are_told(capsys):
    with cli._told(Console()):
        warnings.warn("skipped 1:\n  Donn\udce9es/\x1b[31ma.xml", stacklevel=1)
    shown = capsys.readouterr().out
    assert shown == "warning: skipped 1:\n  Donn\\udce9es/\\x1b[31ma.xml\n"


def test_the_plot_names_what_it_needs(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'mslmn\[experiments\]'"):
        report.plot_sweeps([], tmp_path / "plot.png")


def test_alternate_takes_turns_and_reports_each():
    calls = []
    times = timing.alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=3)
    assert set(times) == {"a", "b"} and all(seconds > 0 for seconds in times.values())
    assert calls.index("b") < len(calls) - 1 - calls[::-1].index("a")


# reproduce, report, prepare, search


@pytest.fixture
def tiny(monkeypatch):
    """Words that take no time to read, and few lines."""
    monkeypatch.setattr(spoken, "embedded", made_up)
    monkeypatch.setattr(reading, "LINES", dict.fromkeys(reading.LINES, 5))
    monkeypatch.setattr(reading, "WORDS", dict.fromkeys(reading.WORDS, (1, 1)))


def lines(result):
    """What was said, without where it was wrapped."""
    return " ".join(result.output.split())


def quick(out, *options, what="generation"):
    return run("reproduce", what, "--epochs", "2", "--jobs", "1", "--device", "cpu", "--out", str(out), *options)


def test_reproduce_runs_reports_and_resumes(tiny, tmp_path):
    result = quick(tmp_path, "--models", "rnn,MS-LMN,lstm", "--seeds", "1", what="all")
    assert result.exit_code == 0, result.output
    found = sorted(str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("result.json"))
    assert found == [
        "generation/lstm-budget1000-seed0",
        "generation/ms-lmn-budget1000-seed0",
        "generation/rnn-budget1000-seed0",
        "handwriting/lstm-lines5-seed0",
        "handwriting/ms-lmn-lines5-seed0",
        "words/lstm-split0-seed0",
        "words/ms-lmn-split0-seed0",
    ]
    assert (tmp_path / "report.html").exists() and f"wrote {tmp_path / 'report.html'}" in result.output
    refused = quick(tmp_path, "--models", "RNN")
    assert refused.exit_code == 2 and "is not empty; add --resume to go on with the runs there" in lines(refused)
    again = quick(tmp_path, "--models", "rnn,MS-LMN,lstm", "--seeds", "1", "--resume", what="all")
    assert again.exit_code == 0
    other = quick(tmp_path, "--models", "RNN", "--resume", "--offset", "0.25")
    assert other.exit_code == 2 and "has other data, BWV 846, rendered, at 0.5 s; choose another --out" in lines(other)
    reported = run("report", str(tmp_path))
    assert reported.exit_code == 0 and "MS-LMN" in reported.output


def test_handwriting_is_read_from_what_prepare_wrote_and_told_epoch_by_epoch(tmp_path):
    prepared = tmp_path / "five.npz"
    assert run("prepare", "handwriting", "--lines", "5", "--features", "offsets", "--out", str(prepared)).exit_code == 0
    options = ("--preset", "best", "--models", "MS-LMN", "--seeds", "1", "--prepared", str(prepared))
    result = quick(tmp_path / "out", *options, what="handwriting")
    assert result.exit_code == 0, result.output
    assert lines(result).count("ms-lmn-lines5-seed0: stage 0, epoch ") == 2
    assert "synthetic lines, seed 0, offsets" in lines(result) and (tmp_path / "out" / "report.html").exists()
    assert "note:" not in result.output
    other = quick(tmp_path / "b", "--preset", "paper", *options[2:], what="handwriting")
    assert "note: the pen's features are offsets; preset paper was made for absolute (--features)" in lines(other)


def test_with_all_experiments_what_was_prepared_are_words(tiny, tmp_path, monkeypatch):
    spoken.keep(tmp_path / "words.npz", made_up())
    seen = []
    monkeypatch.setattr(jobs, "execute", lambda tasks, **options: seen.extend(tasks) or [])
    quick(tmp_path / "out", "--prepared", str(tmp_path / "words.npz"), "--models", "LMN", "--seeds", "1", what="all")
    assert [task.folder.name for task in seen if task.job.experiment == "handwriting"] == ["lmn-lines5-seed0"]


def test_seeds_budgets_and_splits_are_runs(tiny, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(jobs, "execute", lambda tasks, **options: seen.extend(tasks) or [])
    quick(tmp_path / "a", "--models", "LMN", "--budgets", "100,250,100", "--seed", "3", "--seeds", "2")
    quick(tmp_path / "b", "--models", "LMN", "--splits", "2", "--seeds", "1", what="words")
    assert sorted(task.folder.name for task in seen) == [
        "lmn-budget100-seed3",
        "lmn-budget100-seed4",
        "lmn-budget250-seed3",
        "lmn-budget250-seed4",
        "lmn-split0-seed0",
        "lmn-split1-seed0",
    ]


def test_a_run_that_fails_is_named_and_the_rest_is_reported(tiny, tmp_path, monkeypatch):
    train = generation.train

    def fail(job, data, folder, device):
        if job.model == "LMN":
            raise RuntimeError("the machine is [out] of luck")
        return train(job, data, folder, device)

    monkeypatch.setattr(generation, "train", fail)
    result = quick(tmp_path, "--models", "RNN,LMN")
    assert result.exit_code == 1 and (tmp_path / "report.html").exists()
    assert "lmn-budget1000-seed0: RuntimeError: the machine is [out] of luck" in lines(result)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("generation --models GRU,LMN", "there is no model gru here; choose of RNN, LSTM, CW-RNN, LMN, MS-LMN"),
        ("words --models RNN", "there is no model rnn here; choose of LSTM, LMN, CW-RNN, MS-LMN, incremental MS-LMN"),
        ("generation --budgets 300", "budgets must be of 100, 250, 500, 1000, got 300; name some of them"),
        ("generation --budgets many", "budgets must be of 100, 250, 500, 1000, got many; name some of them"),
        ("generation --preset fast", "'fast' is not one of 'quick', 'paper', 'best'"),
        ("music", "'music' is not one of 'generation', 'words', 'handwriting', 'all'"),
        ("generation --audio {folder}/gone.flac", "gone.flac is not a file; pass a recording, FLAC or WAV"),
        ("generation --audio {folder}/text.txt", "text.txt cannot be read as sound"),
        ("generation --offset 7", "too few for 300 from 7.0 s on; choose a smaller offset"),
        ("generation --offset -1", "offset must be at least 0 seconds, got -1.0"),
        ("generation --device tpu9", "there is no device 'tpu9' here"),
        ("generation --seeds 0", "Invalid value for '--seeds'"),
        ("words --splits 11", "Invalid value for '--splits'"),
        ("all --timit {folder}/gone", "gone is not a folder; pass the root of TIMIT (LDC93S1)"),
        ("words --timit {folder}", "must hold .WRD files"),
        ("words --words {folder}/text.txt", "--words needs --timit: the package has only the paper's 25 words"),
        ("words --prepared {folder}/gone.npz", "gone.npz cannot be read as prepared data"),
        ("words --prepared {folder}/text.txt", "text.txt cannot be read as prepared data"),
        ("handwriting --iam-ondb {folder}/gone", "gone is not a folder"),
        ("handwriting --iam-ondb x --lines 5", "--iam-ondb has its own lines; leave out --lines"),
        ("handwriting --prepared {folder}/text.txt", "text.txt cannot be read as prepared data"),
        ("handwriting --prepared x.npz --lines 5", "--prepared has its lines and features already; leave out"),
        ("generation --lines 7", "--lines is not for generation; leave it out"),
        ("words --iam-ondb x --offset 1", "--offset is not for words; leave it out"),
        ("handwriting --timit x --splits 2", "--timit, --splits is not for handwriting; leave it out"),
        ("handwriting --models RNN", "there is no model rnn here; choose of LSTM, CW-RNN, LMN, MS-LMN, incremental"),
        ("words --prepared x.npz --timit y", "--prepared has the words already; leave out --timit and --words"),
    ],
)
def test_reproduce_says_what_is_wrong_and_writes_nothing(options, message, tmp_path):
    (tmp_path / "text.txt").write_text("do re mi")
    out = tmp_path / "out"
    result = run("reproduce", *options.format(folder=tmp_path).split(), "--out", str(out))
    assert result.exit_code == 2 and message in lines(result), result.output
    assert "Traceback" not in result.output and not (result.exception and not isinstance(result.exception, SystemExit))
    assert not out.exists()


def test_an_out_that_is_no_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for command in (("reproduce", "generation"), ("search", "words"), ("prepare", "handwriting", "--lines", "5")):
        result = run(*command, "--out", str(tmp_path / "file" / "out"))
        assert result.exit_code == 2 and "choose a folder you can write to" in lines(result)


@pytest.mark.parametrize("command", ["search words", "prepare words --timit gone", "prepare handwriting --lines 5"])
def test_an_out_that_is_a_folder_is_told_before_anything_is_read(tmp_path, command):
    result = run(*command.split(), "--out", str(tmp_path))
    assert result.exit_code == 2 and f"{tmp_path} is a folder; name a file in it" in lines(result)


def test_errors_are_not_on_stdout(tmp_path):
    result = run("report", str(tmp_path / "gone"))
    assert result.exit_code == 2 and result.stdout == "" and "no results under" in result.stderr


def test_ctrl_c_says_how_to_go_on(tiny, tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "execute", interrupted)
    result = quick(tmp_path / "out", "--models", "RNN")
    assert result.exit_code == 130 and f"0 of 1 runs are done; go on with --resume --out {tmp_path}" in result.output
    monkeypatch.setattr(search, "search", interrupted)
    result = run("search", "words", "--out", str(tmp_path / "search.json"))
    assert result.exit_code == 130 and "the same command goes on" in lines(result)


def test_report_needs_results_that_can_be_read(tmp_path):
    assert "no results under" in lines(run("report", str(tmp_path)))
    record = fake_runs.put(tmp_path)
    (record.folder / "result.json").write_text("{}")
    result = run("report", str(tmp_path))
    assert result.exit_code == 2 and "result.json is damaged" in lines(result)


def test_prepare_writes_what_reproduce_reads(tmp_path, monkeypatch):
    for i in range(4):
        utter(tmp_path / "timit", f"TRAIN/DR1/FAA{i}0/SX1", i)
    (tmp_path / "list.txt").write_text("she\nwater\n")
    prepare = ("prepare", "words", "--timit", str(tmp_path / "timit"), "--words", str(tmp_path / "list.txt"))
    out = tmp_path / "words.npz"
    result = run(*prepare, "--out", str(out))
    assert result.exit_code == 0 and f"wrote {out}: 8 clips of 2 words" in result.output, result.output
    assert spoken.load(out).classes == ["she", "water"]
    assert run(*prepare, "--out", str(out)).exit_code == 0  # the same again
    monkeypatch.setattr(spoken, "embedded", made_up)
    refused = run("prepare", "words", "--out", str(out))
    assert refused.exit_code == 2 and "words.npz has other data, 2 words of" in lines(refused)
    result = quick(tmp_path / "runs", "--prepared", str(out), "--models", "LMN", "--seeds", "1", what="words")
    assert result.exit_code == 0, result.output
    with np.load(next(tmp_path.rglob("arrays.npz")), allow_pickle=False) as arrays:
        assert arrays["names"].tolist() == ["she", "water"]


def test_prepare_writes_synthetic_handwriting(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("prepare", "handwriting", "--lines", "5", "--seed", "3")
    assert result.exit_code == 0, result.output
    assert "wrote handwriting.npz: 5 for train, 1 for validation, 1 for test; " in result.output
    assert "steps a line, 58 outputs" in result.output
    data = handwriting.load("handwriting.npz")
    assert (
        data.name == "synthetic lines, seed 3"
        and data.kind == "absolute"
        and data.alphabet.characters == handwriting.PAPER
    )
    result = run(
        "prepare", "handwriting", "--lines", "5", "--features", "offsets", "--alphabet", "all", "--out", "b.npz"
    )
    assert result.exit_code == 0 and handwriting.load("b.npz").kind == "offsets", result.output
    assert handwriting.load("b.npz").alphabet.outputs < 58
    refused = run("prepare", "handwriting", "--lines", "6", "--seed", "3")
    assert refused.exit_code == 2 and "handwriting.npz has other data, synthetic lines, seed 3" in lines(refused)


@pytest.mark.filterwarnings("default")
def test_prepare_reads_iam_ondb_and_says_what_it_skipped(tmp_path):
    put_corpus(tmp_path / "iam")
    (tmp_path / "iam" / line_file("a01-000u", 1)).write_text("<")
    out = tmp_path / "iam.npz"
    result = run(
        "prepare", "handwriting", "--iam-ondb", str(tmp_path / "iam"), "--features", "offsets", "--out", str(out)
    )
    assert result.exit_code == 0, result.output
    assert "warning: not as many lines as the task t1 has: trainset.txt 1 of 5,364, " in lines(result)
    assert "warning: skipped 1: " in lines(result) and "a01-000u-01.xml must be XML" in lines(result)
    assert f"wrote {out}: 1 for train, 4 for validation, 2 for test; " in result.output
    data = handwriting.load(out)
    assert data.texts[0] == "don't go." and data.names[0] == "a01-000u-02"


@pytest.mark.filterwarnings("default")
def test_prepare_joins_digits_with_an_alphabet_of_digits(tmp_path):
    for name in ("tra", "tes"):
        (tmp_path / f"pendigits-orig.{name}").write_text(unipen(range(1, 8)))
    out = tmp_path / "digits.npz"
    result = run("prepare", "handwriting", "--pendigits", str(tmp_path), "--lines", "10", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "warning: " in result.output and "has 84 digits of 7,494" in lines(result)
    data = handwriting.load(out)
    assert set(data.alphabet.characters) <= set("0123456789") and data.splits.count("train") == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("handwriting --timit x", "--timit is not for handwriting; leave it out"),
        ("words --iam-ondb x --seed 0", "--iam-ondb, --seed is not for words; leave it out"),
        (
            "handwriting --iam-ondb x --lines 3",
            "--iam-ondb has its own lines; leave out --lines",
        ),
        ("handwriting --fold 1/4", "--fold is of the writers of pendigits; pass --pendigits too, or leave it out"),
        ("handwriting --iam-ondb x --fold 1/4", "--iam-ondb has its own lines; leave out --fold"),
        ("words --fold 1/4", "--fold is not for words; leave it out"),
        ("handwriting --iam-ondb gone", "gone is not a folder; pass the root of IAM-OnDB"),
        ("handwriting --pendigits gone", "gone is not a folder; pass the one with pendigits-orig.tra"),
        ("handwriting --lines 0", "Invalid value for '--lines'"),
        ("handwriting --features deltas", "Invalid value for '--features'"),
    ],
)
def test_what_cannot_be_prepared_is_said(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = run("prepare", *arguments.split())
    assert result.exit_code == 2 and message in lines(result)
    assert "Traceback" not in result.output and not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("default")
def test_what_is_skipped_is_said(tmp_path):
    for i in range(4):
        sound = utter(tmp_path / "timit", f"TRAIN/DR1/FAA{i}0/SX1", i)
    sound.write_bytes(sound.read_bytes()[:-1])
    (tmp_path / "list.txt").write_text("she water")
    result = run(
        "prepare", "words", "--timit", str(tmp_path / "timit"), "--words", str(tmp_path / "list.txt"),
        "--out", str(tmp_path / "words.npz"),
    )  # fmt: skip
    assert result.exit_code == 0 and "6 clips" in result.output
    assert "warning: skipped: " in result.output and "FAA30" in result.output and "Traceback" not in result.output


def test_search_searches_prints_and_exports(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.setattr(spoken, "embedded", made_up)
    options = ("--models", "LMN", "--trials", "1", "--epochs", "1", "--storage", f"sqlite:///{tmp_path}/s.db")
    result = run("search", "words", *options, "--out", str(tmp_path / "new" / "search.json"), "--device", "cpu")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "new" / "search.json").read_text())
    assert found["LMN"]["completed"] == 1 and "the best of each" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--space all", "'all' is not one of 'paper', 'best'"),
        ("--models RNN", "there is no model rnn here; choose of LSTM"),
        ("--trials 0", "Invalid value for '--trials'"),
        ("--split 10", "Invalid value for '--split'"),
        ("--device tpu9", "there is no device 'tpu9' here"),
        ("--storage nonsense://x", "the storage cannot be opened"),
        ("--prepared gone.npz", "gone.npz cannot be read as prepared data"),
        ("--prepared x.npz --timit y", "--prepared has the words already"),
    ],
)
def test_search_says_what_is_wrong(options, message, tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(spoken, "embedded", made_up)
    result = run("search", "words", *options.split())
    assert result.exit_code == 2 and message in lines(result), result.output
    assert list(Path().iterdir()) == []


def test_a_search_without_a_result_fails(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise search.Failed("1 of 2 processes failed; what they finished is kept, search again")

    monkeypatch.setattr(spoken, "embedded", made_up)
    monkeypatch.setattr(search, "search", fail)
    result = run("search", "words", "--out", str(tmp_path / "search.json"))
    assert result.exit_code == 1 and "failed: 1 of 2 processes failed" in lines(result)
    assert not (tmp_path / "search.json").exists()
