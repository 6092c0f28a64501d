"""Which units stay: counts that meet a goal, and of each group the units that score best.

Law: groups that are tied keep the same share, what there are objections to is frozen, and no count goes below what the
code compares sizes with.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.allocation import Allocation, Counts, everywhere, uniform
from secateur.coupling import Axis, Coupling, Expression, Group, Kept, Product, leaves, resolved, size_of
from secateur.patterns import Pattern
from secateur.pipeline import make_masks
from secateur.selection import keep_largest
from secateur.shrinking.plan import carry_out, plan_of
from secateur.support import alternating, ratio, run_example, track

__all__ = [
    "TARGETS",
    "by_cost",
    "check_globs",
    "choose",
    "cost_of",
    "globs_of",
    "names_of",
    "ratio_of_times",
    "rows_at_once",
]

TARGETS = ("params", "macs", "memory", "latency", "units")

_TRIES = 64  # of counts that a configuration may allow
_PIECE = 1 << 17  # entries of a weight that are scored at a time: in cache


def by_cost(scores: Mapping[str, Tensor], sparsity: float, pattern: Pattern) -> Counts:
    """`everywhere`, of scores per cost: what leaves first gains most of the target for the score that it loses.

    An allocation for `secateur.shrink`, which divides each group's scores by what one of its units costs of the target
    before (parameters, multiply-adds, bytes); of "latency" and "units" all cost the same.

    >>> from secateur import shrink
    >>> layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=4), nn.ReLU(), nn.Conv2d(8, 2, 1)
    >>> model = nn.Sequential(*layers)
    >>> _ = shrink(model, torch.zeros(1, 1, 16, 16), 0.3, target="macs", allocate=by_cost)
    >>> model[0].out_channels < model[2].out_channels  # eight times the positions
    True
    """
    return everywhere(scores, sparsity, pattern)


_marked: Any = by_cost
_marked.divides_by_cost = True


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
    groups = _chosen(coupling, include, keep, known)
    scores = None if sparsity is None else _scores(weights, coupling, groups, criterion, evidence)
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
        groups = _chosen(coupling, include, keep, known)


def globs_of(given: str | Iterable[str] | None) -> list[str] | None:
    return None if given is None else [given] if isinstance(given, str) else list(given)


def names_of(coupling: Coupling) -> set[str]:
    """What a glob can match."""
    names = {name for group in coupling.groups for name, _ in group.members} | {name for name, _ in coupling.frozen}
    return names | {group.name for group in coupling.groups}


def check_globs(known: Collection[str], *given: str | Iterable[str] | None) -> None:
    for glob in (each for one in given for each in globs_of(one) or ()):
        if not any(fnmatchcase(name, glob) for name in known):
            raise ValueError(f"{glob!r} matches no tensor of the model.")


def _chosen(
    coupling: Coupling,
    include: str | Iterable[str] | None,
    keep: str | Iterable[str] | None,
    known: Collection[str],
) -> list[Group]:
    check_globs(known, include, keep)
    included, whole = globs_of(include), globs_of(keep) or []

    def about(group: Group, globs: Sequence[str]) -> bool:
        names = {group.name, *(name for name, _ in group.members)}
        return any(fnmatchcase(name, glob) for name in names for glob in globs)

    wanted = [group for group in coupling.groups if included is None or about(group, included)]
    left = [group for group in wanted if not about(group, whole)]
    # of groups that keep equally many, all leave together or none
    excluded = {group.tied for group in coupling.groups} - {group.tied for group in left}
    partly = {group.tied for group in coupling.groups if group not in left}
    left = [group for group in left if group.tied not in excluded | partly]
    if not left:
        reasons = dict.fromkeys(coupling.frozen.values())
        why = "".join(
            f"\n  {name} dimension {at}: {reason}" for (name, at), reason in list(coupling.frozen.items())[:10]
        )
        raise ValueError(f"nothing of the model can leave ({len(reasons)} reasons).{why}")
    return left


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
    tied = [_Tied(each, round_to, minimum) for each in _by_tie(groups)]
    outer = _outer(coupling, groups) if allocate is None and target != "units" else set()
    whole = {group.name for group in groups if group.tied in outer}
    if getattr(allocate, "divides_by_cost", False) and target not in ("units", "latency"):
        prices = _prices(cost_of(model, coupling, example_inputs, target), tied)
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


def _prices(cost: Callable[[Mapping[Axis, int]], float], tied: Sequence[_Tied]) -> dict[Axis, float]:
    """What a unit of each group costs, when all others are there; of tied groups, which leave together, in the mean."""
    found: dict[Axis, float] = {}
    for each in tied:
        fewer = each.counts(each.parts - each.step)
        units = sum(group.size - fewer[group.axis] for group in each.groups)
        price = (cost({}) - cost(fewer)) / units if units else 0.0
        found |= {group.axis: price or 1.0 for group in each.groups}
    return found


def _by_tie(groups: Iterable[Group]) -> list[list[Group]]:
    tied: dict[int, list[Group]] = {}
    for group in groups:
        tied.setdefault(group.tied, []).append(group)
    return list(tied.values())


class _Tied:
    """Groups that keep the same share: of a group of 36 and one of 3 together a number of thirds."""

    def __init__(self, groups: Sequence[Group], round_to: int | None, minimum: Mapping[Axis, int]) -> None:
        self.groups = groups
        self.parts = math.gcd(*(group.size for group in groups))
        self.step, self.least = 1, 1
        for group in groups:
            step = (16 if group.size >= 64 else 1) if round_to is None else round_to
            self.step = math.lcm(self.step, step // math.gcd(step, group.size // self.parts))
            self.least = max(self.least, -(-minimum.get(group.axis, 1) * self.parts // group.size))

    def mean(self, counts: Mapping[Axis, int]) -> float:
        """Of how many of the parts the groups keep."""
        return sum(counts[group.axis] * self.parts / group.size for group in self.groups) / len(self.groups)

    def counts(self, parts: int) -> dict[Axis, int]:
        """What each group keeps of so many parts, as far as it may."""
        parts = min(max(parts, self.step, self.least), self.parts)
        return {group.axis: group.size // self.parts * parts for group in self.groups}


def _made_possible(
    counts: dict[Axis, int], tied: Sequence[_Tied], possible: Callable[[Mapping[Axis, int]], bool]
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
    counts: dict[Axis, int], tied: Sequence[_Tied], affordable: Callable[[dict[Axis, int]], bool]
) -> dict[Axis, int]:
    """The counts, and as many more as the goal allows: one share for all groups is rarely exact.

    Groups that keep equally many of equally many stay so, as the layers of a transformer.
    """
    alike: dict[tuple[Any, ...], list[_Tied]] = {}
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


def cost_of(
    model: nn.Module, coupling: Coupling, example_inputs: Any, target: str
) -> Callable[[Mapping[Axis, int]], float]:
    """What the target is when so many stay of each axis."""
    if target == "params":
        names = [name for name, _ in model.named_parameters()]
        return lambda counts: sum(coupling.size(name, counts) for name in names)
    if target == "macs":
        return coupling.multiply_adds
    return coupling.memory if target == "memory" else _latency(model, coupling, example_inputs)


def _latency(model: nn.Module, coupling: Coupling, example_inputs: Any) -> Callable[[Mapping[Axis, int]], float]:
    """The time of a forward pass over the model's own, in turn: the median of the ratios."""
    dense = copy.deepcopy(model).eval()

    def ratio(counts: Mapping[Axis, int]) -> float:
        smaller = copy.deepcopy(dense)
        kept = {axis: np.arange(axis.size) < count for axis, count in counts.items()}
        carry_out(smaller, plan_of(smaller, coupling, kept), None)
        return ratio_of_times(smaller, dense, example_inputs)

    return ratio


@torch.no_grad()
def ratio_of_times(smaller: nn.Module, dense: nn.Module, example_inputs: Any) -> float:
    """The time of a forward pass over another's, in turn: the median of the ratios."""
    finish = torch.cuda.synchronize if torch.cuda.is_available() else None
    calls = [functools.partial(run_example, module, example_inputs) for module in (smaller, dense)]
    times = alternating(dict(enumerate(calls)), 9, seconds=0.3, finish=finish)
    return ratio(times[1], times[0])


def _scores(
    weights: Mapping[str, Tensor],
    coupling: Coupling,
    groups: Sequence[Group],
    criterion: Callable[..., Tensor],
    evidence: Mapping[str, Mapping[str, Tensor]] | None,
) -> dict[Axis, Tensor]:
    """For each group the score of each of its units; one weight is held at a time."""
    units = {group.axis: np.zeros(group.size) for group in groups}
    places: dict[str, list[tuple[Group, int]]] = {}
    for group in groups:
        members = [(name, at) for name, at in group.members if name in weights]
        matrices = [(name, at) for name, at in members if len(coupling.dims(name)) > 1]
        for name, at in matrices or members:
            places.setdefault(name, []).append((group, at))
    blocks: Callable[[str], Iterable[Tensor]] | None = getattr(weights, "blocks", None)
    for name in track([name for name in coupling.names() if name in places], "scoring"):
        shape = [size_of(dim) for dim in coupling.dims(name)]
        its = (evidence or {}).get(name, {})
        if not getattr(criterion, "elementwise", False) or its:
            whole = criterion(weights[name].detach(), **its)
            along = _sums([whole], shape, [at for _, at in places[name]], lambda scores: scores)
        else:
            read = [weights[name].detach()] if blocks is None else blocks(name)
            along = _sums(read, shape, [at for _, at in places[name]], criterion)
        for group, at in places[name]:
            index = coupling.indices(group, name, at)
            np.add.at(units[group.axis], index[index >= 0], along[at][index >= 0])
    for group in groups:
        if np.isnan(units[group.axis]).any():
            raise ValueError(f"a score of {group.name} is NaN; mend the weights first.")
    return {axis: torch.from_numpy(each / (abs(each).mean() or 1.0)) for axis, each in units.items()}


def rows_at_once(shape: Sequence[int]) -> int:
    """How many rows of a weight are scored at a time."""
    return max(1, _PIECE // max(1, math.prod(shape[1:])))


def _sums(
    blocks: Iterable[Tensor], shape: Sequence[int], dims: Sequence[int], criterion: Callable[[Tensor], Tensor]
) -> dict[int, npt.NDArray[np.float64]]:
    """The sums of a weight's scores over all dimensions but one, for each of ``dims``, in float64.

    The weight comes as one or more blocks of its rows; all but the last have a multiple of `rows_at_once`.
    """
    found = {at: torch.zeros(shape[at], dtype=torch.float64) for at in dims}
    rows, start = rows_at_once(shape), 0
    for block in blocks:
        for part in torch.split(block, rows):
            piece = criterion(part).double()
            for at, total in found.items():
                others = [dim for dim in range(piece.dim()) if dim != at]
                along = (piece.sum(others) if others else piece).cpu()
                if at == 0:
                    total[start : start + len(part)] = along
                else:
                    total += along
            start += len(part)
    return {at: total.numpy() for at, total in found.items()}


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
    for equal in _by_tie(groups):
        tied = _Tied(equal, 1, {})
        counts = {group.axis: int(alive[group.axis].sum()) for group in equal}
        for axis, count in tied.counts(max(-(-counts[each.axis] * tied.parts // each.size) for each in equal)).items():
            dead = np.flatnonzero(~alive[axis])
            alive[axis][dead[: count - counts[axis]]] = True
    return alive
