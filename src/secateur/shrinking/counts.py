"""How many units of each group stay, so that what was asked is met.

Law: groups that are tied keep the same share, what there are objections to is frozen, and no count goes below what the
code compares sizes with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from secateur.allocation import Allocation, uniform
from secateur.coupling import Axis, Coupling, Expression, Group, Kept, Product, leaves, resolved
from secateur.pipeline import make_masks
from secateur.selection import keep_largest
from secateur.shrinking.costs import cost_of, prices
from secateur.shrinking.scope import chosen, names_of
from secateur.shrinking.scores import scores
from secateur.shrinking.ties import Tied, by_tie
from secateur.support import track

__all__ = ["choose"]

_TRIES = 64  # of counts that a configuration may allow


def choose(
    model: nn.Module,
    coupling: Coupling,
    sparsity: float | None,
    weights: Mapping[str, Tensor],
    *,
    criterion: Callable[..., Tensor],
    allocate: Allocation | None,
    evidence: Mapping[str, Mapping[str, Tensor]] | None,
    include: str | Iterable[str] | None,
    keep: str | Iterable[str] | None,
    known: Collection[str] = (),
    round_to: int | None,
    target: str,
    example_inputs: Any,
    objections: Callable[[Sequence[Group], Kept], tuple[list[Group], str]],
    possible: Callable[[Mapping[Axis, int]], bool] | None = None,
) -> dict[Axis, npt.NDArray[np.bool_]]:
    """Which units of each group stay. What there are objections to is frozen in the coupling, and the rest tried again.

    Of counts that are not ``possible`` one is raised until they are, if that can be.
    ``weights`` are the values of the model's parameters, of which one at a time is looked at: the model may be on meta.
    ``known`` are names that globs may match beside those of the coupling.
    If they have a method ``blocks(name)``, a criterion that works value by value is given a weight in blocks of rows.
    """
    known = names_of(coupling) | set(known)
    minimum: dict[Axis, int] = {}  # fewer would turn a comparison in the code
    groups = chosen(coupling, include, keep, known)
    scores = None if sparsity is None else scores(weights, coupling, groups, criterion, evidence)
    while True:
        if scores is None or sparsity is None:
            kept = _dead(weights, coupling, groups)
        else:
            kept = _ranked(
                model,
                coupling,
                groups,
                sparsity,
                scores,
                allocate,
                example_inputs=example_inputs,
                minimum=minimum,
                round_to=round_to,
                target=target,
                possible=possible,
            )
        if turned := coupling.contradicted({axis: int(mask.sum()) for axis, mask in kept.items()}):
            minimum |= {group.axis: int(kept[group.axis].sum()) + 1 for group in turned if group.axis in kept}
            whole = [group for group in turned if minimum.get(group.axis, group.size) >= group.size]
            coupling.freeze(turned if sparsity is None else whole, "a comparison in the code would come out otherwise")
        else:
            wrong, why = objections(groups, kept)
            if not wrong:
                return kept
            coupling.freeze(wrong, why)
        groups = chosen(coupling, include, keep, known)


def _ranked(
    model: nn.Module,
    coupling: Coupling,
    groups: Sequence[Group],
    sparsity: float,
    every: Mapping[Axis, Tensor],
    allocate: Allocation | None,
    *,
    example_inputs: Any,
    minimum: Mapping[Axis, int],
    round_to: int | None,
    target: str,
    possible: Callable[[Mapping[Axis, int]], bool] | None = None,
) -> dict[Axis, npt.NDArray[np.bool_]]:
    """The best units of each group, as few as leave ``sparsity`` of the target."""
    scores = {group.name: every[group.axis] for group in groups}
    tied = [Tied(each, round_to, minimum) for each in by_tie(groups)]
    outer = _outer(coupling, groups) if allocate is None and target != "units" else set()
    whole = {group.name for group in groups if group.tied in outer}
    if getattr(allocate, "divides_by_cost", False) and target not in ("units", "latency"):
        prices = prices(cost_of(model, coupling, example_inputs, target), tied)
        scores = {group.name: scores[group.name] / prices[group.axis] for group in groups}

    def counts_at(share: float) -> dict[Axis, int]:
        ranked = {name: each for name, each in scores.items() if name not in whole}
        masks = make_masks(ranked, share, criterion=lambda weight: weight, allocate=allocate or uniform)
        counts = {group.axis: int(masks[group.name].sum()) if group.name in masks else group.size for group in groups}
        found: dict[Axis, int] = {}
        for each in tied:
            mean = each.mean(counts)
            multiple = round(mean / each.step) if target == "units" else math.ceil(round(mean) / each.step)
            found |= each.counts(multiple * each.step)
        return found if is_possible(found) else _made_possible(found, tied, is_possible)

    def is_possible(counts: Mapping[Axis, int]) -> bool:
        return possible is None or possible(counts)

    if target == "units":
        counts = counts_at(sparsity)
    else:
        cost = cost_of(model, coupling, example_inputs, target)
        goal = (1 - sparsity) * cost({})
        low, high = 0.0, 1.0
        if cost(counts_at(high)) > goal:
            whole = set()  # heads have to leave, too
        if cost(counts_at(high)) > goal:
            most = max(0.0, 1 - cost(counts_at(high)) / cost({}))
            raise ValueError(
                f"at most {most:.1%} of the {target} can leave, not {sparsity:.1%}: the rest is frozen or kept."
            )
        for _ in track(range(8 if target == "latency" else 24), "looking for the counts"):
            middle = (low + high) / 2
            if cost(counts_at(middle)) > goal:
                low = middle
            else:
                high = middle
        counts = counts_at(high)
        if target != "latency":
            counts = _handed_back(counts, tied, lambda more: cost(more) <= goal and is_possible(more))
    kept = {}
    for group in groups:
        mask = keep_largest(scores[group.name].reshape(1, -1), counts[group.axis])
        kept[group.axis] = mask.reshape(-1).numpy()
    return kept


def _made_possible(
    counts: dict[Axis, int], tied: Sequence[Tied], possible: Callable[[Mapping[Axis, int]], bool]
) -> dict[Axis, int]:
    """The counts with one of the sets raised by as little as makes them possible; as they are where nothing does."""
    for more in range(1, _TRIES):
        for each in tied:
            raised = counts | each.counts(round(each.mean(counts)) + more * each.step)
            if raised != counts and possible(raised):
                return raised
    return counts


def _outer(coupling: Coupling, groups: Sequence[Group]) -> set[int]:
    """Which groups have, wherever they are, another that leaves within them: heads around the widths of heads.

    Both at one share would take its square; and of a small vision transformer at equal multiply-adds, what is left
    with all heads was right more often (`benchmarks/shrinking/RESULTS.md`).
    """
    free = {group.axis for group in groups}
    alone: set[Axis] = set()

    def look(expression: Expression, *, around: bool) -> None:
        dim = resolved(expression)
        if isinstance(dim, Axis):
            if not around:
                alone.add(dim)
        elif isinstance(dim, Product):
            for at, factor in enumerate(dim.factors):
                within = (axis for each in dim.factors[at + 1 :] for axis in leaves(each))
                look(factor, around=around or not free.isdisjoint(within))
        else:
            for segment in dim.segments:
                look(segment, around=around)

    for group in groups:
        for name, at in group.members:
            look(coupling.dims(name)[at], around=False)
    return {group.tied for group in groups} - {group.tied for group in groups if group.axis in alone}


def _handed_back(
    counts: dict[Axis, int], tied: Sequence[Tied], affordable: Callable[[dict[Axis, int]], bool]
) -> dict[Axis, int]:
    """The counts, and as many more as the goal allows: one share for all groups is rarely exact.

    Groups that keep equally many of equally many stay so, as the layers of a transformer.
    """
    alike: dict[tuple[Any, ...], list[Tied]] = {}
    for each in tied:
        sizes = tuple(sorted({group.size for group in each.groups}))
        alike.setdefault((round(each.mean(counts)) / each.parts, sizes, each.step), []).append(each)
    # those come first that lost most by rounding
    for key in track(sorted(alike, key=lambda each: each[0]), "handing back"):
        more = dict(counts)
        for each in alike[key]:
            more |= each.counts(round(each.mean(counts)) + each.step)
        if more != counts and affordable(more):
            counts = more
    return counts


def _dead(
    weights: Mapping[str, Tensor], coupling: Coupling, groups: Sequence[Group]
) -> dict[Axis, npt.NDArray[np.bool_]]:
    """Units that are zero in every member leave; of groups that keep the same share, as many as of the fullest."""
    alive = {group.axis: np.zeros(group.size, dtype=bool) for group in groups}
    places: dict[str, list[tuple[Group, int]]] = {}
    for group in groups:
        for name, at in group.members:
            if name in weights:
                places.setdefault(name, []).append((group, at))
    for name in track([name for name in coupling.names() if name in places], "looking for zeros"):
        entries = weights[name].detach().ne(0)
        for group, at in places[name]:
            others = [dim for dim in range(entries.dim()) if dim != at]
            along = (entries.sum(others) if others else entries).cpu().numpy() > 0
            index = coupling.indices(group, name, at)
            np.logical_or.at(alive[group.axis], index[index >= 0], along[index >= 0])
    for lives in alive.values():
        lives[0] |= not lives.any()
    for equal in by_tie(groups):
        tied = Tied(equal, 1, {})
        counts = {group.axis: int(alive[group.axis].sum()) for group in equal}
        for axis, count in tied.counts(max(-(-counts[each.axis] * tied.parts // each.size) for each in equal)).items():
            dead = np.flatnonzero(~alive[axis])
            alive[axis][dead[: count - counts[axis]]] = True
    return alive
