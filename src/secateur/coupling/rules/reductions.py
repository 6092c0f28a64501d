"""Reductions: sums, means, maxima, distances. Functions along a dimension that keep it: cumulative sums and products,
sorts, transforms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from secateur.coupling.axes import Axis, freeze, size_of, unify
from secateur.coupling.operations import rule
from secateur.coupling.rules.pointwise import broadcast, follow_extreme, places, pointwise
from secateur.coupling.trace import Call, Dims, tensors_of_tree, without_rule

# ---- in a form that does not count -----------------------------------------------------------------------------------


# ---- Reductions: sums, means, maxima, distances.
#
# Law: entries that are zero are missed by no sum; a statistic is flagged; anything else keeps the axis whole.


def _mean(x: Tensor, *args: Any, sums: bool, **kwargs: Any) -> Tensor:
    dims, keepdim = _reduction(x, *args, **kwargs)
    total = x.double().sum(dims, keepdim=keepdim) / 64
    return total if sums else torch.zeros_like(total)


def _spread(x: Tensor, *args: Any, sums: bool, **kwargs: Any) -> Tensor:
    dims, keepdim = _reduction(x, *args, **kwargs)
    total = x.double().square().sum(dims, keepdim=keepdim) / 64
    return total if sums else torch.ones_like(total)


def _spread_and_mean(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _spread(x, *args, **kwargs), _mean(x, *args, **kwargs)


def _reduction(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, bool]:
    given = kwargs.get("dim", kwargs.get("axis", args[0] if args and not isinstance(args[0], bool) else None))
    rest = [each for each in args[1:] if isinstance(each, bool)]
    keepdim = bool(kwargs.get("keepdim", rest[-1] if rest else False))
    return (tuple(range(x.dim())) if given is None else given), keepdim


# ---- rules -----------------------------------------------------------------------------------------------------------


@rule("sum", "norm", "vector_norm", "linalg_vector_norm", "nansum", "count_nonzero")
def _sum(call: Call) -> None:
    _reduced(call)


@rule("mean", "nanmean", uncounted=_mean)
@rule("var", "std", uncounted=_spread)
@rule("var_mean", "std_mean", uncounted=_spread_and_mean)
def _statistic(call: Call) -> None:
    over = _reduced(call)
    for dim in over:
        call.flag(dim)
    for out in tensors_of_tree(call.out):
        call.trace.pooled[id(out)] = over


@rule("amax", "amin", "prod", "all", "any", "logsumexp", "max", "min", "median", "argmax", "argmin", "aminmax", "mode")
def _extreme(call: Call) -> None:
    if call.name in ("max", "min") and isinstance(call.get(1, "other"), Tensor):
        pointwise(call)
        return
    reduced, x = _reduced(call), call.dims(call.args[0])
    if call.name in ("amax", "argmax", "logsumexp", "max") and len(reduced) == 1:
        follow_extreme(call, next(at for at, dim in enumerate(x) if dim is reduced[0]))
        return
    for dim in reduced:
        freeze(dim, f"{call.name} over it")


def _reduced(call: Call) -> Dims:
    """Declares the result's dimensions; those that it has no more."""
    x = call.dims(call.args[0])
    given = call.get(1, "dim", call.kwargs.get("axis"))
    if call.name == "norm":
        given = call.get(2, "dim")
        if call.get(1, "p", 2) not in (2, 1, "fro", 2.0, 1.0):
            without_rule(call)
            return []
    if call.name.endswith("vector_norm"):
        given = call.get(2, "dim")
        if call.get(1, "ord", 2) not in (1, 2):
            without_rule(call)
            return []
    if isinstance(given, bool):  # var(unbiased)
        given = call.kwargs.get("dim")
    reduced = places(given, len(x))
    for out in tensors_of_tree(call.out):
        keeps = out.dim() == len(x) and bool(reduced)
        left = [Axis(1) if at in reduced else dim for at, dim in enumerate(x) if keeps or at not in reduced]
        call.returns(left, out)
    return [x[at] for at in reduced]


@rule("cosine_similarity", "pairwise_distance", "cdist")
def _distance(call: Call) -> None:
    tensors = call.tensors()
    one, other = call.dims(tensors[0]), call.dims(tensors[1])
    if call.name == "cdist":
        unify(one[-1], other[-1])
        batch = [dim if size_of(dim) > 1 else its for dim, its in zip(one[:-2], other[:-2], strict=True)]
        for dim, its in zip(one[:-2], other[:-2], strict=True):
            if size_of(dim) > 1 and size_of(its) > 1:
                unify(dim, its)
        call.returns([*batch, one[-2], other[-2]])
        return
    whole = broadcast(call, tensors[:2], max(len(one), len(other)))
    at = int(call.get(2, "dim", 1)) % len(whole) if call.name == "cosine_similarity" else len(whole) - 1
    if call.name == "pairwise_distance":
        freeze(whole[-1], "a small number is added along it")
    keeps = call.out.dim() == len(whole)
    call.returns([Axis(1) if other == at else dim for other, dim in enumerate(whole) if keeps or other != at])


# ---- Functions along a dimension that keep it: cumulative sums and products, sorts, transforms.
#
# Law: the dimension stays whole.


@rule(
    "fft_fft",
    "fft_ifft",
    "fft_rfft",
    "fft_irfft",
    "fft_fftn",
    "fft_ifftn",
    "sparsemax",
    "multinomial",
    "renorm",
    "roll_one",
    "gumbel_softmax",
    "kthvalue",
    "diff",
    "fliplr",
    "flipud",
    "cummax",
    "cummin",
    "unique_consecutive",
    "rot90",
    "cumprod",
    "sort",
    "argsort",
    "softmin",
    "logcumsumexp",
)
@rule("flip", rows="moved")
def _across(call: Call) -> None:
    """Functions that look along a dimension, or choose in it: it is frozen, and of the result it is its own."""
    x = call.dims(call.args[0])
    position = {"kthvalue": 2, "diff": 2, "gumbel_softmax": 4}
    default = dict.fromkeys(("sort", "argsort", "kthvalue", "diff", "gumbel_softmax"), -1)
    if call.name.startswith("fft_"):
        position[call.name] = 2
        if not call.name.endswith("n"):
            default[call.name] = -1
    given = call.get(position.get(call.name, 1), "dim", call.kwargs.get("dims", default.get(call.name)))
    if isinstance(given, bool) or not isinstance(given, int | tuple | list) or not x:
        without_rule(call)
        return
    over = places(given, len(x))
    for at in over:
        freeze(x[at], f"{call.name} along it")
    for out in tensors_of_tree(call.out):
        if out.dim() == len(x):
            kept = [call.fresh(out.shape[at]) if at in over else dim for at, dim in enumerate(x)]
        else:
            kept = [dim for at, dim in enumerate(x) if at not in over]
        if [size_of(dim) for dim in kept] != list(out.shape):
            without_rule(call)
            return
        call.returns(kept, out)


@rule("diagonal", "diag", "diag_embed", "tril", "triu")
def _diagonal(call: Call) -> None:
    x = call.dims(call.args[0])
    for dim in x[-2:] if call.name in ("tril", "triu") else x:
        freeze(dim, "a diagonal")
    if call.name in ("tril", "triu"):
        call.returns(x)
    else:
        call.returns(call.fresh(size, "a diagonal") for size in call.out.shape)


@rule("roll", rows="moved")
def _roll(call: Call) -> None:
    x = call.dims(call.args[0])
    given = call.get(2, "dims")
    for at in places(None if given == () else given, len(x)):
        freeze(x[at], "rolled")
    call.returns(x)
