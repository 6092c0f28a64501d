"""Which units of each group stay, so that the requested share of the target leaves.

Law: groups that fail a check are frozen, and the rest is counted again; no count falls below a number that the model's
code compares it with.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from secateur.coupling import Axis, Group, Kept
from secateur.selection import keep_largest
from secateur.shrinking.costs import cost_of
from secateur.shrinking.counting import counted
from secateur.shrinking.fields import Place
from secateur.shrinking.measuring import Measured
from secateur.shrinking.plan import Plan, plan_of
from secateur.shrinking.request import Request
from secateur.shrinking.roles import role_of
from secateur.shrinking.scope import check_globs, groups_in_scope, names_of
from secateur.shrinking.scores import scores_of
from secateur.shrinking.subject import Subject
from secateur.shrinking.ties import Tied, by_tie
from secateur.support import track

__all__ = ["Choice", "choose"]


@dataclass(frozen=True)
class Choice:
    """The units that stay, after all checks passed.

    Attributes:
        kept: which units stay of the groups that may leave, ``{axis: mask}``.
        plan: the same as slices of tensors and numbers of modules.
        fields: what becomes of fields of the configuration, if it is to say what is left.
        left: how much of the target stays, as a share of what the subject has.
        beside: the same of the two nearest to what was asked that exist; this is one of them, the larger comes first.
        refused: why groups had to stay that were to leave, by what they do (`role_of`).
    """

    kept: dict[Axis, npt.NDArray[np.bool_]]
    plan: Plan
    fields: dict[Place, int]
    left: float
    beside: tuple[float, float]
    refused: Mapping[Any, str]


def choose(
    subject: Subject,
    asked: Request,
    known: Collection[str] = (),
    measured: Measured | None = None,
    *,
    chosen: bool = False,
    given: Mapping[Axis, Tensor] | None = None,
) -> Choice:
    """Which units of each group stay. Groups that fail a check are frozen in the coupling, and the rest is tried again.

    ``known`` are names that globs may match beside those of the coupling; ``measured`` is what data says of the units,
    by default their magnitude counts, and `even` losses; with ``chosen`` it is about units that are chosen between, and
    ``given`` are scores that some have already.

    Raises:
        ValueError: nothing can leave, or not as much as asked.
    """
    coupling = subject.coupling
    check_globs(names_of(coupling) | set(known), asked.globs)
    minimum: dict[Axis, int] = {}  # fewer would change the result of a comparison in the code
    refused: dict[Any, str] = {}
    groups = groups_in_scope(coupling, asked, chosen=chosen)
    if chosen:
        minimum = {group.axis: coupling.least(group) for group in groups}
    scores = None
    if asked.sparsity is not None:
        known_scores = {**(measured.scores if measured else {}), **(given or {})}
        scores = scores_of(subject, [each for each in groups if each.axis not in known_scores], asked) | known_scores
    while True:
        if scores is None:
            kept = _dead(subject, groups)
            beside = _counts(kept), _counts(kept)
        else:
            found = counted(
                subject, groups, asked, scores=scores, minimum=minimum, loss=None if measured is None else measured.loss
            )
            kept = {
                axis: keep_largest(scores[axis].reshape(1, -1), count)[0].numpy()
                for axis, count in found.counts.items()
            }
            beside = found.less, found.more
        if turned := coupling.contradicted(_counts(kept)):
            minimum |= {group.axis: int(kept[group.axis].sum()) + 1 for group in turned if group.axis in kept}
            whole = [group for group in turned if minimum.get(group.axis, group.size) >= group.size]
            coupling.freeze(turned if scores is None else whole, "a comparison in the code would change its result")
        else:
            wrong, why = subject.objections(groups, kept)
            if not wrong:
                break
            refused |= {role_of(coupling, group): why for group in wrong}
            coupling.freeze(wrong, why)
        groups = groups_in_scope(coupling, asked, chosen=chosen)
    fields = {} if subject.configured is None else subject.configured.fields(_counts(kept)) or {}
    return Choice(
        kept,
        plan_of(subject.model, coupling, kept),
        fields,
        *_left(subject, _counts(kept), beside, asked.target),
        refused,
    )


def _counts(kept: Kept) -> dict[Axis, int]:
    return {axis: int(mask.sum()) for axis, mask in kept.items()}


def _left(
    subject: Subject, counts: Mapping[Axis, int], beside: Sequence[Mapping[Axis, int]], target: str
) -> tuple[float, tuple[float, float]]:
    """The share of the target that stays of a subject, and with the counts beside."""

    def units(counts: Mapping[Axis, int]) -> float:
        return sum(counts.values())

    cost = units if target == "units" else cost_of(subject.model, subject.coupling, subject.inputs[0], target)
    whole = cost({axis: axis.size for axis in counts})
    if not whole:
        return 1.0, (1.0, 1.0)
    left, less, more = (cost(each) / whole for each in (counts, *beside))
    return left, (less, more)


def _dead(subject: Subject, groups: Sequence[Group]) -> dict[Axis, npt.NDArray[np.bool_]]:
    """Units that are zero in every member leave; groups that keep the same share follow the one with the most left."""
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
        parts = max(-(-counts[each.axis] * tied.parts // each.size) for each in equal)
        for axis, count in tied.counts(-(-parts // tied.step) * tied.step).items():
            dead = np.flatnonzero(~alive[axis])
            alive[axis][dead[: count - counts[axis]]] = True
    return alive
