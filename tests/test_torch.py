"""At home in PyTorch: dtypes, devices, autocast, torch.compile, functional transforms."""

import shutil

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

import mslmn
from helpers import LAYERS, make
from mslmn import MSLMN

kinds = pytest.mark.parametrize("kind", list(LAYERS))


@kinds
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_float_type(kind, dtype, device):
    exact = make(kind, bidirectional=True, device=device)
    layer = LAYERS[kind](2, bidirectional=True, dtype=dtype, device=device)
    layer.load_state_dict(exact.state_dict())
    x = torch.randn(9, 3, 2, dtype=torch.float64, device=device)
    output, state = layer(x.to(dtype))
    assert output.dtype == state.memory.dtype == dtype
    tolerance = 30 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), exact(x)[0], rtol=tolerance, atol=tolerance)
    output.sum().backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in layer.parameters())


@kinds
def test_a_layer_moves_between_dtypes_and_devices(kind, device):
    layer = LAYERS[kind](2).to(device).double()
    output, state = layer(torch.randn(5, 3, 2, device=device, dtype=torch.float64))
    assert output.dtype == torch.float64 and state.clock.device.type == device


@kinds
def test_packed_input_on_every_device(kind, device):
    layer = make(kind, bidirectional=True, num_layers=2, layer_norm=True, device=device)
    xs = [torch.randn(n, 2, dtype=torch.float64, device=device) for n in (3, 9, 5)]
    packed, state = layer(pack_sequence(xs, enforce_sorted=False))
    for b, (x, row) in enumerate(zip(xs, unpack_sequence(packed), strict=True)):
        expected, end = layer(x)
        torch.testing.assert_close(row, expected)
        torch.testing.assert_close(state.memory[:, b], end.memory)
        assert state.clock[b] == len(x)


@kinds
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_autocast_keeps_the_recurrence_in_the_precision_of_the_weights(kind, low):
    """On a GPU inputs and outputs are stored in 16 bits, see test_cuda.py."""
    device = "cpu"
    layer = LAYERS[kind](8).to(device)
    x = torch.randn(300, 3, 8, device=device)
    expected, _ = layer(x)
    with torch.autocast(device, dtype=low):
        output, state = layer(x)
        rounded, _ = layer(x.to(low), state)  # what an autocast layer below would hand over
        output.square().mean().backward()
    assert output.dtype == state.memory.dtype == rounded.dtype == torch.float32
    assert torch.equal(output, expected)
    assert torch.equal(rounded, layer(x.to(low).float(), state)[0])
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters())


def test_autocast_never_converts_float64():
    layer, x = MSLMN(2, 4, 3, 3), torch.randn(5, 1, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(TypeError, match=r"input is torch.float64, the layer torch.float32; convert"):
            layer(x.double())
        with pytest.raises(TypeError, match=r"input is torch.float32, the layer torch.float64; convert"):
            MSLMN(2, 4, 3, 3, dtype=torch.float64)(x)


@kinds
def test_autocast_of_a_low_precision_state(kind, device):
    layer = LAYERS[kind](2).to(device)
    x = torch.randn(5, 3, 2, device=device)
    _, state = layer(x)
    with torch.autocast(device, dtype=torch.bfloat16):
        output, end = layer(x, state._replace(memory=state.memory.bfloat16()))
    assert end.memory.dtype == torch.float32
    assert output.dtype == (torch.float32 if device == "cpu" else torch.bfloat16)


@pytest.mark.filterwarnings("default")  # while it traces, torch warns itself about its own doings
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    ("kind", "bidirectional", "compiler"),
    [(kind, both, "aot_eager") for kind in LAYERS for both in (False, True)] + [("MSLMN", False, "inductor")],
)
def test_compiled_equals_eager(kind, bidirectional, compiler, backend):
    """The whole layer in one graph, values and gradients."""
    if compiler == "inductor" and not shutil.which("g++"):
        pytest.skip("torch.compile's own backend needs a C++ compiler")
    torch.compiler.reset()
    layer = make(kind, bidirectional=bidirectional)
    compiled = torch.compile(layer, fullgraph=True, backend=compiler)
    x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    with mslmn.set_backend(backend):
        expected, end = layer(x)
        output, state = compiled(x)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(state.memory, end.memory)
        assert torch.equal(state.clock, end.clock)
        w = torch.randn_like(expected)
        inputs = [x, *layer.parameters()]
        for ours, theirs in zip(
            torch.autograd.grad((output * w).sum(), inputs),
            torch.autograd.grad((expected * w).sum(), inputs),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(compiled(x, state.detach())[0], layer(x, end)[0])


@kinds
def test_the_compiled_graph_has_one_node_per_cell_and_does_not_unroll_time(kind):
    layer = make(kind, bidirectional=True, num_layers=2)

    def nodes(T):
        graphs = []
        torch.compiler.reset()
        compiled = torch.compile(layer, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)
        compiled(torch.randn(T, 3, 2, dtype=torch.float64))
        return [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]

    assert len(nodes(5)) == len(nodes(50))
    assert sum("mslmn.run" in target for target in nodes(5)) == 4


@kinds
@pytest.mark.filterwarnings("default")
def test_export_keeps_the_recurrence_as_one_operator(kind):
    layer, x = make(kind, bidirectional=True).eval(), torch.randn(7, 3, 2, dtype=torch.float64)
    program = torch.export.export(layer, (x,), dynamic_shapes={"input": {0: torch.export.Dim("T", min=2), 1: None}})
    assert sum("mslmn.run" in str(node.target) for node in program.graph.nodes) == 2
    longer = torch.randn(31, 3, 2, dtype=torch.float64)
    output, state = program.module()(longer)
    expected, end = layer(longer)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(state.memory, end.memory)


def test_compiled_packed_input_equals_eager():
    layer = make("MSLMN", bidirectional=True)
    x = pack_sequence([torch.randn(n, 2, dtype=torch.float64) for n in (3, 5)], enforce_sorted=False)
    output, state = torch.compile(layer, backend="aot_eager")(x)
    expected, end = layer(x)
    torch.testing.assert_close(output.data, expected.data)
    torch.testing.assert_close(state.memory, end.memory)


def test_an_ensemble_runs_under_vmap():
    models = [MSLMN(2, 4, 3, num_modules=3) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    x = torch.randn(7, 2, 2)

    def run(parameters, buffers, x):
        return torch.func.functional_call(models[0], (parameters, buffers), (x,))[0]

    outputs = torch.vmap(run, in_dims=(0, 0, None))(parameters, buffers, x)
    for output, model in zip(outputs, models, strict=True):
        torch.testing.assert_close(output, model(x)[0])


@kinds
def test_replicas_of_data_parallel_equal_the_layer(kind):
    """`nn.DataParallel` hands out copies whose weights are plain tensors, not parameters."""
    layer = make(kind, bidirectional=True, learn_initial_state=True)
    replica = layer._replicate_for_data_parallel()
    modules = dict(layer.named_modules())
    copies = {name: module._replicate_for_data_parallel() for name, module in modules.items()}
    copies[""] = replica
    for name, module in modules.items():
        for child in module._modules:
            copies[name]._modules[child] = copies[f"{name}.{child}".lstrip(".")]
        for key, parameter in module._parameters.items():
            if parameter is not None:
                setattr(copies[name], key, parameter.detach().clone())
    assert not list(replica.parameters())
    x = torch.randn(5, 2, 2, dtype=torch.float64)
    assert torch.equal(replica(x)[0], layer(x)[0])
