"""Where a benchmark ran."""

import platform

import torch

import mslmn

from ..ops import backends, cpu


def machine() -> dict[str, str]:
    backend = backends.chosen(torch.device("cpu"))
    return {
        "processor": _processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mslmn": mslmn.__version__,
        "backend": f"{backend} ({cpu.instruction_set()})" if backend == "cpu" else backend,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
