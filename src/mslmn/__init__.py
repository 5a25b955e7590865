"""MultiScale Linear Memory Networks for PyTorch."""

from importlib.metadata import version

from . import clock
from .baselines import nearest_size, set_forget_gate_bias
from .layers import LMN, MSLMN, ClockworkRNN, State
from .ops.backends import set_backend

__version__ = version("mslmn")
__all__ = [
    "LMN",
    "MSLMN",
    "ClockworkRNN",
    "State",
    "clock",
    "nearest_size",
    "set_backend",
    "set_forget_gate_bias",
]
