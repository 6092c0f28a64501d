"""Channels and branches that leave: `shrink` takes them out of a model, which stays an ordinary module, but smaller.

Law: the smaller model computes what the original computes with the removed entries zeroed, and a call that fails leaves
the model as it was.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.allocation import Allocation, check_sparsity, uniform
from secateur.axes import Axis
from secateur.branches import Branch
from secateur.coupling import Coupling, Group, find_coupling, run
from secateur.criteria import magnitude
from secateur.depth import choose_branches, influences
from secateur.masks import make_masks
from secateur.plans import Plan, carry_out, plan_of, plan_without
from secateur.progress import track
from secateur.proof import wrong_groups
from secateur.selection import keep_largest

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
    criterion: Callable[..., Tensor] = magnitude,
    allocate: Allocation = uniform,
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
        criterion: ``(weight, *, <evidence>) -> scores``, higher = keep; see `secateur.criteria`.
        allocate: how many units each group keeps; `uniform` (the same fraction of each) by default. Names are groups'.
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
            (`secateur.depth.influences`), or of the least mean score by the ``"criterion"``.
        optimizer: its state (moments, momentum) loses the same slices, so that training goes on.
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
    if target not in _TARGETS:
        raise ValueError(f"target must be one of {', '.join(map(repr, _TARGETS))}, not {target!r}.")
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
    coupling = find_coupling(model, example_inputs, modes=modes, more_inputs=more_inputs)
    inputs = [example_inputs, *more_inputs]
    every, known, work = coupling.branches, _names(coupling), coupling.multiply_adds({})
    plans: list[Plan] = []
    stayed: dict[str, str] = {}
    undo: Callable[[], None] | None = None
    rest = sparsity
    if branches:
        known |= {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
        _check_globs(known, include, keep)
        chosen, stayed = choose_branches(
            model,
            coupling,
            branches,
            inputs,
            score=influences if rank_branches == "influence" else _by_criterion(criterion, evidence or {}),
            include=_globs(include),
            keep=_globs(keep) or (),
            verify=verify,
        )
        share_left = _share_left(model, coupling, example_inputs, target)
        plans.append(plan_without(chosen))
        undo = carry_out(model, plans[0], optimizer)
    try:
        if branches:
            coupling = find_coupling(model, example_inputs, modes=modes, more_inputs=more_inputs)
            rest = 0.0 if sparsity is None else max(0.0, 1 - (1 - sparsity) / share_left(coupling))
        kept: dict[Axis, npt.NDArray[np.bool_]] = {}
        if rest or not branches:
            kept = _kept(
                model,
                coupling,
                inputs,
                rest,
                criterion=criterion,
                allocate=allocate,
                include=include,
                keep=keep,
                known=known,
                round_to=round_to,
                target=target,
                evidence=evidence,
                verify=verify,
            )
            plans.append(plan_of(model, coupling, kept))
            carry_out(model, plans[-1], optimizer)
    except BaseException:
        if undo is not None:
            undo()
        raise
    if report is not None:
        counts = {axis: int(mask.sum()) for axis, mask in kept.items()}
        report(Shrunk(every, stayed, coupling, kept, plans, (work, coupling.multiply_adds(counts))))
    return model_given


def _kept(
    model: nn.Module,
    coupling: Coupling,
    inputs: Sequence[Any],
    sparsity: float | None,
    *,
    criterion: Callable[..., Tensor],
    allocate: Allocation,
    include: str | Iterable[str] | None,
    keep: str | Iterable[str] | None,
    known: Collection[str],
    round_to: int | None,
    target: str,
    evidence: Mapping[str, Mapping[str, Tensor]] | None,
    verify: bool,
) -> dict[Axis, npt.NDArray[np.bool_]]:
    """What stays of the channels' axes, proved; changes nothing but what the coupling has frozen."""
    minimum: dict[Axis, int] = {}  # fewer would turn a comparison in the code
    while True:
        groups = _chosen(coupling, include, keep, known)
        if sparsity is None:
            kept = _dead(model, coupling, groups)
        else:
            kept = _ranked(
                model,
                coupling,
                groups,
                sparsity,
                criterion,
                allocate,
                evidence,
                example_inputs=inputs[0],
                minimum=minimum,
                round_to=round_to,
                target=target,
            )
        if turned := coupling.contradicted({axis: int(mask.sum()) for axis, mask in kept.items()}):
            minimum |= {group.axis: int(kept[group.axis].sum()) + 1 for group in turned if group.axis in kept}
            whole = [group for group in turned if minimum.get(group.axis, group.size) >= group.size]
            coupling.freeze(turned if sparsity is None else whole, "a comparison in the code would come out otherwise")
            continue
        wrong = wrong_groups(model, coupling, groups, kept, inputs) if verify else []
        if not wrong:
            return kept
        coupling.freeze(wrong, "the smaller model computed something else")


# ---- choosing -------------------------------------------------------------------------------------------------------

_TARGETS = ("params", "macs", "memory", "latency", "units")


def _globs(given: str | Iterable[str] | None) -> list[str] | None:
    return None if given is None else [given] if isinstance(given, str) else list(given)


def _names(coupling: Coupling) -> set[str]:
    """What a glob can match."""
    names = {name for group in coupling.groups for name, _ in group.members} | {name for name, _ in coupling.frozen}
    return names | {group.name for group in coupling.groups}


def _check_globs(known: Collection[str], *given: str | Iterable[str] | None) -> None:
    for glob in (each for one in given for each in _globs(one) or ()):
        if not any(fnmatchcase(name, glob) for name in known):
            raise ValueError(f"{glob!r} matches no tensor of the model.")


def _chosen(
    coupling: Coupling,
    include: str | Iterable[str] | None,
    keep: str | Iterable[str] | None,
    known: Collection[str],
) -> list[Group]:
    _check_globs(known, include, keep)
    included, whole = _globs(include), _globs(keep) or []

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
    criterion: Callable[..., Tensor],
    allocate: Allocation,
    evidence: Mapping[str, Mapping[str, Tensor]] | None,
    *,
    example_inputs: Any,
    minimum: Mapping[Axis, int],
    round_to: int | None,
    target: str,
) -> dict[Axis, npt.NDArray[np.bool_]]:
    """The best units of each group, as few as leave ``sparsity`` of the target."""
    every = _scores(model, coupling, groups, criterion, evidence)
    scores = {group.name: each for group, each in zip(groups, every, strict=True)}

    def counts_at(share: float) -> dict[Axis, int]:
        masks = make_masks(scores, share, criterion=lambda weight: weight, allocate=allocate)
        counts = [int(masks[group.name].sum()) for group in groups]
        tied: dict[int, list[int]] = {}
        for group, count in zip(groups, counts, strict=True):
            tied.setdefault(group.tied, []).append(count)
        found: dict[Axis, int] = {}
        for group in groups:
            equal = tied[group.tied]
            step = _step(group, round_to)
            mean = sum(equal) / len(equal)
            multiple = round(mean / step) if target == "units" else math.ceil(round(mean) / step)
            found[group.axis] = min(max(multiple * step, step, minimum.get(group.axis, 1)), group.size)
        return found

    if target == "units":
        counts = counts_at(sparsity)
    else:
        cost = _cost_of(model, coupling, example_inputs, target)
        goal = (1 - sparsity) * cost({})
        low, high = 0.0, 1.0
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
            counts = _handed_back(counts, groups, lambda more: cost(more) <= goal, round_to)
    kept = {}
    for group in groups:
        mask = keep_largest(scores[group.name].reshape(1, -1), counts[group.axis])
        kept[group.axis] = mask.reshape(-1).numpy()
    return kept


def _step(group: Group, round_to: int | None) -> int:
    return (16 if group.size >= 64 else 1) if round_to is None else round_to


def _handed_back(
    counts: dict[Axis, int],
    groups: Sequence[Group],
    affordable: Callable[[dict[Axis, int]], bool],
    round_to: int | None,
) -> dict[Axis, int]:
    """The counts, and as many more as the goal allows: one share for all groups is rarely exact.

    Groups that keep equally many of equally many stay so, as the layers of a transformer.
    """
    alike: dict[tuple[int, int], list[Group]] = {}
    for group in groups:
        alike.setdefault((group.size, counts[group.axis]), []).append(group)
    # those come first that lost most by rounding
    for key in track(sorted(alike, key=lambda each: each[1] / each[0]), "handing back"):
        more = dict(counts)
        for group in alike[key]:
            more[group.axis] = min(counts[group.axis] + _step(group, round_to), group.size)
        if more != counts and affordable(more):
            counts = more
    return counts


def _cost_of(
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
        return _ratio_of_times(smaller, dense, example_inputs)

    return ratio


@torch.no_grad()
def _ratio_of_times(smaller: nn.Module, dense: nn.Module, example_inputs: Any) -> float:
    """The time of a forward pass over another's, in turn: the median of the ratios."""

    def seconds(module: nn.Module) -> float:
        begin = time.perf_counter()
        run(module, example_inputs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    seconds(smaller)
    seconds(dense)
    ratios: list[float] = []
    begin = time.perf_counter()
    while len(ratios) < 9 or (time.perf_counter() - begin < 0.3 and len(ratios) < 200):
        ratios.append(seconds(smaller) / seconds(dense))
    return float(np.median(ratios))


def _share_left(model: nn.Module, before: Coupling, example_inputs: Any, target: str) -> Callable[[Coupling], float]:
    """How much of the target is left of what the model has now, told later, when branches have left it."""
    if target == "units":
        return lambda _: 1.0  # a branch has none: the fraction is of those that stay
    if target == "latency":
        dense = copy.deepcopy(model).eval()
        return lambda _: _ratio_of_times(copy.deepcopy(model).eval(), dense, example_inputs)
    whole = _cost_of(model, before, example_inputs, target)({})
    return lambda after: _cost_of(model, after, example_inputs, target)({}) / whole if whole else 1.0


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


def _scores(
    model: nn.Module,
    coupling: Coupling,
    groups: Sequence[Group],
    criterion: Callable[..., Tensor],
    evidence: Mapping[str, Mapping[str, Tensor]] | None,
) -> list[Tensor]:
    """For each group the score of each of its units."""
    parameters = dict(model.named_parameters())
    found = []
    for group in track(groups, "scoring"):
        members = [(name, at) for name, at in group.members if name in parameters]
        matrices = [(name, at) for name, at in members if parameters[name].dim() > 1]
        units = np.zeros(group.size)
        for name, at in matrices or members:
            scores = criterion(parameters[name].detach(), **(evidence or {}).get(name, {}))
            others = [dim for dim in range(scores.dim()) if dim != at]
            along = scores.double().sum(others) if others else scores.double()
            index = coupling.indices(group, name, at)
            np.add.at(units, index[index >= 0], along.cpu().numpy()[index >= 0])
        if np.isnan(units).any():
            raise ValueError(f"a score of {group.name} is NaN; mend the weights first.")
        found.append(torch.from_numpy(units / (abs(units).mean() or 1.0)))
    return found


def _dead(model: nn.Module, coupling: Coupling, groups: Sequence[Group]) -> dict[Axis, npt.NDArray[np.bool_]]:
    """Units that are zero in every member leave; of groups that keep equally many, as many as of the fullest."""
    parameters = dict(model.named_parameters())
    alive: dict[Axis, npt.NDArray[np.bool_]] = {}
    for group in groups:
        lives = np.zeros(group.size, dtype=bool)
        for name, at in group.members:
            if name in parameters:
                entries = parameters[name].detach().ne(0)
                others = [dim for dim in range(entries.dim()) if dim != at]
                along = (entries.sum(others) if others else entries).cpu().numpy() > 0
                index = coupling.indices(group, name, at)
                np.logical_or.at(lives, index[index >= 0], along[index >= 0])
        lives[0] |= not lives.any()
        alive[group.axis] = lives
    most: dict[int, int] = {}
    for group in groups:
        most[group.tied] = max(most.get(group.tied, 0), int(alive[group.axis].sum()))
    for group in groups:
        dead = np.flatnonzero(~alive[group.axis])
        alive[group.axis][dead[: most[group.tied] - int(alive[group.axis].sum())]] = True
    return alive
