"""A device that is not the CPU: a GPU where there is one, and a stand-in for it everywhere.

Law: the stand-in is compiled once for each torch, and registered in a process of its own, since that cannot be undone.
"""

import contextlib
import ctypes
import hashlib
import shutil
import subprocess
import types
from pathlib import Path

import torch
from filelock import FileLock

from support.forks import on_ranks

SOURCE = Path(__file__).with_name("standin.cpp")
ROOT = Path(__file__).parents[3]
COMPILER = shutil.which("g++") or shutil.which("clang++")
DEVICES = [*(["standin"] if COMPILER else []), *(["cuda"] if torch.cuda.is_available() else [])]


def compiled() -> Path:
    """The stand-in as a library, in ``build/``."""
    name = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = ROOT / "build" / "standin" / f"{name}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(library.with_suffix(".lock")):
        if not library.exists():
            made, of_torch = library.with_suffix(".new"), Path(torch.__file__).parent
            flags = ["-std=c++20", "-O0", "-shared", "-fPIC", "-w"]
            places = [f"-I{of_torch / 'include'}", f"-I{of_torch / 'include/torch/csrc/api/include'}"]
            linked = [f"-L{of_torch / 'lib'}", "-ltorch_cpu", "-lc10"]
            subprocess.run([COMPILER, *flags, *places, SOURCE, *linked, "-o", made], check=True, timeout=300)
            made.rename(library)
    return library


def register() -> None:
    """The device "standin" is there in this process, from here on."""
    library = ctypes.CDLL(str(compiled()))
    for name in ("standin_taken", "standin_most"):
        getattr(library, name).restype = ctypes.c_size_t
    torch.utils.rename_privateuse1_backend("standin")
    module = types.ModuleType("torch.standin")
    # its random numbers are drawn by the CPU, whose generator has the state
    nothing = torch.empty(0, dtype=torch.uint8)
    said = {"is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True}
    said |= {"_is_in_bad_fork": False, "get_rng_state": nothing, "set_rng_state": None, "manual_seed_all": None}
    said |= {"get_amp_supported_dtype": [torch.float16, torch.bfloat16], "synchronize": None}
    said |= {"device": contextlib.nullcontext()}
    for name, value in said.items():
        setattr(module, name, lambda *_, value=value: value)
    module.memory_allocated = lambda *_: library.standin_taken()
    module.max_memory_allocated = lambda *_: library.standin_most()
    module.reset_peak_memory_stats = lambda *_: library.standin_forget()
    torch._register_device_module("standin", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def on_device(device, body, *arguments):
    """``body(device, *arguments)`` in a process that has the device."""
    if device == "standin":
        compiled()
    on_ranks(_with_device, device, body, *arguments, ranks=1)


def _with_device(_rank, device, body, *arguments):
    torch.set_num_threads(1)
    if device == "standin":
        register()
    body(torch.device(device), *arguments)
