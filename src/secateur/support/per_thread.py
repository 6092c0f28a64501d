"""What torch sets for the whole process, for one thread alone; and a lock around what can be set for all only.

Law: no thread sees what another one asked for, and afterwards everything is as before, in whatever order threads end.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from secateur.support import private

__all__ = ["NewTensors", "ONE_AT_A_TIME", "in_dtype"]

# Random generators, and what is patched in a class, are the whole process's: who seeds or patches holds this.
ONE_AT_A_TIME = threading.RLock()

# torch's functions that make tensors of numbers, and take a dtype
_MAKERS = {"arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty", "empty_permuted"}
_MAKERS |= {"empty_strided", "eye", "fft_fftfreq", "fft_rfftfreq", "full", "hamming_window", "hann_window"}
_MAKERS |= {"kaiser_window", "linspace", "logspace", "normal", "ones", "rand", "randn", "range", "scalar_tensor"}
_MAKERS |= {"tensor", "zeros"}
_COMPLEX = {torch.float16: torch.complex32, torch.float64: torch.complex128}


class NewTensors(TorchFunctionMode):
    """A context with another default dtype for new tensors: ``set_default_dtype`` for one thread.

    That is what is made of numbers, and what is computed of integers alone. (``torch.Tensor(3)`` is none of torch's
    functions and stays as it is.)

    >>> with NewTensors(torch.float64):
    ...     torch.ones(2).dtype, torch.tensor([1, 2]).dtype, (torch.tensor([1, 2]) / 2).dtype
    (torch.float64, torch.int64, torch.float64)
    >>> torch.ones(2).dtype
    torch.float32
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return in_dtype(self.dtype, func, args, kwargs or {})


def in_dtype(dtype: torch.dtype, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A call of one of torch's functions: what would come out in the default dtype comes out in this one."""
    out = func(*args, **kwargs)
    default = torch.get_default_dtype()
    into = {default: dtype, _complex(default): _complex(dtype)}
    if dtype == default or not any(
        isinstance(each, Tensor) and each.dtype in into for each in private.tree_leaves(out)
    ):
        return out
    for each in private.tree_leaves((args, dict(kwargs))):
        if isinstance(each, torch.dtype) or (
            isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex())
        ):
            return out  # it is what was asked for, or what its arguments are
    if isinstance(out, Tensor) and getattr(func, "__name__", "") in _MAKERS:
        return func(*args, **{**kwargs, "dtype": into[out.dtype]})  # from the numbers, not rounded before
    return private.tree_map_only(Tensor, lambda each: each.to(into.get(each.dtype, each.dtype)), out)


def _complex(dtype: torch.dtype) -> torch.dtype:
    return _COMPLEX.get(dtype, torch.complex64)
