"""A step of the weights: clipped, by Adam, contracted; the same from a CUDA graph."""

import pytest
import torch
from torch import nn

from mslmn import MSLMN, SequenceModel
from mslmn.update import MOMENTS, Update

CHOSEN = {"learning_rate": 1e-2, "weight_decay": 1e-3, "clip": 0.5, "contract": True}


def model(device="cpu"):
    torch.manual_seed(0)
    return SequenceModel(MSLMN(2, 6, 4, num_modules=3, bidirectional=True), 2).to(device)


def gradients(net, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)


def steps(net, update, count, first=0, rate=1e-2):
    fine = torch.tensor(True, device=next(net.parameters()).device)
    for i in range(first, first + count):
        update.clear()
        gradients(net, i)
        update(rate / (1 + i), fine)


def weights(net):
    return {name: value.detach().cpu().clone() for name, value in net.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_step_is_clipping_then_adam_then_contraction(device):
    net, plain = model(device), model(device)
    update = Update(net, {}, **CHOSEN, alone=False)
    adam = torch.optim.Adam(plain.parameters(), lr=1e-2, weight_decay=1e-3, fused=True)
    for i in range(4):
        gradients(net, i)
        gradients(plain, i)
        update(1e-2, torch.tensor(True, device=device))
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        adam.step()
        plain.encoder.contract()
    for name, value in weights(net).items():
        torch.testing.assert_close(value, weights(plain)[name])


def test_what_is_not_fine_changes_nothing_but_may_be_followed_by_a_step(device):
    net, twin = model(device), model(device)
    update, other = Update(net, {}, **CHOSEN), Update(twin, {}, **CHOSEN)
    steps(net, update, 3)
    steps(twin, other, 3)
    before = weights(net)
    net.encoder.cells[0].Wxh.grad.fill_(float("nan"))
    update(1e-2, torch.tensor(False, device=device))
    assert same(weights(net), before)
    steps(net, update, 2, first=3)
    steps(twin, other, 2, first=3)
    assert same(weights(net), weights(twin))


def test_the_average_forgets_and_goes_on_where_it_was(device):
    d, whole, net = 0.8, model(device), model(device)
    update, first = Update(whole, {}, **CHOSEN, average=d), Update(net, {}, **CHOSEN, average=d)
    seen = []
    for i in range(7):
        steps(whole, update, 1, first=i)
        seen.append(weights(whole))
        expected = {name: sum(d**k * w[name].double() for k, w in enumerate(reversed(seen))) for name in seen[0]}
        for name, value in update.averages.items():
            mean = expected[name] * (1 - d) / (1 - d ** (i + 1))
            torch.testing.assert_close(value.cpu().double(), mean, rtol=0, atol=1e-6)
    steps(net, first, 4)
    again = Update(net, first.moments, **CHOSEN, average=d, averages=first.averages, batches=4)
    steps(net, again, 3, first=4)
    assert same(again.averages, update.averages) and same(weights(net), weights(whole))


def test_the_average_of_16_bit_weights_moves():
    net = model(torch.device("cpu")).bfloat16()
    update = Update(net, {}, **CHOSEN, average=0.998)
    for value in [1.0] * 100 + [2.0] * 1000:
        for p in net.parameters():
            p.detach().fill_(value)
        update._follow()
    expected = 2 - (0.998**1000 - 0.998**1100) / (1 - 0.998**1100)
    for average in update.averages.values():
        torch.testing.assert_close(average, torch.full_like(average, expected), rtol=1e-4, atol=0)


def test_moments_go_on_where_they_were(device):
    whole, net = model(device), model(device)
    steps(whole, Update(whole, {}, **CHOSEN), 6)
    first = Update(net, {}, **CHOSEN)
    steps(net, first, 3)
    moments = first.moments
    assert moments.keys() == dict(net.named_parameters()).keys() and all(
        set(m) == set(MOMENTS) for m in moments.values()
    )
    second = Update(net, moments, **CHOSEN)
    steps(net, second, 3, first=3)
    assert same(weights(net), weights(whole))
    assert all(torch.equal(moments[name]["step"].cpu(), torch.tensor(3.0)) for name in moments)  # a copy


def test_without_any_gradient_a_weight_stays(device):
    net = model(device)
    update = Update(net, {}, **{**CHOSEN, "weight_decay": 0.0})
    for i in range(3):
        update.clear()
        gradients(net, i)
        net.readout.b_y.grad = None
        before = weights(net)
        update(1e-2, torch.tensor(True, device=device))
        after = weights(net)
        assert torch.equal(before["readout.b_y"], after["readout.b_y"])
        assert not torch.equal(before["encoder.cells.0.Wxh"], after["encoder.cells.0.Wxh"])


@pytest.mark.gpu
def test_a_graph_computes_the_same_bits():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    replayed, called = model("cuda"), model("cuda")
    one, two = Update(replayed, {}, **CHOSEN), Update(called, {}, **CHOSEN, alone=False)
    steps(replayed, one, 8)
    steps(called, two, 8)
    assert one.graph is not None and two.graph is None
    assert same(weights(replayed), weights(called))


def twice(layer):
    """A model that uses a layer twice in a step, as a part of itself."""

    class Twice(nn.Module):
        def forward(self, x):
            return layer(layer(x)[0])[0]

    return Twice()


@pytest.mark.parametrize("use", ["once", "bidirectional", "packed", "stacked", "twice", "frozen", "hidden"])
def test_gradients_put_aside_are_those_of_autograd(device, use):
    from torch.nn.utils.rnn import pack_sequence

    from mslmn import ClockworkRNN, ops

    torch.manual_seed(0)
    options = {"bidirectional": use == "bidirectional", "num_layers": 2 if use == "stacked" else 1}
    layer = MSLMN(12, 5, 4, num_modules=3, learn_initial_state=True, **options).to(device)
    if use == "hidden":
        layer = ClockworkRNN(12, 4, num_modules=3).to(device)
    if use == "frozen":
        layer.cells[0].Wxh.requires_grad_(False)
    x = torch.randn(9, 3, 12, device=device, requires_grad=True)

    def loss():
        given = pack_sequence([x[:9, 0], x[:4, 1], x[:1, 2]]) if use == "packed" else x
        output = twice(layer)(given) if use == "twice" else layer(given)[0]
        return (output.data if use == "packed" else output).square().sum()

    leaves = [p for p in [x, *layer.parameters()] if p.requires_grad]
    expected = dict(zip(map(id, leaves), torch.autograd.grad(loss(), leaves), strict=True))
    with ops.gradients_aside() as aside:
        loss().backward()
    put = {id(w) for one in aside for w in one.weights}
    names = {id(p): name for name, p in layer.named_parameters()}
    outside = {id(x), *(i for i, name in names.items() if "m_0" in name)}
    assert put == (set() if use == "frozen" else set(expected) - outside)
    assert all(leaf.grad is None for leaf in leaves if id(leaf) in put)
    for one in aside:
        for weight, gradient in zip(one.weights, one.views(one.flat), strict=True):
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
    for leaf in leaves:
        torch.testing.assert_close(leaf.grad, expected[id(leaf)])
    loss().backward()  # outside of the block all is as ever
    torch.testing.assert_close(leaves[-1].grad, 2 * expected[id(leaves[-1])])


def test_a_hook_on_a_weight_sees_its_gradient(device):
    net = model(device)
    seen = []
    net.encoder.cells[0].Wxh.register_hook(seen.append)
    update = Update(net, {}, **CHOSEN)
    with update.aside() as aside:
        net(torch.randn(5, 2, 2, device=device)).sum().backward()
    assert len(seen) == 1 and not aside
    update(1e-2, torch.tensor(True, device=device), aside)


def test_a_model_is_trained_alike_whichever_way_gradients_come(device):
    found = []
    for alone in (True, False):
        net = model(device)
        update = Update(net, {}, **CHOSEN, alone=alone)
        for i in range(6):
            x = torch.randn(7, 3, 2, generator=torch.Generator().manual_seed(i)).to(device)
            update.clear()
            with update.aside() as aside:
                net(x).square().sum().backward()
            assert bool(aside) == alone
            update(1e-2, torch.tensor(True, device=device), aside)
        found.append(weights(net))
    assert same(*found)


class Replayed:
    """Stands in for a CUDA graph: it computes on what is there when it is replayed, at the same addresses."""

    def __init__(self, call, parameters):
        self.call, self.parameters = call, parameters
        self.gradients = [p.grad for p in parameters]

    def replay(self):
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        self.call()


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_a_graph_reads_every_gradient(monkeypatch, extra, late):
    """Also of weights that the loss reads by themselves, and of those that have none at first; on the CPU."""
    from mslmn import update as module

    nets, found = [model(), model()], []
    for net, replay in zip(nets, (True, False), strict=True):
        made = []

        update = Update(net, {}, **CHOSEN)
        update.replay = replay

        def captured(call, device, net=net, made=made, adam=update.adam):
            assert all(p in adam.state for p in net.parameters())  # none is made by the graph
            made.append(Replayed(call, list(net.parameters())))
            return made[-1]

        monkeypatch.setattr(module, "captured", captured)
        for i in range(6):
            update.clear()
            x = torch.randn(7, 3, 2, generator=torch.Generator().manual_seed(i))
            with update.aside() as aside:
                loss = net(x).square().sum()
                if extra:
                    loss = loss + 10 * net.encoder.cells[0].Wxh.square().sum()
                loss.backward()
            if late and i == 0:
                net.readout.b_y.grad = None
            update(1e-2, torch.tensor(True), aside)
        assert bool(made) == (replay and not extra)
        found.append(weights(net))
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name])


@pytest.mark.parametrize("way", ["checkpoint", "offload"])
def test_gradients_put_aside_find_their_parameters(device, way):
    """Where what is saved for the backward pass is computed again, or comes back from somewhere else."""
    from torch.utils.checkpoint import checkpoint

    from mslmn import ops

    net = model(device)
    x = torch.randn(7, 3, 2, device=device)

    def loss():
        if way == "checkpoint":
            return checkpoint(net, x, use_reentrant=False).square().sum()
        with torch.autograd.graph.save_on_cpu():
            return net(x).square().sum()

    with ops.gradients_aside() as aside:
        loss().backward()
    parameters = {id(p): p for p in net.encoder.parameters()}
    assert {id(w) for one in aside for w in one.weights} == set(parameters)
    expected = torch.autograd.grad(net(x).square().sum(), [w for one in aside for w in one.weights])
    found = [view for one in aside for view in one.views(one.flat)]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_frozen_weights_stay_and_the_others_go_on(device):
    net = model(device)
    net.readout.b_y.requires_grad_(False)
    update, before = Update(net, {}, **CHOSEN), weights(net)
    for _ in range(3):
        update.clear()
        with update.aside() as aside:
            net(torch.randn(7, 3, 2, device=device)).square().sum().backward()
        update(1e-2, torch.tensor(True, device=device), aside)
    after = weights(net)
    assert [name for name in after if torch.equal(after[name], before[name])] == ["readout.b_y"]
    assert device == "cpu" or update.graph is not None
