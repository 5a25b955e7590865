"""CTC on CUDA devices: the kernels of ctc.cu, for packed batches of float32 and float64 logits.

`prepare` brings labels and lengths to the device, in one copy that nothing waits for; `loss` launches three kernels,
which leave the gradient too where autograd wants one, and which a CUDA graph can record. While they run they need 40
bytes for each step and each label of a sequence in float32, 80 in float64.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Function, forward_ad

from .. import packing
from . import backends, cuda, nvrtc
from .fitting import plain

__all__ = ["Layout", "Targets", "choose", "has_kernels", "loss", "prepare", "table", "takes"]

NAMES = ("emit", "sweep", "finish")
STEPS = 16  # of a sequence, that a block of `emit` or `finish` takes
LARGEST_GRID = 65535  # blocks that share a sequence
EMIT_WARPS = 8
SHARED = 48 << 10  # bytes that every device has for a block


class Layout(NamedTuple):
    """The constants of ctc.cu in capitals."""

    pairs: int  # of states, that a thread has
    warps: int  # of a sweep
    ahead: int  # steps that are fetched before they are needed


LAYOUTS = [  # the first that has room for the labels is taken
    Layout(1, 1, 16),
    *(Layout(1, warps, 8) for warps in (2, 4, 8)),
    Layout(2, 8, 8),
    *(Layout(4, warps, 4) for warps in (8, 16)),
]
LONGEST = 32 * LAYOUTS[-1].pairs * LAYOUTS[-1].warps - 1  # labels


def choose(longest: int) -> Layout:
    """For sequences of so many labels, at most."""
    return next(layout for layout in LAYOUTS if longest < 32 * layout.pairs * layout.warps)


class Targets(NamedTuple):
    """Labels of a packed batch, and where everything lies, on a device. Numbers are those of the batch, or, where it is
    placed (see `cuda.placed`), the most that there is room for."""

    data: Tensor  # a `table`
    steps: int  # of the longest sequence
    sequences: int
    rows: int  # of the batch: steps of all sequences
    labels: int
    longest: int  # label sequence
    pairs: int  # of states, of all sequences and steps


def takes(device: torch.device, batch_sizes: Tensor, counts: Sequence[int]) -> bool:
    """Whether the kernels compute a batch on a device."""
    return has_kernels(device, len(batch_sizes), max(counts, default=0)) and forward_ad._current_level < 0


def has_kernels(device: torch.device, steps: int, labels: int) -> bool:
    """Whether there are some for sequences of so many steps and labels, and the user has not asked for others."""
    return (
        device.type == "cuda"
        and backends.wish() in ("auto", "cuda")
        and backends.eager()
        and backends.why_not(device) is None
        and labels <= LONGEST
        and steps <= STEPS * LARGEST_GRID
    )


def prepare(
    labels: Tensor,  # one sequence after the other, int64, from 1 to O - 1
    counts: Sequence[int],  # of labels of each sequence, in the order of the packed batch
    batch_sizes: Tensor,  # (T,) int64
    device: torch.device,
) -> Targets:
    sizes = batch_sizes.numpy()
    T, B = len(sizes), int(sizes[0])
    if len(counts) != B or sum(counts) != len(labels):
        raise ValueError(
            f"counts must be the numbers of labels of {B} sequences, {len(labels)} in all, "
            f"got {len(counts)} that add up to {sum(counts)}; count those of each sequence"
        )
    found, pairs = table(labels.cpu().numpy(), counts, sizes, T)
    data = packing.to_device(torch.from_numpy(found), device)
    return Targets(data, T, B, int(sizes.sum()), len(labels), max(counts), pairs)


def table(
    labels: NDArray[np.int64], counts: Sequence[int], sizes: NDArray[np.int64], T: int
) -> tuple[NDArray[np.int64], int]:
    """What `Batch` of ctc.cu reads, for a batch of at most T steps, and how many pairs it has."""
    B = len(counts)
    found = np.zeros(T + 3 * B + 1 + len(labels), np.int64)
    np.cumsum(sizes[:-1], out=found[1 : len(sizes)])
    lengths = found[T : T + B]
    lengths[:] = packing.lengths_of(sizes)
    found[T + B : T + 2 * B + 1] = [0, *accumulate(counts)]
    pairs = np.cumsum(lengths * (np.asarray(counts) + 1))
    found[T + 2 * B + 2 : T + 3 * B + 1] = pairs[:-1]
    found[T + 3 * B + 1 :] = labels
    return found, int(pairs[-1])


def loss(logits: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:  # (N, O), packed
    """The sum of the losses, where the label 0 is the blank, and how many sequences there are, which counts those whose
    loss is infinite and taken as zero."""
    if logits.dtype not in (torch.float32, torch.float64) or logits.dim() != 2 or len(logits) != targets.rows:
        raise ValueError(
            f"logits must be ({targets.rows}, O), float32 or float64, got {tuple(logits.shape)}, {logits.dtype}; "
            "give those of the batch that the targets were prepared for"
        )
    if logits.device != targets.data.device:
        raise ValueError(
            f"logits and targets must be on one device, got {logits.device} and {targets.data.device}; "
            "prepare the targets for the device of the logits"
        )
    if torch.is_grad_enabled() and logits.requires_grad:
        total, items, _ = _CTC.apply(logits, targets)  # type: ignore[no-untyped-call]
        return total, items
    return _run(logits, targets, False)[:2]


class _CTC(Function):
    """The gradient is an output, too, so that autograd knows whose it is when somebody wants to derive it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Targets) -> tuple[Tensor, Tensor, Tensor | None]:
        total, items, gradient = _run(logits, targets, True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(items)
        return total, items, gradient

    @staticmethod
    def backward(ctx: Any, gtotal: Tensor | None, gitems: None, ggradient: Tensor | None) -> tuple[Tensor | None, None]:
        if ggradient is not None:
            raise RuntimeError(
                "CTC has no second derivatives, here a gradient of it was derived again; "
                "leave its loss out of what create_graph=True is for"
            )
        (gradient,) = ctx.saved_tensors
        return None if gtotal is None else gradient * gtotal, None


def _run(logits: Tensor, targets: Targets, need_gradient: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    if cuda._elsewhere(logits):
        with torch.cuda.device_of(logits):
            return _run(logits, targets, need_gradient)
    logits = plain(logits.detach())
    data, T, B, N, labels, longest, pairs = targets
    layout = choose(longest)
    functions = _functions(layout, logits.dtype, logits.device.index)
    stream, real = cuda.stream_of(logits), logits.element_size()
    total, items = logits.new_empty(()), logits.new_empty(())
    gradient = (torch.empty_like if cuda.place() is None else torch.zeros_like)(logits) if need_gradient else None
    # Workspace, widest first, so that each part is aligned: alpha, beta, emitted, totals, lse, links
    sizes = [4 * real * pairs * need_gradient] * 2 + [2 * real * pairs, 2 * real * B, real * N, 4 * labels]
    space = logits.new_empty(sum(sizes), dtype=torch.uint8)
    alpha, beta, emitted, totals, lse, links = accumulate(sizes[:-1], initial=space.data_ptr())
    if not need_gradient:
        alpha = beta = links = 0
    batch = (data.data_ptr(), T, B, logits.shape[1])
    warps, chunks = rows(layout, logits.dtype), -(-T // STEPS)

    def launch(name: str, blocks: tuple[int, int], warps: int, shared: int, *arguments: int) -> None:
        nvrtc.launch(functions[name], blocks, 32 * warps, shared, [*batch, *arguments], stream)

    launch("emit", (B, chunks), EMIT_WARPS, 0, logits.data_ptr(), lse, emitted, links)
    shared = sweep_bytes(layout, logits.dtype)
    launch("sweep", (B, 1 + need_gradient), layout.warps, shared, emitted, alpha, beta, totals)
    shared = finish_bytes(layout, logits.dtype)
    results = (0 if gradient is None else gradient.data_ptr(), total.data_ptr(), items.data_ptr())
    blocks = (B, chunks) if need_gradient else (1, 1)
    launch("finish", blocks, warps, shared, logits.data_ptr(), lse, alpha, beta, totals, links, *results)
    return total, items, gradient


def rows(layout: Layout, real: torch.dtype) -> int:
    """Warps of a block of `finish`: each has the posteriors of a row in shared memory."""
    return max(n for n in (1, 2, 4, 8) if n * 32 * layout.pairs * layout.warps * real.itemsize <= SHARED)


def finish_bytes(layout: Layout, real: torch.dtype) -> int:
    return rows(layout, real) * 32 * layout.pairs * layout.warps * real.itemsize


def sweep_bytes(layout: Layout, real: torch.dtype) -> int:
    return 2 * layout.warps * 2 * real.itemsize if layout.warps > 1 else 0


def source(layout: Layout, real: torch.dtype) -> str:
    """ctc.cu, with its constants in front."""
    pairs, warps, ahead = layout
    constants = {"PAIRS": pairs, "WARPS": warps, "AHEAD": ahead, "ROWS": rows(layout, real)}
    lines = [f"constexpr int {name} = {number};" for name, number in constants.items()]
    return "\n".join([f"typedef {cuda.NAMES[real]} real;", *lines, nvrtc.text("ctc.cu")])


@lru_cache
def _functions(layout: Layout, real: torch.dtype, index: int) -> dict[str, int]:
    """The kernels on a device, by name."""
    shared = {"emit": 0, "sweep": sweep_bytes(layout, real), "finish": finish_bytes(layout, real)}
    return nvrtc.load(source(layout, real), NAMES, cuda.device_of(index).capability, shared)
