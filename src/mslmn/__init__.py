"""MultiScale Linear Memory Networks for PyTorch."""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from . import clock
from .baselines import nearest_size, set_forget_gate_bias
from .layers import LMN, MSLMN, ClockworkRNN, State
from .ops.backends import set_backend

if TYPE_CHECKING:
    from .linear_autoencoder import LinearAutoencoder

__version__ = version("mslmn")
__all__ = [
    "LMN",
    "MSLMN",
    "ClockworkRNN",
    "LinearAutoencoder",
    "State",
    "clock",
    "nearest_size",
    "set_backend",
    "set_forget_gate_bias",
]


def __getattr__(name: str) -> Any:
    """On first use: scikit-learn would double the time that importing the package takes."""
    if name == "LinearAutoencoder":
        from .linear_autoencoder import LinearAutoencoder

        return LinearAutoencoder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
