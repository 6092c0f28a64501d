"""How many units of each group stay, so that the requested share of the target leaves.

Law: no single step leads nearer to the request, so it is missed by at most half of the smallest step. Only where steps
are coarse the smaller of the two nearest models is taken. Groups that are tied keep the same share.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from secateur.coupling import UNUSED, Axis, Group
from secateur.pipeline import make_masks
from secateur.shrinking.amounts import Amount
from secateur.shrinking.costs import amount_of, by_cost, cost_of, prices_of
from secateur.shrinking.losses import Loss, even, late
from secateur.shrinking.request import Request
from secateur.shrinking.steps import Integers, Steps, path_by_loss, path_by_share
from secateur.shrinking.subject import Subject
from secateur.shrinking.ties import ROUNDED, Tied, by_tie
from secateur.support import printable, track

__all__ = ["Counted", "counted"]

_FINE = 0.01  # of the target: the smallest step of counts that are rounded unasked is worth no more
_COARSE = 0.05  # of the target: where the nearest is further off, the smaller model is taken
_REASONS, _NAMED = 2, 5  # of what stays whole, and of what takes no part, that an error says
_MEASURED = 8  # times a model is built to find out its time


@dataclass(frozen=True)
class Counted:
    """How many units stay of each group, ``{axis: count}``.

    Attributes:
        counts: those that were chosen.
        less, more: the nearest of which less leaves than was asked, and more; one of the two was chosen.
    """

    counts: dict[Axis, int]
    less: dict[Axis, int]
    more: dict[Axis, int]


def counted(
    subject: Subject,
    groups: Sequence[Group],
    asked: Request,
    *,
    scores: Mapping[Axis, Tensor] | None = None,
    minimum: Mapping[Axis, int] | None = None,
    loss: Loss | None = None,
) -> Counted:
    """The counts of least loss among those nearest to the request, for the groups that may leave.

    ``scores`` are needed by an allocation alone; ``minimum`` is the least count of a group.

    Raises:
        ValueError: more than half of a step is missing when nothing more can leave.
    """
    assert asked.sparsity is not None  # otherwise what is zero leaves
    tied = _rounded(subject, groups, asked, minimum or {})
    amount = amount_of(subject.model, subject.coupling, asked.target, tied)
    whole = amount([each.parts for each in tied])
    goal = (1 - asked.sparsity) * whole

    def counts(parts: Integers) -> dict[Axis, int]:
        return {
            axis: count for each, its in zip(tied, parts, strict=True) for axis, count in each.counts(int(its)).items()
        }

    possible = None if subject.configured is None else (lambda parts: subject.is_possible(counts(parts)))
    steps = Steps(tied, amount, goal, possible)
    if asked.allocate is None and asked.target != "latency" and possible is None:
        least = np.array([each.choices()[-1] for each in tied])  # looking for what is not there takes long
        if steps.missing(least) > steps.smallest(least) / 2:
            raise _unattainable(subject, asked, 1 - amount(least) / whole, chosen=all(each.chosen for each in groups))
    if asked.allocate is None:
        behind = late(subject.coupling, groups) if asked.target != "units" else {}
        path = path_by_loss(loss or even(amount, tied, behind), tied, amount)
        if asked.target == "latency":
            return _measured(
                subject, asked, lambda share: counts(steps.near(path.after(round(share * len(path.ties)))))
            )
    else:
        assert scores is not None
        parts_at = _allocation(groups, asked, scores, tied, amount)
        if asked.target == "latency":
            return _measured(
                subject, asked, lambda share: counts(steps.near(path_by_share(parts_at(share), tied).start))
            )
        if asked.target == "units":
            ideal = parts_at(asked.sparsity)
            steps.goal = amount(ideal)  # it has said how many: only what rounding adds is evened out
        else:
            ideal = _where_met(parts_at, subject, asked, amount, goal, steps)
        path = path_by_share(ideal, tied)
    found = steps.reached(path)
    less, more = steps.beside(found)
    missing = steps.missing(found)
    if missing > 0 and more is found and missing > steps.smallest(found) / 2:
        raise _unattainable(subject, asked, 1 - amount(found) / whole, chosen=all(group.chosen for group in groups))
    if found is less and missing > _COARSE * whole:
        found = more
    return Counted(counts(found), counts(less), counts(more))


def _rounded(subject: Subject, groups: Sequence[Group], asked: Request, minimum: Mapping[Axis, int]) -> list[Tied]:
    """The ties. A multiple that nobody asked for is halved until the smallest step is hardly seen in what leaves."""
    rounded = ROUNDED
    while True:
        tied = [Tied(each, asked.round_to, minimum, rounded) for each in by_tie(groups)]
        if asked.round_to is not None or rounded == 1:
            return tied
        amount = amount_of(subject.model, subject.coupling, asked.target, tied)
        whole = [each.parts for each in tied]
        steps = (-amount.changes(whole, at, [max(0, each.parts - each.step)])[0] for at, each in enumerate(tied))
        if min((step for step in steps if step > 0), default=0.0) <= _FINE * amount(whole):
            return tied
        rounded //= 2


def _allocation(
    groups: Sequence[Group], asked: Request, scores: Mapping[Axis, Tensor], tied: Sequence[Tied], amount: Amount
) -> Callable[[float], list[float]]:
    """How many parts an allocation gives each tie when such a share leaves."""
    assert asked.allocate is not None
    allocate = asked.allocate
    ranked = {group.name: scores[group.axis] for group in groups}
    if allocate is by_cost and asked.target not in ("latency", "units"):
        prices = prices_of(amount, tied)
        ranked = {group.name: scores[group.axis] / prices[group.axis] for group in groups}

    def parts_at(share: float) -> list[float]:
        masks = make_masks(ranked, share, criterion=lambda weight: weight, allocate=allocate)
        counts = {group.axis: int(masks[group.name].sum()) for group in groups}
        return [max(each.mean(counts), int(each.choices()[-1])) for each in tied]

    return parts_at


def _where_met(
    parts_at: Callable[[float], list[float]],
    subject: Subject,
    asked: Request,
    amount: Amount,
    goal: float,
    steps: Steps,
) -> list[float]:
    """How many parts the allocation gives each tie at the share at which the request is met."""
    most = parts_at(1.0)
    whole = steps.amount(steps.whole)
    if amount(most) - goal > max(steps.smallest(steps.whole) / 2, 1e-9 * whole):
        raise _unattainable(subject, asked, 1 - amount(most) / whole)
    low, high = 0.0, 1.0
    for _ in track(range(24), "looking for the counts"):
        middle = (low + high) / 2
        low, high = (middle, high) if amount(parts_at(middle)) > goal else (low, middle)
    return parts_at(high)


def _measured(subject: Subject, asked: Request, counts_at: Callable[[float], dict[Axis, int]]) -> Counted:
    """The largest counts whose measured time is as short as requested."""
    assert asked.sparsity is not None
    time = cost_of(subject.model, subject.coupling, subject.inputs[0], asked.target)
    whole, shortest = time({}), time(counts_at(1.0))
    if shortest > (1 - asked.sparsity) * whole:
        raise _unattainable(subject, asked, max(0.0, 1 - shortest / whole))
    low, high = 0.0, 1.0
    for _ in track(range(_MEASURED), "looking for the counts"):
        middle = (low + high) / 2
        low, high = (middle, high) if time(counts_at(middle)) > (1 - asked.sparsity) * whole else (low, middle)
    found = counts_at(high)
    return Counted(found, found, found)


def _unattainable(subject: Subject, asked: Request, most: float, *, chosen: bool = False) -> ValueError:
    assert asked.sparsity is not None
    attainable = math.floor(1e4 * most + 1e-6) / 1e4  # rounded down: the share that the message names is possible
    what = f"at most {attainable:.2%} of the {'experts' if chosen else asked.target} can leave"
    why = f"{'as many stay as are chosen at a time, and ' if chosen else ''}the rest is frozen or kept"
    return ValueError(f"{what}, not {asked.sparsity:.1%}: {why}.{'' if chosen else _whole(subject)}")


def _whole(subject: Subject) -> str:
    """Why most parameters stay whole: first what the example does not run, then the reasons that freeze most."""
    sizes = {name: parameter.numel() for name, parameter in subject.model.named_parameters()}
    entries, frozen = sum(sizes.values()), subject.coupling.frozen
    idle = [name for name in sizes if frozen.get((name, 0)) == UNUSED]
    said = ""
    if share := sum(sizes[name] for name in idle) / entries:
        said = f" {share:.1%} of all parameters take no part in the forward pass: {_modules(idle, sizes)}."
    weights = Counter[str]()
    for (name, _), reason in frozen.items():
        if name not in idle:
            weights[reason] += sizes.get(name, 0)
    most = [reason for reason, count in weights.most_common(_REASONS) if count > _COARSE * entries]
    if most:
        first = {reason: next(name for (name, _), why in frozen.items() if why == reason) for reason in most}
        said += f" Most of what is frozen: {', '.join(f'{first[each]} ({printable(each)})' for each in most)}."
    return said


def _modules(names: Sequence[str], every: Collection[str]) -> str:
    """The outermost modules all of whose parameters are among the names; of many the first.

    >>> _modules(["a.0.weight", "a.1.weight", "b.weight"], ["a.0.weight", "a.1.weight", "b.weight", "b.bias"])
    'a, b.weight'
    """
    others = {path for name in {*every} - {*names} for path in _paths(name)}
    outer = list(dict.fromkeys(next(path for path in _paths(name) if path not in others) for name in names))
    return ", ".join(outer[:_NAMED]) + (f" and {len(outer) - _NAMED} more" if len(outer) > _NAMED else "")


def _paths(name: str) -> list[str]:
    """The modules that a parameter is in, the outermost first, and itself."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
