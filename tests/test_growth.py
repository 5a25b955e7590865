"""Growth changes nothing it should not, and the new module is the autoencoder of what it hears."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import mslmn
from mslmn import MSLMN, LinearAutoencoder, SequenceModel, growth
from mslmn.growth import add_module, evaluate, initialise, subsample
from mslmn.objectives import CTC, NMSE, CrossEntropy

SHAPES = {
    "plain": {},
    "bidirectional": {"bidirectional": True},
    "stacked": {"num_layers": 3},
    "stacked, bidirectional, learnt start": {"num_layers": 2, "bidirectional": True, "learn_initial_state": True},
    "no bias": {"bias": False},
}


def encoder(g=2, **options):
    layer = MSLMN(2, 5, 3, num_modules=g, **{"dtype": torch.float64, **options})
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(0.4 * torch.randn_like(p))
    return layer


def data(kind, lengths=(40, 9, 33, 40), seed=0, batches=2):
    """(input, target) pairs for an objective: the target depends on the whole past."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(batches):
        xs = [torch.randn(T, 2, generator=generator, dtype=torch.float64) for T in lengths]
        if kind == "last":
            target = torch.stack([x[::4].sum() for x in xs])[:, None]
        elif kind == "classes":
            target = torch.tensor([int(x[0, 0] > 0) for x in xs])
        elif kind == "labels":
            target = [torch.randint(1, 4, (3,), generator=generator) for _ in xs]
        else:
            target = pack_sequence([x[:, :1].cumsum(0) for x in xs], enforce_sorted=False)
        result.append((pack_sequence(xs, enforce_sorted=False), target))
    return result


OBJECTIVES = {
    "least squares at every step": ("all", 1, NMSE, "steps"),
    "least squares at the end": ("last", 1, NMSE, "last"),
    "classes": ("last", 2, CrossEntropy, "classes"),
    "labels": ("all", 4, CTC, "labels"),
}


def problem(name, norm=None, g=2, **options):
    output, O, objective, kind = OBJECTIVES[name]
    model = SequenceModel(encoder(g, **options), O, output=output, norm=norm)
    return model.double(), data(kind), objective()


def tensors(x):
    return x.data if not isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("backend", ["auto", "reference", "torch"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("packed", [True, False])
def test_hidden_states_and_old_memories_are_bitwise_what_they_were(shape, packed, backend):
    layer = encoder(**SHAPES[shape])
    x = torch.randn(37, 4, 2, dtype=torch.float64)
    input = pack_sequence([x[:T, i] for i, T in enumerate((37, 20, 9, 1))]) if packed else x
    D, G, cells = layer.num_directions, 6, len(layer.cells)
    with mslmn.set_backend(backend), torch.no_grad():
        before, hidden = layer(input), layer.hidden_states(input)
        old = {name: p.detach().clone() for name, p in layer.named_parameters()}
        A = [torch.randn(3, 5, dtype=torch.float64) for _ in range(cells)]
        B = [0.3 * torch.randn(3, 3, dtype=torch.float64) for _ in range(cells)]
        layer.grow(A if cells > 1 else A[0], B if cells > 1 else B[0])
        after, hidden_after = layer(input), layer.hidden_states(input)
    assert layer.num_modules == 3 and layer.output_size == D * 9
    for i in range(D):  # the lowest layer bit for bit, upper ones, whose sums are longer, to rounding
        torch.testing.assert_close(hidden_after[i], hidden[i], rtol=0, atol=0)
    for a, b in zip(hidden_after, hidden, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    memory, grown = tensors(before[0]).unflatten(-1, (D, G)), tensors(after[0]).unflatten(-1, (D, G + 3))
    tolerance = 0 if layer.num_layers == 1 else 1e-12
    torch.testing.assert_close(grown[..., :G], memory, rtol=0, atol=tolerance)
    torch.testing.assert_close(after[1].memory[:D, :, :G], before[1].memory[:D], rtol=0, atol=0)
    assert grown[..., G:].abs().max() > 0
    new = dict(layer.named_parameters())
    for name, value in old.items():
        if new[name].shape == value.shape:
            assert torch.equal(new[name], value)
        else:  # an upper layer's Wxh
            columns = new[name].unflatten(1, (D, -1))
            assert torch.equal(columns[..., :G].flatten(1), value) and not columns[..., G:].any()


@pytest.mark.parametrize("norm", [None, "module"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_with_the_zero_readout_outputs_are_what_they_were(name, shape, norm):
    model, batches, objective = problem(name, norm, **SHAPES[shape])
    before = [tensors(model(x)) for x, _ in batches]
    columns = [[p.detach().clone() for p in direction] for direction in model.readout.Wmy]
    report = add_module(model, batches, objective, readout="zeros")
    for (x, _), y in zip(batches, before, strict=True):
        torch.testing.assert_close(tensors(model(x)), y, rtol=0, atol=1e-12)
    for direction, old in zip(model.readout.Wmy, columns, strict=True):
        assert len(direction) == 3 and not direction[2].any()
        assert all(torch.equal(new, p) for new, p in zip(direction, old, strict=False))
    assert report.readout == "zeros" and report.loss_after == pytest.approx(report.loss_before, abs=1e-12)


@pytest.mark.parametrize("norm", [None, "module"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_loss_right_after_growth_is_not_above_the_loss_right_before(name, shape, norm):
    model, batches, objective = problem(name, norm, **SHAPES[shape])
    for _ in range(3):
        before = evaluate(model, batches, objective)
        report = add_module(model, batches, objective)
        assert report.loss_before == pytest.approx(before)
        assert report.loss_after == pytest.approx(evaluate(model, batches, objective))
        assert report.loss_after <= report.loss_before + 1e-12
        assert report.readout in (objective.readout, "zeros")
    assert model.num_modules == 5 and report.modules == 5


def test_the_readout_is_the_pseudoinverse():
    model, batches, objective = problem("least squares at every step")
    add_module(model, batches, objective)
    x = torch.cat([model.features(input).data for input, _ in batches]).detach()
    y = torch.cat([target.data for _, target in batches])
    X = torch.cat([x, torch.ones(len(x), 1)], 1)
    solution = (torch.linalg.pinv(X, rtol=growth.CUT**0.5) @ y).T
    torch.testing.assert_close(model.readout.weight.detach(), solution[:, :-1], rtol=0, atol=1e-8)
    torch.testing.assert_close(model.readout.b_y.detach(), solution[:, -1], rtol=0, atol=1e-8)


def test_the_readout_of_modules_that_repeat_each_other_stays_small(monkeypatch):
    """The plain pseudoinverse gives weights that are huge and cancel: the first step of training destroys them."""
    x = 0.5 * torch.randn(64, 200, 6)  # at the last step all modules hear the same
    largest = []
    for cut in (growth.CUT, 1e-14):
        monkeypatch.setattr(growth, "CUT", cut)
        torch.manual_seed(0)
        model = SequenceModel(MSLMN(6, 6, 12, num_modules=1), 6)
        for _ in range(3):
            assert add_module(model, [(x, x[-17])], NMSE(), horizon=2).readout == "least squares"
        largest.append(model.readout.weight.abs().max().item())
    assert largest[0] < largest[1] / 3


def test_the_convex_readout_is_at_the_minimum():
    model, batches, objective = problem("classes")
    add_module(model, batches, objective)
    x = torch.cat([model.features(input) for input, _ in batches]).detach()
    y = torch.cat([target for _, target in batches])
    W, b = model.readout.weight.detach().requires_grad_(), model.readout.b_y.detach().requires_grad_()
    loss = nn.functional.cross_entropy(x @ W.T + b, y) + 0.5e-4 * (W.square().sum() + b.square().sum())
    assert all(g.abs().max() < 1e-4 for g in torch.autograd.grad(loss, (W, b)))


def test_a_worse_readout_is_not_taken(monkeypatch):
    model, batches, objective = problem("classes")
    old = model.readout.weight.detach().clone()
    monkeypatch.setattr("mslmn.growth._convex", lambda model, batches: model.readout.Wmy[0][0][0].fill_(9.0))
    report = add_module(model, batches, objective)
    assert report.readout == "zeros" and report.loss_after == pytest.approx(report.loss_before, abs=1e-12)
    assert torch.equal(model.readout.weight[:, :6], old) and not model.readout.weight[:, 6:].any()


def test_a_failure_while_solving_leaves_a_working_model(monkeypatch):
    model, batches, objective = problem("classes")
    before = model(batches[0][0])

    def interrupted(model, batches):
        model.readout.Wmy[0][0].fill_(9.0)
        raise KeyboardInterrupt

    monkeypatch.setattr("mslmn.growth._convex", interrupted)
    with pytest.raises(KeyboardInterrupt):
        add_module(model, batches, objective)
    torch.testing.assert_close(model(batches[0][0]), before, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_new_module_is_the_autoencoder_of_what_it_hears(shape, stored):
    model, batches, objective = problem("least squares at every step", **SHAPES[shape])
    layer = model.encoder
    D = layer.num_directions
    hears = [[] for _ in layer.cells]
    for x, _ in batches:
        for i, h in enumerate(layer.hidden_states(x)):
            hears[i] += subsample(h.detach(), x, 3, reverse=bool(i % D))
    report = add_module(model, batches, objective, max_memory=2**29 if stored else 1)
    assert report.stored == stored and report.steps == sum(map(len, hears[0]))
    for i, cell in enumerate(layer.cells):
        expected = LinearAutoencoder(3, random_state=0).fit(hears[i])
        torch.testing.assert_close(cell.Whm[2].detach(), expected.A_, atol=1e-6, rtol=0)
        torch.testing.assert_close(cell.Wmm[2][-3:].detach(), expected.B_, atol=1e-6, rtol=0)
        assert not cell.Wmm[2][:-3].any() and not cell.Wmh[2].any()
        error = expected.reconstruction_error(hears[i])
        torch.testing.assert_close(torch.tensor(report.error[i], dtype=torch.float64), error, atol=1e-6, rtol=0)
        assert report.rank[i] == 3
    # decoding the module's memory at the end of each sequence gives back what it heard, with that error
    last, wrong, whole = [], torch.zeros(len(error)), torch.zeros(len(error))
    for x, _ in batches:
        last += list(layer(x)[1].memory[0, :, 6:9][x.sorted_indices].detach())
    decoder = LinearAutoencoder(3, random_state=0).fit(hears[0])
    for m, h in zip(last, hears[0], strict=True):
        remembered = decoder.inverse_transform(m[None], max(len(h), 1))[0].flip(0)
        for lag in range(len(h)):
            wrong[lag] += (remembered[lag] - h[len(h) - 1 - lag]).square().sum()
            whole[lag] += h[len(h) - 1 - lag].square().sum()
    if not layer.bias or not layer.learn_initial_state:
        torch.testing.assert_close((wrong / whole).sqrt().tolist(), report.error[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("batch_first", [True, False])
def test_subsampling_takes_the_steps_at_which_the_module_fires(batch_first):
    layer = encoder(batch_first=batch_first, bidirectional=True)
    x = torch.randn(11, 3, 2, dtype=torch.float64)
    input = x.transpose(0, 1) if batch_first else x
    packed = pack_sequence([x[:T, i] for i, T in enumerate((11, 6, 3))])
    for i, h in enumerate(layer.hidden_states(input)):
        seen = subsample(h, input, 3, reverse=bool(i))
        for row, steps in enumerate(seen):
            positions = [11 - 4, 11 - 8] if i else [3, 7]
            torch.testing.assert_close(steps, h[positions, row])
    for i, h in enumerate(layer.hidden_states(packed)):
        seen = subsample(h, packed, 2, reverse=bool(i))
        for row, (steps, T) in enumerate(zip(seen, (11, 6, 3), strict=True)):
            alone = layer.hidden_states(x[:T, row].unsqueeze(0 if batch_first else 1))[i][:, 0]
            positions = [t - 1 for t in range(1, T + 1) if (T - t + 1 if i else t) % 2 == 0]
            torch.testing.assert_close(steps, alone[positions[::-1] if i else positions])


def test_the_first_module_is_the_autoencoder_of_the_input_alone():
    model, batches, objective = problem("least squares at every step", g=1, num_layers=2)
    report = initialise(model, batches, objective)
    cell = model.encoder.cells[0]
    h = [torch.tanh(x @ cell.Wxh.T + cell.b_h).detach() for b, _ in batches for x in nn.utils.rnn.unpack_sequence(b)]
    expected = LinearAutoencoder(3, random_state=0).fit(h)
    torch.testing.assert_close(cell.Whm[0].detach(), expected.A_, atol=1e-6, rtol=0)
    torch.testing.assert_close(cell.Wmm[0].detach(), expected.B_, atol=1e-6, rtol=0)
    assert not cell.Wmh[0].any() and not cell.b_m[0].any()
    assert report.modules == 1 and report.loss_after < report.loss_before and report.readout == "least squares"
    add_module(model, batches, objective)
    with pytest.raises(ValueError, match="this has 2; use add_module"):
        initialise(model, batches, objective)


def test_missing_rank_is_filled_with_leaky_units():
    model = SequenceModel(MSLMN(1, 2, 6, num_modules=1, dtype=torch.float64), 1, output="all")
    x = torch.randn(8, 1, 1, dtype=torch.float64)  # the new module hears 4 states of 2 numbers each
    report = add_module(model, [(x, x)], NMSE(1.0))
    cell = model.encoder.cells[0]
    (r,) = report.rank
    assert r < 6 and (cell.Whm[1][r:].abs().sum(1) > 0).all()
    decays = cell.Wmm[1][-6:].diagonal()[r:]
    assert ((decays > 0) & (decays < 1)).all()
    assert not cell.Wmm[1][-6:][:r, r:].any()


def test_growth_keeps_training_mode_and_gradients():
    model, batches, objective = problem("least squares at every step", num_layers=2, dropout=0.5)
    model.encoder.eval()
    add_module(model, batches, objective)
    assert model.training and not model.encoder.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    objective.loss(model(batches[0][0]), batches[0][1]).mean.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("layers", [1, 2])
def test_a_silent_model_is_one_with_a_single_module(layers):
    """What the slower modules hear they remember, but no one listens to them."""
    model = SequenceModel(
        MSLMN(2, 5, 3, 4, num_layers=layers, bidirectional=True, init="xavier"), 3, output="all"
    ).double()
    alone = SequenceModel(MSLMN(2, 5, 3, 1, num_layers=layers, bidirectional=True), 3, output="all").double()
    model.silence()
    weights = model.state_dict()
    own = {name: value for name, value in weights.items() if name in alone.state_dict()}
    for i in range(2, 2 * layers):  # upper layers read the first module of each direction
        own[f"encoder.cells.{i}.Wxh"] = own[f"encoder.cells.{i}.Wxh"].unflatten(1, (2, 4, 3))[:, :, 0].flatten(1)
    alone.load_state_dict(own)
    x = torch.randn(40, 2, 2, dtype=torch.float64)
    torch.testing.assert_close(model(x), alone(x))
    memory = model.encoder(x)[0].unflatten(-1, (2, 4, 3))
    assert (memory.abs().amax((0, 1, 4)) > 0).all()  # they hear
    model(x).square().sum().backward()
    for cell in list(model.encoder.cells)[-2:]:
        assert all(p.grad.abs().sum() > 0 for p in [*cell.Wmh, *model.readout.Wmy[0]])  # and can learn to speak


def test_only_modules_can_be_silenced():
    with pytest.raises(TypeError, match="only the modules of an MSLMN can be silenced"):
        SequenceModel(torch.nn.LSTM(2, 3), 1).silence()


def test_a_grown_layer_is_like_one_that_was_built_so():
    layer = encoder(g=1, bidirectional=True, num_layers=2)
    for _ in range(2):
        layer.grow([torch.randn(5, 3).T] * 4, [torch.randn(3, 3).T] * 4)
    built = MSLMN(**layer.config)
    assert all(p.is_contiguous() for p in layer.parameters())  # else sums would round otherwise than after loading
    assert layer.config["num_modules"] == 3
    assert {n: p.shape for n, p in layer.named_parameters()} == {n: p.shape for n, p in built.named_parameters()}
    built.double().load_state_dict(layer.state_dict())
    x = torch.randn(9, 2, 2, dtype=torch.float64)
    torch.testing.assert_close(built(x)[0], layer(x)[0])


WRONG = [
    (lambda: mslmn.LMN(2, 5, 3).grow(torch.ones(3, 5), torch.ones(3, 3)), TypeError, "build MSLMN"),
    (lambda: encoder().grow(torch.ones(3, 4), torch.ones(3, 3)), ValueError, r"A of cell 0 must be a tensor \(3, 5\)"),
    (lambda: encoder().grow(torch.ones(3, 5), torch.ones(3)), ValueError, r"B of cell 0 .* got \(3,\)"),
    (
        lambda: encoder().grow([torch.ones(3, 5)] * 2, torch.ones(3, 3)),
        ValueError,
        "must be lists of 1, .* got 2 and 1",
    ),
    (lambda: encoder().grow(torch.full((3, 5), torch.nan), torch.ones(3, 3)), ValueError, "A of cell 0 is not finite"),
    (lambda: SequenceModel(nn.LSTM(2, 3), 1).grow(1, 2), TypeError, "the encoder is LSTM; build the model on one"),
    (lambda: add_module(SequenceModel(nn.LSTM(2, 3), 1), [], NMSE()), TypeError, "only a SequenceModel on an MSLMN"),
    (lambda: add_module(problem("classes")[0], [], CrossEntropy()), ValueError, "never fire"),
    (
        lambda: add_module(problem("classes")[0], data("classes", (3, 2)), CrossEntropy()),
        ValueError,
        "module 3, 4 steps",
    ),
    (
        lambda: add_module(problem("classes")[0], data("classes"), CrossEntropy(), readout="x"),
        ValueError,
        "readout must",
    ),
    (
        lambda: add_module(problem("classes")[0], iter(data("classes")), CrossEntropy()),
        ValueError,
        "iterated only once",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG, ids=[message[:30] for *_, message in WRONG])
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
