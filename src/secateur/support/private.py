"""Private parts of torch that this library touches, each in one function.

Law: what torch does not promise is used here and nowhere else, and has a test, so that a new release breaks one file.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "DispatchMode",
    "fake_values",
    "is_convolution",
    "is_wrapped",
    "memory_of",
    "tree_leaves",
    "tree_map_only",
    "unwatched",
    "unwrapped_once",
    "version_of",
    "written_in_python",
]


def fake_values() -> contextlib.AbstractContextManager[Any]:
    """Within, tensors on the meta device refuse to give values, as while a model is exported."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def is_convolution(module: nn.Module) -> TypeGuard[nn.modules.conv._ConvNd]:
    """Whether it is one of torch's convolutions, transposed or not, or of a class made from them."""
    return isinstance(module, nn.modules.conv._ConvNd)


def is_wrapped(tensor: Tensor) -> bool:
    """Whether it is a tensor inside torch.func.vmap or grad, with other dimensions there than outside."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def memory_of(tensor: Tensor) -> int:
    """A number for the memory that a strided tensor lies in; the same for all of its views."""
    return int(tensor.untyped_storage()._cdata)


def unwatched() -> contextlib.AbstractContextManager[Any]:
    """Within, no mode sees the functions of torch that are called."""
    return torch._C.DisableTorchFunction()


def unwrapped_once(tensor: Tensor) -> Tensor:
    """The tensor outside of one that `is_wrapped`; that may be another such."""
    return torch._C._functorch.get_unwrapped(tensor)


def version_of(tensor: Tensor) -> int:
    """How often its memory was written over; 0 for one of inference mode, which does not count."""
    return 0 if tensor.is_inference() else int(tensor._version)


@functools.cache
def written_in_python(func: Any) -> Callable[..., Any] | None:
    """A function of torch that is written in Python, such that the functions that it calls are seen; None for others.

    Such a function asks first whether a mode or a subclass wants it as a whole; in this one nobody does.
    """
    code = getattr(func, "__code__", None)
    if code is None or not any(name.startswith("has_torch_function") for name in code.co_names):
        return None
    told = {name: _no for name in code.co_names if name.startswith("has_torch_function")}
    made = types.FunctionType(code, {**func.__globals__, **told}, func.__name__, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    return made


def _no(*_: Any) -> bool:
    return False
