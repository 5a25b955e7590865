"""From CUDA source to functions that can be launched: NVRTC, a cache on disk, the driver.

PyTorch's CUDA builds bring NVRTC and, from 2.10, cuda-bindings, through which both are called, but for launches.
"""

import contextlib
import ctypes
import hashlib
import os
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from struct import Struct
from typing import Any

import torch

OPTIONS = ("--std=c++17", "-default-device")
DIGEST = hashlib.sha256().digest_size  # bytes in front of what is kept


@lru_cache
def text(*names: str) -> str:
    """Files of CUDA source, beside this one, one after the other."""
    return "".join(Path(__file__).with_name(name).read_text() for name in names)


@lru_cache
def why_not() -> str | None:
    """Why nothing can be compiled here, or None if it can."""
    try:
        from cuda.bindings import driver, nvrtc  # noqa: F401
    except ImportError:
        return "they are loaded with cuda-bindings, which is not installed: pip install 'mslmn[cuda]'"
    try:
        version()
    except Exception as error:
        return f"NVRTC, which compiles them, cannot be loaded ({error})"
    return None


@lru_cache
def version() -> tuple[int, int]:
    from cuda.bindings import nvrtc

    major, minor = _nvrtc(nvrtc.nvrtcVersion())
    return major, minor


@lru_cache
def architecture(capability: tuple[int, int]) -> int | None:
    """The newest one that NVRTC compiles for and a device of this capability runs: code for 10.0 runs on 10.3 too."""
    from cuda.bindings import nvrtc

    major, minor = capability
    try:
        (known,) = _nvrtc(nvrtc.nvrtcGetSupportedArchs())
    except (AttributeError, RuntimeError, ValueError):  # it does not tell; the compiler will
        return 10 * major + minor
    return max((found for found in known if 10 * major <= found <= 10 * major + minor), default=None)


def shared_memory(index: int) -> int:
    """Bytes of shared memory that a block of a device can have."""
    from cuda.bindings import driver

    torch.cuda.current_stream(index)  # torch starts the driver
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    (size,) = _driver(driver.cuDeviceGetAttribute(attribute, index))
    return int(size)


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``MSLMN_CACHE``, or ``mslmn`` in the user's folder for caches."""
    if chosen := os.environ.get("MSLMN_CACHE"):
        return Path(chosen)
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "mslmn"
    try:
        return Path.home() / ".cache" / "mslmn"
    except RuntimeError:  # a user without a home, as in some containers: nothing is kept
        return Path(os.devnull) / "mslmn"


def where_kept() -> str:
    """Compiled kernels, in words."""
    folder = cache_folder()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK):
        return f"kept in {folder}"
    return f"and again in each process, because {folder} cannot be written (set MSLMN_CACHE)"


def compiled(source: str, capability: tuple[int, int]) -> bytes:
    """The machine code, from the cache or from NVRTC."""
    options = (*OPTIONS, f"--gpu-architecture=sm_{architecture(capability)}")
    name = hashlib.sha256("\0".join([*map(str, version()), *options, source]).encode()).hexdigest()
    path = cache_folder() / f"{name}.cubin"
    try:
        content = path.read_bytes()
        digest, code = content[:DIGEST], content[DIGEST:]
        if hashlib.sha256(code).digest() == digest:  # else the file is damaged
            return code
    except OSError:
        pass
    code = compile_source(source, options)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(hashlib.sha256(code).digest() + code)
        temporary.replace(path)
    except OSError:  # a read-only home, a full disk: compiled again next time
        with contextlib.suppress(OSError):
            temporary.unlink()
    return code


def compile_source(source: str, options: Sequence[str]) -> bytes:
    from cuda.bindings import nvrtc

    (program,) = _nvrtc(nvrtc.nvrtcCreateProgram(source.encode(), b"mslmn.cu", 0, [], []))
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            (size,) = _nvrtc(nvrtc.nvrtcGetProgramLogSize(program))
            log = bytes(size)
            _nvrtc(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"NVRTC refuses the kernels: {log.decode(errors='replace')}")
        (size,) = _nvrtc(nvrtc.nvrtcGetCUBINSize(program))
        code = bytes(size)
        _nvrtc(nvrtc.nvrtcGetCUBIN(program, code))
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def load(source: str, names: Sequence[str], capability: tuple[int, int], shared: Mapping[str, int]) -> dict[str, int]:
    """Functions of the current device, by name; each may use the shared memory it needs."""
    from cuda.bindings import driver

    enter_context()
    (module,) = _driver(driver.cuModuleLoadData(compiled(source, capability)))
    functions = {}
    for name in names:
        (function,) = _driver(driver.cuModuleGetFunction(module, name.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _driver(driver.cuFuncSetAttribute(function, attribute, shared[name]))
        functions[name] = int(function)
    return functions


def enter_context() -> None:
    """Give this thread the context of its device. Autograd's threads have none before torch's first call that needs
    one, and the driver does not look for it as the runtime does."""
    if getattr(_here, "context", False):
        return
    from cuda.bindings import driver

    torch.cuda.current_stream()  # torch starts the driver
    (context,) = _driver(driver.cuCtxGetCurrent())
    if not int(context):
        (device,) = _driver(driver.cuDeviceGet(torch.cuda.current_device()))
        (context,) = _driver(driver.cuDevicePrimaryCtxRetain(device))
        _driver(driver.cuCtxSetCurrent(context))
    _here.context = True


_here = threading.local()
Prepared = tuple[int, Callable[..., None], bytearray, int, object]
PREPARED = 256  # launches that a thread keeps


def launch(
    function: int,
    blocks: tuple[int, int],
    threads: int,
    shared: int,
    arguments: Sequence[int],  # the one struct that the kernel takes, 64 bits each
    stream: int,
    first: "array[int] | None" = None,  # what it begins with, the same from launch to launch
) -> None:
    """By ctypes, which takes half as long as cuda-bindings, and half of that where the launch is prepared: a small
    network's pass is a matter of microseconds."""
    key = function, blocks, stream
    try:
        config, fill, struct, parameters, _ = _here.launches[key]
    except (AttributeError, KeyError):
        count = len(arguments) + (0 if first is None else len(first))
        config, fill, struct, parameters, _ = _prepare(key, threads, shared, count, len(arguments))
    begin = 0
    if first is not None:
        begin = 8 * len(first)
        struct[:begin] = first
    fill(struct, begin, *arguments)
    error = _cuLaunchKernelEx()(config, function, parameters, 0)
    if error:
        from cuda.bindings import driver

        raise RuntimeError(f"the CUDA driver failed: {driver.CUresult(error).name}")


def _prepare(key: tuple[int, tuple[int, int], int], threads: int, shared: int, count: int, filled: int) -> Prepared:
    """What a launch passes to the driver, but for the values of the arguments. It is this thread's own: between them
    and the driver another thread could write others."""
    enter_context()
    _, blocks, stream = key
    config = array("I", CONFIG.pack(*blocks, 1, threads, 1, 1, shared, stream, 0, 0))
    struct = bytearray(8 * count)
    view = (ctypes.c_char * len(struct)).from_buffer(struct)
    parameters = array("Q", [ctypes.addressof(view)])
    launches: dict[Any, Prepared] = _here.__dict__.setdefault("launches", {})
    if len(launches) >= PREPARED:
        launches.clear()
    launches[key] = found = (
        config.buffer_info()[0],
        Struct(f"{filled}q").pack_into,
        struct,
        parameters.buffer_info()[0],
        (config, view, parameters),  # to be kept alive
    )
    return found


CONFIG = Struct("7I4x2QI4x")  # CUlaunchConfig: grid, block, shared memory, stream, no attributes


@lru_cache
def _cuLaunchKernelEx() -> Callable[..., int]:
    library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
    return prototype(("cuLaunchKernelEx", library))


def _nvrtc(result: tuple[Any, ...]) -> tuple[Any, ...]:
    error, *values = result
    if error.value:
        raise RuntimeError(f"NVRTC failed: {error.name}")
    return tuple(values)


def _driver(result: tuple[Any, ...]) -> tuple[Any, ...]:
    error, *values = result
    if error.value:
        raise RuntimeError(f"the CUDA driver failed: {error.name}")
    return tuple(values)
