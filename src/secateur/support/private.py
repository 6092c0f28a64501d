"""Private parts of torch and transformers that this library touches, each in one function.

Law: what they do not promise is used here and nowhere else, and has a test, so that a new release breaks one file.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "DispatchMode",
    "add_all",
    "converted",
    "experts_in_turn",
    "fake_values",
    "flatten_anew",
    "gathered_as",
    "is_batchnorm",
    "is_convolution",
    "is_tracing",
    "is_transposed_convolution",
    "is_wrapped",
    "loaded_as",
    "memory_of",
    "multiply_all",
    "padding_of",
    "reverted",
    "tells_of_steps",
    "tree_leaves",
    "tree_map_only",
    "unwatched",
    "unwrapped_once",
    "version_of",
    "written_in_python",
]

is_tracing: Callable[[], bool] = torch._C._is_tracing
"""Whether torch.jit.trace is watching. The function itself: a pruned weight asks at every read."""
is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether it is a tensor inside torch.func.vmap or grad, with other dimensions there than outside; itself, likewise."""


def add_all(tensors: list[Tensor], others: list[Tensor], alpha: float = 1) -> None:
    """``tensor += alpha * other`` for each, in one call."""
    torch._foreach_add_(tensors, others, alpha=alpha)


def converted(
    conversion: Any, target: str, parts: Iterable[tuple[str, str | None, Tensor]], model: Any
) -> dict[str, Tensor]:
    """What a conversion of transformers' loader makes of tensors in files, ``(name, pattern, tensor)``: tensors by
    their names in the model, such as one of all experts."""
    own = copy.deepcopy(conversion)  # it gathers what it is given
    for name, pattern, tensor in parts:
        own.add_tensor(target, name, pattern, tensor)
    made = own.convert(target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def experts_in_turn() -> tuple[str, str]:
    """``(field, value)`` of a configuration of transformers with which experts run one after the other."""
    return "_experts_implementation_internal", "eager"


def fake_values() -> contextlib.AbstractContextManager[Any]:
    """Within, tensors on the meta device refuse to give values, as while a model is exported."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def flatten_anew(module: nn.RNNBase) -> None:
    """A recurrent module lists its parameters once more, to compute with: from now on those that it has now."""
    module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def gathered_as(record: Any) -> Any:
    """Where ``fully_shard`` swaps a parameter: ``module`` and ``param_name``, ``shared_modules`` and their names."""
    return record._module_info


def is_batchnorm(module: nn.Module) -> TypeGuard[nn.modules.batchnorm._BatchNorm]:
    """Whether it is one of torch's batch normalizations, or of a class made from them."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def is_convolution(module: nn.Module) -> TypeGuard[nn.modules.conv._ConvNd]:
    """Whether it is one of torch's convolutions, transposed or not, or of a class made from them."""
    return isinstance(module, nn.modules.conv._ConvNd)


def is_transposed_convolution(module: nn.Module) -> TypeGuard[nn.modules.conv._ConvTransposeNd]:
    """Whether it is one of torch's transposed convolutions, or of a class made from them."""
    return isinstance(module, nn.modules.conv._ConvTransposeNd)


def loaded_as(
    model: Any, names: Sequence[str], own: Mapping[str, Tensor]
) -> dict[str, tuple[Any, list[tuple[str, str | None]]]]:
    """As what transformers' loader takes tensors in files: ``{name in the model: (conversion, [(name, pattern)])}``.

    The conversion is None of what is only renamed; it is for `converted`. What was used is noted in the model, from
    which `reverted` knows it. Before version 5 there are no conversions, and nothing is found.

    Args:
        names: of the tensors in files.
        own: the model's tensors by name.
    """
    try:
        from transformers import core_model_loading
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return {}
    loader: Any = core_model_loading
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, loader.WeightRenaming)]
    conversions = [each for each in transforms if isinstance(each, loader.WeightConverter)]
    by_pattern = {pattern: each for each in conversions for pattern in each.source_patterns}
    found: dict[str, tuple[Any, list[tuple[str, str | None]]]] = {}
    prefix = getattr(model, "base_model_prefix", "")
    for name in sorted(names, key=loader.dot_natural_key):
        target, pattern = loader.rename_source_key(name, renamings, conversions, prefix, own)
        found.setdefault(target, (by_pattern.get(pattern), []))[1].append((name, pattern))
    model._weight_conversions = [each for each in transforms if each.was_used()]
    return found


def memory_of(tensor: Tensor) -> int:
    """A number for the memory that a strided tensor lies in; the same for all of its views."""
    return int(tensor.untyped_storage()._cdata)


def multiply_all(tensors: list[Tensor], factors: list[Tensor]) -> None:
    """``tensor *= factor`` for each, in one call."""
    torch._foreach_mul_(tensors, factors)


def _no(*_: Any) -> bool:
    return False


def padding_of(convolution: Any) -> list[int]:
    """What `torch.nn.functional.pad` is given for a convolution: before and after each dimension, from the last."""
    padding: list[int] = convolution._reversed_padding_repeated_twice
    return padding


def reverted(model: Any, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in files that tensors of a model were made of, see `loaded_as`."""
    from transformers import core_model_loading

    loader: Any = core_model_loading
    return dict(loader.revert_weight_conversion(model, dict(made)))


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
