"""Views, permutations, stretched and repeated tensors.

Law: a view refines axes into factors or joins them; the sizes that the code asks for are those of the result's.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from secateur.coupling.axes import Axis, factored, freeze, multiplied, size_of
from secateur.coupling.numbers import Outcome
from secateur.coupling.operations import declare, rule
from secateur.coupling.rules.arguments import places
from secateur.coupling.rules.creation import sized
from secateur.coupling.trace import Call, Dims, without_rule

__all__: list[str] = []


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
