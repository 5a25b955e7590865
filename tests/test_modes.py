"""One layer, every way to call it: chunks, packed batches, stacks, directions, forms of the input."""

import copy

import pytest
import torch
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    unpack_sequence,
)

from helpers import LAYERS, gradients, in_chunks, make
from mslmn import MSLMN, State
from properties import given, st

pytestmark = pytest.mark.usefixtures("everywhere")
F64 = torch.float64
kinds = pytest.mark.parametrize("kind", list(LAYERS))
every_kind = st.sampled_from(list(LAYERS))
stacks = st.sampled_from([{}, {"num_layers": 2}, {"num_layers": 2, "layer_norm": True}])


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@given(every_kind, st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 3), stacks)
def test_chunks_of_any_sizes_equal_the_whole(kind, chunks, B, stack):
    layer = make(kind, **stack)
    x = torch.randn(sum(chunks), B, 2, dtype=F64, requires_grad=True)
    whole, end = layer(x)
    fed, state = in_chunks(layer, x, chunks)
    close(fed, whole)
    close(state.memory, end.memory)
    assert torch.equal(state.clock, end.clock)
    w = torch.randn_like(whole)
    for ours, expected in zip(
        gradients((fed * w).sum(), layer, x), gradients((whole * w).sum(), layer, x), strict=True
    ):
        close(ours, expected)


@kinds
def test_streaming_one_step_at_a_time_unbatched(kind):
    layer = make(kind)
    x = torch.randn(19, 2, dtype=F64)
    whole, end = layer(x)
    state = None
    for t, x_t in enumerate(x):
        y, state = layer(x_t[None], state)
        close(y[0], whole[t])
        assert state.clock.shape == () and state.clock == t + 1
    close(state.memory, end.memory)


@given(
    every_kind,
    st.lists(st.integers(1, 12), min_size=1, max_size=5),
    st.booleans(),
    stacks,
    st.booleans(),
    st.booleans(),
)
def test_a_packed_batch_equals_its_sequences_one_by_one(kind, lengths, bidirectional, stack, with_state, learn):
    layer = make(kind, bidirectional=bidirectional, learn_initial_state=learn, **stack)
    cells, G = len(layer.cells), layer.output_size // layer.num_directions
    xs = [torch.randn(n, 2, dtype=F64, requires_grad=True) for n in lengths]
    state = None
    if with_state:
        memory = torch.randn(cells, len(xs), G, dtype=F64, requires_grad=True)
        state = State(memory, torch.randint(50, (len(xs),)))
    packed, end = layer(pack_sequence(xs, enforce_sorted=False), state)
    rows = unpack_sequence(packed)
    loss = expected_loss = torch.zeros((), dtype=F64)
    for b, x in enumerate(xs):
        row, row_end = layer(x, None if state is None else State(state.memory[:, b], state.clock[b]))
        close(rows[b], row)
        close(end.memory[:, b], row_end.memory)
        assert end.clock[b] == row_end.clock
        w, w_end = torch.randn_like(row), torch.randn_like(row_end.memory)
        loss = loss + (rows[b] * w).sum() + (end.memory[:, b] * w_end).sum()
        expected_loss = expected_loss + (row * w).sum() + (row_end.memory * w_end).sum()
    if with_state and learn:  # a given state takes the place of the learnt one
        parameters = [p for n, p in layer.named_parameters() if "m_0" not in n]
    else:
        parameters = list(layer.parameters())
    inputs = [*xs, *parameters] + ([state.memory] if with_state else [])
    for ours, expected in zip(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(expected_loss, inputs), strict=True
    ):
        close(ours, expected)


@kinds
def test_sorted_and_unsorted_packing_agree(kind):
    layer = make(kind, bidirectional=True)
    x, lengths = torch.randn(9, 4, 2, dtype=F64), torch.tensor([9, 7, 7, 2], device="cpu")
    order = torch.tensor([2, 0, 3, 1])
    a, a_end = layer(pack_padded_sequence(x, lengths))
    b, b_end = layer(pack_padded_sequence(x[:, order], lengths[order.cpu()], enforce_sorted=False))
    close(pad_packed_sequence(a)[0][:, order], pad_packed_sequence(b)[0])
    close(a_end.memory[:, order], b_end.memory)
    assert torch.equal(a_end.clock[order], b_end.clock)
    assert isinstance(b, PackedSequence)


@kinds
def test_a_packed_batch_whose_rows_end_at_different_clocks_goes_on(kind):
    layer = make(kind, num_layers=2)
    xs = [torch.randn(n, 2, dtype=F64) for n in (13, 6, 10)]
    firsts, seconds = zip(*[(x[:n], x[n:]) for x, n in zip(xs, (3, 5, 8), strict=True)], strict=True)
    _, state = layer(pack_sequence(firsts, enforce_sorted=False))
    assert state.clock.tolist() == [3, 5, 8]
    rest, end = layer(pack_sequence(seconds, enforce_sorted=False), state)
    assert end.clock.tolist() == [13, 6, 10]
    for b, part in enumerate(unpack_sequence(rest)):
        whole, whole_end = layer(xs[b])
        close(part, whole[-len(part) :])
        close(end.memory[:, b], whole_end.memory)


@kinds
def test_a_padded_batch_may_go_on_too(kind):
    """Different clocks without packing: the rows of one plain batch are at different steps."""
    layer = make(kind)
    x = torch.randn(8, 3, 2, dtype=F64)
    memory, clock = torch.randn(1, 3, layer.output_size, dtype=F64), torch.tensor([0, 5, 1022])
    output, _ = layer(x, State(memory, clock))
    for b in range(3):
        row, _ = layer(x[:, b], State(memory[:, b], clock[b]))
        close(output[:, b], row)


@kinds
def test_the_backward_direction_is_the_layer_on_the_reversed_sequence(kind):
    both = make(kind, bidirectional=True)
    one = LAYERS[kind](2, dtype=F64)
    one.cells[0].load_state_dict(both.cells[1].state_dict())
    x = torch.randn(11, 3, 2, dtype=F64)
    G = one.output_size
    output, end = both(x, State(torch.zeros(2, 3, G, dtype=F64), torch.tensor([7, 0, 3])))
    backward, backward_end = one(x.flip(0))  # from clock 0, whatever the state's clock says
    close(output[..., G:], backward.flip(0))
    close(end.memory[1], backward_end.memory[0])
    assert end.clock.tolist() == [18, 11, 14]


@kinds
def test_batch_first_and_unbatched_are_other_views_of_the_same(kind):
    layer = make(kind, bidirectional=True, num_layers=2)
    first = copy.deepcopy(layer)
    first.batch_first = True
    x = torch.randn(9, 3, 2, dtype=F64)
    output, end = layer(x)
    transposed, transposed_end = first(x.transpose(0, 1))
    close(transposed, output.transpose(0, 1))
    close(transposed_end.memory, end.memory)
    row, row_end = first(x[:, 1])
    assert row.shape == (9, layer.output_size) and row_end.memory.shape == (4, layer.output_size // 2)
    close(row, output[:, 1])
    close(row_end.memory, end.memory[:, 1])


@kinds
@pytest.mark.parametrize("layer_norm", [False, True])
def test_layers_stack(kind, layer_norm):
    stack = make(kind, num_layers=3, layer_norm=layer_norm)
    x = torch.randn(9, 2, 2, dtype=F64)
    output, end = stack(x)
    for layer in range(3):
        if layer and layer_norm:
            norm = stack.norms[layer - 1]
            deviation = (x.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
            x = norm.weight * (x - x.mean(-1, keepdim=True)) / deviation + norm.bias
        single = LAYERS[kind](x.shape[-1], dtype=F64)
        single.cells[0].load_state_dict(stack.cells[layer].state_dict())
        x, single_end = single(x)
        close(end.memory[layer], single_end.memory[0])
    close(output, x)


@kinds
def test_dropout_acts_between_layers_in_training_only(kind):
    layer = make(kind, num_layers=2, dropout=1.0)
    plain = copy.deepcopy(layer)
    plain.dropout = 0.0
    x = torch.randn(9, 3, 2, dtype=F64)
    output, end = layer(x)
    # With everything dropped the upper layer sees zeros, and its own output is whole.
    single = LAYERS[kind](plain.output_size, dtype=F64)
    single.cells[0].load_state_dict(layer.cells[1].state_dict())
    close(output, single(torch.zeros(9, 3, plain.output_size, dtype=F64))[0])
    close(end.memory[0], plain(x)[1].memory[0])
    close(layer.eval()(x)[0], plain(x)[0])


@kinds
def test_no_input_at_all(kind):
    layer = make(kind, I=0, learn_initial_state=True)
    output, _ = layer(torch.empty(6, 2, 0, dtype=F64))
    assert output.shape == (6, 2, layer.output_size) and output.abs().sum() > 0
    close(output[:, 0], output[:, 1])
    output.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@kinds
def test_an_empty_batch_gives_an_empty_output(kind):
    layer = make(kind, bidirectional=True)
    output, end = layer(torch.randn(5, 0, 2, dtype=F64))
    assert output.shape == (5, 0, layer.output_size)
    assert end.memory.shape == (2, 0, layer.output_size // 2) and end.clock.shape == (0,)
    layer(torch.randn(5, 0, 2, dtype=F64), end)


@kinds
def test_the_learnt_initial_state_is_where_sequences_start(kind):
    layer = make(kind, learn_initial_state=True, num_layers=2)
    x = torch.randn(5, 3, 2, dtype=F64)
    memory = torch.stack([torch.cat(list(cell.m_0)) for cell in layer.cells])[:, None].expand(-1, 3, -1)
    output, _ = layer(x)
    close(output, layer(x, State(memory, torch.zeros(3, dtype=torch.int64)))[0])
    layer(x)[0].sum().backward()
    assert all(m.grad.abs().sum() > 0 for m in layer.cells[0].m_0)


@kinds
def test_non_contiguous_input(kind):
    layer = make(kind)
    x = torch.randn(2, 3, 9, dtype=F64).permute(2, 1, 0)
    assert not x.is_contiguous()
    close(layer(x)[0], layer(x.contiguous())[0])


def test_state_detach_cuts_the_graph_and_keeps_the_place():
    layer = MSLMN(2, 4, 3, num_modules=3)
    _, state = layer(torch.randn(5, 1, 2))
    cut = state.detach()
    assert state.memory.requires_grad and not cut.memory.requires_grad
    assert torch.equal(cut.memory, state.memory) and cut.clock.tolist() == [5]


def test_a_plain_pair_is_a_state():
    layer = make("MSLMN")
    x = torch.randn(5, 2, 2, dtype=F64)
    _, state = layer(x)
    close(layer(x, (state.memory, state.clock))[0], layer(x, state)[0])
