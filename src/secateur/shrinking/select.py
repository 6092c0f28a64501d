"""Which units of each group stay: groups in scope, their roles, the score of a unit, and the choice."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.coupling import OUTPUT, Coupling, Group, Kept, Scope, counts_kept, size_of
from secateur.selection import keep_largest
from secateur.shrinking.apply import Place
from secateur.shrinking.configuration import Configured, Described, has_configuration
from secateur.shrinking.costs import TiedGroups, by_tie, cost_of
from secateur.shrinking.counting import Counted, solve_counts
from secateur.shrinking.gates import Gated
from secateur.shrinking.measure import Measured
from secateur.shrinking.plan import Plan
from secateur.shrinking.request import PruningTarget, Request, pruning_target
from secateur.support import Forward, Undo, matched, track

# ---- Which groups play the same role: in two layers of a model, or in two models of other sizes.
#
# Law: a role is given by the names of members without their numbers, and by where the units lie in them.


def tie_roles(scope: Scope) -> Scope:
    """Groups of the same role keep equally many: same tensors but for the numbers in their names, same places in them.

    >>> import torch
    >>> from torch import nn
    >>> from secateur.coupling import find_coupling
    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(3)))
    >>> scope = tie_roles(Scope.of(find_coupling(model, torch.zeros(1, 4), modes=[False])))
    >>> [(group.size, group.tied) for group in scope.groups]
    [(8, 0), (4, 1), (8, 0), (4, 1), (8, 0)]
    """
    roles: dict[Any, list[str]] = {}
    coupling = scope.coupling
    for group in scope.groups:
        places = frozenset(coupling.indices(group, name, at).tobytes() for name, at in group.members)
        roles.setdefault((group.size, layer_signature(coupling, group), places), []).append(group.name)
    return scope.tied(roles.values())


def layer_signature(coupling: Coupling, group: Group) -> tuple[frozenset[tuple[str, int]], bool]:
    """A key that is equal for groups of the same role in two layers, or in two models of other sizes.

    The members without the numbers in their names, and whether the units lie side by side in the first: heads and the
    entries of heads may have the same members.
    """
    name, at = group.members[0]
    index = coupling.indices(group, name, at)
    index = index[index >= 0]
    members = frozenset((re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name), at) for name, at in group.members)
    return members, bool(index[0] != index[1])


# ---- Which groups of units may leave: globs over the names of groups and of all their tensors.
#
# Law: a group is left whole if any of its names says so; of groups that keep equally many all may leave, or none.


def names_of(coupling: Coupling) -> set[str]:
    """The names of a group that a glob can match: its own, and those of all its tensors."""
    names = {name for group in coupling.groups for name, _ in group.members} | {name for name, _ in coupling.frozen}
    return names | {group.name for group in coupling.groups}


def check_globs(known: Collection[str], globs: Iterable[str]) -> None:
    """Raises ValueError for a glob that matches none of the names."""
    matched(globs, known, "tensor or group")


def groups_in_scope(scope: Scope, asked: Request, *, chosen: bool = False) -> Sequence[Group]:
    """The groups that may lose units: with ``chosen`` those of experts, else all others.

    Raises:
        ValueError: there is none; the message says what is frozen and why.
    """
    left = scope.within(asked.include, asked.exclude, chosen=chosen).groups
    if not left and chosen:
        by_reason: dict[str, list[str]] = {}
        for name, at in scope.compared:
            by_reason.setdefault(scope.frozen[name, at], []).append(f"{name} dimension {at}")
        why = "".join(
            f"\n  {places[0]}{f' and {len(places) - 1} others' if len(places) > 1 else ''}: {reason}."
            for reason, places in [*by_reason.items()][:10]
        )
        if any(OUTPUT in reason for reason in by_reason):
            why += "\n  Where routers return their scores, give an example without, such as output_router_logits=False."
        raise ValueError(f"no experts of the model can leave: no router that chooses between units was found.{why}")
    if not left:
        reasons = dict.fromkeys(scope.frozen.values())
        why = "".join(f"\n  {name} dimension {at}: {reason}" for (name, at), reason in list(scope.frozen.items())[:10])
        kept = f"\n  include and exclude leave whole: {', '.join(group.name for group in scope.groups[:10])}"
        raise ValueError(f"nothing of the model can leave ({len(reasons)} reasons).{why}{kept if scope.groups else ''}")
    return left


# ---- The score of a unit: a criterion's scores, summed over all tensors that hold a part of it.
#
# Law: one weight is held at a time, and one that comes in blocks of rows has the score of the whole.

_PIECE = 1 << 17  # entries of a weight that are scored at a time: in cache


def scores_of(subject: PruningTarget, groups: Sequence[Group], asked: Request) -> dict[str, Tensor]:
    """For each group the score of each of its units; one weight is held at a time."""
    coupling, weights, criterion = subject.coupling, subject.weights, asked.criterion
    units = {group.name: np.zeros(group.size) for group in groups}
    places: dict[str, list[tuple[Group, int]]] = {}
    for group in groups:
        members = [(name, at) for name, at in group.members if name in weights]
        matrices = [(name, at) for name, at in members if len(coupling.dims(name)) > 1]
        for name, at in matrices or members:
            places.setdefault(name, []).append((group, at))
    for name in track([name for name in coupling.names() if name in places], "scoring"):
        shape = [size_of(dim) for dim in coupling.dims(name)]
        its = asked.evidence.get(name, {})
        if not getattr(criterion, "elementwise", False) or its:
            whole = criterion(weights[name].detach(), **its)
            along = _sums([whole], shape, [at for _, at in places[name]], lambda scores: scores)
        else:
            along = _sums(subject.blocks(name, rows_at_once(shape)), shape, [at for _, at in places[name]], criterion)
        for group, at in places[name]:
            for index in coupling.occurrences(group, name, at):
                np.add.at(units[group.name], index[index >= 0], along[at][index >= 0])
    for group in groups:
        if np.isnan(units[group.name]).any():
            raise ValueError(f"a score of {group.name} is NaN; correct the weights or the criterion first.")
    return {name: torch.from_numpy(each / (abs(each).mean() or 1.0)) for name, each in units.items()}


def rows_at_once(shape: Sequence[int]) -> int:
    """How many rows of a weight are scored at a time."""
    return max(1, _PIECE // max(1, math.prod(shape[1:])))


def _sums(
    blocks: Iterable[Tensor], shape: Sequence[int], dims: Sequence[int], criterion: Callable[[Tensor], Tensor]
) -> dict[int, npt.NDArray[np.float64]]:
    """The sums of a weight's scores over all dimensions but one, for each of ``dims``, in float64.

    The weight comes as one or more blocks of its rows; all but the last have a multiple of `rows_at_once`.
    """
    found = {at: torch.zeros(shape[at], dtype=torch.float64, device="cpu") for at in dims}
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


# ---- The loop of every kind of what may leave: propose, ask what is against it, propose again of less.
#
# Law: what may leave is a value that is never changed; what is against a proposal gives the next, smaller one.

Free = TypeVar("Free")
Name = TypeVar("Name")
Proposed = TypeVar("Proposed")
CONTRADICTED = "a comparison in the code would change its result"


def select(
    free: Free, propose: Callable[[Free], Proposed], without_wrong: Callable[[Free, Proposed], Free | None]
) -> tuple[Free, Proposed]:
    """The first proposal that nothing is against, and of what it was made.

    Args:
        free: what may leave.
        propose: what of it is to leave; ValueError where that is not enough.
        without_wrong: what may leave without what is wrong in a proposal; None where nothing is.

    >>> select({3, 5, 8}, max, lambda free, proposed: free - {proposed} if proposed % 2 == 0 else None)
    ({3, 5}, 5)
    """
    while (less := without_wrong(free, proposed := propose(free))) is not None:
        free = less
    return free, proposed


def least(
    costs: Callable[[Sequence[Name], Sequence[Name]], Mapping[Name | None, float]],
    leaving: Callable[[Sequence[Name]], Mapping[Name, int]],
    target: int,
    *,
    at_once: int = 1,
) -> tuple[list[Name], float]:
    """What is taken out, one after the other, so that the outputs move little, and how far they move then. Fewer than
    the target where there is no more.

    Next leaves what adds the least for each that leaves with it. A cost that was measured with fewer gone counts as a
    lower bound, so that few are measured again.

    Args:
        costs: ``(gone, more)``: how far the outputs move without those that are gone, under None, and without each one
            more.
        leaving: of those that may leave beside what is gone, how many leave with each.
        target: how many leave at most.
        at_once: how many are measured in one go, when not all are.

    >>> price = {"a": 3.0, "b": 1.0, "c": 2.0}
    >>> def costs(gone, more):
    ...     base = sum(price[each] for each in gone)
    ...     return {None: base} | {each: base + price[each] for each in more}
    >>> least(costs, lambda gone: {each: 1 for each in price if each not in gone}, 2)
    (['b', 'c'], 3.0)
    """
    gone: list[Name] = []
    lost, adds, fresh = 0.0, dict[Name, float](), dict[Name, int]()
    for _ in track(range(target), "choosing what leaves"):
        sizes = leaving(gone)
        if not sizes:
            break
        known = {each: adds.get(each, -math.inf) for each in sizes}
        while fresh.get(best := min(known, key=known.__getitem__)) != len(gone):
            stale = sorted((each for each in known if fresh.get(each) != len(gone)), key=known.__getitem__)
            found = costs(gone, stale[:at_once] if gone else stale)
            lost = found[None]
            for each in stale:
                if each in found:
                    more = found[each]
                    known[each] = (more - lost) / sizes[each] if math.isfinite(more) else math.inf
                    fresh[each] = len(gone)
        adds |= known
        gone.append(best)
        lost += known[best] * sizes[best]
    return gone, lost


def too_few(what: str, target: int, stayed: Mapping[str, str]) -> ValueError:
    """The error where not so many can leave, and why those that stay do."""
    why = "".join(f"\n  {name}: {words}" for name, words in list(stayed.items())[:10])
    return ValueError(f"{what} can leave, not {target}.{why}")


@dataclass(frozen=True)
class FreeUnits:
    """The groups that may lose units, and the fewest that each keeps, so that no comparison comes out otherwise."""

    scope: Scope
    minimum: Mapping[str, int] = field(default_factory=dict)

    def without_wrong(
        self, subject: PruningTarget, groups: Sequence[Group], kept: Kept, *, at_once: bool = False
    ) -> FreeUnits | None:
        """Without the groups that cannot keep these units, and more units of those that a comparison in the code is
        about, which are frozen where all would have to stay, or ``at_once``; None where nothing is wrong."""
        counts = counts_kept(kept)
        if turned := self.scope.contradicted(counts):
            least = {group.name: counts[group.name] + 1 for group in turned if group.name in counts}
            whole = [group.name for group in turned if at_once or least.get(group.name, group.size) >= group.size]
            return FreeUnits(self.scope.without(whole, CONTRADICTED), {**self.minimum, **least})
        wrong, why = subject.objections(groups, kept) if groups else ([], "")
        return FreeUnits(self.scope.without((each.name for each in wrong), why), self.minimum) if wrong else None


# ---- Which units of each group stay, so that the requested share of the target leaves.
#
# Law: groups that fail a check are frozen, and the rest is counted again; no count falls below a number that the
# model's code compares it with.


@dataclass(frozen=True)
class Choice:
    """The units that stay, after all checks passed.

    Attributes:
        kept: which units stay of the groups that may leave, ``{group: mask}``.
        scope: what may leave after the checks; what failed one is frozen in it.
        plan: the same as slices of tensors and numbers of modules.
        fields: what becomes of fields of the configuration, if it is to say what is left.
        left: how much of the target stays, as a share of what the subject has.
        beside: the same of the two nearest to what was asked that exist; this is one of them, the larger comes first.
        in_blocks: ``{parameter: note}`` of those whose Gram matrix was summed in blocks of inputs.
    """

    kept: dict[str, npt.NDArray[np.bool_]]
    scope: Scope
    plan: Plan
    fields: dict[Place, Any]
    left: float
    beside: tuple[float, float]
    in_blocks: Mapping[str, str] = field(default_factory=dict)


def choose(
    subject: PruningTarget,
    asked: Request,
    known: Collection[str] = (),
    measured: Measured | None = None,
    *,
    chosen: bool = False,
    given: Mapping[str, Tensor] | None = None,
) -> Choice:
    """Which units of each group stay. Groups that fail a check are frozen, and the rest is tried again.

    ``known`` are names that globs may match beside those of the coupling; ``measured`` is what data says of the units,
    by default their magnitude counts, and `even` losses; with ``chosen`` it is about units that are chosen between, and
    ``given`` are scores that some have already.

    Raises:
        ValueError: nothing can leave, or not as much as asked.
    """
    coupling = subject.coupling
    check_globs(names_of(coupling) | set(known), asked.globs)
    groups = groups_in_scope(subject.scope, asked, chosen=chosen)
    scores: Mapping[str, Tensor] | None = None
    if asked.sparsity is not None:
        known_scores = {**(measured.scores if measured else {}), **(given or {})}
        scores = scores_of(subject, [each for each in groups if each.name not in known_scores], asked) | known_scores
    loss = None if measured is None else measured.loss

    def propose(free: FreeUnits) -> tuple[Sequence[Group], dict[str, npt.NDArray[np.bool_]], Counted]:
        groups = groups_in_scope(free.scope, asked, chosen=chosen)
        if scores is None:
            kept = _dead(subject, groups)
            return groups, kept, Counted(*(3 * [counts_kept(kept)]))
        now = replace(subject, scope=free.scope)
        found = solve_counts(now, groups, asked, scores=scores, minimum=free.minimum, loss=loss)
        return groups, largest(scores, found.counts), found

    free, (groups, kept, counted) = select(
        FreeUnits(subject.scope, {group.name: coupling.least(group) for group in groups} if chosen else {}),
        propose,
        lambda free, proposed: free.without_wrong(subject, *proposed[:2], at_once=scores is None),
    )
    return choice_of(replace(subject, scope=free.scope), groups, kept, asked, counted)


def choice_of(
    subject: PruningTarget, groups: Sequence[Group], kept: Kept, asked: Request, counted: Counted | None = None
) -> Choice:
    """What it comes to that these groups keep these units."""
    counts = counts_kept(kept)
    beside = (counts, counts) if counted is None else (counted.less, counted.more)
    left = _left(subject, groups, counts, beside, asked)
    return Choice(dict(kept), subject.scope, subject.plan(kept), subject.fields(kept), *left)


def largest(scores: Mapping[str, Tensor], counts: Mapping[str, int]) -> dict[str, npt.NDArray[np.bool_]]:
    """So many units of each group, those of the highest scores."""
    return {name: keep_largest(scores[name].reshape(1, -1), count)[0].numpy() for name, count in counts.items()}


def _left(
    subject: PruningTarget,
    groups: Sequence[Group],
    counts: Mapping[str, int],
    beside: Sequence[Mapping[str, int]],
    asked: Request,
) -> tuple[float, tuple[float, float]]:
    """The share of the target that stays of a subject, and with the counts beside."""

    def units(counts: Mapping[str, int]) -> float:
        return sum(counts.values())

    cost: Callable[[Mapping[str, int]], float] = units
    if asked.target != "units":
        cost = cost_of(subject.model, subject.coupling, subject.inputs[0], asked.target, asked.runtime)
    whole = cost({group.name: group.size for group in groups})
    if not whole:
        return 1.0, (1.0, 1.0)
    left, less, more = (cost(each) / whole for each in (counts, *beside))
    return left, (less, more)


def _dead(subject: PruningTarget, groups: Sequence[Group]) -> dict[str, npt.NDArray[np.bool_]]:
    """Units that are zero in every member leave; groups that keep the same share follow the one with the most left."""
    weights, coupling = subject.weights, subject.coupling
    alive = {group.name: np.zeros(group.size, dtype=bool) for group in groups}
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
            np.logical_or.at(alive[group.name], index[index >= 0], along[index >= 0])
    for lives in alive.values():
        lives[0] |= not lives.any()
    for equal in by_tie(groups):
        tied = TiedGroups(equal, 1, {})
        counts = {group.name: int(alive[group.name].sum()) for group in equal}
        parts = max(-(-counts[each.name] * tied.parts // each.size) for each in equal)
        for name, count in tied.counts(-(-parts // tied.step) * tied.step).items():
            dead = np.flatnonzero(~alive[name])
            alive[name][dead[: count - counts[name]]] = True
    return alive


# ---- A kind of what leaves a module before its units: what its function in `kinds/` is given, and what it gives.
#
# Law: the function chooses, proves and repairs what is there; `shrink` takes out what it names, for every kind alike.


@dataclass(frozen=True)
class Leaving:
    """A module that something is to leave.

    Attributes:
        model, coupling: as they are now.
        inputs: the examples that were watched.
        asked: what is asked for, and what of it is still to leave.
        known: names that globs may match beside those of the coupling.
        batches, forward: the data, if there is some, and how it is run.
        repair: whether what stays may move.
        undo: takes back what moves.
    """

    model: nn.Module
    coupling: Coupling
    inputs: Sequence[Any]
    asked: Request
    known: Collection[str]
    batches: Sequence[Any] | None
    forward: Forward | None
    repair: bool
    undo: Undo

    def target(self, tied: Callable[[Scope], Scope] = lambda scope: scope) -> PruningTarget:
        """Its groups, as far as a configuration can say it where that is asked; ``tied`` ties more of them."""
        scope, configured = Scope.of(self.coupling), None
        if self.asked.uniform and has_configuration(self.model):
            configured = Configured(self.model, scope, heads=self.asked.rotate)
            scope = configured.scope
        elif self.asked.uniform:
            scope = tie_roles(scope)
        proved_on = self.model if self.asked.verify else None
        return pruning_target(self.model, tied(scope), self.inputs, configured=configured, proved_on=proved_on)


@dataclass(frozen=True)
class Left:
    """What leaves a module.

    Attributes:
        plan: what is taken out.
        facts: fields of `Shrunk` on it.
        configured, fields: what the module's configuration becomes.
        mend: repairs the smaller model, of which it is given the coupling; more of the facts.
        gates: what gates came to, where they chose.
    """

    plan: Plan
    facts: Mapping[str, Any]
    configured: Described | None = None
    fields: Mapping[Place, Any] = field(default_factory=dict)
    mend: Callable[[Coupling], Mapping[str, Any]] = lambda _: {}
    gates: Gated | None = None
