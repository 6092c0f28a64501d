"""Tensors that the code makes, questions about a tensor, views, permutations, stretched and repeated tensors."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from secateur.coupling.axes import Axis, Expression, factored, freeze, leaves, multiplied, size_of
from secateur.coupling.numbers import Along, Known, Outcome
from secateur.coupling.operations import declare, rule
from secateur.coupling.rules.pointwise import places
from secateur.coupling.trace import Call, Dims, tensors_of_tree, without_rule
from secateur.support import private

# ---- Tensors that the code makes: of zeros, of random numbers, of its own numbers.
#
# Law: a size that remembers is followed; one that is written in the code, or values that depend on their place, stay.


def sized(call: Call, number: int, why: str) -> Expression:
    """A dimension made at a size that the code asks for: it follows that number."""
    if not isinstance(number, Known):
        return call.fresh(number, f"{why} of {int(number)}, which is written in the code")
    made = Axis(int.__index__(number))
    call.trace.agree(number, made, f"{why} of {int.__index__(number)}")
    return made


@rule("zeros", "ones", "empty", "full")
@rule("rand", "randn", draws=True)
def _made(call: Call) -> None:
    given = call.get(0, "size") if call.name == "full" else call.sequence(0, "size")
    sizes = [each for each in given if isinstance(each, int)]
    if len(sizes) != call.out.dim():
        without_rule(call)
    else:
        call.returns(sized(call, size, "a tensor made") for size in sizes)


@rule("arange", "eye", "linspace", "logspace", "tensor", "scalar_tensor", "as_tensor", "from_numpy", "empty_strided")
def _counted(call: Call) -> None:
    """Values that depend on their place, or come from elsewhere: the sizes that they were made at stay."""
    for number in private.tree_leaves((call.args, dict(call.kwargs))):
        if isinstance(number, Known):
            number.stays(f"counted by {call.name}")
    for out in tensors_of_tree(call.out):
        if not call.trace.knows(out):
            call.returns([call.fresh(size, call.name) for size in out.shape], out)


@rule("new_zeros", "new_ones", "new_empty", "new_full")
def _new(call: Call) -> None:
    given = call.get(1, "size") if call.name == "new_full" else call.sequence(1, "size")
    given = [given] if isinstance(given, int) else given
    call.returns(sized(call, size, "a tensor made") for size in given)


declare("randint", "randperm", draws=True)


# ---- Questions about a tensor: its sizes, and other facts.
#
# Law: the answer to a question for a size remembers what it is the size of; what leaves torch stays whole.


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


# ---- Views, permutations, stretched and repeated tensors.
#
# Law: a view refines axes into factors or joins them; the sizes that the code asks for are those of the result's.


@rule("unsafe_view")
@rule("view", "reshape", values="kept", rows="moved")
def _view(call: Call) -> None:
    if any(isinstance(each, torch.dtype) for each in call.args):
        without_rule(call)
        return
    _reshaped(call, call.sequence(1, "shape" if "shape" in call.kwargs else "size"))


@rule("flatten", values="kept", rows="moved")
def _flatten(call: Call) -> None:
    x = call.dims(call.args[0])
    begin, end = int(call.get(1, "start_dim", 0)) % max(len(x), 1), int(call.get(2, "end_dim", -1)) % max(len(x), 1)
    call.returns([*x[:begin], multiplied(x[begin : end + 1]), *x[end + 1 :]] if x else [Axis(1)])


@rule("ravel")
def _ravel(call: Call) -> None:
    call.returns([multiplied([Axis(1), *call.dims(call.args[0])])])


@rule("unflatten", rows="moved")
def _unflatten(call: Call) -> None:
    at, sizes = int(call.get(1, "dim")) % call.args[0].dim(), call.get(2, "sizes")
    if not all(isinstance(size, int) for size in sizes):
        without_rule(call)
        return
    shape = [call.trace.number(dim) for dim in call.dims(call.args[0])]
    _reshaped(call, [*shape[:at], *sizes, *shape[at + 1 :]])


@rule("view_as", "reshape_as", rows="moved")
def _view_as(call: Call) -> None:
    _reshaped(call, [call.trace.number(dim) for dim in call.dims(call.args[1])])


def _reshaped(call: Call, asked: Sequence[int]) -> None:
    """Blocks of old dimensions become blocks of new ones, each of the size that the code asks for."""
    old, sizes = call.dims(call.args[0]), list(call.out.shape)
    if 0 in sizes:
        call.returns(call.fresh(size, "an empty view") for size in sizes)
        return
    made: Dims = []
    taken = 0
    while len(made) < len(sizes):
        block: Dims = []
        begin = len(made)
        count, wanted = 1, sizes[begin]
        ends = begin + 1
        while count != wanted or (not block and taken < len(old) and wanted != 1):
            if count < wanted:
                block.append(old[taken])
                count *= size_of(old[taken])
                taken += 1
            else:
                wanted *= sizes[ends]
                ends += 1
        whole = multiplied(block)
        parts: Dims = []
        for size in reversed(sizes[begin + 1 : ends]):
            split = factored(whole, size)
            if split is None:  # the parts behind it are what they are
                freeze(whole, "a view that cuts through it")
                before = sizes[begin + 1 : ends - len(parts)]
                parts += [call.fresh(each, "a view") for each in reversed(before)]
                whole = call.fresh(sizes[begin], "a view")
                break
            whole, inner = split
            parts.append(inner)
        made += [whole, *reversed(parts)]
    for size, dim in zip(asked, made, strict=True):
        if int.__index__(size) != -1:
            call.trace.agree(size, dim, f"a view to {int.__index__(size)}")
    call.returns(made)


@rule("permute", values="kept", rows="moved")
def _permute(call: Call) -> None:
    x = call.dims(call.args[0])
    call.returns(x[int(at)] for at in call.sequence(1, "dims"))


@rule("swapaxes", "swapdims", rows="moved")
@rule("transpose", values="kept", rows="moved")
def _transpose(call: Call) -> None:
    x = list(call.dims(call.args[0]))
    first = int(call.get(1, "dim0", call.kwargs.get("axis0", 0)))
    second = int(call.get(2, "dim1", call.kwargs.get("axis1", 0)))
    x[first], x[second] = x[second], x[first]
    call.returns(x)


@rule("H", "mH", "adjoint")
@rule("T", "mT", rows="moved")
@rule("t", values="kept", rows="moved")
def _swapped(call: Call) -> None:
    x = list(call.dims(call.args[0]))
    call.returns([*x[:-2], *x[-2:][::-1]] if call.name != "T" else x[::-1])


@rule("movedim", "moveaxis", rows="moved")
def _movedim(call: Call) -> None:
    x = call.dims(call.args[0])
    marks = torch.empty(tuple(range(1, len(x) + 1)), device="meta")
    moved = torch.movedim(marks, call.get(1, "source"), call.get(2, "destination"))
    call.returns(x[size - 1] for size in moved.shape)


@rule("unsqueeze", values="kept", rows="moved")
def _unsqueeze(call: Call) -> None:
    x = list(call.dims(call.args[0]))
    x.insert(int(call.get(1, "dim")) % (len(x) + 1), Axis(1))
    call.returns(x)


@rule("squeeze", values="kept", rows="moved")
def _squeeze(call: Call) -> None:
    x = call.dims(call.args[0])
    given = call.get(1, "dim")
    over = places(given, len(x))
    if given is None:
        for dim in x:  # more than one have to stay where there are more
            if size_of(dim) > 1:
                call.trace.equations.append(Outcome(dim, 1, operator.ne, result=True))
    call.returns(dim for at, dim in enumerate(x) if at not in over or size_of(dim) != 1)


@rule("broadcast_to")
@rule("expand", values="kept", rows="moved")
def _expand(call: Call) -> None:
    _stretched(call, call.sequence(1, "size"))


@rule("expand_as", values="kept", rows="moved")
def _expand_as(call: Call) -> None:
    _stretched(call, [call.trace.number(dim) for dim in call.dims(call.args[1])])


def _stretched(call: Call, asked: Sequence[int]) -> None:
    x = call.dims(call.args[0])
    made: Dims = []
    for at, number in enumerate(asked):
        own = at - (len(asked) - len(x))
        dim = x[own] if own >= 0 else Axis(1)
        size = int.__index__(number)
        if size_of(dim) == 1 and size > 1:
            dim = sized(call, number, "stretched to a size")
        elif size != -1:
            call.trace.agree(number, dim, f"expanded to {size}")
        made.append(dim)
    call.returns(made)


@rule("tile")
@rule("repeat", rows="moved")
def _repeat(call: Call) -> None:
    x, times = call.dims(call.args[0]), call.sequence(1, "repeats" if call.name == "repeat" else "dims")
    if len(times) < len(x):
        times = [1] * (len(x) - len(times)) + times
    padded = [*(Axis(1) for _ in range(len(times) - len(x))), *x]
    call.returns(
        dim if int.__index__(count) == 1 else multiplied([sized(call, count, "repeats"), dim])
        for count, dim in zip(times, padded, strict=True)
    )


@rule("repeat_interleave", rows="moved")
def _repeat_interleave(call: Call) -> None:
    x, count, at = call.dims(call.args[0]), call.get(1, "repeats"), call.get(2, "dim")
    if not isinstance(count, int) or at is None:
        without_rule(call)
        return
    made = list(x)
    made[at] = multiplied([x[at], sized(call, count, "repeats")])
    call.returns(made)


def _channel_shuffle(x: Tensor, groups: int) -> Tensor:
    split = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    return split.transpose(1, 2).reshape(x.shape)


declare("channel_shuffle", "native_channel_shuffle", instead=_channel_shuffle)
