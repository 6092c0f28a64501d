"""Functions value by value, of tensors that are stretched to one shape.

Law: dimensions that meet are the same axes, and the result has them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from secateur.coupling.axes import Axis, freeze, size_of, unify
from secateur.coupling.operations import rule
from secateur.coupling.rules.choices import follow_comparison, true_places
from secateur.coupling.trace import Call, Dims, tensors_of_tree

__all__ = ["broadcast", "pointwise"]

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
