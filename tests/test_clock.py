"""When modules fire, against the paper's own words: module k fires at t if t mod 2^(k-1) is 0."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import mslmn
from mslmn import clock

hypothesis = pytest.importorskip("hypothesis")  # bare GPU machines lack it
given, st = hypothesis.given, hypothesis.strategies


@given(t=st.integers(0, 2**62), g=st.integers(1, clock.MAX_MODULES))
def test_active_is_the_modulus_of_the_paper(t, g):
    expected = [t % 2**k == 0 for k in range(g)]
    assert clock.active(torch.tensor(t), g).tolist() == expected


@given(t=st.integers(1, 2**20), g=st.integers(1, 30))
def test_faster_modules_fire_with_slower_ones_and_their_number_counts_trailing_zeros(t, g):
    fires = clock.active(torch.tensor([t]), g)[0].tolist()
    c = sum(fires)
    assert fires == [True] * c + [False] * (g - c)
    assert c == min(g, 1 + len(bin(t)) - len(bin(t).rstrip("0")))


@given(k=st.integers(1, 8), length=st.integers(0, 300), start=st.integers(0, 10_000))
def test_firing_steps_are_the_positions_at_which_the_module_is_active(k, length, start):
    t = start + 1 + torch.arange(length)
    expected = clock.active(t, k)[:, k - 1].nonzero().flatten().tolist()
    assert list(clock.firing_steps(k, length, start)) == expected


def test_firing_steps_select_from_a_tensor():
    h = torch.arange(1, 10)
    assert h[clock.firing_steps(3, 9)].tolist() == [4, 8]


@given(st.integers(1, 10**9))
def test_num_modules_is_every_period_up_to_the_length(length):
    g = clock.num_modules(length)
    assert clock.period(g) <= length < clock.period(g + 1)


def test_num_modules_takes_the_integers_of_numpy_and_torch():
    assert clock.num_modules(np.int64(300)) == clock.num_modules(torch.tensor([97, 300]).max()) == 9


def test_num_modules_of_the_paper():
    assert (clock.num_modules(300), clock.num_modules(97), clock.num_modules(1)) == (9, 7, 1)
    assert clock.num_modules(300) == math.floor(math.log2(300)) + 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: clock.num_modules(0), "at least 1 step, got 0; drop empty sequences"),
        (lambda: clock.period(0), "numbered from 1"),
        (lambda: clock.firing_steps(0, 5), "numbered from 1"),
        (lambda: clock.firing_steps(1, -5), "must not be negative, got -5"),
    ],
)
def test_wrong_numbers_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_nothing_else_in_the_package_computes_a_modulus():
    for path in Path(mslmn.__file__).parent.rglob("*.py"):
        if path.name == "clock.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            is_modulus = isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.Mod)
            name = getattr(node, "attr", None) or getattr(node, "id", None)
            named = name in {"remainder", "fmod", "divmod", "mod"}
            assert not is_modulus, f"{path}:{node.lineno}"
            assert not named, f"{path}:{node.lineno}"
