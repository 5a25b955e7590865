"""The benchmark of the GPU: what it computes beside the times, and that it runs."""

import json

import pytest
import torch
from torch import nn

import mslmn
from mslmn.benchmarks import cuda, timing
from mslmn.benchmarks.recurrence import Size

SMALL = Size("small", T=7, B=3, I=2, H=4, M=3, g=3, also_lstm=5)
CASES = (
    cuda.Case(SMALL, family=True, loop=True, required=(3.0, 0.5)),
    cuda.Case(SMALL, bidirectional=True),
    cuda.Case(Size("no input", T=5, B=1, I=0, H=1, M=2, g=3), loop=True, direct=True, required=(1.0, 1.0)),
)


def millisecond(call, times):
    """A clock by which everything takes as long."""
    call()
    return 1e-3 * times


@pytest.fixture(autouse=True)
def _small_ceilings(monkeypatch):
    monkeypatch.setattr(cuda, "SIDE", 128)


def test_the_work_is_that_counted_by_hand():
    layer, x = mslmn.MSLMN(2, 3, 2, num_modules=2), torch.randn(5, 4, 2)
    # Wxh 6; module 1: Whm 6, Wmh 6, Wmm 4; module 2, every other step: 6, 6, 8; two operations each, 20 steps
    operations = 2 * 20 * (6 + 16 + 20 / 2)
    x_bytes, weights, hidden, memory = 4 * 40, 4 * 49, 4 * 60, 4 * 80
    forward = x_bytes + weights + memory
    training = forward + hidden + (x_bytes + hidden + memory) + memory + weights  # backward reads, and writes
    assert cuda.work(layer, x) == {"forward": (forward, operations), "training": (training, 3 * operations)}
    both = cuda.work(mslmn.MSLMN(2, 3, 2, num_modules=2, bidirectional=True), x)
    assert both["forward"] == (x_bytes + 2 * weights + 2 * memory, 2 * operations)


def test_the_floor_is_the_larger_of_both_times():
    one = cuda.Candidate("MS-LMN", "fp32", SMALL.layer(), SMALL.input(), SMALL.layer())
    times = {"forward": 1.0, "training": 2.0, "forward_graph": None, "training_graph": None}
    moved, operations = cuda.work(one.layer, one.x)["training"]
    for limits, floor in (
        ({"bandwidth": moved / 0.5, "operations": operations / 0.25}, 0.5),
        ({"bandwidth": moved / 0.5, "operations": operations / 4.0}, 4.0),
    ):
        row = cuda.row(CASES[0], one, times, limits)
        assert row.floors["training"]["seconds"] == pytest.approx(floor)
        assert row.floors["training"]["ratio"] == pytest.approx(2.0 / floor)
        assert row.latency == 1.0 / SMALL.T


def test_the_whole_benchmark(device):
    seen = []
    clock = timing.event_clock if device == "cuda" else millisecond
    found = json.loads(json.dumps(cuda.run(2, seen.append, device, CASES, clock)))
    assert seen == ["ceilings", "small, B = 3", "small, bidirectional, B = 3", "no input, B = 1"]
    names = [row["candidate"] for row in found["rows"] if row["size"] == "small"]
    assert names[0] == "MS-LMN" and names[-1] == "reference loop"
    assert any(name.startswith("LMN(2, ") for name in names)
    assert any(name.startswith("ClockworkRNN(2, ") for name in names)
    assert {"nn.LSTM(2, 5)", "nn.LSTM(2, 5), tf32", "nn.LSTM(2, 5), bf16", "MS-LMN, bf16 autocast"} <= set(names)
    for row in found["rows"]:
        assert row["forward"] > 0 and row["training"] > 0 and row["latency"] > 0
        if row["candidate"] == "MS-LMN":
            assert 0 < row["error"] <= cuda.FP32_BOUND and row["floors"]["forward"]["seconds"] > 0
        if device == "cuda" and row["candidate"] == "MS-LMN":
            assert row["forward_graph"] > 0 and row["training_graph"] > 0
    required = [(one["size"], one["pass"], one["against"]) for one in found["required"]]
    assert required[:2] == [("small", "forward", "nn.LSTM(2, 5)"), ("small", "training", "nn.LSTM(2, 5)")]
    assert all(against.startswith("nn.LSTM(1, ") for _, _, against in required[2:])
    assert [(what, against.endswith("direct gradients")) for _, what, against in required[2:]] == [
        ("forward", False), ("training", False), ("training", True),
    ]  # fmt: skip
    if device == "cpu":  # where the clock is made up
        assert cuda.missed(found) == ["small, B = 3, forward: 1.00 times as fast as nn.LSTM(2, 5), 3.0 required"]


@pytest.mark.parametrize("wrong", [1.1, float("nan")])
def test_nothing_wrong_is_timed(monkeypatch, wrong):
    right = cuda.results

    def spoilt(module, x, g):
        found = right(module, x, g)
        if mslmn.ops.backends.wish() != "reference":
            found["the gradient of cells.0.Wmm.1"] = found["the gradient of cells.0.Wmm.1"] * wrong
        return found

    monkeypatch.setattr(cuda, "results", spoilt)
    with pytest.raises(timing.Disagreement, match=r"the gradient of cells\.0\.Wmm\.1 of MSLMN.*no time is reported"):
        cuda.run(1, lambda doing: None, "cpu", CASES[:1], millisecond)


def test_an_lstm_that_cudnn_does_not_have_is_left_blank(monkeypatch):
    class Missing(nn.LSTM):
        def forward(self, x, state=None):
            if x.dtype == torch.bfloat16:
                raise RuntimeError("CUDNN_STATUS_NOT_SUPPORTED")
            return super().forward(x, state)

    monkeypatch.setattr(nn, "LSTM", Missing)
    rows = cuda.run(1, lambda doing: None, "cpu", CASES[:1], millisecond)["rows"]
    assert all((row["forward"] is None) == (row["precision"] == "bf16") for row in rows)


def test_relative_errors_of_nothing_are_none():
    assert cuda.relative(torch.zeros(0), torch.zeros(0)) == 0
    assert cuda.relative(torch.zeros(2), torch.zeros(2)) == 0
    assert cuda.relative(torch.tensor([0.0, 2.0]), torch.tensor([0.0, 1.0])) == 1


def test_a_network_without_input_is_heard(device):
    one = next(iter(cuda.entrants(CASES[2], device)))
    assert one.module(one.x)[0].abs().sum() > 0


def test_precision_is_as_before_afterwards():
    def switches():
        rnn = torch.backends.cudnn.rnn
        return (rnn if hasattr(rnn, "fp32_precision") else torch.backends.cudnn), torch.backends.cuda.matmul

    def read():
        name = "fp32_precision" if hasattr(torch.backends.cudnn.rnn, "fp32_precision") else "allow_tf32"
        return [getattr(switch, name) for switch in switches()]

    before = read()
    with cuda.float32("ieee", matmul=True):
        assert read() in (["ieee", "ieee"], [False, False])
        with cuda.float32("tf32"):
            assert read() in (["tf32", "ieee"], [True, False])
        assert read() in (["ieee", "ieee"], [False, False])
    assert read() == before


def test_a_replay_of_ours_that_gives_something_else_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(cuda, "_capture", lambda call, module: None)
    assert cuda.captured(lambda: None, nn.LSTM(1, 1), ours=False) is None
    with pytest.raises(timing.Disagreement, match=r"MSLMN\(.* gives something else when it is replayed"):
        cuda.captured(lambda: None, mslmn.MSLMN(1, 1, 1, 1), ours=True)


def test_a_call_that_cannot_be_captured_has_no_graph(device):
    layer, x = nn.Linear(2, 2).to(device), torch.randn(3, 2, device=device)
    assert cuda.captured(lambda: layer(x) * layer(x).sum().item(), layer, ours=True) is None  # it waits for the GPU
    assert torch.randn(1, device=device).isfinite()  # and all goes on
    replay = cuda.captured(lambda: layer(x), layer, ours=False)
    assert (replay is not None) == (device == "cuda")


def test_alternate_asks_the_clock_it_is_given():
    asked = []

    def clock(call, times):
        asked.append(times)
        return 0.25 * times

    assert timing.alternate({"a": lambda: None}, 3, clock, least=1.0) == {"a": 0.25}
    assert asked == [1, 4, 4, 4]
