"""Wrong input gets a message that says what was expected, what came, and what to do."""

import re

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from helpers import LAYERS
from mslmn import LMN, MSLMN, ClockworkRNN, State


def layer(**options):
    return MSLMN(3, 4, 2, num_modules=5, **options)


def state(cells=1, B=2, G=10, clock=None, **options):
    return State(torch.zeros(cells, B, G, **options), torch.zeros(B, dtype=torch.int64) if clock is None else clock)


X = torch.zeros(7, 2, 3)

CALLS = {
    "rank 1": (lambda: layer()(torch.zeros(3)), ValueError, "input must be (T, B, input_size), or (T, input_size) unbatched, got 1 dimensions, (3,); reshape"),
    "rank 4": (lambda: layer(batch_first=True)(torch.zeros(1, 7, 2, 3)), ValueError, "input must be (B, T, input_size), or"),
    "a list": (lambda: layer()([1.0, 2.0]), TypeError, "input must be a tensor (T, B, input_size), (T, input_size) unbatched, or a PackedSequence, got list; convert it with torch.as_tensor"),
    "features": (lambda: layer()(torch.zeros(7, 2, 4)), ValueError, "with input_size 3, got (7, 2, 4); pass sequences with 3 features, or build the layer for 4"),
    "features, unbatched": (lambda: layer()(torch.zeros(7, 4)), ValueError, "input must be (T, input_size) with input_size 3, got (7, 4)"),
    "features, packed": (lambda: layer()(pack_sequence([torch.zeros(7, 4)])), ValueError, "input must be a PackedSequence of (N, input_size) with input_size 3, got (7, 4)"),
    "packed scalars": (lambda: layer()(pack_sequence([torch.zeros(7)])), ValueError, "input must be a PackedSequence of (N, input_size) with input_size 3, got data (7,); pack sequences of shape (T, input_size)"),
    "packed, too deep": (lambda: layer()(pack_sequence([torch.zeros(7, 3, 3)])), ValueError, "input must be a PackedSequence of (N, input_size) with input_size 3, got data (7, 3, 3); pack sequences of shape (T, input_size)"),
    "no steps": (lambda: layer()(torch.zeros(0, 2, 3)), ValueError, "input must have at least one step, got (0, 2, 3); drop empty sequences"),
    "no steps, batch first": (lambda: layer(batch_first=True)(torch.zeros(2, 0, 3)), ValueError, "at least one step, got (2, 0, 3)"),
    "no steps, unbatched": (lambda: layer(batch_first=True)(torch.zeros(0, 3)), ValueError, "at least one step, got (0, 3)"),
    "dtype": (lambda: layer()(X.double()), TypeError, "input is torch.float64, the layer torch.float32; convert one: input.to(torch.float32), or layer.to(torch.float64)"),
    "integers": (lambda: layer()(X.long()), TypeError, "input is torch.int64, the layer torch.float32; convert it: input.to(torch.float32)"),
    "device": (lambda: layer()(X.to("meta")), ValueError, "input is on meta, the layer on cpu; move it: input.to('cpu')"),
    "not a state": (lambda: layer()(X, torch.zeros(1, 2, 10)), TypeError, "state must be mslmn.State(memory, clock), two tensors, got Tensor; pass a state that this layer returned"),
    "memory without clock": (lambda: layer()(X, (torch.zeros(1, 2, 10),)), TypeError, "state must be mslmn.State(memory, clock), two tensors, got tuple of (Tensor); pass a state"),
    "an LSTM's state": (lambda: layer()(X, (torch.zeros(1, 2, 10), torch.zeros(1, 2, 10))), ValueError, "state.clock must be (2,), one count of steps per sequence, got (1, 2, 10); pass a state"),
    "batch of the state": (lambda: layer()(X, state(B=3)), ValueError, "state.memory must be (1, 2, 10), got (1, 3, 10); batch size is 3 in the state, 2 here; pass a state"),
    "units of the state": (lambda: layer()(X, state(G=8)), ValueError, "got (1, 2, 8); memory of all modules is 8 in the state, 10 here; pass a state"),
    "layers of the state": (lambda: layer(num_layers=2, bidirectional=True)(X, state(cells=2)), ValueError, "num_layers * num_directions is 2 in the state, 4 here"),
    "batched state, unbatched input": (lambda: layer()(X[:, 0], state(B=1)), ValueError, "state.memory must be (1, 10), got (1, 1, 10); pass a state"),
    "batch of a packed state": (lambda: layer()(pack_sequence([X[:, 0]]), state(B=2)), ValueError, "batch size is 2 in the state, 1 here"),
    "shape of the clock": (lambda: layer()(X, state(clock=torch.tensor(0))), ValueError, "state.clock must be (2,), one count of steps per sequence, got ()"),
    "dtype of the clock": (lambda: layer()(X, state(clock=torch.zeros(2))), TypeError, "state.clock must count steps in torch.int64, got torch.float32"),
    "dtype of the state": (lambda: layer()(X, state(dtype=torch.float64)), TypeError, "state.memory is torch.float64, the layer torch.float32; convert it: state._replace(memory=state.memory.to(torch.float32))"),
    "device of the state": (lambda: layer()(X, state(device="meta")), ValueError, "state.memory is on meta, the layer on cpu; move it: state._replace(memory=state.memory.to('cpu'))"),
    "device of the clock": (lambda: layer()(X, state(clock=torch.zeros(2, dtype=torch.int64, device="meta"))), ValueError, "state.clock is on meta, the layer on cpu; move it: state._replace(clock=state.clock.to('cpu'))"),
    "a clock that is a number": (lambda: layer()(X, State(torch.zeros(1, 2, 10), 7)), TypeError, "two tensors, got State of (Tensor, int); pass a state"),
    "a layer without memory": (lambda: layer(device="meta")(X), ValueError, "input is on cpu, the layer on meta; give the layer memory: layer.to_empty(device='cpu').reset_parameters()"),
    "batch sizes that grow": (lambda: layer()(PackedSequence(torch.zeros(3, 3), torch.tensor([1, 2]))), ValueError, "batch_sizes of a PackedSequence must be positive, never grow and add up to its 3 rows, got [1, 2]; make it with pack_sequence"),
    "batch sizes that do not add up": (lambda: layer()(PackedSequence(torch.zeros(7, 3), torch.tensor([3, 2, 1]))), ValueError, "add up to its 7 rows, got [3, 2, 1]"),
    "no batch sizes": (lambda: layer()(PackedSequence(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))), ValueError, "add up to its 0 rows, got []"),
    "state of another kind": (lambda: layer()(X, LMN(3, 4, 2)(X)[1]), ValueError, "memory of all modules is 2 in the state, 10 here"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CALLS))
def test_a_wrong_call_says_expected_got_remedy(name):
    call, error, message = CALLS[name]
    with pytest.raises(error, match=re.escape(message)):
        call()


OPTIONS = {
    "input_size": (-1, ValueError, "input_size must be at least 0, got -1; choose another size"),
    "hidden_size": (0, ValueError, "hidden_size must be at least 1, got 0; choose another size"),
    "num_layers": (0, ValueError, "num_layers must be at least 1, got 0"),
    "dropout": (1.5, ValueError, "dropout must be a probability in [0, 1], got 1.5; 0 switches it off"),
    "bias": (1, TypeError, "bias must be True or False, got 1; pass options by keyword"),
    "batch_first": ("yes", TypeError, "batch_first must be True or False, got 'yes'"),
    "bidirectional": (None, TypeError, "bidirectional must be True or False, got None"),
    "learn_initial_state": (0, TypeError, "learn_initial_state must be True or False, got 0"),
    "layer_norm": ("layer", TypeError, "layer_norm must be True or False, got 'layer'"),
    "init": (
        "orthogonal",
        ValueError,
        "init must be one of 'leaky', 'fan-in', 'xavier', got 'orthogonal'; choose one of them",
    ),
    "dtype": (torch.int64, TypeError, "dtype must be a real floating type, got torch.int64"),
}
SIZES = {
    LMN: {"input_size": 3, "hidden_size": 4, "memory_size": 2},
    MSLMN: {"input_size": 3, "hidden_size": 4, "memory_size": 2, "num_modules": 5},
    ClockworkRNN: {"input_size": 3, "hidden_size": 4, "num_modules": 5},
}


@pytest.mark.parametrize("kind", list(SIZES))
@pytest.mark.parametrize("name", list(OPTIONS))
def test_a_wrong_argument_is_named_with_its_value(kind, name):
    value, error, message = OPTIONS[name]
    with pytest.raises(error, match=re.escape(message)):
        kind(**{**SIZES[kind], name: value})


@pytest.mark.parametrize("kind", [MSLMN, ClockworkRNN])
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, "num_modules must be between 1 and 63, got 0"),
        (64, ValueError, "num_modules must be between 1 and 63, got 64"),
        (2.0, TypeError, "num_modules must be an int, got 2.0 (float)"),
        (True, TypeError, "num_modules must be an int, got True (bool)"),
    ],
)
def test_wrong_numbers_of_modules(kind, value, error, message):
    with pytest.raises(error, match=re.escape(message)):
        kind(**{**SIZES[kind], "num_modules": value})


@pytest.mark.parametrize("kind", [LMN, MSLMN])
def test_wrong_memory_size(kind):
    with pytest.raises(ValueError, match="memory_size must be at least 1, got 0"):
        kind(**{**SIZES[kind], "memory_size": 0})


@pytest.mark.parametrize("value", ["0.5", True])
def test_dropout_that_is_no_number(value):
    with pytest.raises(TypeError, match=re.escape("dropout must be a number in [0, 1]")):
        layer(dropout=value, num_layers=2)


@pytest.mark.parametrize("kind", list(SIZES))
@pytest.mark.parametrize(
    ("option", "module"), [({"dropout": 0.5}, "dropout=0.5"), ({"layer_norm": True}, "layer_norm")]
)
def test_what_needs_a_second_layer_warns_where_the_layer_is_built(kind, option, module):
    with pytest.warns(UserWarning, match=f"{module} acts between layers, and num_layers is 1; add layers") as caught:
        kind(**SIZES[kind], **option)
    assert caught[0].filename == __file__


def test_a_dtype_that_is_a_string():
    with pytest.raises(TypeError, match=r"dtype must be a real floating type, got 'float32'; use torch.float32"):
        layer(dtype="float32")


@pytest.mark.parametrize("kind", list(LAYERS))
def test_a_refused_call_leaves_the_layer_as_it_was(kind):
    healthy = LAYERS[kind](3)
    before = {name: p.clone() for name, p in healthy.state_dict().items()}
    with pytest.raises(ValueError, match="input_size"):
        healthy(torch.zeros(7, 2, 9))
    assert all(torch.equal(p, before[name]) for name, p in healthy.state_dict().items())
