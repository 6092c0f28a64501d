"""A test alone: a seed of its own before it, and after it the process is as it was.

Law: what a test draws depends on its name alone, not on what ran before it or beside it.
"""

import contextlib
import os
import random
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import distributed

from secateur.support import seed_torch

# variables that pytest and libraries set on their own, when they are imported or first used
OF_LIBRARIES = {
    "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "PYTEST_CURRENT_TEST", "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
}  # fmt: skip


def deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def set_deterministic(wanted: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(wanted[0], warn_only=wanted[1])


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in OF_LIBRARIES}


def set_environment(wanted: dict[str, str]) -> None:
    for name in environment().keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)


def path() -> list[str]:
    return [folder for folder in sys.path if not is_of_a_library(folder)]


def set_path(wanted: list[str]) -> None:
    sys.path[:] = [*wanted, *filter(is_of_a_library, sys.path)]


def is_of_a_library(folder: str) -> bool:
    """What onnxruntime adds when it is imported, and torch.distributed.nn of older torches."""
    return "site-packages" in folder or os.path.dirname(folder) == tempfile.gettempdir()


def set_device(wanted: torch.device) -> None:
    torch.set_default_device(None if wanted.type == "cpu" else wanted)
    mode: Any = torch._GLOBAL_DEVICE_CONTEXT
    if getattr(mode, "device_context", wanted) is None:  # of which torch 2.7 asks the device
        del mode.device_context


def stance() -> str:
    compiler = sys.modules.get("torch._dynamo")
    return "default" if compiler is None else str(compiler.eval_frame._stance.stance)


def in_a_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def end_group(wanted: bool) -> None:
    if not wanted:
        distributed.destroy_process_group()


# what the whole process shares, how it is read, and how it is put back; pytest itself looks after the warnings
SHARED: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the default device": (torch.get_default_device, set_device),
    "whether gradients are computed": (torch.is_grad_enabled, torch.set_grad_enabled),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "whether algorithms are deterministic": (deterministic, set_deterministic),
    "the precision of products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "what the compiler may do": (stance, torch.compiler.set_stance),
    "the search for anomalies": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "the group of processes": (in_a_group, end_group),
    "the working directory": (os.getcwd, os.chdir),
    "the search path of modules": (path, set_path),
    "the environment": (environment, set_environment),
}


def seed(name: str) -> None:
    number = zlib.crc32(name.encode())  # `hash` differs from process to process
    seed_torch(number)
    np.random.seed(number)  # noqa: NPY002 the generator that all share
    random.seed(number)


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """Seeds by the name; raises where what others would see has changed, once it is put back."""
    before = {what: read() for what, (read, _) in SHARED.items()}
    seed(name)
    yield
    after = {what: read() for what, (read, _) in SHARED.items()}
    changed = [what for what in SHARED if after[what] != before[what]]
    for what in changed:
        SHARED[what][1](before[what])
    assert not changed, "; ".join(f"{what}: {difference(before[what], after[what])}" for what in changed)


def difference(before: Any, after: Any) -> str:
    """Of an environment the names alone: its values may be nothing for a log."""
    if isinstance(before, dict):
        return "changed in " + ", ".join(sorted(name for name, _ in before.items() ^ after.items()))
    return f"{before} became {after}"
