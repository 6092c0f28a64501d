"""The fixed allocations as choices of levels: a search starts from them and is compared with them.

Law: each fits the budget; the model is left as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from secateur import allocation
from secateur.evidence import collect
from secateur.patterns import Unstructured
from secateur.search.evolution import Choice
from secateur.search.space import Space
from secateur.support import Forward

__all__ = ["LAYER", "candidates"]

LAYER = ":layer"  # at the end of the name of a matrix' levels
_ALLOCATIONS = ("erk", "owl", "progression", "everywhere")

SharesAt = Callable[[float], Mapping[str, float]]


def candidates(
    model: nn.Module,
    space: Space,
    limits: Mapping[str, float],
    batches: Sequence[Any],
    *,
    forward: Forward | None = None,
) -> dict[str, Choice]:
    """``{name: choice}`` that fit: the levels nearest to what each allocation gives at this budget.

    - ``"uniform"``: the same share of each group.
    - ``"erk"``, ``"owl"``, ``"progression"``, ``"everywhere"``: of the entries of matrices, by Wanda's scores of the
      dense model; see `secateur.allocation`. Units leave in equal shares.
    - ``"shrink"``: what `secateur.shrink` does by default: the least loss per cost saved comes next, on the lower
      convex hull of each group's curve.

    Args:
        space: what can be chosen.
        limits: what it may cost.
        batches: what levels were made of.
        forward: how a batch is run.
    """
    layers = [name for each in space.classes for name in each.names if name.endswith(LAYER)]
    units = [name for each in space.classes for name in each.names if not name.endswith(LAYER)]
    ways: dict[str, SharesAt] = {"uniform": functools.partial(_even, (*layers, *units))}
    if layers:
        ways |= _of_entries(model, layers, units, batches, forward)
    found = {name: space.snapped(shares_at, limits) for name, shares_at in ways.items()}
    if units:
        found["shrink"] = space.by_slopes(limits)
    return {name: choice for name, choice in found.items() if choice is not None}


def _even(names: Sequence[str], amount: float) -> dict[str, float]:
    return dict.fromkeys(names, amount)


def _of_entries(
    model: nn.Module, layers: Sequence[str], units: Sequence[str], batches: Sequence[Any], forward: Forward | None
) -> dict[str, SharesAt]:
    weights = {name.removesuffix(LAYER): model.get_parameter(name.removesuffix(LAYER)) for name in layers}
    scores = {name: each.detach().abs().float() for name, each in weights.items()}
    try:
        evidence = collect(model, batches, ["input_norm"], weights=weights, forward=forward)
    except (TypeError, ValueError):
        pass  # fused experts, say: nothing says what such a tensor is multiplied with, and magnitudes are left
    else:
        scores = {name: each * evidence[name]["input_norm"].to(each) for name, each in scores.items()}
    return {word: functools.partial(_shares, allocation.parse(word), scores, tuple(units)) for word in _ALLOCATIONS}


def _shares(
    allocate: allocation.Allocation, scores: Mapping[str, Tensor], units: Sequence[str], amount: float
) -> dict[str, float]:
    counts = allocate(scores, min(amount, 0.999), Unstructured())
    kept = {name: int(count) if isinstance(count, int) else int(count.sum()) for name, count in counts.items()}
    found = {f"{name}{LAYER}": 1 - kept[name] / scores[name].numel() for name in scores}
    return found | dict.fromkeys(units, amount)
