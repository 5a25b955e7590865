"""MultiScale Linear Memory Networks for PyTorch."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from . import clock, objectives
from .baselines import nearest_size, set_forget_gate_bias
from .gradients import direct_gradients
from .inputs import standardise
from .layers import LMN, MSLMN, ClockworkRNN, State
from .model import SequenceModel
from .ops.backends import set_backend

if TYPE_CHECKING:
    from .checkpoint import load, save
    from .growth import add_module
    from .linear_autoencoder import LinearAutoencoder
    from .training import Plan, fit

__version__ = version("mslmn")
__all__ = [
    "LMN",
    "MSLMN",
    "ClockworkRNN",
    "LinearAutoencoder",
    "Plan",
    "SequenceModel",
    "State",
    "add_module",
    "clock",
    "direct_gradients",
    "fit",
    "load",
    "nearest_size",
    "objectives",
    "save",
    "set_backend",
    "set_forget_gate_bias",
    "standardise",
]
LAZY = {
    "LinearAutoencoder": ".linear_autoencoder",
    "Plan": ".training",
    "add_module": ".growth",
    "fit": ".training",
    "load": ".checkpoint",
    "save": ".checkpoint",
}


def __getattr__(name: str) -> Any:
    """On first use: scikit-learn would multiply the time that importing the package takes."""
    if name in LAZY:
        return getattr(import_module(LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
