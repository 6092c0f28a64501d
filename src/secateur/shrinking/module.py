"""Channels that leave: `shrink` takes coupled slices out of a model, which stays an ordinary module, but smaller.

Law: the smaller model computes what the original computes with the removed entries zeroed, and a call that fails leaves
the model as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur import allocation, criteria
from secateur.allocation import Allocation, check_sparsity
from secateur.coupling import Axis, Branch, Coupling, Group, Kept, find_coupling
from secateur.criteria import magnitude
from secateur.shrinking.branches import choose_branches, influences
from secateur.shrinking.configuration import Configured
from secateur.shrinking.costs import TARGETS, cost_of, ratio_of_times
from secateur.shrinking.counts import choose
from secateur.shrinking.plan import Plan, carry_out, plan_of, plan_without
from secateur.shrinking.proof import wrong_groups
from secateur.shrinking.roles import tie_roles
from secateur.shrinking.scope import check_globs, globs_of, names_of
from secateur.support import track

__all__ = ["Shrunk", "shrink"]


@dataclass(frozen=True)
class Shrunk:
    """What a call of `shrink` did.

    Attributes:
        branches: the residual branches that the model had.
        stayed: ``{name: why}`` of branches that were not to leave, or could not.
        coupling: the groups of channels of the model without the branches that left, and what is frozen, also by the
            proof.
        kept: which units stay, of the groups that lost some.
        plans: what left, in order: branches, then channels.
        multiply_adds: those of the example before and after, as far as they are contractions.
    """

    branches: Sequence[Branch]
    stayed: Mapping[str, str]
    coupling: Coupling
    kept: Mapping[Axis, npt.NDArray[np.bool_]]
    plans: Sequence[Plan]
    multiply_adds: tuple[int, int]


def shrink(
    model: nn.Module,
    example_inputs: Any,
    sparsity: float | None = None,
    *,
    criterion: str | Callable[..., Tensor] = magnitude,
    allocate: str | Allocation | None = None,
    include: str | Iterable[str] | None = None,
    keep: str | Iterable[str] | None = None,
    round_to: int | None = None,
    target: str = "params",
    evidence: Mapping[str, Mapping[str, Tensor]] | None = None,
    modes: Iterable[bool] | None = None,
    more_inputs: Iterable[Any] = (),
    branches: float = 0.0,
    rank_branches: str = "influence",
    optimizer: torch.optim.Optimizer | None = None,
    uniform: bool = False,
    verify: bool = True,
    report: Callable[[Shrunk], None] | None = None,
) -> nn.Module:
    """Take whole channels, heads and hidden units out of a model, in place; returns the same module, smaller.

    Which slices live and die together is found by watching a forward pass (`find_coupling`); the outputs of the model
    keep their shapes. Each unit's score is the sum of the criterion's scores over all entries that would leave with it,
    divided by its group's mean; biases and normalizations count only where a group has no matrices.

    Args:
        model: any module; its parameters stay the same objects, with smaller data.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        sparsity: the fraction of ``target`` that leaves, in [0, 1). None: the units that are zero in all members leave,
            or, with ``branches``, nothing but these.
        criterion: ``(weight, *, <evidence>) -> scores``, higher = keep, or its name; see `secateur.criteria`.
        allocate: how many units each group keeps, or its word; it is given the groups by their names. By default the
            same fraction of each, but where units of two groups multiply, as heads and what is within a head, only the
            inner ones leave as long as that is enough. An allocation that is given, such as `uniform`, decides about
            all groups.
        include, keep: globs over the names of groups and of all their tensors: shrink only these; leave these whole.
        round_to: counts become multiples of this, rounded up (with "units" to the nearest). By default 16 for groups of
            64 units or more, since other counts run no faster; 1 leaves them as they are.
        target: what ``sparsity`` is a fraction of: ``"params"`` (entries of parameters), ``"macs"`` (multiply-adds of
            the example), ``"memory"`` (bytes of parameters, buffers and the results of all calls, as training holds
            them), ``"latency"`` (time of the example in evaluation mode, measured beside the model's own), ``"units"``.
        evidence: ``{name: {keyword: Tensor}}`` for a criterion that names some; see `secateur.evidence.collect`.
        modes, more_inputs: which passes to watch; see `find_coupling`.
        branches: the fraction of the residual branches, the f of ``x + f(x)``, that leave first, rounded up; one stays
            at least. Channels make up what is missing to ``sparsity``.
        rank_branches: which leave: those of the least ``"influence"`` on the examples, which have to be real ones then
            (`secateur.shrinking.branches.influences`), or of the least mean score by the ``"criterion"``.
        optimizer: its state (moments, momentum) loses the same slices, so that training goes on.
        uniform: keep what the model's configuration can say, in general as many units in each layer, and change it, so
            that ``save_pretrained`` and ``from_pretrained`` need nothing else; a model without a configuration keeps
            equally many units in groups that play the same role. Which units leave is still each layer's own choice.
        verify: compare, on a copy with random weights in float64, with the original whose removed entries are zero.
            What does not agree is frozen, and the rest tried again.
        report: called in the end with a `Shrunk`: what left, and what is frozen and why.

    Raises:
        ValueError: nothing can leave, or not as much as asked; the message says what is frozen and why.

    >>> model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> shrink(model, torch.zeros(1, 4), 0.5)
    Sequential(
      (0): Linear(in_features=4, out_features=7, bias=True)
      (1): ReLU()
      (2): Linear(in_features=7, out_features=3, bias=True)
    )
    """
    criterion = criteria.parse(criterion)
    allocate = None if allocate is None else allocation.parse(allocate)
    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(map(repr, TARGETS))}, not {target!r}.")
    if sparsity is not None:
        check_sparsity(sparsity)
    model_given, model = model, getattr(model, "_orig_mod", model)  # torch.compile's wrapper holds the model itself
    if not any(True for _ in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters, so nothing of it can leave.")
    if lazy := [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]:
        raise ValueError(f"{lazy[0]} has no shape yet; run the model once on an example before.")
    if meta := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise ValueError(f"{meta[0]} is on the meta device and has no values to rank; load the weights first.")
    if round_to is not None and round_to < 1:
        raise ValueError(f"round_to must be at least 1, not {round_to}.")
    if rank_branches not in ("influence", "criterion"):
        raise ValueError(f"rank_branches must be 'influence' or 'criterion', not {rank_branches!r}.")
    check_sparsity(branches)
    if branches and uniform:
        raise ValueError("no configuration says which branches left; leave out uniform, or branches.")
    coupling = find_coupling(model, example_inputs, modes=modes, more_inputs=more_inputs)
    inputs = [example_inputs, *more_inputs]
    every, known, work = coupling.branches, names_of(coupling), coupling.multiply_adds({})
    plans: list[Plan] = []
    stayed: dict[str, str] = {}
    undo: list[Callable[[], None]] = []
    rest = sparsity
    if branches:
        known |= {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
        check_globs(known, include, keep)
        chosen, stayed = choose_branches(
            model,
            coupling,
            branches,
            inputs,
            score=influences if rank_branches == "influence" else _by_criterion(criterion, evidence or {}),
            include=globs_of(include),
            keep=globs_of(keep) or (),
            verify=verify,
        )
        share_left = _share_left(model, coupling, example_inputs, target)
        plans.append(plan_without(chosen))
        undo.append(carry_out(model, plans[0], optimizer))
    kept: dict[Axis, npt.NDArray[np.bool_]] = {}
    configured: Configured | None = None
    try:
        if branches:
            coupling = find_coupling(model, example_inputs, modes=modes, more_inputs=more_inputs)
            rest = 0.0 if sparsity is None else max(0.0, 1 - (1 - sparsity) / share_left(coupling))
        if uniform and hasattr(getattr(model, "config", None), "to_dict"):
            configured = Configured(model, coupling)
        elif uniform:
            tie_roles(coupling)

        def objections(groups: Sequence[Group], kept: Kept) -> tuple[list[Group], str]:
            if verify and (wrong := wrong_groups(model, coupling, groups, kept, inputs)):
                return wrong, "the smaller model computed something else"
            if configured is None:
                return [], ""
            wrong = configured.unsaid(model, coupling, groups, kept, inputs if verify else None)
            return wrong, "a model built from the configuration is not the smaller one"

        if rest or not branches:
            kept = choose(
                model,
                coupling,
                rest,
                dict(model.named_parameters()),
                criterion=criterion,
                allocate=allocate,
                evidence=evidence,
                include=include,
                keep=keep,
                known=known,
                round_to=round_to,
                target=target,
                example_inputs=example_inputs,
                objections=objections,
                possible=None if configured is None else configured.is_possible,
            )
            counts = {axis: int(mask.sum()) for axis, mask in kept.items()}
            changes = None if configured is None else configured.fields(counts)
            plans.append(plan_of(model, coupling, kept))
            undo.append(carry_out(model, plans[-1], optimizer))
            if configured is not None and changes is not None:
                undo.append(configured.adopt(model, changes))
        if report is not None:
            counts = {axis: int(mask.sum()) for axis, mask in kept.items()}
            report(Shrunk(every, stayed, coupling, kept, plans, (work, coupling.multiply_adds(counts))))
    except BaseException:
        for each in reversed(undo):
            each()
        raise
    return model_given


# ---- before and after branches --------------------------------------------------------------------------------------


def _share_left(model: nn.Module, before: Coupling, example_inputs: Any, target: str) -> Callable[[Coupling], float]:
    """How much of the target is left of what the model has now, told later, when branches have left it."""
    if target == "units":
        return lambda _: 1.0  # a branch has none: the fraction is of those that stay
    if target == "latency":
        dense = copy.deepcopy(model).eval()
        return lambda _: ratio_of_times(copy.deepcopy(model).eval(), dense, example_inputs)
    whole = cost_of(model, before, example_inputs, target)({})
    return lambda after: cost_of(model, after, example_inputs, target)({}) / whole if whole else 1.0


def _by_criterion(
    criterion: Callable[..., Tensor], evidence: Mapping[str, Mapping[str, Tensor]]
) -> Callable[[nn.Module, Coupling, Sequence[Any]], dict[Branch, float]]:
    """Branches by the mean score of the entries of their matrices; of those that have none, of all."""

    def score(model: nn.Module, coupling: Coupling, _: Sequence[Any]) -> dict[Branch, float]:
        found = {}
        for branch in track(coupling.branches, "scoring branches"):
            members = {name: model.get_parameter(name).detach() for name in branch.parameters}
            chosen = {name: each for name, each in members.items() if each.dim() > 1} or members
            scores = [criterion(each, **evidence.get(name, {})).double().flatten() for name, each in chosen.items()]
            found[branch] = float(torch.cat(scores).mean())
        return found

    return score
