"""The CUDA backend on CPU tensors: its host code as it is, its kernels by emulator.hpp, compiled with g++."""

import ctypes
import hashlib
import itertools
import subprocess
from array import array
from pathlib import Path

from mslmn.ops import ctc, cuda, nvrtc

HERE = Path(__file__).parent
KERNELS = "pack", "forward", "backward", "products", "gather", "emit", "sweep", "finish"
STRUCTS = {name: name.capitalize() for name in KERNELS}
ENTRY = """
extern "C" int run_{name}(const void* a, int x, int y, int threads, int bytes, unsigned seed) {{
    return emulator::launch([=] {{ {name}(*static_cast<const {struct}*>(a)); }}, x, y, threads, bytes, seed);
}}
"""


class Emulator:
    """Stands in for `nvrtc.load` and `nvrtc.launch`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seeds = itertools.count()

    def load(self, source, names, capability, shared):
        entries = "".join(ENTRY.format(name=name, struct=STRUCTS[name]) for name in names)
        code = f'#include "{HERE / "emulator.hpp"}"\n{source}{entries}'
        name = hashlib.sha256((code + (HERE / "emulator.hpp").read_text()).encode()).hexdigest()
        library = self.folder / f"{name}.so"
        if not library.exists():
            text = library.with_suffix(".cpp")
            text.write_text(code)
            options = ["-std=c++17", "-O0", "-shared", "-fPIC", "-w", "-ffp-contract=fast"]
            subprocess.run(["g++", *options, "-o", str(library), str(text)], check=True)
        loaded = ctypes.CDLL(str(library))
        return {name: getattr(loaded, f"run_{name}") for name in names}

    def launch(self, function, blocks, threads, shared, arguments, stream, first=None):
        struct = array("q", [*(first or ()), *arguments])
        failed = function(ctypes.c_void_p(struct.buffer_info()[0]), *blocks, threads, shared, next(self.seeds))
        if failed:
            raise RuntimeError("threads wait for others who never come" if failed == 1 else "no memory")


def install(monkeypatch, folder: Path, device: cuda.Device) -> Emulator:
    """From now on the CUDA backend computes CPU tensors."""
    emulator = Emulator(folder)
    monkeypatch.setattr(nvrtc, "load", emulator.load)
    monkeypatch.setattr(nvrtc, "launch", emulator.launch)
    monkeypatch.setattr(cuda, "device_of", lambda index: device)
    cuda._kernels_of.cache_clear()
    ctc._functions.cache_clear()
    return emulator
