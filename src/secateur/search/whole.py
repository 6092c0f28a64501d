"""Levels of what leaves in one piece: residual branches, and experts of a mixture.

Law: what is taken out is proved as `shrink` proves it; nothing is repaired here, and the error says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.coupling import Branch, Coupling, Group, SameDraws
from secateur.search.costs import TARGETS
from secateur.search.files import Kept, Stored, rising, tensor_of
from secateur.search.replaying import Replayed
from secateur.shrinking import (
    OutputCosts,
    Plan,
    Request,
    Subject,
    Tied,
    by_tie,
    carry_out,
    counts_at,
    groups_in_scope,
    may_leave,
    mixture_of,
    plan_of,
    plan_without,
    ranked,
    right_branches,
    routed_in_memory,
    running,
)
from secateur.support import Forward, device_of, mapped, moved, run_batch, tensors_in, track

__all__ = ["Whole", "branch_entries", "branches_that_leave", "expert_entries", "experts_that_leave"]

_BATCHES = 4  # that errors are measured on


@dataclass(frozen=True)
class Whole:
    """What the levels of a model are measured with: its batches, and what its outputs are of them."""

    model: nn.Module
    coupling: Coupling
    batches: Sequence[Any]
    forward: Forward | None

    def losses(self) -> Callable[[Plan], float]:
        """What the model's outputs lose without what a plan takes: their divergence, measured."""
        costs = OutputCosts(self.model, self.batches, self.forward)
        replayed = Replayed(self.model, costs.now)

        def loss(plan: Plan) -> float:
            touched = {*plan.tensors, *plan.modules, *(str(place[0]) for place, _, _ in plan.numbers)}
            with _without(self.model, plan):
                return replayed(touched)

        return loss


@contextlib.contextmanager
def _without(model: nn.Module, plan: Plan) -> Iterator[None]:
    undo = carry_out(model, plan, None)
    try:
        yield
    finally:
        undo()


# ---- branches -------------------------------------------------------------------------------------------------------


def branches_that_leave(subject: Subject, asked: Request, proof: Sequence[Any]) -> tuple[list[Branch], dict[str, str]]:
    """The residual branches that may leave, proved all at once, and ``{name: why}`` of the others."""
    coupling = subject.coupling
    names = {each: {each.name, *each.modules, *each.parameters} for each in coupling.branches}
    wanted = [each for each in coupling.branches if may_leave(names[each], asked.include, asked.exclude)]
    if not wanted or not asked.verify:
        return wanted, {}
    right, wrong = right_branches(subject.model, coupling, wanted, proof)
    return list(right.values()), {each.name: f"the model without it: {why}" for each, why in wrong.items()}


def branch_entries(whole: Whole, branches: Sequence[Branch]) -> Iterator[Stored]:
    """Each leaves whole: what it adds to its stream is lost, as a share of the stream behind it."""
    if not branches:
        return
    errors = _shares(whole, branches)
    loss = whole.losses()
    for branch in track(branches, "measuring branches"):
        plan = plan_without([branch])
        left = dict.fromkeys(TARGETS, 0.0)
        level = Kept(1.0, 0, errors[branch.name], loss(plan), left, (), plan.to_json())
        kept = {"kept.1.0": torch.zeros(1, dtype=torch.uint8)}
        yield Stored(branch.name, "branch", 1, (branch.name,), (1,), (), (level,), kept)


def _shares(whole: Whole, branches: Sequence[Branch]) -> dict[str, float]:
    """Of the squares of the stream behind each branch what it added."""
    terms, totals = (
        dict.fromkeys((each.name for each in branches), 0.0),
        dict.fromkeys((each.name for each in branches), 0.0),
    )
    in_pass = next((each for each in whole.coupling.passes if not each[1]), whole.coupling.passes[0])
    wanted: dict[int, list[Branch]] = {}
    for branch in branches:
        wanted.setdefault(branch.terms[in_pass].number, []).append(branch)

    def seen(at: int, sides: Sequence[Any]) -> Callable[[Tensor], None]:
        for branch in wanted.get(at, ()):
            term = sides[branch.terms[in_pass].position].detach()
            terms[branch.name] += float(term.double().square().sum())

        def then(total: Tensor) -> None:
            for branch in branches:
                if branch.terms[in_pass].final == at:
                    totals[branch.name] += float(total.detach().double().square().sum())

        return then

    with running(whole.model):
        for batch in whole.batches[:_BATCHES]:
            with SameDraws(seen=seen):
                run_batch(whole.model, moved(batch, device_of(whole.model)), whole.forward)
    return {name: terms[name] / totals[name] if totals[name] > 0 else float(terms[name] > 0) for name in terms}


# ---- experts --------------------------------------------------------------------------------------------------------


def experts_that_leave(subject: Subject, asked: Request, shares: Sequence[float]) -> tuple[list[Tied], dict[str, str]]:
    """Mixtures of which experts may leave, proved at the largest share that the router's choice allows."""
    coupling, stays = subject.coupling, dict[str, str]()
    if not any(group.chosen for group in coupling.groups):
        return [], stays
    minimum: dict[Any, int] = {}
    while True:
        try:
            groups = groups_in_scope(coupling, asked, chosen=True)
        except ValueError:
            return [], stays
        tied = [Tied(each, 1, minimum) for each in by_tie(groups)]
        tied = [each for each in tied if counts_at(each, shares)]
        counts = {axis: count for each in tied for axis, count in each.counts(counts_at(each, shares)[-1][1]).items()}
        turned = [group for group in coupling.contradicted(counts) if group.axis in counts]
        if turned:
            minimum |= {group.axis: counts[group.axis] + 1 for group in turned}
            why = "a comparison in the code would come out otherwise"
            wrong = [group for group in turned if minimum[group.axis] >= group.size]
        else:
            kept = {axis: np.arange(axis.size) < count for axis, count in counts.items()}
            chosen = [group for each in tied for group in each.groups]
            wrong, why = subject.objections(chosen, kept) if chosen else ([], "")
            smaller = {group.axis: counts[group.axis] + 1 for group in wrong if counts[group.axis] + 1 < group.size}
            minimum |= smaller  # a router chooses so many at a time
            wrong = [group for group in wrong if group.axis not in smaller]
            if not wrong and not smaller:
                return tied, stays
        coupling.freeze(wrong, why)
        stays |= {group.name: why for group in wrong}


def expert_entries(
    whole: Whole, subject: Subject, asked: Request, tied: Sequence[Tied], shares: Sequence[float]
) -> Iterator[Stored]:
    """Of each mixture those experts leave whose outputs, by their weight, are least (REAP, arXiv:2510.13999)."""
    if not tied:
        return
    groups = [group for each in tied for group in each.groups]
    routed = routed_in_memory(whole.model, whole.coupling, groups, whole.batches, whole.forward)
    scores = ranked(subject, groups, asked, routed)
    loss = whole.losses()
    for each in track(tied, "measuring experts"):
        given = _given(whole, each.groups)
        tensors: dict[str, Tensor] = {}
        found: list[tuple[float, int, Plan, float, float]] = []
        for number, (share, parts) in enumerate(counts_at(each, shares), 1):
            counts = each.counts(parts)
            kept = {}
            for at, group in enumerate(each.groups):
                order = scores[group.axis].argsort(descending=True, stable=True)[: counts[group.axis]].numpy()
                kept[group.axis] = np.zeros(group.size, dtype=bool)
                kept[group.axis][order] = True
                tensors[f"kept.{number}.{at}"] = tensor_of(kept[group.axis])
            plan = plan_of(whole.model, whole.coupling, kept)
            found.append((share, parts, plan, _error_without(whole, given, plan), loss(plan)))
        errors, losses = rising([error for *_, error, _ in found]), rising([lost for *_, lost in found])
        units = sum(group.size for group in each.groups)
        levels = tuple(
            Kept(
                share,
                parts * units // each.parts,
                error,
                lost,
                dict.fromkeys(TARGETS, float(parts)),
                (),
                plan.to_json(),
            )
            for (share, parts, plan, _, _), error, lost in zip(found, errors, losses, strict=True)
        )
        names = tuple(group.name for group in each.groups)
        sizes = tuple(group.size for group in each.groups)
        yield Stored(names[0], "experts", units, names, sizes, (), levels, tensors)


def _given(whole: Whole, groups: Iterable[Group]) -> list[tuple[nn.Module, Any, Tensor]]:
    """What the groups' mixtures were given, and gave."""
    found: list[tuple[nn.Module, Any, Tensor]] = []

    def see(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        held = mapped((args, kwargs), lambda tensor: tensor.detach().clone())
        found.append((module, held, next(tensors_in(out)).detach().clone()))

    with running(whole.model), contextlib.ExitStack() as stack:
        for group in groups:
            _, module = mixture_of(whole.model, group)
            stack.callback(module.register_forward_hook(see, with_kwargs=True).remove)
        for batch in whole.batches[:_BATCHES]:
            run_batch(whole.model, moved(batch, device_of(whole.model)), whole.forward)
    return found


def _error_without(whole: Whole, given: Sequence[tuple[nn.Module, Any, Tensor]], plan: Plan) -> float:
    lost = total = 0.0
    with running(whole.model), _without(whole.model, plan):
        for module, (args, kwargs), before in given:
            args, kwargs = mapped((args, kwargs), lambda tensor: tensor.clone())
            after = next(tensors_in(module(*args, **kwargs)))
            lost += float((after.double() - before.double()).square().sum())
            total += float(before.double().square().sum())
    return lost / total if total > 0 else float(lost > 0)
