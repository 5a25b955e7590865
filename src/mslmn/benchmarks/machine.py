"""Where a benchmark ran."""

import platform

import torch

import mslmn

from ..ops import backends, cpu


def machine(device: str = "cpu") -> dict[str, str]:
    """Processor, versions and backend; of a GPU also its name, CUDA's version and cuDNN's."""
    backend = backends.chosen(torch.device(device))
    gpu = {}
    if torch.device(device).type == "cuda":
        gpu["gpu"] = torch.cuda.get_device_name(device)
        gpu["cuda"], gpu["cudnn"] = str(torch.version.cuda), str(torch.backends.cudnn.version())
    return {
        **gpu,
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
