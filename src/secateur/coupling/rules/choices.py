"""Functions that compare the positions of a dimension and choose some: softmax, topk, argmax, sorting and counting.

Law: a thing whose score is minus infinity is missed by none of these. Where it is not known that this is all that is
done with a dimension, it stays whole.
"""

from __future__ import annotations

import operator

from torch import Tensor

from secateur.coupling.axes import Axis, Expression, concatenated, cut, freeze, resolved, size_of
from secateur.coupling.numbers import Known, Outcome, formula_of
from secateur.coupling.operations import rule
from secateur.coupling.trace import Call, tensors_of_tree, without_rule

__all__ = ["follow_comparison", "follow_extreme", "true_places"]


@rule("softmax", "log_softmax", "cumsum")
def _softmax(call: Call) -> None:
    """What is along the dimension is a share, or a sum so far: of what is zero for those that are not there."""
    x = call.dims(call.args[0])
    at = call.get(1, "dim")
    if isinstance(at, bool) or not isinstance(at, int) or not x:
        without_rule(call)
        return
    at = int(at) % len(x)
    goes_on = call.trace.compared(call, call.args[0], at, f"{call.name} along it", scores=call.name != "cumsum")
    call.returns(dim if other != at or goes_on else call.fresh(size_of(dim)) for other, dim in enumerate(x))


@rule("topk")
def _topk(call: Call) -> None:
    """The best: as many have to be there."""
    x, count = call.dims(call.args[0]), call.get(1, "k")
    at = int(call.get(2, "dim", -1)) % len(x)
    if not call.get(3, "largest", True):
        freeze(x[at], "the smallest along it")
    elif call.trace.compared(call, call.args[0], at, "topk along it"):
        call.trace.equations.append(Outcome(formula_of(count), x[at], operator.le, result=True))
    values, indices = call.out
    taken = call.fresh(int.__index__(count), "topk along it")
    whole = resolved(x[at])
    if isinstance(whole, Axis) and not whole.reasons and whole.size == taken.size > 1 and isinstance(count, Known):
        call.trace.agree(count, whole, f"all {whole.size} in order")  # what is not there comes last
        taken = call.trace.ranks(whole)
    for out in (values, indices):
        call.returns((taken if other == at else dim for other, dim in enumerate(x)), out)
    call.trace.places[id(indices)] = x[at]


def follow_extreme(call: Call, at: int) -> bool:
    """Of the largest along a dimension: whether it may be chosen between. Its place is a place of the dimension."""
    x = call.dims(call.args[0])[at]
    for out in tensors_of_tree(call.out):
        if not out.is_floating_point():
            call.trace.places[id(out)] = x
    return call.trace.compared(call, call.args[0], at, f"{call.name} over it")


@rule("one_hot")
def _one_hot(call: Call) -> None:
    """A dimension for the places that a tensor holds, and maybe one more for those that it holds none of."""
    index, classes = call.args[0], call.get(1, "num_classes", -1)
    size = call.out.shape[-1]
    places = call.trace.places.get(id(index))
    made: Expression = call.fresh(size, "classes")
    if places is not None and isinstance(classes, Known) and size - size_of(places) in (0, 1):
        made = places if size == size_of(places) else concatenated([places, Axis(1)])
        call.trace.agree(classes, made, f"{size} classes")
        call.trace.chosen.append(places)
    call.returns([*call.dims(index), made])


@rule("bincount", "histc")
def _counted(call: Call) -> None:
    """How often each place comes."""
    bins = call.get(1, "minlength" if call.name == "bincount" else "bins")
    if call.name == "bincount":
        bins = call.get(2, "minlength", call.kwargs.get("minlength"))
    places = call.trace.places.get(id(call.args[0]))
    size = call.out.shape[0]
    if places is not None and size_of(places) > size:
        places = (cut(places, size) or (None,))[0]  # those behind are not counted
    if places is None or not isinstance(bins, Known) or not size_of(places) == size == int.__index__(bins):
        without_rule(call)
        return
    call.trace.agree(bins, places, f"{size} counts")
    call.trace.chosen.append(places)
    call.returns([places])


@rule("nonzero", "argwhere")
def _nonzero(call: Call) -> None:
    true_places(call)


def true_places(call: Call) -> None:
    """The places where it is true, of one dimension as numbers that say them; how many is not known."""
    x = call.dims(call.args[0])
    apart = isinstance(call.out, tuple)
    outs = list(call.out) if apart else [call.out]
    many = Axis(outs[0].shape[0], reasons=["how many are true"])
    for at, dim in enumerate(x):
        if len(x) == 1 or apart:
            call.trace.compared(call, call.args[0], at, "places where it is true", scores=False)
        else:
            freeze(dim, "places where it is true")
    for at, out in enumerate(outs):
        call.returns([many] if apart else [many, call.fresh(len(x), "places")], out)
        if apart or len(x) == 1:
            call.trace.places[id(out)] = x[at]


def follow_comparison(call: Call) -> None:
    """A place that is compared with a number: the one behind them all follows how many there are."""
    first, other = call.args[0], call.get(1, "other")
    places = call.trace.places.get(id(first)) if isinstance(first, Tensor) else None
    if places is None or isinstance(other, Tensor) or not isinstance(other, int):
        return
    number = int.__index__(other)
    head = cut(places, number) if isinstance(other, Known) and 0 < number <= size_of(places) else None
    if head is not None:
        call.trace.agree(other, head[0], f"compared with {number}")
    elif 0 <= number <= size_of(places):
        freeze(places, "one of it is taken by its number")
