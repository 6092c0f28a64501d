"""Indexing: reading from a tensor, or writing to it, by index. Tensors joined and cut along a dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from secateur.coupling.axes import Axis, Expression, concatenated, cut, factored, freeze, leaves, size_of, unify
from secateur.coupling.numbers import Along, Known
from secateur.coupling.operations import declare, rule
from secateur.coupling.rules.pointwise import broadcast, plain_number
from secateur.coupling.rules.shapes import sized
from secateur.coupling.trace import Call, Dims, without_rule

# ---- Indexing: reading from a tensor, or writing to it, by index.
#
# Law: what an index or a tensor chooses stays whole; a slice is cut where the code says.


@rule("getitem", values="kept", rows="moved")
def _getitem(call: Call) -> None:
    dims = _indexed(call, call.dims(call.args[0]), call.args[1])
    if dims is None or [size_of(dim) for dim in dims] != list(call.out.shape):
        without_rule(call)
    else:
        call.returns(dims)


@rule("setitem", writes=True)
def _setitem(call: Call) -> None:
    target = _indexed(call, call.dims(call.args[0]), call.args[1])
    value = call.args[2]
    if target is None:
        without_rule(call)
    elif isinstance(value, Tensor):
        its = call.dims(value)
        for dim, other in zip(reversed(target), reversed(its), strict=False):
            if size_of(other) > 1:
                unify(dim, other, "written into")


def _indexed(call: Call, x: Dims, index: Any) -> Dims | None:
    """The dimensions of ``x[index]``; None where there is no rule."""
    indices = list(index) if isinstance(index, tuple) else [index]
    indices = [torch.as_tensor(each, device="cpu") if isinstance(each, list) else each for each in indices]
    taking = sum(
        each.dim() if isinstance(each, Tensor) and each.dtype == torch.bool else 1
        for each in indices
        if each is not None and each is not Ellipsis and not isinstance(each, bool)
    )
    if taking > len(x) or any(isinstance(each, bool) for each in indices):
        return None
    if Ellipsis not in [each if not isinstance(each, Tensor) else None for each in indices]:
        indices.append(Ellipsis)
    made: Dims = []
    chosen: list[Tensor] = []
    first_chosen = None
    at = 0
    for each in indices:
        if each is Ellipsis:
            made += x[at : at + len(x) - taking]
            at += len(x) - taking
        elif each is None:
            made.append(Axis(1))
        elif isinstance(each, slice):
            made.append(sliced(call, x[at], each))
            at += 1
        elif isinstance(each, Tensor) and each.dtype == torch.bool:
            if chosen or any(isinstance(other, Tensor) and other is not each for other in indices):
                return None
            for dim, its in zip(x[at : at + each.dim()], call.dims(each), strict=True):
                unify(dim, its)
                freeze(dim, "chosen by a mask")
            made.append(call.fresh(int(each.sum()), "chosen by a mask"))
            at += each.dim()
        elif isinstance(each, Tensor):
            call.trace.choose(x[at], each)
            if chosen and first_chosen != len(made):
                return None  # tensors apart from each other: their dimensions come first
            first_chosen = len(made)
            chosen.append(each)
            at += 1
        elif isinstance(each, int):
            if isinstance(each, Known):
                each.stays("an index")
            _one_of(call, x[at], each, alone=len(indices) == 2)  # and the dots
            at += 1
        else:
            return None
    if chosen:
        assert first_chosen is not None
        made[first_chosen:first_chosen] = broadcast(call, chosen, max(each.dim() for each in chosen))
    return made


def _one_of(call: Call, dim: Expression, number: int, *, alone: bool) -> None:
    """One thing of a dimension is taken by its number."""
    tensor, out = call.args[0], call.out if call.name != "setitem" else None
    if type(number) is not int or not call.trace.numbered.takes(dim, number, tensor, out, alone=alone):
        freeze(dim, "one of it is taken by its number")


def sliced(call: Call, dim: Expression, asked: slice) -> Expression:
    """A piece of a dimension, whose ends are where the code says."""
    size = size_of(dim)
    if any(isinstance(each, Tensor) for each in (asked.start, asked.stop, asked.step)):
        freeze(dim, "a slice by a tensor")
        asked = slice(*(None if each is None else int(each) for each in (asked.start, asked.stop, asked.step)))
    begin, end, step = slice(*(plain_number(each) for each in (asked.start, asked.stop, asked.step))).indices(size)
    length = len(range(begin, end, step))
    if begin == 0 and asked.stop is None and step == 1:
        return dim
    if all(axis.reasons or axis.size == 1 for axis in leaves(dim)):
        return call.fresh(length, "a slice")
    if step > 1 and asked.stop is None and size % step == 0 and begin < step:
        split = factored(dim, step)  # every step-th: the inner ones stay as they are
        if split is not None:
            freeze(split[1], f"every {step}th is taken")
            return split[0]
    if step != 1:
        freeze(dim, "a slice with steps")
        return call.fresh(length, "a slice with steps")
    head = cut(dim, begin)
    body = cut(head[1], length) if head is not None else None
    if head is None or body is None:
        freeze(dim, "a slice that cuts through it")
        return call.fresh(length, "a slice")
    for given, before in ((asked.start, head[0]), (asked.stop, concatenated([head[0], body[0]]))):
        if given is None:
            continue
        number = int.__index__(given)
        if number >= 0 and number <= size:
            call.trace.agree(given, before, f"a slice at {number}")
        elif -size <= number < 0:
            after = concatenated([body[0], body[1]]) if before is head[0] else body[1]
            call.trace.agree(-given, after, f"a slice at {number}")
        else:
            freeze(dim, "a slice beyond its end")
    return body[0]


@rule("select", values="cut", rows="moved")
def _select(call: Call) -> None:
    x, at = call.dims(call.args[0]), int(call.get(1, "dim")) % call.args[0].dim()
    _one_of(call, x[at], call.get(2, "index"), alone=at == 0)
    call.returns([*x[:at], *x[at + 1 :]])


@rule("index_select", rows="moved")
def _index_select(call: Call) -> None:
    x, at = call.dims(call.args[0]), int(call.get(1, "dim")) % call.args[0].dim()
    call.trace.choose(x[at], call.get(2, "index"))
    call.returns([*x[:at], *call.dims(call.get(2, "index")), *x[at + 1 :]])


@rule("gather", "take_along_dim")
def _gather(call: Call) -> None:
    named = call.name == "gather"
    index, at = (call.get(2, "index"), call.get(1, "dim")) if named else (call.get(1, "indices"), call.get(2, "dim"))
    if at is None:
        without_rule(call)
        return
    x, its = call.dims(call.args[0]), call.dims(index)
    at = int(at) % len(x)
    for other, (dim, place) in enumerate(zip(x, its, strict=True)):
        if other == at:
            call.trace.choose(dim, index)
        elif size_of(dim) == size_of(place):
            unify(dim, place)
        else:
            freeze(dim, "chosen by a tensor")
    call.returns([dim if size_of(dim) > 1 or named else x[other] for other, dim in enumerate(its)])


@rule("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy")
def _scatter(call: Call) -> None:
    """Values written at places that a tensor says: what is written into along that dimension stays."""
    x, at = call.dims(call.args[0]), int(call.get(1, "dim")) % call.args[0].dim()
    source = call.get(3, "src", call.kwargs.get("source", call.kwargs.get("tensor")))
    others = [call.dims(source)] if isinstance(source, Tensor) else []
    if call.name.startswith("scatter"):
        others.append(call.dims(call.get(2, "index")))
    call.trace.choose(x[at], call.get(2, "index"), "written at places that a tensor says")
    for its in others:
        freeze(its[at], "written at places that a tensor says")
        for number, (dim, other) in enumerate(zip(x, its, strict=True)):
            if number != at and size_of(dim) == size_of(other):
                unify(dim, other, call.name)
            elif number != at:
                freeze(dim, "written in part")
                freeze(other, "written in part")
    call.returns(x)


@rule("masked_scatter")
def _masked_scatter(call: Call) -> None:
    """Whole rows that a mask chooses are replaced, one after the other, by those of another tensor."""
    target, mask, source = call.args[0], call.get(1, "mask"), call.get(2, "source")
    if mask.shape != target.shape or mask.stride(-1) != 0 or source.shape[-1:] != target.shape[-1:]:
        without_rule(call)
        return
    x, its, rows = call.dims(target), call.dims(mask), call.dims(source)
    for dim in (*x[:-1], *its[:-1], *rows[:-1]):
        freeze(dim, "chosen by a mask")
    unify(x[-1], its[-1])
    unify(x[-1], rows[-1])
    call.returns(x)


@rule("embedding", "embedding_bag")
def _embedding(call: Call) -> None:
    first, second = call.get(0, "input"), call.get(1, "weight")
    tokens, weight = (second, first) if first.is_floating_point() else (first, second)
    table = call.dims(weight)
    call.trace.choose(table[0], tokens, "a vocabulary")  # of the inputs', unless the model itself says which
    if call.name == "embedding":
        call.returns([*call.dims(tokens), table[1]])
        return
    out = call.out[0] if isinstance(call.out, tuple) else call.out
    call.returns([call.fresh(out.shape[0], "bags"), table[1]], out)


# ---- Tensors joined and cut along a dimension.
#
# Law: joined dimensions are a sum of axes; a cut is at a boundary of axes, which the code's number has to follow.

_NAMED = {"column_stack": 1, "hstack": 1, "vstack": 0, "dstack": 2}  # and the dimension that each joins along


@rule(*_NAMED)
@rule("cat", "concat", "concatenate", values="cut", rows="moved")
def _cat(call: Call) -> None:
    given = list(call.get(0, "tensors"))
    named = _NAMED.get(call.name)
    if named is not None and any(each.dim() < max(named + 1, 2) for each in given):  # they get dimensions first
        without_rule(call)
        return
    tensors = [each for each in given if each.dim() > 1 or each.numel()]
    at = named if named is not None else int(call.kwargs.get("axis", call.get(1, "dim", 0))) % call.out.dim()
    parts = [call.dims(tensor) for tensor in tensors]
    for part in parts[1:]:
        for other, dim in enumerate(part):
            if other != at:
                unify(parts[0][other], dim)
    made = list(parts[0])
    made[at] = concatenated([part[at] for part in parts])
    call.returns(made)


@rule("stack", values="cut", rows="moved")
def _stack(call: Call) -> None:
    tensors, at = call.get(0, "tensors"), int(call.get(1, "dim", 0)) % call.out.dim()
    parts = [call.dims(tensor) for tensor in tensors]
    for part in parts[1:]:
        for first, dim in zip(parts[0], part, strict=True):
            unify(first, dim)
    made = list(parts[0])
    made.insert(at, call.fresh(len(parts), "a stack"))
    call.returns(made)


@rule("unbind", values="cut", rows="moved")
def _unbind(call: Call) -> None:
    at = int(call.get(1, "dim", 0)) % call.args[0].dim()
    x = call.dims(call.args[0])
    freeze(x[at], "unbind along it")
    for out in call.out:
        call.returns([*x[:at], *x[at + 1 :]], out)


@rule("hsplit", "vsplit")
@rule("chunk", "tensor_split", values="cut", rows="moved")
def _chunk(call: Call) -> None:
    count = call.get(1, "chunks", call.kwargs.get("sections"))
    if call.name in ("hsplit", "vsplit") or not isinstance(count, int):
        without_rule(call)
        return
    at = int(call.get(2, "dim", 0)) % call.args[0].dim()
    lengths = [int(out.shape[at]) for out in call.out]
    pieces = _parts(call, at, lengths)
    for length, piece in zip(lengths, pieces, strict=True):
        if length == lengths[0] == lengths[-1]:
            call.trace.agree(call.trace.number(pieces[0]), piece, f"{len(lengths)} chunks of equal length")
        else:
            freeze(piece, "chunks of different lengths")
    if isinstance(count, Known):
        count.stays("a number of chunks")


@rule("split", "split_with_sizes", values="cut", rows="moved")
def _split(call: Call) -> None:
    at = int(call.get(2, "dim", 0)) % call.args[0].dim()
    lengths = [int(out.shape[at]) for out in call.out]
    given = call.get(1, "split_size_or_sections", call.kwargs.get("split_size", call.kwargs.get("split_sizes")))
    along = given.dim if isinstance(given, Along) else None  # how many of each thing of a dimension
    given = given.plain() if isinstance(given, Along) else given
    asked = list(given) if isinstance(given, tuple | list) else [given] * len(call.out)
    for number, piece, length in zip(asked, _parts(call, at, lengths), lengths, strict=True):
        if int.__index__(number) == length:
            call.trace.agree(number, piece, f"split by {length}")
        else:
            freeze(piece, "the rest of a split")
    if along is not None:
        call.trace.numbered.split(along, call.out)


@rule("narrow", values="cut", rows="moved")
def _narrow(call: Call) -> None:
    x, at = call.dims(call.args[0]), int(call.get(1, "dim")) % call.args[0].dim()
    begin, length = call.get(2, "start"), call.get(3, "length")
    if isinstance(begin, Tensor):
        without_rule(call)
        return
    piece = sliced(call, x[at], slice(begin, begin + length, None))
    call.returns([*x[:at], piece, *x[at + 1 :]])


def _parts(call: Call, at: int, lengths: Sequence[int]) -> Dims:
    x = call.dims(call.args[0])
    rest: Expression = x[at]
    pieces: Dims = []
    for length in lengths:
        split = cut(rest, length)
        if split is None:
            freeze(x[at], f"{call.name} cuts through it")
            pieces = [call.fresh(each) for each in lengths]
            break
        pieces.append(split[0])
        rest = split[1]
    for piece, out in zip(pieces, call.out, strict=True):
        call.returns([*x[:at], piece, *x[at + 1 :]], out)
    return pieces


@rule("constant_pad_nd")
@rule("pad", values="cut")
def _pad(call: Call) -> None:
    x, widths = call.dims(call.args[0]), list(call.get(1, "pad"))
    made = list(x)
    for number in range(len(widths) // 2):
        before, after = widths[2 * number : 2 * number + 2]
        at = len(x) - 1 - number
        plain = int.__index__(before), int.__index__(after)
        if plain == (0, 0):
            continue
        if min(plain) < 0 or (call.name == "pad" and call.get(2, "mode", "constant") != "constant"):
            freeze(x[at], "padded")
            made[at] = call.fresh(call.out.shape[at], "padded")
        else:
            made[at] = concatenated([sized(call, before, "padding"), x[at], sized(call, after, "padding")])
    call.returns(made)


def _glu(x: Tensor, dim: int = -1) -> Tensor:
    value, gate = x.chunk(2, dim)
    return value * gate.sigmoid()


declare("glu", instead=_glu)
