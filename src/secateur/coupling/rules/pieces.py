"""Tensors joined and cut along a dimension.

Law: joined dimensions are a sum of axes; a cut is at a boundary of axes, which the code's number has to follow.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from secateur.coupling.axes import Expression, concatenated, cut, freeze, unify
from secateur.coupling.numbered import Along
from secateur.coupling.numbers import Known
from secateur.coupling.operations import declare, rule
from secateur.coupling.rules.creation import sized
from secateur.coupling.rules.indexing import sliced
from secateur.coupling.trace import Call, Dims, without_rule

__all__: list[str] = []

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
