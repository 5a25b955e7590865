"""The fused CUDA kernels of cuda.cu and small.cu, compiled for a layer's sizes when it first runs, and kept on disk.

float32, float64, and float32 with 16-bit inputs and outputs: x, memory and hidden are stored as x is, all else is as
the weights are.
"""

import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import packing
from . import nvrtc
from .fitting import check_batch, check_results, fitting, plain, unmoved
from .nvrtc import where_kept
from .weights import Sizes, Weights, numels

__all__ = [
    "backward",
    "compiler",
    "forward",
    "next_pooling",
    "packing_table",
    "place",
    "placed",
    "stream_of",
    "where_kept",
    "why_not",
    "why_not_these",
]

NAMES = {torch.float32: "float", torch.float64: "double", torch.float16: "float16", torch.bfloat16: "bfloat16"}
OLDEST = (8, 0)  # compute capability: copies to shared memory that do not wait
INLINE_INPUT = 16  # inputs up to so many features are multiplied inside the kernel, wider ones before it
LONGEST = 2**30  # steps of all sequences together: records name them, and loops count them, in 32 bits
CARRIERS = {"forward": 2, "backward": 3}  # warps that carry inputs and outputs
REGISTERS = 65536  # of a processor
WAVES = 2  # of chunks of records on all processors
SMALL = 64  # rows of a state that one warp takes through time
IN_REGISTERS = 128  # 4-byte registers of a thread for weights
NEAR = 4  # modules whose weights are there
NO_RECORD = -(2**31)  # NONE of cuda.cu


class Choices(NamedTuple):
    """How a pass is laid out on a device: the constants of cuda.cu in capitals."""

    blocks: int  # sequences at a time on one processor
    compute: int  # threads that compute, beside those that carry inputs and outputs
    lanes: int  # threads that share a sum
    ahead: int  # steps that are fetched before they are needed
    cached: bool  # the weights of module 0 in registers
    resident: int  # modules whose weights are in shared memory
    small: bool = False  # one warp does it all: the kernels of small.cu


class Device(NamedTuple):
    """What matters of a CUDA device."""

    capability: tuple[int, int]
    processors: int
    shared: int  # bytes of shared memory a block can have


@lru_cache
def device_of(index: int) -> Device:
    found = torch.cuda.get_device_properties(index)
    return Device((found.major, found.minor), found.multi_processor_count, nvrtc.shared_memory(index))


@lru_cache
def why_not(index: int) -> str | None:
    """Why the kernels cannot be used on a device, or None if they can."""
    if torch.version.cuda is None:
        return "this PyTorch is not built for CUDA"
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST:
        return "they need compute capability {}.{} or above, this device has {}.{}".format(*OLDEST, *capability)
    reason = nvrtc.why_not()
    if reason is None and nvrtc.architecture(capability) is None:
        return (
            f"NVRTC {compiler()} does not know its compute capability, {capability[0]}.{capability[1]}; update PyTorch"
        )
    return reason


def compiler() -> str:
    return ".".join(map(str, nvrtc.version()))


@lru_cache
def why_not_these(sizes: Sizes, real: torch.dtype, value: torch.dtype, index: int) -> str | None:
    """Why a layer of these sizes cannot use the kernels, or None if it can."""
    if real not in (torch.float32, torch.float64) or value not in NAMES or value.itemsize > real.itemsize:
        return f"they compute float32 and float64, not {real} with inputs of {value}"
    device = device_of(index)
    products = Products.of(sizes, _projects(sizes)).shared(real)
    if products > device.shared or any(choose(part, sizes, real, value, 1, device) is None for part in CARRIERS):
        return f"the state of a sequence does not fit the {device.shared} bytes of shared memory that a block can have"
    return None


def forward(
    x: Tensor,  # (T, B, I), or packed (N, I)
    m: Tensor,  # (B, G)
    clock: Tensor,  # (B,) int64
    weights: Weights,
    batch_sizes: Tensor | None,  # (T,) int64
    reverse: bool,
    need_hidden: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Memories, hidden states (None if not needed) and last memories."""
    if _elsewhere(x):
        with torch.cuda.device_of(x):
            return forward(x, m, clock, weights, batch_sizes, reverse, need_hidden)
    x, m, clock = _plain(x), _plain(m), clock.contiguous()
    check_batch(batch_sizes, x, m)
    sizes = weights.sizes
    _alive, pointers = fitting(x, m, clock, weights)
    steps, B = x.shape[:-1], m.shape[0]
    new = x.new_empty if place() is None else x.new_zeros
    memory = new((*steps, m.shape[1]))
    hidden = new((*steps, sizes.H)) if need_hidden else None
    last = torch.empty_like(m)
    if steps.numel() == 0:
        return memory, hidden, last.copy_(m)
    kernels, stream = _kernels("forward", sizes, m.dtype, x.dtype, B, x.device), stream_of(x)
    packed = m.new_empty(kernels.packed)
    kernels.pack(pointers, packed.data_ptr(), stream)
    given = _projected(x, weights) if kernels.projected else x
    tensors = (packed, given, m, memory, hidden, last)
    batch = _batch(x, B, clock, batch_sizes, reverse)
    kernels.launch("forward", (B, 1), [*batch, *map(_address, tensors)], stream, pointers)
    return memory, hidden, last


def backward(
    x: Tensor,
    m: Tensor,
    clock: Tensor,
    weights: Weights,
    batch_sizes: Tensor | None,
    reverse: bool,
    memory: Tensor,
    hidden: Tensor | None,  # None: of the Clockwork RNN
    gmemory: Tensor | None,  # None: zero
    ghidden: Tensor | None,
    glast: Tensor | None,
    need_x: bool,
    need_weights: bool,
    *,
    checked: bool = False,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of x (None if not needed), of m, and of the weights, one after the other (empty if not needed).

    Where ``checked``, all but the gradients is what a forward pass took and gave, and autograd has looked at these.
    """
    if _elsewhere(x):
        with torch.cuda.device_of(x):
            return backward(
                *(x, m, clock, weights, batch_sizes, reverse, memory, hidden, gmemory, ghidden, glast),
                *(need_x, need_weights),
                checked=checked,
            )
    x, m, clock, memory, hidden = _plain(x), _plain(m), clock.contiguous(), _plain(memory), _plain_or_none(hidden)
    gmemory, ghidden, glast = _plain_or_none(gmemory), _plain_or_none(ghidden), _plain_or_none(glast)
    sizes = weights.sizes
    I, H, M, g, _ = sizes
    check_batch(batch_sizes, x, m)
    pointers = unmoved(weights, x, m, clock, memory) if checked else None
    if pointers is None:
        _alive, pointers = fitting(x, m, clock, weights)
        check_results(x, m, H, memory, hidden, gmemory, ghidden, glast)
    B, N = m.shape[0], x.shape[:-1].numel()
    gx = torch.empty_like(x) if need_x else None
    gm = torch.empty_like(m)
    gflat = m.new_empty(sum(numels(sizes)) if need_weights else 0)
    if N == 0:
        return gx, gm.zero_() if glast is None else gm.copy_(glast), gflat.zero_()
    kernels, stream = _kernels("backward", sizes, m.dtype, x.dtype, B, x.device), stream_of(x)
    layout = kernels.layout(N, B, need_x, need_weights)
    space = m.new_empty(layout.size, dtype=torch.uint8)
    origin = space.data_ptr()
    packed, gbias, left, left_of, ga, records, record_of, sums = (
        0 if begin is None else origin + begin for begin in layout[1:9]
    )
    if place() is not None:  # rows of no step have no records
        for begin, count in ((layout.left_of, N), (layout.record_of, layout.record_of_count)):
            if begin is not None:
                space[begin : begin + 4 * count].view(torch.int32).fill_(NO_RECORD)
        if layout.left is not None:
            space[layout.left : layout.left + N * (H + M) * x.element_size()].zero_()
        if layout.ga is not None:
            space[layout.ga : layout.ga + N * g * M * x.element_size()].zero_()
    kernels.pack(pointers, packed, stream)
    batch = _batch(x, B, clock, batch_sizes, reverse)
    before = map(_address, (memory, hidden if H else None, gmemory, ghidden if H else None, glast, gm))
    arguments = [*batch, packed, *before, gbias, left, left_of, ga, records, record_of]
    kernels.launch("backward", (B, 1), [*arguments, *layout.record_at, *layout.record_of_at], stream)

    def factor(begin: int | None, width: int, columns: int) -> Tensor:
        """The left one of a product, in the workspace."""
        found = space[begin : (begin or 0) + N * width * x.element_size()].view(x.dtype)
        return found.view(N, width)[:, :columns]

    if gx is not None:
        inputs = torch.cat(list(weights.Whm)) if weights.Wxh is None else weights.Wxh
        left_factor = factor(layout.left, H + M, H) if H else factor(layout.ga, g * M, g * M)
        torch.mm(left_factor, inputs.to(x.dtype), out=gx.view(N, I))
    if need_weights:
        read = map(_address, (x, memory, hidden if H else None))
        arguments = [*batch, N, layout.chunk, *read, left, left_of, m.data_ptr(), records, record_of]
        arguments += [*layout.record_at, *layout.record_of_at, sums]
        kernels.launch("products", layout.blocks, arguments, stream)
        gradients = gflat.data_ptr()
        kernels.launch("gather", (-(-gflat.shape[0] // 32), 1), [N, B, layout.chunk, sums, gbias, gradients], stream)
        if kernels.projected and H:
            left_factor = factor(layout.left, H + M, H).to(m.dtype)
            torch.mm(left_factor.T, x.view(N, I).to(m.dtype), out=gflat[: H * I].view(H, I))
    return gx, gm, gflat


def _elsewhere(x: Tensor) -> bool:
    """Whether x is on another device than the current one."""
    return x.is_cuda and x.get_device() != torch._C._cuda_getDevice()


def stream_of(x: Tensor) -> int:
    """The current one of the device."""
    return torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else 0


def _projected(x: Tensor, weights: Weights) -> Tensor:
    """What the kernel adds at each step: (N, H), or (N, G) of the Clockwork RNN."""
    W = torch.cat(list(weights.Whm)) if weights.Wxh is None else weights.Wxh
    return x.view(-1, x.shape[-1]) @ W.to(x.dtype).T


class Products(NamedTuple):
    """The kernel `products`: what a chunk of each module's records leaves, and how many blocks have its tiles."""

    outputs: list[int]
    threads: int
    columns: int
    staged: int  # values of one record
    batched: int  # records staged at a time

    def shared(self, real: torch.dtype) -> int:
        return self.batched * (self.staged * real.itemsize + 8)

    @classmethod
    def of(cls, sizes: Sizes, projected: bool) -> "Products":
        I, H, M, g, _ = sizes
        K = H or I
        inline = 0 if projected or H == 0 else I
        outputs = [(H + (j + 1) * M) * M + M * K + (H * inline if j == 0 else 0) for j in range(g)]
        MP = _up(M, 4)
        tiles = [
            (_up(H + (j + 1) * M, 8) + _up(K, 8)) // 8 * (MP // 4)
            + (_up(H, 8) // 8 * (_up(inline, 4) // 4) if j == 0 else 0)
            for j in range(g)
        ]
        threads = min(256, _up(max(tiles), 32))
        staged = _up(H + g * M, 8) + _up(K, 8) + 2 * MP + _up(inline, 4)
        batched = max(1, min(8, 32 * threads // staged))
        return cls(outputs, threads, -(-max(tiles) // threads), staged, batched)


def choose(part: str, sizes: Sizes, real: torch.dtype, value: torch.dtype, B: int, device: Device) -> Choices | None:
    """The layout of a pass, or None if the state of a sequence does not fit the device."""
    _, H, M, g, _ = sizes
    if is_small(part, sizes, real):
        choices = Choices(1, 32, 1, 8, True, 0, True)
        if shared_bytes(part, sizes, real, value, choices) <= device.shared:
            return choices
    most = {("forward", 2): 192}
    for blocks in (2, 1) if device.processors < B else (1,):
        compute = min(512, _up(max(H + M, min(H + g * M, most.get((part, blocks), 288))), 32))
        lanes = 1
        while lanes < 4 and 32 * lanes <= H and 2 * lanes * M <= compute:
            lanes *= 2
        own, slowest = -(-(H + M) // compute), min(g - 1, (compute // lanes - 1) // M)
        cached = (own * _up(M, 4) + _widths(part, sizes, lanes)[slowest] // lanes) * real.itemsize // 4
        registers = min(255, REGISTERS // (blocks * (compute + 32 * CARRIERS[part])))
        choices = Choices(blocks, compute, lanes, 8, cached + 72 <= registers, g)
        while choices.resident >= 0:
            if shared_bytes(part, sizes, real, value, choices) <= device.shared // blocks - (blocks - 1) * 1024:
                return choices
            choices = choices._replace(resident=choices.resident - 1)
    return None


def is_small(part: str, sizes: Sizes, real: torch.dtype) -> bool:
    """Whether one warp takes a sequence through time: two rows of the state a lane, with their weights in registers."""
    I, H, M, g, _ = sizes
    if not 0 < H <= 32 or H + g * M > SMALL or g > 32:
        return False
    rows, near = -(-(H + g * M) // 32), min(g, NEAR)
    if part == "forward":
        each = _each(sizes)
        weights = (rows + each) * near * _up(M, 4) + rows * _up(H, 4) + (0 if _projects(sizes) else I * max(1, each))
    else:
        weights = rows * _widths(part, sizes, 1)[near - 1] + near * _up(M, 4)
    return weights * real.itemsize <= 4 * IN_REGISTERS


def _each(sizes: Sizes) -> int:
    """How many values of h every lane of such a warp computes for itself."""
    return sizes.H if sizes.H * _up(sizes.M, 4) <= 8 else 0


def shared_bytes(part: str, sizes: Sizes, real: torch.dtype, value: torch.dtype, choices: Choices) -> int:
    """Of a block, as cuda.cu counts them (it checks)."""
    I, H, M, g, _ = sizes
    MP, G = _up(M, 4), g * M
    if choices.small:
        near, rows, word = min(g, NEAR), -(-(H + G) // 32), -(-value.itemsize // 4)
        widths, each = _widths(part, sizes, 1), _each(sizes) if part == "forward" else 0
        far = packed_size(part, sizes, 1) * (near < g) + (g - near) * 32 * (rows + each)
        state = widths[0] if part == "forward" else g * (widths[-1] + 4)
        slot = (1 + rows) * 32 if part == "backward" else 32 if _projects(sizes) else I
        return (far + state + g * MP + 4) * real.itemsize + choices.ahead * slot * word * 4
    widths = _widths(part, sizes, choices.lanes)
    owned = [H + (j + 1) * M if part == "forward" else H for j in range(g)]
    resident = sum(owned[j] * MP + widths[j] * M for j in range(choices.resident))

    def words(values: int) -> int:
        return _up(values * value.itemsize + 2, 16) // 4

    if part == "forward":
        z = g * H + M * (g * (g + 1) // 2)
        state = _up(H + G, 4) + _up(z, 4) + widths[0] + g * MP
        slot = words((H or G) if _projects(sizes) else I) * 4 + 4
    else:
        state = sum(widths) + _up(H + G, 4) + _up(G, 4) + g * MP
        slot = (words(G) + words(H or G)) * 4 + 8
    return (resident + state) * real.itemsize + choices.ahead * slot


def packed_size(part: str, sizes: Sizes, lanes: int) -> int:
    """How many values the weights are as a pass reads them."""
    _, H, M, g, _ = sizes
    owned = [H + (j + 1) * M if part == "forward" else H for j in range(g)]
    return _up(M, 4) * sum(owned) + M * sum(_widths(part, sizes, lanes))


def _widths(part: str, sizes: Sizes, lanes: int) -> list[int]:
    """What is summed over for each module, in equal parts for the lanes."""
    _, H, M, g, _ = sizes
    more = 0 if part == "forward" else _up(M, 4 * lanes)
    return [_up(H, 4 * lanes) + (j + 1) * more for j in range(g)]


def _projects(sizes: Sizes) -> bool:
    """Whether the input is multiplied before the kernel."""
    return sizes.I > INLINE_INPUT or (sizes.H == 0 and sizes.I > 0)


class Kernels:
    """The compiled kernels of one pass for one layer's sizes, on one device."""

    def __init__(self, part: str, sizes: Sizes, real: torch.dtype, value: torch.dtype, B: int, index: int) -> None:
        device = device_of(index)
        choices = choose(part, sizes, real, value, B, device)
        if choices is None:
            raise RuntimeError(f"a layer of {sizes} does not fit this device; use mslmn.set_backend('torch')")
        self.sizes, self.real, self.value, self.processors = sizes, real, value, device.processors
        self.choices, self.projected, self.products = choices, _projects(sizes), Products.of(sizes, _projects(sizes))
        self.source = source(part, sizes, real, value, choices)
        self.threads = {
            part: choices.compute + 32 * (0 if choices.small else CARRIERS[part]),
            "products": self.products.threads,
            "pack": 256,
            "gather": 256,
        }
        self.shared = {
            part: shared_bytes(part, sizes, real, value, choices),
            "products": self.products.shared(real),
            "pack": 0,
            "gather": 256 * real.itemsize,
        }
        names = ("pack", "forward") if part == "forward" else ("pack", "backward", "products", "gather")
        self.functions = nvrtc.load(self.source, names, device.capability, self.shared)
        self.packed = packed_size(part, sizes, choices.lanes)
        self.layouts: dict[tuple[int, int, bool, bool], Layout] = {}

    def pack(self, pointers: "array[int]", to: int, stream: int) -> None:
        self.launch("pack", (-(-self.packed // 256), 1), [to], stream, pointers)

    def launch(
        self,
        name: str,
        blocks: tuple[int, int],
        arguments: Sequence[int],
        stream: int,
        pointers: "array[int] | None" = None,
    ) -> None:
        nvrtc.launch(self.functions[name], blocks, self.threads[name], self.shared[name], arguments, stream, pointers)

    def layout(self, N: int, B: int, need_x: bool, need_weights: bool) -> "Layout":
        """Of a backward pass. The last few are kept: small networks run in the time that it takes to make one."""
        key = N, B, need_x, need_weights
        found = self.layouts.get(key)
        if found is None:
            if len(self.layouts) >= LAYOUTS:
                self.layouts.clear()
            found = self.layouts[key] = Layout.of(self, N, B, need_x, need_weights)
        return found


class Layout(NamedTuple):
    """What a backward pass computes with, in one piece of memory: where its parts begin, in bytes; None: not there."""

    size: int
    packed: int
    gbias: int
    left: int | None
    left_of: int | None
    ga: int | None
    records: int | None
    record_of: int | None
    sums: int | None
    record_at: list[int]  # of each module, in values
    record_of_at: list[int]
    record_of_count: int  # of all modules
    chunk: int  # records that a block of `products` adds up
    blocks: tuple[int, int]  # of `products`

    @classmethod
    def of(cls, kernels: Kernels, N: int, B: int, need_x: bool, need_weights: bool) -> "Layout":
        _, H, M, g, _ = kernels.sizes
        real, value = kernels.real.itemsize, kernels.value.itemsize
        counts = [N, *((N >> j) + 2 * B for j in range(1, g))]  # of records, at most
        widths = [0, *(H + (j + 2) * M for j in range(1, g))]
        record_at = list(accumulate((n * w for n, w in zip(counts, widths, strict=True)), initial=0))
        record_of_at = list(accumulate([0, *counts[1:]], initial=0))
        products = kernels.products
        chunk = max(32, -(-N // max(1, WAVES * kernels.processors // products.columns)))  # columns are blocks too
        chunks = [-(-n // chunk) for n in counts]
        sums = sum(n * outputs for n, outputs in zip(chunks, products.outputs, strict=True))
        end = 0

        def part(size: int, there: bool = True) -> int | None:
            nonlocal end
            begin, end = end, end + _up(size, 16) * there
            return begin if there else None

        packed, gbias = end, end + _up(kernels.packed * real, 16)
        end = gbias + _up(B * (H + g * M) * real, 16)
        left = part(N * (H + M) * value, need_weights or (need_x and H > 0))
        left_of = part(4 * N, need_weights)
        ga = part(N * g * M * value, need_x and H == 0)
        records = part(record_at[-1] * real, need_weights)
        record_of = part(4 * record_of_at[-1], need_weights)
        adding = part(sums * real, need_weights)
        blocks = (sum(chunks), products.columns)
        parts = (packed, gbias, left, left_of, ga, records, record_of, adding)
        return cls(end, *parts, record_at[:-1], record_of_at[:-1], record_of_at[-1], chunk, blocks)


def source(part: str, sizes: Sizes, real: torch.dtype, value: torch.dtype, choices: Choices) -> str:
    """cuda.cu for one layer: its sizes and the choices, then the text."""
    I, H, M, g, biased = sizes
    projected = _projects(sizes)
    products = Products.of(sizes, projected)
    constants = {
        "I": I, "H": H, "M": M, "g": g,
        "BLOCKS": choices.blocks, "COMPUTE": choices.compute, "CARRIERS": 0 if choices.small else CARRIERS[part],
        "LANES": choices.lanes, "AHEAD": choices.ahead, "RESIDENT": choices.resident,
        "TILES": products.threads, "BATCHED": products.batched, "PRODUCTS_BYTES": products.shared(real),
        f"{part.upper()}_BYTES": shared_bytes(part, sizes, real, value, choices),
    }  # fmt: skip
    flags = {"CACHED": choices.cached, "PROJECTED": projected, "BIASED": biased}
    lines = [
        *(["#define FORWARD"] if part == "forward" else []),
        *(["#define SMALL"] if choices.small else []),
        *(f"struct {NAMES[value]};" for _ in range(value.itemsize == 2)),
        f"typedef {NAMES[real]} real;",
        f"typedef {NAMES[value]} value;",
        *(f"constexpr int {name} = {number};" for name, number in constants.items()),
        *(f"constexpr bool {name} = {str(flag).lower()};" for name, flag in flags.items()),
    ]
    return "\n".join([*lines, nvrtc.text("cuda.cu", "small.cu")])


@lru_cache(maxsize=256)
def _kernels_of(part: str, sizes: Sizes, real: torch.dtype, value: torch.dtype, many: bool, index: int) -> Kernels:
    return Kernels(part, sizes, real, value, device_of(index).processors + many, index)


def _kernels(part: str, sizes: Sizes, real: torch.dtype, value: torch.dtype, B: int, device: torch.device) -> Kernels:
    return _kernels_of(part, sizes, real, value, device_of(device.index).processors < B, device.index)


def _batch(x: Tensor, B: int, clock: Tensor, batch_sizes: Tensor | None, reverse: bool) -> list[int]:
    """`Batch` of cuda.cu."""
    T = x.shape[0] if batch_sizes is None else batch_sizes.shape[0]
    table = None if batch_sizes is None else packing_of(batch_sizes, x.device)
    return [_address(table), clock.data_ptr(), T | B << 32, int(reverse)]


_packings: dict[tuple[bytes, torch.device], Tensor] = {}
_captured: dict[int, Tensor] = {}  # what CUDA graphs read, for as long as they may
PACKINGS = LAYOUTS = 16  # that are kept
_packing = threading.Lock()


def packing_of(batch_sizes: Tensor, device: torch.device) -> Tensor:
    """Offsets of the steps (T + 1), lengths of the sequences (B), steps of all sequences before each (B + 1).

    The last few are kept on the device: both directions of a layer, its layers and their backward passes share one, and
    a CUDA graph can be captured after a run to warm up.
    """
    if (found := place()) is not None:
        return found
    sizes = batch_sizes.to("cpu", torch.int64)
    key = sizes.numpy().tobytes(), device
    with _packing:  # autograd's threads ask too
        found = _kept(key, sizes, device)
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        found.record_stream(torch.cuda.current_stream(device))  # it may be another's than the one that made it
    return found


def _kept(key: tuple[bytes, torch.device], sizes: Tensor, device: torch.device) -> Tensor:
    found = _packings.pop(key, None)
    if found is None:
        found = torch.from_numpy(packing_table(sizes.numpy(), len(sizes))).to(device)
        while len(_packings) >= PACKINGS:
            del _packings[next(iter(_packings))]
    _packings[key] = found
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured[id(found)] = found
    return found


def packing_table(sizes: NDArray[np.int64], T: int) -> NDArray[np.int64]:
    """What `packing_of` describes, for a batch of at most T steps: those that it has not begin where it ends."""
    B = int(sizes[0])
    ends = np.cumsum(sizes)
    table = np.full(T + 1 + B + B + 1, ends[-1])
    table[0], table[1 : len(sizes) + 1] = 0, ends
    lengths = table[T + 1 : T + 1 + B]
    lengths[:] = packing.lengths_of(sizes)
    table[T + 1 + B] = 0
    np.cumsum(lengths, out=table[T + 2 + B :])
    return table


class Pooling(NamedTuple):
    """Where a placed batch lies once a layer has pooled it: see `pooling.pooled_rows`."""

    places: Tensor  # (N,): rows of no step go to a window of their own
    counts: Tensor  # (S,)
    batch_sizes: Tensor  # for as many windows as there is room for
    table: Tensor  # `packing_table` of the windows


@contextmanager
def placed(table: Tensor, poolings: Sequence[Pooling] = ()) -> Iterator[None]:
    """Within the block, and in the plain backward passes of what it computes, the packed batch lies as ``table`` says,
    a `packing_table` on the device, and not as its batch_sizes, which only tell how many steps, sequences and rows
    there is room for. So a CUDA graph takes batches of any sizes. Rows of no step come out as zeros, and nothing
    depends on them. What the batch becomes by ``poolings``, one after the other, lies as their tables say."""
    before = place(), getattr(_here, "poolings", None)
    _here.place, _here.poolings = table, iter(poolings)
    try:
        yield
    finally:
        _here.place, _here.poolings = before


def next_pooling() -> Pooling | None:
    """The next one of a placed batch, which from now on lies as it says; None if none is placed."""
    if place() is None:
        return None
    found: Pooling | None = next(_here.poolings, None)
    if found is None:
        raise RuntimeError("a placed batch is pooled that has no tables for it, see ops.placed; do without it here")
    _here.place = found.table
    return found


def place() -> Tensor | None:
    """Where packed batches lie in this thread, if not where their batch_sizes say."""
    found: Tensor | None = getattr(_here, "place", None)
    return found


_here = threading.local()


def _plain(t: Tensor) -> Tensor:
    """The values as they lie in memory, from a multiple of 16 bytes on: the kernels read four at a time."""
    if not t.is_contiguous() or t.is_neg():
        t = plain(t)
    return t.clone() if t.data_ptr() & 15 else t


def _plain_or_none(t: Tensor | None) -> Tensor | None:
    return None if t is None else _plain(t)


def _address(of: Tensor | None) -> int:
    return 0 if of is None else of.data_ptr()


def _up(n: int, to: int) -> int:
    return -(-n // to) * to
