"""Private parts of torch, transformers and einops that this library touches, each in one function.

Law: what they do not promise is used here and nowhere else, and has a test, so that a new release breaks one file.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import operator
import re
import sys
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

PARAMETERS, BUFFERS = "_parameters", "_buffers"
"""Where ``vars(module)`` has its tables: for what reads them in every forward; others ask `parameters_of`."""
FLAT_WEIGHTS, UPDATE_FLAT_WEIGHTS = "_flat_weights", "_update_flat_weights"
"""The list that a recurrent module computes with, and the method that compares it with the module's weights."""
OF_RECURRENT = frozenset({FLAT_WEIGHTS, "_flat_weights_names", "_flat_weight_refs", "_all_weights"})
"""What ``vars`` of a recurrent module has beside what any module has, and is no setting of it."""

DispatchMode = TorchDispatchMode
"""What sees each operation that torch dispatches."""
ChannelNorm = nn.modules.batchnorm._NormBase
"""The class of batch and instance normalizations, whose scales are one a channel."""
Convolution = nn.modules.conv._ConvNd
"""The class of convolutions, transposed or not."""

_OF_ALL_MODULES = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks",
)  # fmt: skip

is_tracing: Callable[[], bool] = torch._C._is_tracing
"""Whether torch.jit.trace is watching. The function itself: a pruned weight asks at every read."""
changes_of: Callable[[Tensor], int] = operator.attrgetter("_version")
"""How often the memory of a tensor that counts its changes was written over; see `version_of`."""
is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether it is a tensor inside torch.func.vmap or grad, with other dimensions there than outside; itself, likewise."""


def add_all(tensors: list[Tensor], others: list[Tensor], alpha: float = 1) -> None:
    """``tensor += alpha * other`` for each, in one call."""
    torch._foreach_add_(tensors, others, alpha=alpha)


def arguments_of(operator: Any) -> Sequence[Any]:
    """What an operator of ATen takes, in order: each says whether it writes there (``alias_info``)."""
    arguments: Sequence[Any] = operator._schema.arguments
    return arguments


def arrival_hooks_of(parameter: Tensor) -> Any:
    """The hooks that are called when its gradient has arrived, in a dict; or None."""
    return parameter._post_accumulate_grad_hooks


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The table of the buffers that are registered with a module itself."""
    return module._buffers


def composed_states() -> list[Any]:
    """What ``fully_shard`` and its like keep of modules; nothing where no such thing was imported."""
    made = sys.modules.get("torch.distributed._composable_state")
    states = [] if made is None else list(made._module_state_mapping.values())
    return [state() if isinstance(state, weakref.ref) else state for state in states]


def configuration_of(kind: Any, values: Mapping[str, Any]) -> Any:
    """What ``from_dict`` of a configuration's class makes of values.

    That of transformers says what it made to a log, in JSON, whether anybody reads it or not, which takes as long as
    building a small model; where a class has no other, it is left out.
    """
    own = getattr(kind.from_dict, "__func__", None)
    if getattr(own, "__module__", "") == "transformers.configuration_utils":
        return kind(**values)
    return kind.from_dict(dict(values))


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


def copied_with(module: nn.Module, submodules: Mapping[str, nn.Module | None]) -> nn.Module:
    """A module that has all that another one has, its parameters themselves, but these modules for its own."""
    twin = copy.copy(module)
    vars(twin)["_modules"] = dict(submodules)
    return twin


def experts_at_once() -> tuple[str, str]:
    """``(field, value)`` of a configuration of transformers with which each token gets copies of its experts' weights:
    no size depends on values."""
    return "_experts_implementation_internal", "batched_mm"


def experts_in_turn() -> tuple[str, str]:
    """``(field, value)`` of a configuration of transformers with which experts run one after the other."""
    return "_experts_implementation_internal", "eager"


def fake_values() -> contextlib.AbstractContextManager[Any]:
    """Within, tensors on the meta device refuse to give values, as while a model is exported."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def real_values() -> contextlib.AbstractContextManager[Any]:
    """Within `fake_values`: what is made here has values all the same."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def is_fake(tensor: Tensor) -> bool:
    """Whether it was made within `fake_values`."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


@functools.cache
def are_fakes_of_one_device() -> bool:
    """Whether within `fake_values` indices of the CPU are no longer taken for weights on meta, as before torch 2.12."""
    with fake_values():
        try:
            torch.embedding(torch.empty(2, 2, device="meta"), torch.zeros(1, dtype=torch.int64, device="cpu"))
        except RuntimeError:
            return True
    return False


def frozen_convolution(module: Any, example: Tensor) -> Callable[[Tensor], Tensor] | None:
    """The convolution that torch.compile makes where it freezes a model, laid out for inputs like the example and in
    their memory format; None where this torch, or oneDNN, has none, or what is padded is not the same on both sides."""
    operators, padding = torch.ops.mkldnn, padding_of(module)
    if padding[::2] != padding[1::2]:
        return None
    layout = [padding[::2][::-1], module.stride, module.dilation, module.groups]

    def convolved(x: Tensor) -> Tensor:
        made: Tensor = operators._convolution_pointwise(x, weight, module.bias, *layout, "none", [], "")
        return made

    try:
        weight = operators._reorder_convolution_weight(module.weight.detach(), *layout, list(example.shape))
        convolved(example)
    except (AttributeError, RuntimeError):
        return None
    return convolved


def frozen_linear(matrix: Tensor, bias: Tensor | None, example: Tensor) -> Callable[[Tensor], Tensor] | None:
    """The product with a weight (outputs, inputs) that torch.compile makes where it freezes a model, laid out for
    vectors (any, inputs) like the example; None where this torch, or oneDNN, has none."""
    operators = torch.ops.mkldnn

    def product(x: Tensor) -> Tensor:
        made: Tensor = operators._linear_pointwise(x, weight, bias, "none", [], "")
        return made

    try:
        weight = operators._reorder_linear_weight(matrix.contiguous(), example.shape[0])
        product(example)
    except (AttributeError, RuntimeError):
        return None
    return product


def int8_linear(matrix: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
    """The product with a weight (outputs, inputs) in int8, a scale for each output, that torch's dynamic quantization
    makes: inputs are rounded to 7 bits as they come, since sums of two products saturate in 8 where a processor has no
    VNNI. None where this torch has no engine for it."""
    try:
        rows = matrix.detach().float().contiguous()
        scales = (rows.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny).double()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a successor is named, which is a package of its own
            numbers = torch.quantize_per_channel(rows, scales, torch.zeros_like(scales).long(), 0, torch.qint8)
            stored = torch.ops.quantized.linear_prepack(numbers, None if bias is None else bias.detach().float())
    except (AttributeError, RuntimeError, NotImplementedError):
        return None

    def product(x: Tensor) -> Tensor:
        made: Tensor = torch.ops.quantized.linear_dynamic(x.float(), stored, reduce_range=True)
        return made

    return product


def flat_names_of(module: nn.Module) -> list[str]:
    """The names of the weights of a recurrent module, in the order in which it computes with them."""
    names: list[str] = vars(module)["_flat_weights_names"]
    return names


def flat_weights_of(module: nn.Module) -> list[Any]:
    """The list in which a recurrent module has its weights once more; empty for others, and where it is computed."""
    listed = vars(module).get(FLAT_WEIGHTS)
    return listed if isinstance(listed, list) else []


def flatten_anew(module: nn.RNNBase) -> None:
    """A recurrent module has its parameters in a list once more, from which it computes: those that it has now."""
    module._flat_weights = [getattr(module, name, None) for name in flat_names_of(module)]


def gathered_as(record: Any) -> Any:
    """Where ``fully_shard`` swaps a parameter: ``module`` and ``param_name``, ``shared_modules`` and their names."""
    return record._module_info


def hooks_of(module: nn.Module) -> list[Any]:
    """What is called before and after a module's forward pass, and after its backward pass."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values(), *module._backward_hooks.values()]


def is_watched(module: nn.Module) -> bool:
    """Whether anything is called before or after a module's forward pass, be it that of every module."""
    own = module._forward_hooks or module._forward_pre_hooks
    # torch 2.7 compiles no generator here
    return bool(own) or any([getattr(nn.modules.module, table) for table in _OF_ALL_MODULES])  # noqa: C419


def inside_compiled(model: nn.Module) -> nn.Module | None:
    """The module inside torch.compile's wrapper; None for what is no such wrapper."""
    return getattr(model, "_orig_mod", None) if "_orig_mod" in model._modules else None


def is_batchnorm(module: nn.Module) -> TypeGuard[nn.modules.batchnorm._BatchNorm]:
    """Whether it is one of torch's batch normalizations, or of a class made from them."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def is_convolution(module: nn.Module) -> TypeGuard[Convolution]:
    """Whether it is one of torch's convolutions, transposed or not, or of a class made from them."""
    return isinstance(module, Convolution)


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


@contextlib.contextmanager
def without_graphs_printed() -> Iterator[None]:
    """The exporter to ONNX that traces prints a graph at which it fails to the process's standard output: not here."""
    inner: Any = torch._C
    before = inner._jit_set_onnx_log_enabled
    inner._jit_set_onnx_log_enabled = lambda _: None  # the exporter switches it on, whatever it is asked for
    try:
        yield
    finally:
        inner._jit_set_onnx_log_enabled = before


@contextlib.contextmanager
def never_traced() -> Iterator[None]:
    """Torch 2.7 exports to ONNX by tracing what it cannot export otherwise: of a branch, the side that was taken."""
    from torch.onnx._internal.exporter import _capture_strategies

    ways: Any = _capture_strategies
    before = ways.CAPTURE_STRATEGIES
    ways.CAPTURE_STRATEGIES = tuple(each for each in before if not each.__name__.startswith("JitTrace"))
    try:
        yield
    finally:
        ways.CAPTURE_STRATEGIES = before


def normalizations() -> tuple[type[nn.Module], ...]:
    """The class that torch's batch and instance normalizations are made from."""
    return (nn.modules.batchnorm._NormBase,)


def _no(*_: Any) -> bool:
    return False


_ASKS = "has_torch_function"  # how the names begin of what tells a function of torch to hand itself over


class _Unasked:
    """A module of torch, in which no mode and no subclass wants a function as a whole."""

    def __init__(self, module: types.ModuleType) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        value = _no if name.startswith(_ASKS) else getattr(self.module, name)
        return _Unasked(value) if value is torch.overrides else value


def optimizer_inside(wrapper: Any) -> Any:
    """The optimizer in Accelerate's wrapper or Lightning's; None for what is neither."""
    return getattr(wrapper, "optimizer", getattr(wrapper, "_optimizer", None))


def convolved(module: Any, x: Tensor, weight: Tensor) -> Tensor:
    """What a convolution computes with another weight."""
    found: Tensor = module._conv_forward(x, weight, module.bias)
    return found


def convolves_as_torch(module: nn.Module) -> bool:
    """Whether it is a convolution that computes as torch's own does; classes made from them may pad by themselves."""
    mine: Any = type(module)
    own = (each for each in (nn.Conv1d, nn.Conv2d, nn.Conv3d) if mine.forward is each.forward)
    return any(mine._conv_forward is each._conv_forward for each in own)


def padding_of(convolution: Any) -> list[int]:
    """What `torch.nn.functional.pad` is given for a convolution: before and after each dimension, from the last."""
    padding: list[int] = convolution._reversed_padding_repeated_twice
    return padding


def offloads(model: nn.Module) -> bool:
    """Whether accelerate gives weights to a model only while it runs: ``device_map`` says "disk", or "cpu" beside a
    device."""
    hooks = [hook for each in model.modules() if (hook := getattr(each, "_hf_hook", None)) is not None]
    return any(getattr(each, "offload", False) for hook in hooks for each in (hook, *getattr(hook, "hooks", ())))


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The table of the parameters that are registered with a module itself."""
    return module._parameters


def pre_hooks_of(module: nn.Module) -> dict[int, Any]:
    """The hooks that are called before a module's forward, by their keys in the order of their calls."""
    return module._forward_pre_hooks


def reverted(model: Any, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in files that tensors of a model were made of, see `loaded_as`."""
    from transformers import core_model_loading

    loader: Any = core_model_loading
    return dict(loader.revert_weight_conversion(model, dict(made)))


def set_arrival_hooks(parameter: Tensor, hooks: Any) -> None:
    """Have these called when its gradient has arrived, see `arrival_hooks_of`."""
    parameter._post_accumulate_grad_hooks = OrderedDict()  # None alone would leave the engine with those of before
    parameter._post_accumulate_grad_hooks = hooks


def shard_groups_of(state: Any) -> list[Any]:
    """The groups of parameters that ``fully_shard`` gathers together, of one of `composed_states`."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def shares_one_width(attention: Any) -> bool:
    """Whether an ``nn.MultiheadAttention`` has queries, keys and values of one width, and one weight for all three."""
    return bool(attention._qkv_same_embed_dim)


def submodules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The table of the modules that are registered with a module itself."""
    return module._modules


def tells_implementation(field: str) -> bool:
    """Whether a field that transformers keeps in a configuration, but in no file, says which implementation runs."""
    return field.startswith("_") and field.endswith("_implementation_internal")


def tells_of_steps(optimizer: Any) -> TypeGuard[torch.optim.Optimizer]:
    """Whether hooks on its steps are called: it is torch's, and was made by the constructor of torch's."""
    return isinstance(optimizer, torch.optim.Optimizer) and "_optimizer_step_post_hooks" in vars(optimizer)


def tree_leaves(tree: Any) -> list[Any]:
    """What nested tuples, lists, dicts, and whatever else torch knows to hold something, hold in the end.

    The first three are gone through here: who watches a model asks at every call, and torch's way takes longer than
    most calls do.
    """
    kind = type(tree)
    if kind in _LEAVES:
        return [tree]
    if kind is not tuple and kind is not list and kind is not dict:
        return [tree] if isinstance(tree, _OF_LEAVES) else _pytree.tree_leaves(tree)
    found: list[Any] = []
    for each in tree.values() if kind is dict else tree:
        if type(each) in _LEAVES:
            found.append(each)
        else:
            found += tree_leaves(each)
    return found


def tensors_of_tree(tree: Any) -> list[Tensor]:
    """The tensors among the leaves."""
    found: list[Tensor] = []
    _gather((tree,), found)
    return found


def _gather(trees: Iterable[Any], found: list[Tensor]) -> None:
    for each in trees:
        kind = type(each)
        if kind is Tensor or kind is nn.Parameter:
            found.append(each)
        elif kind in _LEAVES:
            continue
        elif kind is tuple or kind is list:
            _gather(each, found)
        elif kind is dict:
            _gather(each.values(), found)
        elif isinstance(each, Tensor):
            found.append(each)
        elif not isinstance(each, int):
            found += [leaf for leaf in _pytree.tree_leaves(each) if isinstance(leaf, Tensor)]


def tree_map_only(kind: type[Any], change: Callable[[Any], Any], tree: Any) -> Any:
    """The same nested values, those of one class changed; as fast as `tree_leaves`."""
    own = type(tree)
    if own in _LEAVES:
        return change(tree) if isinstance(tree, kind) else tree
    if own is tuple or own is list:
        return own([tree_map_only(kind, change, each) for each in tree])
    if own is dict:
        return {key: tree_map_only(kind, change, each) for key, each in tree.items()}
    if isinstance(tree, _OF_LEAVES):
        return change(tree) if isinstance(tree, kind) else tree
    return _pytree.tree_map_only(kind, change, tree)


_LEAVES = frozenset(
    {
        *(Tensor, nn.Parameter, bool, int, float, complex, str, slice, type(None), type(...)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)


_OF_LEAVES = (Tensor, int)  # and whatever is of their kind, such as sizes that remember where they came from


@contextlib.contextmanager
def uncached_shapes() -> Iterator[None]:
    """Within, einops computes shapes at every call, and does not look for sizes that it met before.

    A size that was met before is another number, which does not say what it follows.
    """
    einops: Any = sys.modules.get("einops.einops")
    cached: Any = getattr(einops, "_reconstruct_from_shape", None)
    if not hasattr(cached, "__wrapped__"):
        yield
        return
    einops._reconstruct_from_shape = cached.__wrapped__
    try:
        yield
    finally:
        einops._reconstruct_from_shape = cached


def caches_of(model: nn.Module) -> Iterator[Any]:
    """Functions of its modules' classes that remember what they returned, also where transformers wraps them."""
    for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
        for held in vars(kind).values():
            function = getattr(held, "__func__", held)
            found = [function]
            for cell in getattr(function, "__closure__", None) or ():
                with contextlib.suppress(ValueError):  # nothing is in it yet
                    found.append(cell.cell_contents)
            yield from (each for each in found if isinstance(each, functools._lru_cache_wrapper))


def made_on_loading(model: nn.Module, module: nn.Module, key: str, name: str) -> Tensor | None:
    """A parameter, of this name in a model of transformers, that its files leave out since its code computes it, as a
    table of positions; None for others."""
    held = module._parameters[key]
    left_out: Any = getattr(model, "_keys_to_ignore_on_load_missing", None)
    if held is None or held.requires_grad or not any(re.search(pattern, name) for pattern in left_out or ()):
        return None
    alone: Any = copy.copy(module)
    alone._parameters = {
        key: nn.Parameter(torch.empty(held.shape, dtype=held.dtype, device="cpu"), requires_grad=False)
    }
    with torch.random.fork_rng(devices=[]):  # it may draw numbers before it computes these
        model._init_weights(alone)  # type: ignore[operator]
    made: Tensor = alone._parameters[key].detach()
    return made


def copies_of_buffers(model: nn.Module) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Buffers that modules of transformers keep as they were, in no state dict, those that they are copies of, and
    whether inputs that are longer have others made of the configuration."""
    for module in model.modules():
        for name in unsaved_buffers_of(module):
            copy = None if name.startswith("original_") else module._buffers.get(f"original_{name}")
            buffer = module._buffers.get(name)
            if copy is not None and buffer is not None:
                kind = str(getattr(module, "rope_type", ""))
                yield copy, buffer, "dynamic" in kind or "longrope" in kind


def unsaved_buffers_of(module: nn.Module) -> set[str]:
    """The names of a module's own buffers that its state dict leaves out."""
    return module._non_persistent_buffers_set


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

    Such a function asks first whether a mode or a subclass wants it as a whole; in this one nobody does. It asks by a
    name of its own module (``has_torch_function_unary``) or through torch (``overrides.has_torch_function``). One that
    imports what it asks with while it runs cannot be made so, and would call its mode without end: None, too.
    """
    code = getattr(func, "__code__", None)
    if code is None or not any(name.startswith(_ASKS) for name in code.co_names):
        return None
    if any(each.opname == "IMPORT_FROM" and each.argval.startswith(_ASKS) for each in dis.get_instructions(code)):
        return None
    its = {name: func.__globals__[name] for name in code.co_names if name in func.__globals__}
    told: dict[str, Any] = {name: _no for name in its if name.startswith(_ASKS)}
    told |= {name: _Unasked(value) for name, value in its.items() if value is torch or value is torch.overrides}
    made = types.FunctionType(code, {**func.__globals__, **told}, func.__name__, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    return made
