"""SequenceModel, objectives, and models on disk."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence, unpack_sequence

import mslmn
from mslmn import LMN, MSLMN, ClockworkRNN, SequenceModel, checkpoint, objectives
from mslmn.checkpoint import CheckpointError
from mslmn.model import ModuleNorm, PrefixNorm, _is_slow
from mslmn.objectives import CTC, NMSE, CrossEntropy

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")  # oneDNN has none

ENCODERS = {
    "LMN": lambda **o: LMN(2, 4, 3, **o),
    "MSLMN": lambda **o: MSLMN(2, 4, 3, num_modules=3, **o),
    "ClockworkRNN": lambda **o: ClockworkRNN(2, 3, num_modules=3, **o),
    "RNN": lambda **o: nn.RNN(2, 5, nonlinearity="relu", **o),
    "LSTM": lambda **o: nn.LSTM(2, 5, proj_size=3, **o),
    "GRU": lambda **o: nn.GRU(2, 5, **o),
}
XS = [torch.randn(T, 2, generator=torch.Generator().manual_seed(T)) for T in (9, 4, 7)]


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("norm", [None, "module", "prefix", "layer"])
@pytest.mark.parametrize("kind", ENCODERS)
def test_the_last_memory_is_that_of_each_sequence_and_direction(kind, layers, bidirectional, norm):
    model = SequenceModel(ENCODERS[kind](num_layers=layers, bidirectional=bidirectional), 4, norm=norm)
    together = model(pack_sequence(XS, enforce_sorted=False))
    assert together.shape == (3, 4)
    for x, y in zip(XS, together, strict=True):
        torch.testing.assert_close(model(x[:, None])[0], y)  # one by one
        torch.testing.assert_close(model(x), y)  # unbatched
        memory, _ = model.encoder(x)
        width = memory.shape[1] // (2 if bidirectional else 1)
        ends = [memory[-1, :width], memory[0, width:]] if bidirectional else [memory[-1]]
        features = torch.cat(ends)
        torch.testing.assert_close(model.readout(features if norm is None else model.norm(features)), y)


@pytest.mark.parametrize("kind", ENCODERS)
def test_all_steps_have_the_form_of_the_input(kind):
    model = SequenceModel(ENCODERS[kind](), 4, output="all")
    packed = model(pack_sequence(XS, enforce_sorted=False))
    for x, y in zip(XS, unpack_sequence(packed), strict=True):
        torch.testing.assert_close(model(x), y)
        assert y.shape == (len(x), 4)


def test_streaming_is_the_whole():
    model = SequenceModel(ENCODERS["MSLMN"](), 4, output="all", norm="module")
    x, state, outputs = torch.randn(20, 3, 2), None, []
    for chunk in x.split(6):
        y, state = model.stream(chunk, state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs), model(x))


def test_the_norm_of_a_module_does_not_hear_the_others_and_holds_at_zero():
    norm = ModuleNorm(2, 3, 4, torch.zeros(1, dtype=torch.float64))
    m = torch.randn(5, 24, dtype=torch.float64)
    m[:, 8:12] = 0  # a module that has not fired
    y = norm(m)
    assert not y[:, 8:12].any()
    for block in range(6):
        part = m[:, 4 * block : 4 * block + 4]
        expected = part / (part.square().mean(1, keepdim=True) + 0.01).sqrt()
        torch.testing.assert_close(y[:, 4 * block : 4 * block + 4], expected)
    m.requires_grad_()
    torch.autograd.gradcheck(norm, m)
    grad = torch.autograd.grad(norm(m).sum(), m)[0]
    assert grad.abs().max() <= 10 + 1e-9  # 1 / floor


def test_the_norm_of_a_prefix_hears_faster_modules_of_both_directions_only():
    norm = PrefixNorm(2, 3, 4, torch.zeros(1, dtype=torch.float64))
    m = torch.randn(5, 24, dtype=torch.float64, requires_grad=True)
    y = norm(m)
    blocks = m.detach().view(5, 2, 3, 4)
    for k in range(3):
        expected = (
            blocks[:, :, k] / (blocks[:, :, : k + 1].square().mean((1, 2, 3), keepdim=True)[..., 0] + 0.0025).sqrt()
        )
        torch.testing.assert_close(y.view(5, 2, 3, 4)[:, :, k], expected)
    torch.autograd.gradcheck(norm, m)
    assert not norm(torch.zeros(24, dtype=torch.float64)).any()
    norm.grow()
    grown = torch.cat([blocks, torch.randn(5, 2, 1, 4, dtype=torch.float64)], 2).flatten(1)
    torch.testing.assert_close(norm(grown).view(5, 2, 4, 4)[:, :, :3], y.view(5, 2, 3, 4))


def test_the_norm_of_a_layer_is_torch_s_and_does_not_grow():
    model = SequenceModel(MSLMN(2, 4, 3, num_modules=2, bidirectional=True), 5, output="all", norm="layer")
    x = torch.randn(6, 2, 2)
    memory, _ = model.encoder(x)
    expected = model.readout(torch.nn.functional.layer_norm(memory, (12,)))
    torch.testing.assert_close(model(x), expected)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"norm='layer' normalises all modules together.*'prefix' or 'module' to grow"):
        model.grow([torch.zeros(3, 4)] * 2, [torch.zeros(3, 3)] * 2)
    assert model.num_modules == 2 and all(map(torch.equal, model.parameters(), before))


def test_dropout_drops_what_is_read_in_training_only():
    model = SequenceModel(LMN(2, 4, 50), 5, output="all", dropout=0.5, bias=False).eval()
    x = torch.randn(9, 3, 2)
    whole = model(x)
    assert torch.equal(model(x), whole)
    model.train()
    torch.manual_seed(0)
    once = model(x)
    features = model.features(x)
    torch.manual_seed(0)
    torch.testing.assert_close(once, model.readout(torch.nn.functional.dropout(features, 0.5)))
    assert not torch.equal(model(x), once)
    packed = model(pack_sequence(XS, enforce_sorted=False))
    assert packed.data.shape == (20, 5)


@pytest.mark.parametrize("norm", [None, "module", "prefix", "layer"])
@pytest.mark.parametrize("kind", ENCODERS)
def test_a_saved_model_comes_back_with_every_argument(kind, norm, tmp_path):
    options = {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.25, "bias": False}
    if kind in ("LMN", "MSLMN", "ClockworkRNN"):
        options |= {"init": "xavier", "learn_initial_state": True}
    encoder = ENCODERS[kind](**options).double()
    model = SequenceModel(encoder, 4, output="all", norm=norm, dropout=0.5, bias=False).double()
    mslmn.save(model, tmp_path / "a" / "b")
    again = mslmn.load(tmp_path / "a" / "b")
    assert checkpoint.describe(again) == checkpoint.describe(model)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value) and again.state_dict()[name].dtype == torch.float64
    x = torch.randn(3, 7, 2, dtype=torch.float64)
    assert torch.equal(again.eval()(x), model.eval()(x))
    mslmn.save(model.encoder, tmp_path / "layer")
    assert type(mslmn.load(tmp_path / "layer")) is type(model.encoder)


def test_a_grown_model_is_saved_as_it_is(tmp_path):
    model = SequenceModel(MSLMN(2, 4, 3, num_modules=1, bidirectional=True), 2)
    model.grow([torch.randn(3, 4)] * 2, [torch.randn(3, 3)] * 2)
    mslmn.save(model, tmp_path)
    again = mslmn.load(tmp_path)
    assert again.num_modules == 2
    assert torch.equal(again(XS[0]), model(XS[0]))


def test_saving_again_replaces_and_leaves_nothing_behind(tmp_path):
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = SequenceModel(LMN(2, 4, 3), 2)
        mslmn.save(model, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert torch.equal(mslmn.load(tmp_path)(XS[0]), model(XS[0]))


def test_saving_deletes_no_one_else_s_files(tmp_path):
    others = ["model-00001-of-00002.safetensors", "model-old.safetensors", "model.tmp", "model-notes.tmp"]
    for name in others:
        (tmp_path / name).write_text("mine")
    for _ in range(2):
        mslmn.save(LMN(2, 4, 3), tmp_path)
    assert all((tmp_path / name).exists() for name in others) and len(list(tmp_path.iterdir())) == len(others) + 2


@pytest.fixture
def saved(tmp_path):
    mslmn.save(SequenceModel(LMN(2, 4, 3), 2), tmp_path)
    return tmp_path


def edit(folder, change):
    content = json.loads((folder / "model.json").read_text())
    change(content)
    (folder / "model.json").write_text(json.dumps(content))


DAMAGE = {
    "no such folder": (lambda f: (f / "model.json").unlink(), "No such file.*right folder"),
    "not JSON": (lambda f: (f / "model.json").write_text("{"), "is not JSON"),
    "another format": (lambda f: edit(f, lambda c: c.update(format=99)), "not a checkpoint of format 1"),
    "no tensors": (lambda f: next(f.glob("*.safetensors")).unlink(), "damaged or missing"),
    "truncated": (
        lambda f: next(f.glob("*.safetensors")).write_bytes(next(f.glob("*.safetensors")).read_bytes()[:-40]),
        "damaged or missing",
    ),
    "unknown argument": (
        lambda f: edit(f, lambda c: c["model"]["encoder"]["config"].update(gates=True)),
        "unexpected keyword argument 'gates'",
    ),
    "unknown key": (lambda f: edit(f, lambda c: c["model"].update(more=1)), r"described by .* got"),
    "unknown class": (lambda f: edit(f, lambda c: c["model"]["encoder"].update({"class": "os"})), "no class 'os'"),
    "another architecture": (
        lambda f: edit(f, lambda c: c["model"]["encoder"]["config"].update(hidden_size=9)),
        "weights of another architecture: encoder.cells.0.*expected",
    ),
    "no model": (lambda f: edit(f, lambda c: c.pop("model")), "has no 'model'"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_named(saved, damage):
    break_it, message = DAMAGE[damage]
    break_it(saved)
    with pytest.raises(CheckpointError, match=message) as error:
        mslmn.load(saved)
    assert str(saved) in str(error.value)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write a checkpoint to .*choose a folder"):
        mslmn.save(LMN(2, 4, 3), tmp_path / "file" / "model")
    with pytest.raises(TypeError, match="got Linear; save the state_dict"):
        mslmn.save(nn.Linear(2, 3), tmp_path)


def test_nothing_is_unpickled():
    from pathlib import Path

    sources = [p.read_text() for p in Path(mslmn.__file__).parent.rglob("*.py")]
    assert not any("torch.load(" in text or "import pickle" in text or "allow_pickle=True" in text for text in sources)


# objectives


def test_nmse_is_the_error_over_the_variance():
    y, t = torch.randn(30, 2), 3 * torch.randn(30, 2)
    objective = NMSE()
    objective.prepare([(None, t[:11]), (None, t[11:])])
    assert objective.variance == pytest.approx(t.var(correction=0).item(), rel=1e-5)
    assert objective.loss(y, t).mean.item() == pytest.approx(((y - t).square().mean() / objective.variance).item())
    assert objective.config == {"variance": objective.variance}
    objective.prepare([(None, 10 * t)])  # other data, another variance
    assert objective.variance == pytest.approx(100 * t.var(correction=0).item(), rel=1e-5)
    objective.prepare([(None, t)])
    with pytest.raises(ValueError, match="constant"):
        NMSE().prepare([(None, torch.ones(5))])
    with pytest.raises(ValueError, match=r"shape of the output, \(30, 2\), got \(30,\)"):
        objective.loss(y, t[:, 0])


def test_cross_entropy_and_accuracy():
    y, t = torch.randn(30, 5), torch.randint(0, 5, (30,))
    objective = CrossEntropy()
    torch.testing.assert_close(objective.loss(y, t).mean, F.cross_entropy(y, t))
    assert objective.metric(y, t).mean.item() == pytest.approx((y.argmax(1) == t).float().mean().item())
    packed = pack_sequence([y[:20], y[20:]])
    target = objective.collate([t[:20], t[20:]])
    torch.testing.assert_close(objective.loss(packed, target).mean, F.cross_entropy(y, t))
    with pytest.raises(ValueError, match="class numbers of shape"):
        objective.loss(y, torch.rand(30))


def test_targets_of_other_lengths_are_an_error():
    """As many rows in all, but not of the same sequences."""
    long, short = torch.randn(5, 2), torch.randn(3, 2)
    output = pack_sequence([long, short], enforce_sorted=False)
    for objective, target in ((NMSE(1.0), [short, long]), (CrossEntropy(), [short[:, 0].long(), long[:, 0].long()])):
        with pytest.raises(ValueError, match="each target must be as long as its sequence"):
            objective.loss(output, objective.collate(target))


def test_sums_add_up_over_batches():
    y, t = torch.randn(30, 5), torch.randint(0, 5, (30,))
    whole = CrossEntropy().loss(y, t)
    parts = [CrossEntropy().loss(y[i::3], t[i::3]) for i in range(3)]
    torch.testing.assert_close(sum(p.total for p in parts) / sum(p.items for p in parts), whole.mean)


def test_ctc_is_torch_s_and_short_sequences_count_zero():
    xs = [torch.randn(T, 5) for T in (12, 7, 3)]
    target = [torch.tensor([1, 2, 2]), torch.tensor([4]), torch.tensor([1, 2, 3, 4])]  # the last does not fit
    packed = pack_sequence(xs, enforce_sorted=False)
    score = CTC().loss(packed, target)
    expected = sum(
        F.ctc_loss(x.log_softmax(-1)[:, None], t[None], (len(x),), (len(t),), reduction="sum")
        for x, t in zip(xs[:2], target[:2], strict=True)
    )
    torch.testing.assert_close(score.total, expected)
    assert score.items == 3
    padded, _ = pad_packed_sequence(packed)
    assert math.isfinite(CTC().loss(padded, target).total.item())


def test_a_flat_start_spreads_labels_and_blanks_evenly():
    lengths, target = [4, 11, 3, 10], [torch.tensor(t) for t in ([3], [2, 2], [1, 2, 3], [])]
    expected = [[0, 0, 3, 0], [0, 0, 0, 2, 2, 0, 0, 2, 2, 0, 0], [0, 2, 3], [0] * 10]  # three steps for seven places
    expected[2] = [[0, 1, 0, 2, 0, 3, 0][t * 7 // 3] for t in range(3)]
    logits = [torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in lengths]
    score = CTC().first_loss(pack_sequence(logits, enforce_sorted=False), target)
    each = [F.cross_entropy(x, torch.tensor(y), reduction="sum") for x, y in zip(logits, expected, strict=True)]
    assert score.items == sum(lengths)
    torch.testing.assert_close(score.total, sum(each))
    with pytest.raises(ValueError, match="labels must be between 1 and 3"):
        CTC().first_loss(pack_sequence(logits, enforce_sorted=False), [torch.tensor([4])] * 4)
    one = NMSE(variance=2.0)
    assert one.first_loss(torch.ones(2), torch.zeros(2)).mean == one.loss(torch.ones(2), torch.zeros(2)).mean


def test_targets_packed_in_another_order_are_brought_into_step():
    """Torch packs many equally long sequences in any order, `collate` in theirs."""
    xs = [torch.randn(4 if i < 12 else 2, 2) for i in range(20)]
    objective = objectives.NMSE()
    for output in (pack_sequence(xs, enforce_sorted=False), pack_sequence(xs), objective.collate(xs)):
        for target in (pack_sequence(xs, enforce_sorted=False), objective.collate(xs)):
            assert objective.loss(output, target).total == 0
    turned = objective.collate(xs[::-1])  # the short ones first: other lengths, the same rows
    with pytest.raises(ValueError, match="each target must be as long as its sequence"):
        objective.loss(objective.collate(xs), turned)


def test_a_packed_lstm_is_padded_only_where_that_is_not_a_waste():
    model = SequenceModel(nn.LSTM(2, 3, bidirectional=True), 1, output="all")
    for lengths in ([5, 5, 4], [90, 1, 1, 1, 1, 1, 1, 1]):
        packed = pack_sequence([torch.randn(n, 2) for n in lengths])
        expected = model.readout(model.encoder(packed)[0].data)
        torch.testing.assert_close(model(packed).data, expected)
    assert not _is_slow(model.encoder, packed)


def test_best_path_collapses_repeats_before_it_drops_blanks():
    path = [0, 1, 1, 0, 1, 2, 2, 0, 0, 3]
    output = F.one_hot(torch.tensor([path, [2] * 10]), 4).float().transpose(0, 1)
    assert objectives.best_path(output) == [[1, 1, 2, 3], [2]]
    packed = pack_sequence([output[:, 0], output[:4, 1]])
    assert objectives.best_path(packed) == [[1, 1, 2, 3], [2]]
    score = CTC().metric(output, [torch.tensor([1, 2, 3]), torch.tensor([2])])
    assert score.mean.item() == pytest.approx((1 - 1 / 3 + 1) / 2)


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("ab", "ba", 2)],
)
def test_edit_distance_with_and_without_rapidfuzz(a, b, distance):
    a, b = [ord(c) for c in a], [ord(c) for c in b]
    assert objectives.edit_distance(a, b) == objectives._edit_distance(a, b) == distance


WRONG = [
    (lambda: SequenceModel(nn.Linear(2, 3), 1), TypeError, "encoder must be a layer of mslmn, .* got Linear"),
    (lambda: SequenceModel(LMN(2, 4, 3), 0), ValueError, "output_size must be at least 1"),
    (lambda: SequenceModel(LMN(2, 4, 3), 1, output="first"), ValueError, "output must be one of 'last', 'all'"),
    (
        lambda: SequenceModel(LMN(2, 4, 3), 1, norm="batch"),
        ValueError,
        "norm must be None, 'module', 'prefix' or 'layer'",
    ),
    (lambda: SequenceModel(LMN(2, 4, 3), 1, dropout=2), ValueError, "dropout must be a probability in"),
    (lambda: SequenceModel(LMN(2, 4, 3, bidirectional=True), 1).stream(XS[0]), ValueError, "needs the whole sequence"),
    (lambda: CTC().loss(torch.randn(4, 3), []), ValueError, "build the model with output='all'"),
    (lambda: CTC().loss(torch.randn(4, 2, 3), [torch.tensor([1])]), ValueError, "each of 2 sequences, got 1"),
    (lambda: CTC().loss(torch.randn(4, 1, 3), [torch.tensor([0, 1])]), ValueError, "between 1 and 2 .* got 0 to 1"),
    (lambda: CTC().loss(torch.randn(4, 1, 3), [torch.tensor([3])]), ValueError, "got 3 to 3 in sequence 0"),
    (lambda: NMSE(0.0), ValueError, "variance must be a number above 0"),
    (lambda: NMSE(1.0).loss([1.0], torch.ones(1)), TypeError, "must be tensors or packed sequences, got list"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG, ids=[message[:30] for *_, message in WRONG])
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
