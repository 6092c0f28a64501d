"""Normalizations by statistics, of weights and by neighbours.

Law: a statistic over an axis that may lose entries is flagged, and the proof compares it in a form that does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from secateur.coupling.axes import factored, freeze, size_of, unify
from secateur.coupling.operations import Weight, rule
from secateur.coupling.trace import Call

# ---- in a form that does not count -----------------------------------------------------------------------------------


def _scaled(out: Tensor, weight: Any, bias: Any, shape: Sequence[int]) -> Tensor:
    out = out * weight.reshape(shape) if weight is not None else out
    return out + bias.reshape(shape) if bias is not None else out


def _by_length(x: Tensor, dims: Sequence[int]) -> Tensor:
    return x / x.square().sum(tuple(dims), keepdim=True).add(1e-3).sqrt()


def _of_layer(
    x: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, *_: Any, sums: bool, **__: Any
) -> Tensor:
    count = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
    bias = bias if isinstance(bias, Tensor) else None
    return _scaled(_by_length(x, range(-count, 0)) if sums else x, weight, bias, x.shape[x.dim() - count :])


def _of_groups(
    x: Tensor, num_groups: int, weight: Any = None, bias: Any = None, *_: Any, sums: bool, **__: Any
) -> Tensor:
    out = _by_length(x.reshape(x.shape[0], num_groups, -1), [-1]).reshape(x.shape) if sums else x
    return _scaled(out, weight, bias, [-1, *(1 for _ in x.shape[2:])])


def _of_batch(x: Tensor, *args: Any, sums: bool, **kwargs: Any) -> Tensor:
    """Also of an instance; the order of the arguments differs between torch's functions of this name."""
    vectors = [each for each in args[:2] if isinstance(each, Tensor)]
    weight, bias = kwargs.get("weight"), kwargs.get("bias")
    if weight is None and len(args) > 3 and isinstance(args[2], Tensor | None):
        weight, bias = args[2], args[3]
    elif weight is None and vectors:
        weight, bias = vectors[0], (vectors[1] if len(vectors) > 1 else None)
    over = [0, *range(2, x.dim())]
    return _scaled(_by_length(x, over) if sums else x, weight, bias, [-1, *(1 for _ in x.shape[2:])])


def _zero_for_nothing(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """A direction of length zero, normalized, is zero: the weight that was removed."""
    out: Tensor = func(*args, **kwargs)
    return out.nan_to_num(0.0)


# ---- rules -----------------------------------------------------------------------------------------------------------


@rule("batch_norm", "instance_norm", uncounted=_of_batch)
def _batch_norm(call: Call) -> None:
    x = call.dims(call.get(0, "input"))
    for tensor in call.tensors()[1:]:
        if tensor.dim() == 1:
            unify(x[1], call.dims(tensor)[0])
    of_batch = call.get(5, "training", call.kwargs.get("use_input_stats", False)) or call.get(1, "running_mean") is None
    for dim in (x[2:] if call.name == "instance_norm" else [x[0], *x[2:]]) if of_batch else []:
        call.flag(dim)
    call.returns(x)


@rule("layer_norm", rows=Weight((2, "weight"), (3, "bias"), dim=-1), uncounted=_of_layer)
@rule("rms_norm", rows=Weight((2, "weight"), dim=-1), uncounted=_of_layer)
def _layer_norm(call: Call) -> None:
    x, shape = call.dims(call.get(0, "input")), call.get(1, "normalized_shape")
    shape = [shape] if isinstance(shape, int) else list(shape)
    normalized = x[len(x) - len(shape) :]
    for tensor in (call.get(2, "weight"), call.get(3, "bias") if call.name == "layer_norm" else None):
        if tensor is not None:
            for dim, its in zip(normalized, call.dims(tensor), strict=True):
                unify(dim, its)
    for number, dim in zip(shape, normalized, strict=True):
        call.trace.agree(number, dim, f"normalized over {int.__index__(number)}")
        call.flag(dim)
    call.returns(x)


@rule("group_norm", uncounted=_of_groups)
def _group_norm(call: Call) -> None:
    x, groups = call.dims(call.get(0, "input")), call.get(1, "num_groups")
    for tensor in (call.get(2, "weight"), call.get(3, "bias")):
        if tensor is not None:
            unify(x[1], call.dims(tensor)[0])
    split = factored(x[1], size_of(x[1]) // int.__index__(groups))
    if split is None:
        freeze(x[1], "normalized over in groups")
    else:
        call.trace.agree(groups, split[0], f"{int.__index__(groups)} groups of a normalization")
        call.flag(split[1])
    call.returns(x)


@rule("local_response_norm")
def _local_response_norm(call: Call) -> None:
    x = call.dims(call.args[0])
    freeze(x[1], "normalized by its neighbours")
    call.returns(x)


@rule("weight_norm", proved=_zero_for_nothing)
def _weight_norm(call: Call) -> None:
    direction, length = call.dims(call.args[0]), call.dims(call.args[1])
    for one, other in zip(direction, length, strict=True):
        if size_of(other) > 1:
            unify(one, other)
    call.returns(direction)
