"""Gradients that go straight to the weights are those of autograd."""

import threading

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import mslmn
from mslmn import MSLMN, ClockworkRNN, SequenceModel

LAYERS = {
    "one layer": lambda: MSLMN(3, 5, 4, num_modules=3),
    "stacked, both directions": lambda: MSLMN(3, 5, 4, num_modules=2, num_layers=2, bidirectional=True),
    "ClockworkRNN": lambda: ClockworkRNN(3, 4, num_modules=2),
    "learnt start": lambda: MSLMN(3, 5, 4, num_modules=2, learn_initial_state=True),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return request.param


def problem(layer, device):
    torch.manual_seed(0)
    model = SequenceModel(LAYERS[layer](), 2, output="all").to(device)
    x = pack_sequence([torch.randn(n, 3) for n in (9, 6, 6, 1)]).to(device)
    return model, x


def gradients(model):
    return [p.grad for p in model.parameters()]


def loss(model, x):
    return model(x).data.square().sum()


@pytest.mark.parametrize("layer", LAYERS)
def test_they_are_those_of_autograd_and_add_up(layer, device):
    model, x = problem(layer, device)
    for _ in range(2):
        loss(model, x).backward()
    expected = gradients(model)
    model.zero_grad()
    for _ in range(2):
        with mslmn.direct_gradients():
            loss(model, x).backward()
    assert all(map(torch.equal, gradients(model), expected))
    model.zero_grad()
    with mslmn.direct_gradients():
        (loss(model, x) + loss(model, x)).backward()
    for found, twice in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(found, twice)


def test_inputs_get_theirs_and_hooks_are_called(device):
    model, _ = problem("one layer", device)
    x = torch.randn(7, 2, 3, device=device, requires_grad=True)
    weight, seen = model.encoder.cells[0].Wxh, []
    weight.register_hook(lambda g: seen.append(g.clone()))
    with mslmn.direct_gradients():
        model(x).square().sum().backward()
    assert x.grad is not None and len(seen) == 1 and torch.equal(seen[0], weight.grad)
    assert all(p.grad is not None for p in model.parameters())


def test_a_backward_pass_after_the_block_is_refused(device):
    model, x = problem("one layer", device)
    with mslmn.direct_gradients():
        late = loss(model, x)
    with pytest.raises(
        RuntimeError, match="came after the block of direct_gradients in which its forward pass was; put"
    ):
        late.backward()


def test_backward_passes_run_in_the_thread_that_calls_them(device):
    model, x = problem("one layer", device)
    output, threads = model(x).data, []
    output.register_hook(lambda g: threads.append(threading.get_ident()))
    with mslmn.direct_gradients():
        output.sum().backward()
    assert threads == [threading.get_ident()] and torch.autograd.is_multithreading_enabled()


def test_a_block_that_fails_adds_nothing(device):
    model, x = problem("one layer", device)

    def fails():
        with mslmn.direct_gradients():
            loss(model, x).backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert all(p.grad is None for p in model.encoder.parameters())
    loss(model, x).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_who_asks_for_other_derivatives_leaves_nothing_in_the_weights(device):
    """As a penalty on the gradient of the input does."""
    model, _ = problem("stacked, both directions", device)
    x = torch.randn(7, 2, 3, device=device, requires_grad=True)

    def penalised():
        out = model(x).square().sum()
        (gx,) = torch.autograd.grad(out, x, retain_graph=True)
        (out * (1 + gx.norm().detach())).backward()

    penalised()
    expected = gradients(model)
    model.zero_grad()
    with mslmn.direct_gradients():
        penalised()
    assert all(map(torch.equal, gradients(model), expected))
    model.zero_grad()
    with mslmn.direct_gradients():
        model(x).square().sum().backward(inputs=[x])
    assert all(p.grad is None for p in model.parameters())


def test_gradients_that_are_there_are_added_to_in_place(device):
    model, x = problem("one layer", device)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    held = gradients(model)
    with mslmn.direct_gradients():
        loss(model, x).backward()
    assert all(
        p.grad is g and not torch.equal(g, torch.ones_like(g)) for p, g in zip(model.parameters(), held, strict=True)
    )


def test_a_weight_in_several_places_gets_the_sum(device):
    model, x = problem("one layer", device)
    cell = model.encoder.cells[0]
    cell.Whm[1] = cell.Whm[2] = cell.Whm[0]
    for _ in range(2):
        loss(model, x).backward()
    expected = cell.Whm[0].grad
    model.zero_grad()
    for _ in range(2):
        with mslmn.direct_gradients():
            loss(model, x).backward()
    torch.testing.assert_close(cell.Whm[0].grad, expected)


@pytest.mark.gpu
def test_a_side_stream_is_waited_for():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    layers = [MSLMN(3, 32, 16, num_modules=4, device="cuda") for _ in range(2)]
    x, side = torch.randn(2000, 8, 3, device="cuda"), torch.cuda.Stream()
    sum(layer(x)[0].square().sum() for layer in layers).backward()
    expected = [p.grad for layer in layers for p in layer.parameters()]
    for layer in layers:
        layer.zero_grad()
    side.wait_stream(torch.cuda.current_stream())
    with mslmn.direct_gradients():
        here = layers[0](x)[0].square().sum()
        with torch.cuda.stream(side):
            there = layers[1](x)[0].square().sum()
        torch.cuda.current_stream().wait_stream(side)
        (here + there).backward()
    found = [p.grad.clone() for layer in layers for p in layer.parameters()]
    assert all(map(torch.equal, found, expected))
