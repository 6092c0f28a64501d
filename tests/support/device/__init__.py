"""A device that is not the CPU: a GPU where there is one, and a stand-in for it everywhere.

Law: the stand-in is compiled once for each torch, and registered in a process of its own, since that cannot be undone.
"""

import concurrent.futures
import contextlib
import ctypes
import functools
import hashlib
import shutil
import subprocess
import types
import warnings
from pathlib import Path

import torch
from filelock import FileLock
from torch.nn import attention

from secateur import env
from support.forks import forking

SOURCE = Path(__file__).with_name("standin.cpp")
ROOT = Path(__file__).parents[3]
COMPILER = shutil.which("g++") or shutil.which("clang++")
CPU = torch.device("cpu")
DEVICES = [*(["standin"] if COMPILER else []), *(["cuda"] if torch.cuda.is_available() else [])]

# How far the stand-in's results may be from the CPU's, and why. Those of all other verbs are the same, bit for bit.
PARTS = "attention and experts multiply parts of a tensor, which lie otherwise in memory where they are copied"
ADAMW = "it is fused on the CPU and not there, and makes a rounding large where a slope is nearly zero"
TIMED = "which layers are packed, and in int8, is found by timing them"
TOLERANCE = {
    "oneshot": (2e-6, PARTS),
    "shrink, heads": (2e-6, PARTS),
    "shrink, experts": (2e-6, PARTS),
    "fit": (2e-6, PARTS),
    "sensitivity": (2e-6, PARTS),
    "recover": (1e-2, ADAMW),
    "recover, by the outputs": (1e-2, ADAMW),
    "recover, a directory": (1e-2, ADAMW),
    "secateur recover": (1e-2, ADAMW),
    "pack, with kernels and int8": (1e-2, TIMED),
}


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
    for name in ("standin_taken", "standin_most", "standin_state"):
        getattr(library, name).restype = ctypes.c_size_t
    torch.utils.rename_privateuse1_backend("standin")
    module = types.ModuleType("torch.standin")
    said = {"is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True}
    said |= {"_is_in_bad_fork": False, "_lazy_init": None, "device": contextlib.nullcontext()}
    said |= {"get_amp_supported_dtype": [torch.float16, torch.bfloat16]}
    for name, value in said.items():
        setattr(module, name, lambda *_, value=value: value)
    module.memory_allocated = lambda *_: library.standin_taken()
    module.max_memory_allocated = lambda *_: library.standin_most()
    module.reset_peak_memory_stats = lambda *_: library.standin_forget()
    module.synchronize = lambda *_: library.standin_synchronize()
    module.manual_seed = module.manual_seed_all = lambda seed: library.standin_seed(ctypes.c_uint64(seed))

    def get_rng_state(*_):
        state = torch.empty(library.standin_state(None), dtype=torch.uint8, device="cpu")
        library.standin_state(ctypes.c_void_p(state.data_ptr()))
        return state

    def set_rng_state(state, *_):
        library.standin_set_state(ctypes.c_void_p(state.data_ptr()))

    module.get_rng_state, module.set_rng_state = get_rng_state, set_rng_state
    torch._register_device_module("standin", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def on_device(device, body, *arguments):
    """``body(device, *arguments)`` in a process that has the device: the same for all until `let_go`.

    Raises what the body raised; BrokenProcessPool if the process died of it.
    """
    return _process(device).submit(_with_device, device, body, *arguments).result()


@functools.cache
def _process(device):
    if device == "standin":
        compiled()
    how = {"max_workers": 1, "mp_context": forking(), "initializer": _begin, "initargs": (device,)}
    return concurrent.futures.ProcessPoolExecutor(**how)


def distance(device, verb):
    """Of what a verb gives there, ``verb(device) -> tensors``, and here."""
    found, states = [], torch.get_device_module(device).get_rng_state
    for each in (device, CPU):
        torch.manual_seed(0)
        before = states(device)
        found.append({name: tensor.detach().cpu() for name, tensor in verb(each).items()})
        assert torch.equal(states(device), before), "no verb draws from the device's generator"
    return env._distance(*found)


def let_go():
    """The processes that have devices end."""
    for device in DEVICES:
        _process(device).shutdown()
    _process.cache_clear()


def _begin(device):
    torch.set_num_threads(1)
    if device == "standin":
        register()


def _with_device(device, body, *arguments):
    with warnings.catch_warnings():
        torch.manual_seed(0)
        torch.backends.mha.set_fastpath_enabled(False)
        with attention.sdpa_kernel(attention.SDPBackend.MATH):  # by the operators that every device has
            return body(torch.device(device), *arguments)
