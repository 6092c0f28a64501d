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
    "add_all",
    "fake_values",
    "gathered_as",
    "is_batchnorm",
    "is_convolution",
    "is_tracing",
    "is_wrapped",
    "memory_of",
    "multiply_all",
    "tells_of_steps",
    "tree_leaves",
    "tree_map_only",
    "unwatched",
    "unwrapped_once",
    "version_of",
    "written_in_python",
]


def add_all(tensors: list[Tensor], others: list[Tensor], alpha: float = 1) -> None:
    """``tensor += alpha * other`` for each, in one call."""
    torch._foreach_add_(tensors, others, alpha=alpha)


def fake_values() -> contextlib.AbstractContextManager[Any]:
    """Within, tensors on the meta device refuse to give values, as while a model is exported."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def gathered_as(record: Any) -> Any:
    """Where ``fully_shard`` swaps a parameter: ``module`` and ``param_name``, ``shared_modules`` and their names."""
    return record._module_info


def is_batchnorm(module: nn.Module) -> TypeGuard[nn.modules.batchnorm._BatchNorm]:
    """Whether it is one of torch's batch normalizations, or of a class made from them."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def is_convolution(module: nn.Module) -> TypeGuard[nn.modules.conv._ConvNd]:
    """Whether it is one of torch's convolutions, transposed or not, or of a class made from them."""
    return isinstance(module, nn.modules.conv._ConvNd)


is_tracing: Callable[[], bool] = torch._C._is_tracing
"""Whether torch.jit.trace is watching. The function itself: a pruned weight asks at every read."""

is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether it is a tensor inside torch.func.vmap or grad, with other dimensions there than outside; itself, likewise."""


def memory_of(tensor: Tensor) -> int:
    """A number for the memory that a strided tensor lies in; the same for all of its views."""
    return int(tensor.untyped_storage()._cdata)


def multiply_all(tensors: list[Tensor], factors: list[Tensor]) -> None:
    """``tensor *= factor`` for each, in one call."""
    torch._foreach_mul_(tensors, factors)


def tells_of_steps(optimizer: Any) -> TypeGuard[torch.optim.Optimizer]:
    """Whether hooks on its steps are called: it is torch's, and was made by the constructor of torch's."""
    return isinstance(optimizer, torch.optim.Optimizer) and "_optimizer_step_post_hooks" in vars(optimizer)


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
