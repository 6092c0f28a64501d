"""The fields of a configuration, those of the configurations within it as well. Carries out a plan on a module, and
undoes it.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.coupling import replacement
from secateur.shrinking.plan import ATTRIBUTE, Plan, factors_of, fits, multiplied, plans_of
from secateur.support import Undo, memory_format, private, tensors_of

# ---- The fields of a configuration, those of the configurations within it as well.
#
# Law: a place is a field's keys from outside in, and whoever changes a field changes a copy.

Place = tuple[str | int, ...]  # of a field: keys of nested configurations, then an index where it holds a list


def with_fields(values: Mapping[str, Any], changes: Mapping[Place, Any]) -> dict[str, Any]:
    """A copy of nested values with fields set.

    >>> with_fields({"text": {"width": 8}, "stages": [3, 5]}, {("text", "width"): 4, ("stages", 1): 2})
    {'text': {'width': 4}, 'stages': [3, 2]}
    """
    made = copy.deepcopy(dict(values))
    for place, value in changes.items():
        held: Any = made
        for key in place[:-1]:
            if isinstance(held[key], tuple):
                held[key] = list(held[key])
            held = held[key]
        held[place[-1]] = value
    return made


def is_configuration(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(type(value), "from_dict") and not isinstance(value, type | nn.Module)


def fields_in(config: Any, values: Mapping[str, Any], place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """All fields, those of configurations within as well; not what lies in other dicts, such as names of labels."""
    for key, value in values.items():
        part = getattr(config, key, None)
        if isinstance(value, Mapping):
            if is_configuration(part):
                yield from fields_in(part, value, (*place, key))
        elif not key.startswith("_"):
            yield (*place, key), value


def configurations_in(config: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """A configuration and those within."""
    yield place, config
    for key, part in vars(config).items():
        if not key.startswith("_") and is_configuration(part):
            yield from configurations_in(part, (*place, key))


def integer_fields(config: Any, values: Mapping[str, Any]) -> Iterator[tuple[Place, int]]:
    for place, value in fields_in(config, values):
        if type(value) is int and value > 0:
            yield place, value
        elif isinstance(value, list | tuple):
            yield from (((*place, at), each) for at, each in enumerate(value) if type(each) is int and each > 0)


def unset_fields(config: Any, values: Mapping[str, Any]) -> Iterator[Place]:
    yield from (place for place, value in fields_in(config, values) if value is None)


def same_ways(config: Any, made: Any) -> None:
    """Which implementations of attention and experts are used is held beside the fields; within as well."""
    for key, value in vars(config).items():
        if private.tells_implementation(key):
            vars(made)[key] = value
        elif is_configuration(value) and is_configuration(vars(made).get(key)):
            same_ways(value, vars(made)[key])


def dotted(place: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in place if part != "")


# ---- Carries out a plan on a module, and undoes it.
#
# Law: all of a plan is carried out or nothing, also one that does not fit the model; taken back, the model and the
# optimizer hold the same objects in the same order.

# Numbers that torch's own modules hold for their printed form and do not use in a forward pass: as their tensors say.
_SIZES: dict[type[nn.Module], dict[str, Callable[[Any], int]]] = {
    nn.Linear: {"in_features": lambda m: m.weight.shape[1], "out_features": lambda m: m.weight.shape[0]},
    nn.Bilinear: {
        "in1_features": lambda m: m.weight.shape[1],
        "in2_features": lambda m: m.weight.shape[2],
        "out_features": lambda m: m.weight.shape[0],
    },
    private.Convolution: {
        "in_channels": lambda m: m.weight.shape[0] if m.transposed else m.weight.shape[1] * m.groups,
        "out_channels": lambda m: m.weight.shape[1] * m.groups if m.transposed else m.weight.shape[0],
    },
    private.ChannelNorm: {
        "num_features": lambda m: next(t.shape[0] for t in (m.weight, m.running_mean) if t is not None)
    },
    nn.GroupNorm: {"num_channels": lambda m: m.weight.shape[0]},
    nn.Embedding: {"embedding_dim": lambda m: m.weight.shape[1], "num_embeddings": lambda m: m.weight.shape[0]},
    nn.EmbeddingBag: {"embedding_dim": lambda m: m.weight.shape[1], "num_embeddings": lambda m: m.weight.shape[0]},
    nn.PReLU: {"num_parameters": lambda m: m.weight.shape[0]},
    nn.MultiheadAttention: {
        "head_dim": lambda m: m.embed_dim // m.num_heads,
        "kdim": lambda m: m.embed_dim if private.shares_one_width(m) else m.k_proj_weight.shape[1],
        "vdim": lambda m: m.embed_dim if private.shares_one_width(m) else m.v_proj_weight.shape[1],
    },
    nn.RNNBase: {"input_size": lambda m: m.weight_ih_l0.shape[1], "hidden_size": lambda m: m.weight_hh_l0.shape[1]},
    nn.RNNCellBase: {"input_size": lambda m: m.weight_ih.shape[1], "hidden_size": lambda m: m.weight_hh.shape[1]},
}


def carry_out(
    model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer | None, before: Mapping[str, Tensor] | None = None
) -> Callable[[], None]:
    """Carry out a plan: slice tensors, set numbers, replace modules; all or nothing. Returns the undo.

    The optimizer drops what left, too: a parameter of a removed module is in none of its groups. ``before`` are the
    values that the undo restores; the present ones are not kept then.
    """
    before = {} if before is None else before
    tensors = tensors_of(model)
    places = _places(model, plan.modules)
    scales = factors_of(plan)
    states: list[tuple[dict[str, Any], str, Tensor]] = []
    for name, (shape, kept) in plan.tensors.items():
        if name not in tensors:
            raise ValueError(f"the model has no tensor {name}, which the plan makes smaller.")
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; the plan was made for {shape}.")
        if not all(0 <= at < len(shape) and fits(each, shape[at]) for at, each in kept.items()):
            raise ValueError(f"the plan keeps entries of {name} that its shape {shape} does not have.")
        state = {} if optimizer is None else optimizer.state.get(tensor, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and tuple(value.shape) == shape:
                states.append((state, key, sliced(value, kept)))
    for place, old, new in plan.numbers:
        if number_at(model, place) != old or isinstance(old, float) != isinstance(new, float):
            raise ValueError(f"{dotted(place)} is {number_at(model, place)}; the plan was made for {old}.")
    changed = {id(tensors[name]) for name in plan.tensors}
    printed = [
        (module, key, size)
        for module in model.modules()
        if any(id(tensor) in changed for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
        for kind, facts in _SIZES.items()
        if isinstance(module, kind)
        for key, size in facts.items()
    ]
    written = [_written(model, place) for place, _, _ in plan.numbers]
    undo = Undo()
    try:  # no `with`: between the end of its block and the end of itself Ctrl-C would find everything changed
        for name, (_, kept) in plan.tensors.items():  # one after the other: the whole ones may be let go of
            tensor = tensors[name]
            grad = tensor.grad
            value = multiplied(sliced(tensor.data, kept), scales.get(name, []))
            undo.call(_set_data, tensor, before.get(name, tensor.data), grad)
            if grad is not None:
                inverse = [(at, 1 / factors) for at, factors in scales.get(name, [])]
                grad = multiplied(sliced(grad, kept), inverse)
            _set_data(tensor, value, grad)
        for (held, key, number), (place, _, new) in zip(written, plan.numbers, strict=True):
            undo.call(operator.setitem, held, key, number)
            _set(model, place, new)
        for module, key, size in printed:
            undo.call(operator.setitem, vars(module), key, vars(module)[key])
            vars(module)[key] = int(size(module))
        for state, word, moment in states:
            undo.call(operator.setitem, state, word, state[word])
            state[word] = moment
        for parent, key, stays in places:
            held = private.submodules_of(parent)
            undo.contents(held)  # in their order
            held[key] = stays
            if stays is None and isinstance(parent, nn.ModuleDict | nn.ModuleList):  # called one after the other
                del held[key]
        if optimizer is not None and places:
            _let_go(optimizer, {*tensors.values()} - {*tensors_of(model).values()}, undo)
        undo.attributes(model, ATTRIBUTE)
        vars(model)[ATTRIBUTE] = [*plans_of(model), plan]
        return undo.roll_back
    except BaseException:
        undo.roll_back()
        raise


def _let_go(optimizer: torch.optim.Optimizer, left: AbstractSet[Tensor], undo: Undo) -> None:
    """Drops parameters that left from an optimizer."""
    undo.contents(optimizer.state)  # in their order
    for group in optimizer.param_groups:
        members = group["params"]
        undo.call(operator.setitem, group, "params", members)
        for each in members:
            if each in left and each in optimizer.state:
                del optimizer.state[each]
        group["params"] = [each for each in members if each not in left]


def _places(
    model: nn.Module, modules: Mapping[str, Mapping[str, Any]]
) -> list[tuple[nn.Module, str, nn.Module | None]]:
    """(parent, key, what stays) of the modules that leave, wherever the model has them."""
    stays: dict[int, nn.Module | None] = {}
    for path, form in modules.items():
        try:
            module = model.get_submodule(path)
        except AttributeError as error:
            raise ValueError(f"the model has no module {path}, which the plan takes out.") from error
        if not path or type(module).__name__ != form["was"]:
            raise ValueError(
                f"{path or 'the model'} is a {type(module).__name__}; the plan was made for {form['was']}."
            )
        made = replacement(form)
        stays[id(module)] = None if made is None else made.train(module.training)
    return [
        (parent, key, stays[id(child)])
        for parent in model.modules()
        for key, child in private.submodules_of(parent).items()
        if child is not None and id(child) in stays
    ]


def sliced(tensor: Tensor, kept: Mapping[int, npt.NDArray[np.int64]]) -> Tensor:
    """What stays of a tensor, ``{dimension: indices}``, in memory of its own and in the same memory format."""
    form = memory_format(tensor)
    for at, indices in kept.items():
        tensor = tensor.index_select(at, torch.from_numpy(indices).to(tensor.device))
    return tensor.contiguous(memory_format=form)


def _set_data(tensor: Tensor, value: Tensor, grad: Tensor | None) -> None:
    tensor.grad = None
    if tensor.requires_grad:
        # A graph that is still alive, as that of the last loss, keeps autograd's node for the old shape; it is let go
        # only where the type of the data changes.
        other = torch.float32 if tensor.dtype == torch.float64 else torch.float64
        tensor.data = torch.empty(0, dtype=other, device=tensor.device)
    tensor.data = value
    tensor.grad = grad


def number_at(model: nn.Module, place: Sequence[str | int]) -> int | float:
    """The number that a module holds at a place: the path of the module, then names, keys and indices."""
    try:
        held: Any = model.get_submodule(str(place[0]))
        for key in place[1:]:
            held = _inside(held)[key]
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"the model has no number at {dotted(place)}.") from error
    if not isinstance(held, int | float):
        raise ValueError(f"{dotted(place)} is no number.")
    return held


def _set(model: nn.Module, place: Sequence[str | int], value: float) -> None:
    _with(model.get_submodule(str(place[0])), place[1:], value)


def _written(model: nn.Module, place: Sequence[str | int]) -> tuple[dict[Any, Any], Any, Any]:
    """Where `_set` writes, and the value there: the innermost that is no tuple or list, since those are replaced."""
    held: Any = model.get_submodule(str(place[0]))
    found: tuple[dict[Any, Any], Any, Any] | None = None
    for key in place[1:]:
        inside = _inside(held)
        if isinstance(inside, dict):
            found = inside, key, inside[key]
        held = inside[key]
    assert found is not None  # a module comes first
    return found


def _with(held: Any, keys: Sequence[str | int], value: float) -> Any:
    """The same with a number at the place of these keys replaced: in place, but for tuples and lists.

    A list that a configuration was made of is often that of other models, too.
    """
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    if isinstance(held, tuple | list):
        return type(held)([_with(each, rest, value) if at == key else each for at, each in enumerate(held)])
    inside = _inside(held)
    inside[key] = _with(inside[key], rest, value)
    return held


def _inside(held: Any) -> Any:
    return held if isinstance(held, dict | list | tuple) else vars(held)


def zero(tensor: Tensor, at: int, gone: Tensor) -> None:
    """Zero in place where a bool vector along one dimension is true."""
    if gone.any():
        shape = [1] * tensor.dim()
        shape[at] = -1
        tensor.data.masked_fill_(gone.reshape(shape).to(tensor.device), 0)
