"""Functions value by value, and those that compare the positions of a dimension and choose some."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from secateur.coupling.axes import Axis, Expression, concatenated, cut, freeze, resolved, size_of, unify
from secateur.coupling.numbers import Known, Outcome, formula_of
from secateur.coupling.operations import rule
from secateur.coupling.trace import Call, Dims, tensors_of_tree, without_rule

# ---- Arguments of calls, as rules read them.
#
# Law: a rule's own arithmetic is not the model's, so that it asks for no equation.


def each_of(given: Any, at: int) -> Any:
    """The value for one dimension of an argument given once or for each."""
    return plain_number(given if isinstance(given, int | str) else given[at] if len(given) > 1 else given[0])


def places(given: Any, rank: int) -> set[int]:
    """Dimensions named by an integer, several, or none (all)."""
    if given is None:
        return set(range(rank))
    return {int(at) % max(rank, 1) for at in ([given] if isinstance(given, int) else given)}


def plain_number(number: Any) -> Any:
    """Without its origin: the rule's own arithmetic is not the model's."""
    return int.__index__(number) if isinstance(number, int) else number


# Functions that compare the positions of a dimension and choose some: softmax, topk, argmax, sorting and counting.
#
# Law: a thing whose score is minus infinity is missed by none of these. Where it is not known that this is all that
# is done with a dimension, it stays whole.


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


# ---- Functions value by value, of tensors that are stretched to one shape.
#
# Law: dimensions that meet are the same axes, and the result has them.

_OTHERS = """
    abs absolute acos acosh addcdiv addcmul and angle asin asinh atan atan2 atanh bitwise_and bitwise_not
    bitwise_or bitwise_xor bool broadcast_tensors ceil celu clamp clamp_max clamp_min clip complex conj copy
    copysign cos cosh cpu cuda data data= deg2rad digamma elu empty_like eq erf erfc erfinv exp exp2 expm1
    fill fill_diagonal float_power floor floor_divide floordiv fmax fmin fmod frac full_like ge gelu
    grad= greater greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot iand idiv ifloordiv
    imag imul int invert ior ipow isfinite isinf isnan itruediv ixor le leaky_relu lerp less less_equal lgamma
    log log10 log1p log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit
    logsigmoid long lt masked_fill maximum minimum mish mod mvlgamma nan_to_num native_dropout ne nextafter
    not_equal ones_like or polar polygamma positive pow randint_like rdiv real reciprocal remainder
    requires_grad= retain_grad rfloordiv rmod ror round rpow rrelu rsqrt rsub rtruediv rxor selu sgn short
    sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign special_erf special_expit sqrt square
    tan tanh tanhshrink threshold trunc where xlogy xor zero zeros_like
"""


_COMPARISONS = frozenset(
    ["eq", "ge", "greater", "greater_equal", "gt", "le", "less", "less_equal", "lt", "ne", "not_equal"]
)


def broadcast(call: Call, tensors: Iterable[Tensor], rank: int) -> Dims:
    """Dimensions aligned from the right; those of size 1 stretch."""
    dims: Dims = [Axis(1) for _ in range(rank)]
    for tensor in tensors:
        its = call.dims(tensor)
        for at, dim in enumerate(its, start=rank - len(its)):
            if size_of(dim) == 1:
                continue
            if size_of(dims[at]) == 1:
                dims[at] = dim
            else:
                unify(dims[at], dim, call.name)
    return dims


def _not_dropped(_func: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.clone()


def _as_double(func: Any, x: Tensor, *_: Any, **__: Any) -> Any:
    """The proof computes in float64, whatever the code asks for. ``float(x)`` has the name of ``x.float()``."""
    return func(x) if func.__name__ == "__float__" else x.double()


def _leaky(_func: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Zero stays zero, and nothing is dead: a unit that no example wakes would hide what is wrong behind it."""
    return torch.where(x > 0, x, 0.3 * x)


_DRAWN = 0.7  # of a standard deviation, or of a mean


def _in_the_middle(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """As many numbers are drawn as there are entries: one that could be drawn, for each."""
    if func.__name__ == "uniform_":
        begin, end = (*args, kwargs.get("from", 0.0), kwargs.get("to", 1.0))[:2] if len(args) < 2 else args[:2]
        return x.fill_((begin + end) / 2)
    if func.__name__ == "normal_":
        mean, spread = (*args, *(kwargs.get(key, value) for key, value in (("mean", 0.0), ("std", 1.0))[len(args) :]))[
            :2
        ]
        return x.fill_(mean + _DRAWN * spread)
    if func.__name__ == "exponential_":
        return x.fill_(_DRAWN / (args[0] if args else kwargs.get("lambd", 1.0)))
    if func.__name__ in ("rand_like", "randn_like"):
        return torch.full_like(x, 0.5 if func.__name__ == "rand_like" else _DRAWN, **kwargs)
    made: Tensor = func(x, *args, **kwargs)
    return made


@rule("add", "sub", values="kept", rows="sum", stream="sum")
@rule("subtract", values="kept", rows="sum")
@rule("iadd", "isub", "radd", values="kept", stream="sum")
@rule("mul", "multiply", "rmul", values="kept", rows="product")
@rule("div", "divide", "true_divide", "truediv", values="kept", rows="quotient")
@rule("detach", "double", "neg", "negative", "pos", "to", values="kept", rows="same")
@rule("bfloat16", "float", "half", values="kept", rows="same", proved=_as_double)
@rule("clone", "contiguous", values="kept", rows="moved")
@rule("relu", "relu6", values="kept", proved=_leaky)
@rule("dropout", values="kept", rows="same", zero=True, steady=_not_dropped)
@rule("dropout1d", "dropout2d", "dropout3d", "feature_dropout", values="kept", zero=True, steady=_not_dropped)
@rule("alpha_dropout", "feature_alpha_dropout", values="kept", steady=_not_dropped)
@rule("bernoulli", values="kept", draws=True)
@rule("exponential", "normal", "rand_like", "randn_like", "uniform", values="kept", draws=True, steady=_in_the_middle)
@rule("type", values="kept", rows="same", asks="facts")
@rule("requires_grad", values="kept", asks="facts")
@rule(*_OTHERS.split(), values="kept")
def pointwise(call: Call) -> None:
    tensors = call.tensors()
    if call.name == "where" and len(tensors) == 1 and len(call.args) == 1:
        true_places(call)
        return
    if call.name in _COMPARISONS:
        follow_comparison(call)
    for out in tensors_of_tree(call.out):
        dims = broadcast(call, tensors, max([out.dim(), *(each.dim() for each in tensors)]))[-out.dim() or None :]
        if not out.dim():
            dims = []
        call.returns(
            [dim if size_of(dim) == size else call.fresh(size) for dim, size in zip(dims, out.shape, strict=True)], out
        )


@rule("type_as", rows="same")
def _type_as(call: Call) -> None:
    call.returns(call.dims(call.args[0]))


@rule("view_as_complex")
def _view_as_complex(call: Call) -> None:
    *dims, pair = call.dims(call.args[0])
    freeze(pair, "the two parts of a complex number")
    call.returns(dims)


@rule("view_as_real")
def _view_as_real(call: Call) -> None:
    call.returns([*call.dims(call.args[0]), call.fresh(2, "the two parts of a complex number")])


@rule("prelu")
def _prelu(call: Call) -> None:
    x, weight = call.dims(call.args[0]), call.dims(call.get(1, "weight"))
    if size_of(weight[0]) > 1:
        unify(x[1], weight[0])
    call.returns(x)
