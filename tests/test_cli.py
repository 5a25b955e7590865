"""The command line, as a user types it."""

import json

import pytest
import torch
from typer.testing import CliRunner

import mslmn
from mslmn.benchmarks import autoencoder, recurrence, report, timing
from mslmn.cli import app
from mslmn.ops import backends, cpu


def run(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_help_names_the_commands():
    result = run("--help")
    assert result.exit_code == 0
    assert "doctor" in result.output and "bench" in result.output


def test_doctor_tells_versions_backends_and_reasons():
    result = run("doctor")
    assert result.exit_code == 0
    assert mslmn.__version__ in result.output and torch.__version__ in result.output
    assert backends.explain("cpu") in result.output
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
    right = recurrence._results

    def wrong(layer, x, g):
        results = right(layer, x, g)
        if backends.wish() != "reference":
            results["the gradient of cells.0.Wmm.1"] = results["the gradient of cells.0.Wmm.1"] + 1e-2
        return results

    monkeypatch.setattr(recurrence, "_results", wrong)
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
