"""The choice of experts to remove: those of least score, equally many of each mixture.

Law: all sets of one size keep the same number, and at least as many as are chosen at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from secateur.coupling import Group, Scope
from secateur.shrinking.kinds.routing import Routed, scores_by
from secateur.shrinking.request import PruningTarget, Request
from secateur.shrinking.select import Choice, choose, groups_in_scope, scores_of


@dataclass(frozen=True)
class Fewer:
    """Which experts stay.

    Attributes:
        choice: of all mixtures.
        counts: ``{router: (experts before, after)}``.
        unreached: ``{router: experts}`` that no token of the batches reached; nothing where no data was asked.
    """

    choice: Choice
    counts: dict[str, tuple[int, int]]
    unreached: dict[str, tuple[int, ...]]


def tied_mixtures(scope: Scope, asked: Request) -> Scope:
    """The scope in which the groups of units that are chosen between and may leave keep the same number, if they are of
    one size."""
    sizes: dict[int, list[str]] = {}
    for group in groups_in_scope(scope, asked, chosen=True):
        sizes.setdefault(group.size, []).append(group.name)
    return scope.tied(sizes.values())


def ranked(
    subject: PruningTarget, groups: Sequence[Group], asked: Request, routed: Mapping[str, Routed] | None
) -> dict[str, Tensor]:
    """The scores of experts, higher = keep; weights are read only where the data leaves ties."""
    rank = asked.experts.rank or ("criterion" if routed is None else "reap")
    if routed is None or rank == "criterion":
        return scores_of(subject, groups, asked)
    unsettled = [
        group
        for group in groups
        if routed[group.name].unreached or len(np.unique(routed[group.name].scores(rank))) < group.size
    ]
    by_criterion = scores_of(subject, unsettled, asked) if unsettled else {}
    return {
        group.name: scores_by(
            rank,
            routed[group.name],
            by_criterion[group.name].numpy() if group.name in by_criterion else np.zeros(group.size),
            unreached_first=asked.experts.unreached_first,
        )
        for group in groups
    }


def choose_experts(
    subject: PruningTarget,
    asked: Request,
    known: Collection[str],
    routed: Mapping[str, Routed] | None = None,
) -> Fewer:
    """Which experts stay, and how many of each mixture there were and are. ``routed`` is what data says of them.

    Raises:
        ValueError: none can leave, or not as many as asked.
    """
    asked = replace(asked, target="units", round_to=1, allocate=None)
    subject = replace(subject, scope=tied_mixtures(subject.scope, asked))
    groups = groups_in_scope(subject.scope, asked, chosen=True)
    scores = ranked(subject, groups, asked, routed)
    every = sum(group.size for group in groups)
    remove = asked.experts.remove
    number = sum(min(remove, group.size - 1) for group in groups) if remove >= 1 else remove * every
    choice = choose(subject, replace(asked, sparsity=number / every), known, chosen=True, given=scores)
    stay = [group for group in groups if group.name in choice.kept]
    counts = {group.name: (group.size, int(choice.kept[group.name].sum())) for group in stay}
    unreached = {} if routed is None else {each.name: routed[each.name].unreached for each in stay}
    return Fewer(choice, counts, {name: each for name, each in unreached.items() if each})
