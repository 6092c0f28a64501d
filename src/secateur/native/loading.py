"""The compiled kernels: which of them this machine has, without torch.

Law: without a compiler, or with ``SECATEUR_KERNELS=0``, there are none, and everything else works as before.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path
from typing import Any

# with a dot before the suffix, so that nothing takes them for Python modules
_FILES = {4: "libkernels.v4.so", 3: "libkernels.v3.so", 1: "libkernels.baseline.so", 0: "libkernels.baseline.so"}
_AT_MOST = {"baseline": 1, "v3": 3}  # what SECATEUR_KERNELS says, to be like another processor
_INTERFACE = 7  # that of kernels.c


def available() -> bool:
    """Whether compiled kernels are used here; without them the operators compute with dense matrices, slowly."""
    return _library()[0] is not None


@functools.cache
def library() -> Any:
    """The shared object as ctypes has it, at work in torch's threads; or None. Its functions are those of csrc."""
    found = _library()[0]
    if found is not None:
        found.secateur_team(_team())
        # a forked child has none of torch's threads, and its runtime would wait for them in vain
        os.register_at_fork(after_in_child=functools.partial(found.secateur_team, None))
    return found


def describe() -> str:
    """A line about the compiled kernels, for ``secateur --version``.

    >>> describe() == ("kernels: " + _library()[1])
    True
    """
    return f"kernels: {_library()[1]}"


@functools.cache
def _library() -> tuple[Any, str]:
    """The shared object for this processor and a word for it, or None and why there is none."""
    wanted = os.environ.get("SECATEUR_KERNELS", "")
    if wanted == "0":
        return None, "not used (SECATEUR_KERNELS=0)"
    folder = Path(__file__).parent
    if not (folder / _FILES[1]).exists():
        return None, "none, installed without a C compiler"
    try:
        found = _opened(folder / _FILES[1])
        level = min(int(found.secateur_level()), _AT_MOST.get(wanted, 4))
        if level > 1:
            found = _opened(folder / _FILES[level])
    except (OSError, AttributeError) as error:
        return None, f"none, {error}"
    return found, f"compiled for x86-64-v{level}" if level else f"compiled for {platform.machine()}"


@functools.cache
def _team() -> Any:
    """What runs a function in the threads that torch's own operations run in, or None: `GOMP_parallel` of the OpenMP
    runtime that torch is linked to, be it GNU's or, on Linux, LLVM's or Intel's.

    After an operation those threads go on looking for work for some milliseconds, and threads of our own would share
    the processors with them.
    """
    import torch  # only whoever computes needs it: `describe` does not

    try:
        torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(torch_library.GOMP_parallel, ctypes.c_void_p)
    except (OSError, AttributeError):
        return None


def _opened(path: Path) -> Any:
    opened = ctypes.CDLL(str(path))
    if opened.secateur_interface() != _INTERFACE:
        raise OSError(f"{path.name} was compiled from another version; install secateur again")
    opened.secateur_team.restype = None
    opened.secateur_team.argtypes = [ctypes.c_void_p]
    products = (
        ("secateur_csr", 7, 5),
        ("secateur_csr_int8", 7, 5),
        ("secateur_block", 7, 3),
        ("secateur_quads", 7, 3),
        ("secateur_window", 9, 4),
        ("secateur_picks", 9, 4),
    )
    for name, tensors, sizes in products:
        function = getattr(opened, name)
        function.restype = ctypes.c_int
        function.argtypes = [ctypes.c_void_p] * tensors + [ctypes.c_size_t] * sizes + [ctypes.c_int, ctypes.c_size_t]
    for name in ("secateur_convolution", "secateur_convolution_int8"):
        function = getattr(opened, name)
        function.restype = ctypes.c_int
        function.argtypes = [*[ctypes.c_void_p] * 9, *[ctypes.c_size_t] * 3, ctypes.c_int, ctypes.c_size_t]
    return opened
