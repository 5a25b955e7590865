"""Fair comparisons: an LSTM that remembers from the start, and sizes that spend the same parameters."""

from collections.abc import Callable

import torch
from torch import nn


@torch.no_grad()
def set_forget_gate_bias(lstm: nn.LSTM, value: float = 5.0) -> nn.LSTM:
    """Open the forget gates of an `nn.LSTM`: their bias becomes ``value``, in every layer and direction.

    `nn.LSTM` adds two biases; ``bias_ih`` gets the value and ``bias_hh`` zero. The paper uses 5.
    Returns the LSTM, changed in place.
    """
    if not isinstance(lstm, nn.LSTM):
        raise TypeError(f"expected an nn.LSTM, got {type(lstm).__name__}; only it has forget gates")
    if not lstm.bias:
        raise ValueError("this LSTM has no biases (bias=False); build it with bias=True")
    H = lstm.hidden_size
    for name, parameter in lstm.named_parameters():
        if name.startswith("bias"):
            parameter[H : 2 * H].fill_(value if name.startswith("bias_ih") else 0.0)  # gates: i, f, g, o
    return lstm


def nearest_size(build: Callable[[int], nn.Module | int], budget: int) -> int:
    """The size at which a model comes nearest to ``budget`` parameters; the smaller of two as near.

    ``build(size)`` makes the model, on the meta device so that nothing is allocated, or just counts its
    parameters; more units must mean more parameters.

    >>> nearest_size(lambda n: nn.LSTM(4, n, bidirectional=True), 100_000)
    109
    """
    if budget < 1:
        raise ValueError(f"budget must be at least 1 parameter, got {budget}")

    def count(size: int) -> int:
        with torch.device("meta"):
            built = build(size)
        return built if isinstance(built, int) else sum(p.numel() for p in built.parameters())

    high = 1
    while count(high) < budget:
        if count(2 * high) <= count(high):
            raise ValueError(
                f"build({2 * high}) has no more parameters than build({high}), {count(high)}; "
                "build must use the size it is given"
            )
        high *= 2
    low = high // 2  # count(low) < budget <= count(high), where low > 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) < budget else (low, middle)
    return low if low > 0 and budget - count(low) <= count(high) - budget else high
