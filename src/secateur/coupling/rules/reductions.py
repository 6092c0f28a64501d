"""Reductions: sums, means, maxima, distances.

Law: entries that are zero are missed by no sum; a statistic is flagged; anything else keeps the axis whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from secateur.coupling.axes import Axis, freeze, size_of, unify
from secateur.coupling.operations import rule
from secateur.coupling.rules.arguments import places
from secateur.coupling.rules.choices import follow_extreme
from secateur.coupling.rules.pointwise import broadcast, pointwise
from secateur.coupling.trace import Call, Dims, tensors_of_tree, without_rule

__all__: list[str] = []


# ---- in a form that does not count -----------------------------------------------------------------------------------


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
