"""Questions about a tensor: its sizes, and other facts.

Law: the answer to a question for a size remembers what it is the size of; what leaves torch stays whole.
"""

from __future__ import annotations

from typing import Any

import torch

from secateur.coupling.axes import Axis, freeze, leaves, multiplied
from secateur.coupling.numbered import Along
from secateur.coupling.operations import declare, rule
from secateur.coupling.trace import Call

__all__: list[str] = []


@rule("shape", asks="sizes")
def _shape(call: Call) -> Any:
    return torch.Size([call.trace.number(dim) for dim in call.dims(call.args[0])])


@rule("size", asks="sizes")
def _size(call: Call) -> Any:
    at = call.get(1, "dim")
    return _shape(call) if at is None else call.trace.number(call.dims(call.args[0])[at])


@rule("numel", "nelement", asks="sizes")
def _numel(call: Call) -> Any:
    return call.trace.number(multiplied([Axis(1), *call.dims(call.args[0])]))


@rule("iter")
def _iter(call: Call) -> Any:
    """One after the other along the first dimension."""
    first, *rest = call.dims(call.args[0])
    parts = call.args[0].unbind(0)
    freeze(first, "iter takes it out of torch")
    for part in parts:
        call.returns(rest, part)
        if (places := call.trace.places.get(id(call.args[0]))) is not None:
            call.trace.places[id(part)] = places
    return iter(parts)


@rule("tolist")
def _to_list(call: Call) -> Any:
    """Numbers along what is compared: a split into parts of so many is followed."""
    tensor, dims = call.args[0], call.dims(call.args[0])
    axes = [axis for dim in dims for axis in leaves(dim) if axis.size > 1]
    if len(dims) == 1 and not tensor.is_floating_point() and axes and all(each.looks for each in axes):
        return Along(call.out, dims[0])
    _leaves_torch(call)
    return None


@rule("numpy", "array")
@rule("len", "stride", asks="sizes")
def _leaves_torch(call: Call) -> None:
    """Values or sizes that leave torch: what becomes of them is not seen."""
    for dim in call.dims(call.args[0]):
        freeze(dim, f"{call.name} takes it out of torch")


declare("dim", "is_contiguous", "ndim", "ndimension", asks="sizes")
declare("data_ptr", "device", "dtype", "element_size", "get_device", "grad", "grad_fn", "is_complex", asks="facts")
declare("is_cpu", "is_cuda", "is_floating_point", "is_inference", "is_leaf", "is_meta", "is_mkldnn", asks="facts")
declare("is_mps", "is_nested", "is_quantized", "is_same_size", "is_sparse", "is_xpu", "layout", "names", asks="facts")
declare("result_type", "version", asks="facts")
