"""Pooling between layers: each hands on the means of windows of steps, whatever the form of the input."""

import copy
import json
import re

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

import mslmn
from helpers import LAYERS, gradients, in_chunks, make
from mslmn import LMN, MSLMN, ClockworkRNN, SequenceModel, State, packing
from mslmn.growth import add_module, initialise
from mslmn.objectives import CTC, NMSE, CrossEntropy
from mslmn.pooling import pooled, pooled_rows
from mslmn.training import Plan, fit
from properties import given, st

F64 = torch.float64
kinds = pytest.mark.parametrize("kind", list(LAYERS))
every_kind = st.sampled_from(list(LAYERS))
lengths = st.lists(st.integers(1, 12), min_size=1, max_size=5)
pools = st.integers(1, 5)
everywhere = pytest.mark.usefixtures("everywhere")


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def means(x, P):  # (T, ..)
    """The definition."""
    return torch.stack([window.mean(0) for window in x.split(P)])


def single(stack, layer):
    """One layer of a stack, by itself, without pooling."""
    D = stack.num_directions
    I = stack.input_size if layer == 0 else stack.output_size
    kind = type(stack).__name__
    one = LAYERS[kind](I, dtype=F64, bidirectional=stack.bidirectional)
    for d in range(D):
        one.cells[d].load_state_dict(stack.cells[layer * D + d].state_dict())
    return one


@everywhere
@given(st.integers(1, 20), st.integers(0, 3), pools)
def test_windows_count_from_the_first_step_and_the_last_has_what_is_left(T, B, P):
    x = torch.randn(T, B, 2, dtype=F64, requires_grad=True)
    close(pooled(x, P), means(x, P))
    w = torch.randn(-(-T // P), B, 2, dtype=F64)
    close(*(torch.autograd.grad((y * w).sum(), x)[0] for y in (pooled(x, P), means(x, P))))


@everywhere
@given(lengths, pools)
def test_rows_of_a_packed_batch_are_pooled_as_each_sequence_alone(lengths, P):
    xs = [torch.randn(n, 2, dtype=F64, requires_grad=True) for n in sorted(lengths, reverse=True)]
    packed = pack_sequence(xs)
    sizes, places, counts = map(torch.from_numpy, packing.windows(packed.batch_sizes.numpy(), P))
    expected = pack_sequence([means(x, P) for x in xs])
    assert torch.equal(sizes, expected.batch_sizes) and sizes.dtype == torch.int64 and sizes.is_contiguous()
    rows = pooled_rows(packed.data, places.to(xs[0].device), counts.to(xs[0].device), P)
    close(rows, expected.data)
    w = torch.randn_like(rows)
    for ours, theirs in zip(
        *(torch.autograd.grad((y * w).sum(), xs, retain_graph=True) for y in (rows, expected.data)), strict=True
    ):
        close(ours, theirs)


def test_pooling_can_be_derived_twice_forward_and_mapped():
    batch = pack_sequence([torch.randn(n, 2, dtype=F64) for n in (5, 4, 1)])
    _, places, counts = map(torch.from_numpy, packing.windows(batch.batch_sizes.numpy(), 2))
    x = batch.data.requires_grad_()

    def rows(x):
        return pooled_rows(x, places, counts, 2)

    dense = torch.randn(5, 2, 3, dtype=F64, requires_grad=True)
    for function, argument in ((rows, x), (lambda x: pooled(x, 2), dense)):
        assert torch.autograd.gradcheck(function, argument, check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(lambda x, f=function: f(x) ** 2, argument)
        several = torch.randn(3, *argument.shape, dtype=F64)
        assert torch.equal(torch.vmap(function)(several), torch.stack([function(one) for one in several]))


@everywhere
@kinds
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"layer_norm": True}])
def test_each_layer_reads_the_means_of_the_one_below(kind, options):
    stack = make(kind, num_layers=3, pool=2, **options)
    first = x = torch.randn(11, 2, 2, dtype=F64)
    output, end = stack(x)
    D = stack.num_directions
    for layer in range(3):
        if layer and stack.norms is not None:
            x = stack.norms[layer - 1](x)
        x, single_end = single(stack, layer)(x)
        close(end.memory[layer * D : layer * D + D], single_end.memory)
        x = means(x, 2)
    close(output, x)
    assert output.shape[0] == 2 and end.clock.tolist() == [11, 11]
    stack.batch_first = True
    close(stack(first.transpose(0, 1))[0], output.transpose(0, 1))
    row, row_end = stack(first[:, 1])
    close(row, output[:, 1])
    close(row_end.memory, end.memory[:, 1])


@kinds
def test_one_layer_pools_its_output(kind):
    layer = make(kind, pool=2)
    x = torch.randn(7, 3, 2, dtype=F64)
    close(layer(x)[0], means(single(layer, 0)(x)[0], 2))


def test_hidden_states_are_at_the_steps_of_their_layers():
    stack = make("MSLMN", num_layers=2, pool=2)
    x = torch.randn(7, 3, 2, dtype=F64)
    lower, upper = stack.hidden_states(x)
    close(lower, single(stack, 0).hidden_states(x)[0])
    close(upper, single(stack, 1).hidden_states(means(single(stack, 0)(x)[0], 2))[0])


def test_dropout_acts_on_what_was_pooled():
    stack = make("MSLMN", num_layers=2, pool=2, dropout=0.5)
    x = torch.randn(8, 3, 2, dtype=F64)
    torch.manual_seed(5)
    output, _ = stack(x)
    below = means(single(stack, 0)(x)[0], 2)
    torch.manual_seed(5)
    upper = torch.nn.functional.dropout(below, 0.5)
    close(output, means(single(stack, 1)(upper)[0], 2))


def test_means_of_large_numbers_in_16_bits_are_finite():
    x = torch.full((9, 1, 1), 30000.0, dtype=torch.float16)
    assert torch.equal(pooled(x, 4), x[:3])


@kinds
def test_without_pool_nothing_changes(kind):
    plain = make(kind, num_layers=2, bidirectional=True)
    one = LAYERS[kind](2, dtype=F64, num_layers=2, bidirectional=True, pool=1)
    one.load_state_dict(plain.state_dict())
    batch = pack_sequence([torch.randn(n, 2, dtype=F64) for n in (5, 3)])
    ours, theirs = one(batch)[0], plain(batch)[0]
    assert torch.equal(ours.data, theirs.data) and ours.batch_sizes is batch.batch_sizes


@everywhere
@given(every_kind, lengths, pools, st.integers(1, 3), st.booleans(), st.booleans(), st.booleans())
def test_a_packed_batch_equals_its_sequences_one_by_one(kind, lengths, P, L, bidirectional, norm, with_state):
    layer = make(kind, num_layers=L, bidirectional=bidirectional, layer_norm=norm and L > 1, pool=P)
    xs = [torch.randn(n, 2, dtype=F64, requires_grad=True) for n in lengths]
    state = None
    if with_state:
        memory = torch.randn(len(layer.cells), len(xs), layer.output_size // layer.num_directions, dtype=F64)
        state = State(memory, P**L * torch.randint(9, (len(xs),)))
    given = pack_sequence(xs, enforce_sorted=False)
    packed, end = layer(given, state)
    assert packed.sorted_indices is given.sorted_indices and packed.unsorted_indices is given.unsorted_indices
    rows = unpack_sequence(packed)
    loss = expected_loss = torch.zeros((), dtype=F64)
    for b, x in enumerate(xs):
        row, row_end = layer(x, None if state is None else State(state.memory[:, b], state.clock[b]))
        assert len(row) == -(-len(x) // P**L)
        close(rows[b], row)
        close(end.memory[:, b], row_end.memory)
        assert end.clock[b] == row_end.clock
        w, w_end = torch.randn_like(row), torch.randn_like(row_end.memory)
        loss = loss + (rows[b] * w).sum() + (end.memory[:, b] * w_end).sum()
        expected_loss = expected_loss + (row * w).sum() + (row_end.memory * w_end).sum()
    for ours, expected in zip(gradients(loss, layer, *xs), gradients(expected_loss, layer, *xs), strict=True):
        close(ours, expected)


@everywhere
@given(every_kind, st.lists(st.integers(1, 3), max_size=3), st.integers(1, 12), st.integers(2, 3), st.integers(1, 2))
def test_chunks_of_whole_windows_equal_the_whole(kind, chunks, rest, P, L):
    layer = make(kind, num_layers=L, pool=P)
    chunks = [*(P**L * n for n in chunks), rest]
    x = torch.randn(sum(chunks), 2, 2, dtype=F64)
    whole, end = layer(x)
    fed, state = in_chunks(layer, x, chunks)
    close(fed, whole)
    close(state.memory, end.memory)
    assert torch.equal(state.clock, end.clock)


@everywhere
@kinds
def test_packed_chunks_whose_rows_are_at_different_clocks_go_on(kind):
    layer = make(kind, num_layers=2, pool=2)
    xs = [torch.randn(n, 2, dtype=F64) for n in (13, 9, 14)]
    firsts, seconds = zip(*[(x[:n], x[n:]) for x, n in zip(xs, (4, 8, 12), strict=True)], strict=True)
    begun, state = layer(pack_sequence(firsts, enforce_sorted=False))
    rest, end = layer(pack_sequence(seconds, enforce_sorted=False), state)
    assert end.clock.tolist() == [13, 9, 14]
    for b, parts in enumerate(zip(unpack_sequence(begun), unpack_sequence(rest), strict=True)):
        whole, whole_end = layer(xs[b])
        close(torch.cat(parts), whole)
        close(end.memory[:, b], whole_end.memory)


@kinds
def test_a_state_within_a_window_is_refused(kind):
    layer = make(kind, num_layers=2, pool=2)
    x = torch.randn(6, 2, 2, dtype=F64)
    _, state = layer(x)
    message = "state.clock must be a multiple of 4, pool to the power of num_layers, got 6; feed chunks whose lengths"
    for input in (x, pack_sequence([x[:, 0], x[:3, 1]])):
        with pytest.raises(ValueError, match=re.escape(message)):
            layer(input, state)
    with pytest.raises(ValueError, match="got 3; feed"):
        layer(x[:, 0], layer(x[:3, 0])[1])
    huge = make(kind, num_layers=2, pool=2**62)  # steps of the second layer do not fit a clock
    output, state = huge(x)
    close(output[0], huge(x, State(torch.zeros_like(state.memory), torch.zeros_like(state.clock)))[0][0])
    with pytest.raises(ValueError, match="got 6; feed"):
        huge(x, state)


@kinds
def test_batches_that_are_empty_short_or_of_few_steps(kind):
    layer = make(kind, num_layers=2, bidirectional=True, pool=100)
    output, end = layer(torch.randn(5, 0, 2, dtype=F64))
    assert output.shape == (1, 0, layer.output_size) and end.memory.shape[1] == 0
    x = torch.randn(1, 3, 2, dtype=F64)
    output, _ = layer(x)
    close(layer(pack_sequence(list(x.unbind(1))))[0].data, output[0])
    copy.deepcopy(layer)(x, State(torch.zeros(4, 3, layer.output_size // 2, dtype=F64), torch.zeros(3).long()))


def test_gradients_can_be_asked_for_again_and_of_inputs_alone():
    layer = make("MSLMN", num_layers=2, pool=2).requires_grad_(False)
    x = torch.randn(7, 2, dtype=F64, requires_grad=True)
    for input in (x, pack_sequence([x])):
        output, _ = layer(input)
        loss = (output.data if isinstance(output, PackedSequence) else output).square().sum()
        first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second) and first.abs().sum() > 0


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_float_type(kind, dtype, device):
    exact = make(kind, num_layers=2, pool=3, device=device)
    layer = LAYERS[kind](2, num_layers=2, pool=3, dtype=dtype, device=device)
    layer.load_state_dict(exact.state_dict())
    x = torch.randn(10, 3, 2, dtype=F64, device=device)
    output, state = layer(x.to(dtype))
    assert output.dtype == state.memory.dtype == dtype
    tolerance = 50 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), exact(x)[0], rtol=tolerance, atol=tolerance)
    packed, _ = layer(pack_sequence(list(x.to(dtype).unbind(1))))
    assert packed.data.dtype == dtype
    torch.testing.assert_close(packed.data.unflatten(0, (-1, 3)), output, rtol=tolerance, atol=tolerance)


@kinds
def test_under_autocast_the_output_has_the_type_that_it_has_without_pool(kind, device):
    plain, layer = (LAYERS[kind](4, num_layers=2, pool=P, device=device) for P in (1, 2))
    x = torch.randn(7, 3, 4, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        for input in (x, pack_sequence(list(x.unbind(1)))):
            output, without = (
                found.data if isinstance(found, PackedSequence) else found
                for found in (layer(input)[0], plain(input)[0])
            )
            assert output.dtype == without.dtype
            expected = layer(x)[0].float().flatten(0, -2)
            torch.testing.assert_close(output.float().flatten(0, -2), expected, rtol=0.02, atol=0.02)
    output.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.gpu
def test_gradients_on_a_gpu_are_the_same_every_time_and_a_captured_packed_batch_is_refused():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    layer = MSLMN(4, 16, 8, num_modules=3, num_layers=3, bidirectional=True, pool=2, device="cuda")
    batch = packing.pack([torch.randn(n, 4) for n in (90, 41, 77, 5)]).to("cuda")
    runs = [gradients(layer(batch)[0].data.square().sum(), layer) for _ in range(3)]
    assert all(all(map(torch.equal, runs[0], again)) for again in runs[1:])
    with pytest.raises(RuntimeError, match="capture a layer without pool"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        layer(batch)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("T", [8, 9])
def test_compiled_equals_eager(T):
    torch.compiler.reset()
    layer = make("MSLMN", num_layers=2, bidirectional=True, pool=2)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(T, 3, 2, dtype=F64, requires_grad=True)
    (output, state), (expected, end) = compiled(x), layer(x)
    close(output, expected)
    close(state.memory, end.memory)
    w = torch.randn_like(expected)
    for ours, theirs in zip(
        gradients((output * w).sum(), layer, x), gradients((expected * w).sum(), layer, x), strict=True
    ):
        close(ours, theirs)
    on = State(end.memory.detach(), torch.full((3,), 4))
    close(compiled(x, on)[0], layer(x, on)[0])


@pytest.mark.filterwarnings("default")
def test_a_compiled_packed_batch_equals_eager():
    layer = make("MSLMN", num_layers=2, bidirectional=True, pool=2)
    x = pack_sequence([torch.randn(n, 2, dtype=F64) for n in (3, 5)], enforce_sorted=False)
    (output, state), (expected, end) = torch.compile(layer, backend="aot_eager")(x), layer(x)
    close(output.data, expected.data)
    assert torch.equal(output.batch_sizes, expected.batch_sizes)
    close(state.memory, end.memory)


@kinds
@pytest.mark.filterwarnings("default")
def test_export_takes_sequences_of_any_length_that_leaves_two_steps(kind):
    """Sizes of one are constants to torch."""
    layer = make(kind, num_layers=2, pool=3).eval()
    dynamic = {"input": {0: torch.export.Dim("T", min=10), 1: None}}
    program = torch.export.export(layer, (torch.randn(23, 3, 2, dtype=F64),), dynamic_shapes=dynamic)
    for T in (10, 11, 18, 31):
        x = torch.randn(T, 3, 2, dtype=F64)
        close(program.module()(x)[0], layer(x)[0])


def test_an_ensemble_runs_under_vmap():
    models = [MSLMN(2, 4, 3, num_modules=3, num_layers=2, pool=2) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    packed = pack_sequence([torch.randn(n, 2) for n in (7, 4)])

    def run(parameters, buffers, x):
        output = torch.func.functional_call(models[0], (parameters, buffers), (x,))[0]
        return output.data if isinstance(output, PackedSequence) else output

    for x in (torch.randn(7, 2, 2), packed):
        outputs = torch.vmap(lambda p, b, x=x: run(p, b, x))(parameters, buffers)
        for output, model in zip(outputs, models, strict=True):
            torch.testing.assert_close(output, run(dict(model.named_parameters()), {}, x))


SIZES = {
    LMN: {"input_size": 3, "hidden_size": 4, "memory_size": 2},
    MSLMN: {"input_size": 3, "hidden_size": 4, "memory_size": 2, "num_modules": 5},
    ClockworkRNN: {"input_size": 3, "hidden_size": 4, "num_modules": 5},
}


@pytest.mark.parametrize("kind", list(SIZES))
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, "pool must be at least 1, got 0; choose another size"),
        (2.0, TypeError, "pool must be an int, got 2.0 (float)"),
        (True, TypeError, "pool must be an int, got True (bool)"),
    ],
)
def test_wrong_values_are_named(kind, value, error, message):
    with pytest.raises(error, match=re.escape(message)):
        kind(**SIZES[kind], pool=value)


@pytest.mark.parametrize("kind", list(SIZES))
def test_the_option_is_printed_saved_and_loaded(kind, tmp_path):
    layer = kind(**SIZES[kind], num_layers=2, pool=3)
    assert layer.config["pool"] == 3 and ", pool=3)" in repr(layer)
    model = SequenceModel(layer, 2, output="all")
    mslmn.save(model, tmp_path)
    again = mslmn.load(tmp_path)
    x = torch.randn(10, 2, 3)
    assert again.encoder.pool == 3 and torch.equal(again(x), model(x))
    content = json.loads((tmp_path / "model.json").read_text())
    del content["model"]["encoder"]["config"]["pool"]  # as before it was there
    (tmp_path / "model.json").write_text(json.dumps(content))
    assert mslmn.load(tmp_path).encoder.pool == 1


def test_a_layer_that_pools_does_not_grow():
    model = SequenceModel(MSLMN(2, 4, 3, num_modules=1, num_layers=2, pool=2), 2)
    data = [(torch.randn(9, 2), torch.tensor(i)) for i in (0, 1)]
    batches = [(torch.randn(9, 3, 2), torch.tensor([0, 1, 0]))]
    before = [weight.clone() for weight in model.state_dict().values()]
    A, B = [torch.zeros(3, 4)] * 2, [torch.zeros(3, 3)] * 2
    message = r"pool=2 lets hidden states .* at different clocks.*; build the layer without it to grow it"
    for call in (
        lambda: model.encoder.grow(A, B),
        lambda: model.grow(A, B),
        lambda: add_module(model, batches, CrossEntropy()),
        lambda: initialise(model, batches, CrossEntropy()),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match=message + r", or train the model under Plan\(grow='never'\)"):
        fit(model, data, data, CrossEntropy(), plan=Plan(epochs=1), progress=False)
    assert model.num_modules == 1 and all(map(torch.equal, model.state_dict().values(), before))
    fit(model, data, data, CrossEntropy(), plan=Plan(epochs=1, grow="never"), progress=False)


def test_a_model_reads_the_last_memory_or_every_mean():
    encoder = make("MSLMN", num_layers=2, pool=2, bidirectional=True)
    xs = [torch.randn(n, 2, dtype=F64) for n in (3, 9, 5)]
    batch = pack_sequence(xs, enforce_sorted=False)
    last = SequenceModel(encoder, 2, norm="prefix")
    every = SequenceModel(encoder, 2, output="all", norm="prefix")
    for b, (x, row) in enumerate(zip(xs, unpack_sequence(every(batch)), strict=True)):
        assert len(row) == -(-len(x) // 4)
        close(row, every(x))
        close(last(batch)[b], last(x))


def test_a_stream_goes_on_by_whole_windows():
    model = SequenceModel(make("MSLMN", num_layers=2, pool=2), 3, output="all", norm="module")
    x = torch.randn(14, 2, 2, dtype=F64)
    one, state = model.stream(x[:8])
    two, state = model.stream(x[8:], state)
    close(torch.cat([one, two]), model(x))
    with pytest.raises(ValueError, match="multiple of 4"):
        model.stream(x, state)


def test_targets_at_every_step_are_as_long_as_the_pooled_output():
    model = SequenceModel(MSLMN(2, 4, 3, num_modules=2, pool=2), 3, output="all")
    xs = [torch.randn(n, 2) for n in (7, 4)]
    output = model(pack_sequence(xs))
    for objective, target in (
        (NMSE(), lambda n: torch.zeros(n, 3)),
        (CrossEntropy(), lambda n: torch.zeros(n).long()),
    ):
        assert objective.loss(output, pack_sequence([target(4), target(2)])).items > 0
        with pytest.raises(ValueError, match="or, where a layer pools, as its output"):
            objective.loss(output, pack_sequence([target(7), target(4)]))
        with pytest.raises(ValueError, match="of which a layer with pool leaves fewer"):
            objective.loss(model(xs[0]), target(7))


def transcripts(lengths, labels):
    return [(torch.randn(n, 2), torch.tensor(labels)) for n in lengths]


def test_ctc_trains_and_validates_on_pooled_steps():
    torch.manual_seed(0)
    model = SequenceModel(MSLMN(2, 8, 4, num_modules=2, num_layers=2, pool=2), 3, output="all")
    data = transcripts([24, 17, 30, 21], [1, 2])
    plan = Plan(epochs=30, grow="never", learning_rate=0.02, batch_size=2, flat_start=2)
    result = fit(model, data, data, CTC(), plan=plan, progress=False, device="cpu")
    losses = [epoch["validation_loss"] for epoch in result.history]
    assert losses[-1] < losses[0] / 2 and result.best["metric"] > 0.9


def test_a_transcript_that_is_longer_than_what_pooling_leaves_counts_zero():
    """As any that is too short for its labels: finite, without a gradient."""
    model = SequenceModel(MSLMN(2, 4, 3, num_modules=2, pool=4), 3, output="all")
    xs = [torch.randn(n, 2) for n in (40, 8)]
    labels = [torch.tensor([1, 2]), torch.tensor([1, 2, 1])]  # 10 steps, and 2 for three labels
    both = CTC().loss(model(pack_sequence(xs)), labels)
    alone = CTC().loss(model(pack_sequence(xs[:1])), labels[:1])
    torch.testing.assert_close(both.total, alone.total)
    assert both.items == 2
    short = CTC().loss(model(pack_sequence(xs[1:])), labels[1:])
    short.total.backward()
    assert short.total == 0 and all(p.grad is None or not p.grad.any() for p in model.parameters())
