"""The choice of experts to remove: those of least score, equally many of each mixture.

Law: all sets of one size keep the same number, and at least as many as are chosen at a time.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.coupling import Coupling, Group, Scope
from secateur.kinds import Experts
from secateur.models import NUMBERS, DenseOutputs, InMemory, Routed, in_turn, last_products, routed_by, scores_by
from secateur.shrinking.costs import by_tie
from secateur.shrinking.gates import GateBudget, Gated, descended, gated, ranked_start
from secateur.shrinking.kinds.expert_repair import mend_mixtures
from secateur.shrinking.oracle import without_experts
from secateur.shrinking.request import PruningTarget, Request
from secateur.shrinking.select import Choice, Leaving, Left, check_globs, choose, groups_in_scope, names_of, scores_of
from secateur.support import Forward, on_rank_zero


@dataclass(frozen=True)
class Fewer:
    """Which experts stay.

    Attributes:
        choice: of all mixtures.
        counts: ``{router: (experts before, after)}``.
        unreached: ``{router: experts}`` that no token of the batches reached; nothing where no data was asked.
        gates: what gates came to, where they chose.
    """

    choice: Choice
    counts: dict[str, tuple[int, int]]
    unreached: dict[str, tuple[int, ...]]
    gates: Gated | None = None


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
    learn: Callable[[Sequence[Group], Mapping[str, Tensor], float], Gated] | None = None,
) -> Fewer:
    """Which experts stay, and how many of each mixture there were and are. ``routed`` is what data says of them, and
    ``learn`` learns gates that begin with these scores, by the share that leaves.

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
    share = number / every
    gates = learn(groups, scores, share) if learn is not None and share else None
    if gates is not None:
        scores = {name: torch.from_numpy(worths) for name, worths in gates.worths.items()}
    choice = choose(subject, replace(asked, sparsity=share), known, chosen=True, given=scores)
    stay = [group for group in groups if group.name in choice.kept]
    counts = {group.name: (group.size, int(choice.kept[group.name].sum())) for group in stay}
    unreached = {} if routed is None else {each.name: routed[each.name].unreached for each in stay}
    return Fewer(choice, counts, {name: each for name, each in unreached.items() if each}, gates)


def learnt_experts(
    subject: PruningTarget,
    groups: Sequence[Group],
    scores: Mapping[str, Tensor],
    share: float,
    model: nn.Module,
    batches: Sequence[Any],
    forward: Forward | None,
) -> Gated:
    """Gates of experts, which begin with the order of their scores. A gate is multiplied into what its expert gives,
    while tokens are sent where they are: so an expert that would leave has a gradient, too. What leaves is judged
    with routers that send no token to it.
    """
    coupling = subject.coupling
    budget = GateBudget.counting(by_tie(groups), share)
    named = {group.name: group for group in groups}
    host = InMemory(model, batches[:1], forward=forward)
    last = last_products(host, coupling, groups)
    places: dict[str, list[tuple[str, int, Tensor]]] = {}
    for group, names in last.items():
        for name in sorted(names):
            index = torch.from_numpy(coupling.indices(named[group], name, 0))
            places.setdefault(name, []).append((group, 0, index))

    def without(gates: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[None]:
        return without_experts(model, coupling, {name: each.numpy(force=True) > 0.5 for name, each in gates.items()})

    return descended(
        DenseOutputs(model, batches, forward, numbers=NUMBERS),
        budget,
        ranked_start(scores[group.name] for group in budget.groups),
        lambda gates: gated(model, places, gates),
        [*host.blocks.values()],
        without,
    )


def leave_experts(leaving: Leaving, experts: Experts) -> Left:
    """The experts of least score leave, by what they give on the batches, and those that stay are mended."""
    model, coupling, asked, batches = leaving.model, leaving.coupling, leaving.asked, leaving.batches
    subject = leaving.target(lambda scope: tied_mixtures(scope, asked))
    check_globs(names_of(coupling) | {*leaving.known}, asked.globs)
    routed = None
    if batches is not None and experts.rank != "criterion":
        groups = groups_in_scope(subject.scope, asked, chosen=True)
        routed = routed_by(InMemory(model, batches, forward=leaving.forward), coupling, groups)

    def learn(groups: Sequence[Group], scores: Mapping[str, Tensor], share: float) -> Gated:
        assert batches is not None  # `shrink` has looked
        its = subject, groups, scores, share, model, in_turn(batches), leaving.forward
        return on_rank_zero(lambda: learnt_experts(*its))

    fewer = choose_experts(subject, asked, leaving.known, routed, learn if asked.gates else None)
    whole = copy.deepcopy(model) if routed is not None and leaving.repair else None

    def mend(coupling: Coupling) -> Mapping[str, Any]:
        if whole is None or batches is None:
            return {}
        mixtures = [group for group in coupling.groups if group.name in fewer.counts]
        mended = mend_mixtures(model, whole, mixtures, batches, forward=leaving.forward, undo=leaving.undo)
        return {"mended": mended.shares, "unmended": mended.whole}

    facts = {"experts": fewer.counts, "unreached": fewer.unreached}
    return Left(fewer.choice.plan, facts, subject.configured, fewer.choice.fields, mend, fewer.gates)
