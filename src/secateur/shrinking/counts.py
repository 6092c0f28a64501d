"""How many units of each group stay, so that what was asked is met.

Law: groups that are tied keep the same share, what there are objections to is frozen, and no count goes below what the
code compares sizes with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from secateur.allocation import uniform
from secateur.coupling import Axis, Coupling, Expression, Group, Kept, Product, leaves, resolved
from secateur.pipeline import make_masks
from secateur.selection import keep_largest
from secateur.shrinking.costs import by_cost, cost_of, prices_of
from secateur.shrinking.fields import Place
from secateur.shrinking.plan import Plan, plan_of
from secateur.shrinking.request import Request
from secateur.shrinking.roles import role_of
from secateur.shrinking.scope import check_globs, groups_in_scope, names_of
from secateur.shrinking.scores import scores_of
from secateur.shrinking.subject import Subject
from secateur.shrinking.ties import Tied, by_tie
from secateur.support import track

__all__ = ["Choice", "choose"]

_TRIES = 64  # of counts that a configuration may allow


@dataclass(frozen=True)
class Choice:
    """What stays of a subject, to which there are no objections any more.

    Attributes:
        kept: which units stay of the groups that may leave, ``{axis: mask}``.
        plan: what that comes to: slices of tensors, numbers of modules.
        fields: what becomes of fields of the configuration, if it is to say what is left.
        left: how much of the target stays, as a share of what the subject has.
        refused: why groups had to stay that were to leave, by what they do (`role_of`).
    """

    kept: dict[Axis, npt.NDArray[np.bool_]]
    plan: Plan
    fields: dict[Place, int]
    left: float
    refused: Mapping[Any, str]


def choose(subject: Subject, asked: Request, known: Collection[str] = ()) -> Choice:
    """Which units of each group stay. What there are objections to is frozen in the coupling, and the rest tried again.

    ``known`` are names that globs may match beside those of the coupling.

    Raises:
        ValueError: nothing can leave, or not as much as asked.
    """
    coupling = subject.coupling
    check_globs(names_of(coupling) | set(known), asked.globs)
    minimum: dict[Axis, int] = {}  # fewer would turn a comparison in the code
    refused: dict[Any, str] = {}
    groups = groups_in_scope(coupling, asked)
    scores = None if asked.sparsity is None else scores_of(subject, groups, asked)
    while True:
        kept = _dead(subject, groups) if scores is None else _ranked(subject, groups, asked, scores, minimum)
        if turned := coupling.contradicted(_counts(kept)):
            minimum |= {group.axis: int(kept[group.axis].sum()) + 1 for group in turned if group.axis in kept}
            whole = [group for group in turned if minimum.get(group.axis, group.size) >= group.size]
            coupling.freeze(turned if scores is None else whole, "a comparison in the code would come out otherwise")
        else:
            wrong, why = subject.objections(groups, kept)
            if not wrong:
                break
            refused |= {role_of(coupling, group): why for group in wrong}
            coupling.freeze(wrong, why)
        groups = groups_in_scope(coupling, asked)
    fields = {} if subject.configured is None else subject.configured.fields(_counts(kept)) or {}
    return Choice(kept, plan_of(subject.model, coupling, kept), fields, _left(subject, kept, asked.target), refused)


def _counts(kept: Kept) -> dict[Axis, int]:
    return {axis: int(mask.sum()) for axis, mask in kept.items()}


def _left(subject: Subject, kept: Kept, target: str) -> float:
    if target == "units":
        return sum(_counts(kept).values()) / sum(axis.size for axis in kept)
    cost = cost_of(subject.model, subject.coupling, subject.inputs[0], target)
    whole = cost({})
    return cost(_counts(kept)) / whole if whole else 1.0


def _ranked(
    subject: Subject,
    groups: Sequence[Group],
    asked: Request,
    every: Mapping[Axis, Tensor],
    minimum: Mapping[Axis, int],
) -> dict[Axis, npt.NDArray[np.bool_]]:
    """The best units of each group, as few as leave what was asked of the target."""
    target, sparsity = asked.target, asked.sparsity
    assert sparsity is not None  # otherwise what is zero leaves
    scores = {group.name: every[group.axis] for group in groups}
    tied = [Tied(each, asked.round_to, minimum) for each in by_tie(groups)]
    outer = _outer(subject.coupling, groups) if asked.allocate is None and target != "units" else set()
    whole = {group.name for group in groups if group.tied in outer}

    def counts_at(share: float) -> dict[Axis, int]:
        ranked = {name: each for name, each in scores.items() if name not in whole}
        masks = make_masks(ranked, share, criterion=lambda weight: weight, allocate=asked.allocate or uniform)
        counts = {group.axis: int(masks[group.name].sum()) if group.name in masks else group.size for group in groups}
        found: dict[Axis, int] = {}
        for each in tied:
            mean = each.mean(counts)
            multiple = round(mean / each.step) if target == "units" else math.ceil(round(mean) / each.step)
            found |= each.counts(multiple * each.step)
        return found if subject.is_possible(found) else _made_possible(found, tied, subject.is_possible)

    if target == "units":
        counts = counts_at(sparsity)
    else:
        cost = cost_of(subject.model, subject.coupling, subject.inputs[0], target)
        if asked.allocate is by_cost and target != "latency":
            prices = prices_of(cost, tied)
            scores = {group.name: scores[group.name] / prices[group.axis] for group in groups}
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
            counts = _handed_back(counts, tied, lambda more: cost(more) <= goal and subject.is_possible(more))
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


def _dead(subject: Subject, groups: Sequence[Group]) -> dict[Axis, npt.NDArray[np.bool_]]:
    """Units that are zero in every member leave; of groups that keep the same share, as many as of the fullest."""
    weights, coupling = subject.weights, subject.coupling
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
