"""Channels that leave: `shrink` takes coupled slices out of a model, which stays an ordinary module, but smaller.

Law: the smaller model computes what the original computes with the removed entries zeroed, and a call that fails leaves
the model as it was.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.allocation import Allocation, check_sparsity, uniform
from secateur.axes import Axis, Expression, Product, leaves, resolved
from secateur.coupling import Coupling, Group, find_coupling, run
from secateur.criteria import magnitude
from secateur.masks import make_masks
from secateur.plans import carry_out, plan_of
from secateur.progress import track
from secateur.proof import wrong_groups
from secateur.selection import keep_largest

__all__ = ["shrink"]


def shrink(
    model: nn.Module,
    example_inputs: Any,
    sparsity: float | None = None,
    *,
    criterion: Callable[..., Tensor] = magnitude,
    allocate: Allocation | None = None,
    include: str | Iterable[str] | None = None,
    keep: str | Iterable[str] | None = None,
    round_to: int | None = None,
    target: str = "params",
    evidence: Mapping[str, Mapping[str, Tensor]] | None = None,
    modes: Iterable[bool] | None = None,
    more_inputs: Iterable[Any] = (),
    optimizer: torch.optim.Optimizer | None = None,
    verify: bool = True,
) -> nn.Module:
    """Take whole channels, heads and hidden units out of a model, in place; returns the same module, smaller.

    Which slices live and die together is found by watching a forward pass (`find_coupling`); the outputs of the model
    keep their shapes. Each unit's score is the sum of the criterion's scores over all entries that would leave with it,
    divided by its group's mean; biases and normalizations count only where a group has no matrices.

    Args:
        model: any module; its parameters stay the same objects, with smaller data.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        sparsity: the fraction of ``target`` that leaves, in [0, 1). None: the units that are zero in all members leave.
        criterion: ``(weight, *, <evidence>) -> scores``, higher = keep; see `secateur.criteria`.
        allocate: how many units each group keeps; names are groups'. By default the same fraction of each, but where
            units of two groups multiply, as heads and what is within a head, only the inner ones leave as long as that
            is enough. An allocation that is given, such as `uniform`, decides about all groups.
        include, keep: globs over the names of groups and of all their tensors: shrink only these; leave these whole.
        round_to: counts become multiples of this, rounded up (with "units" to the nearest). By default 16 for groups of
            64 units or more, since other counts run no faster; 1 leaves them as they are.
        target: what ``sparsity`` is a fraction of: ``"params"`` (entries of parameters), ``"macs"`` (multiply-adds of
            the example), ``"memory"`` (bytes of parameters, buffers and the results of all calls, as training holds
            them), ``"latency"`` (time of the example in evaluation mode, measured beside the model's own), ``"units"``.
        evidence: ``{name: {keyword: Tensor}}`` for a criterion that names some; see `secateur.evidence.collect`.
        modes, more_inputs: which passes to watch; see `find_coupling`.
        optimizer: its state (moments, momentum) loses the same slices, so that training goes on.
        verify: compare, on a copy with random weights in float64, with the original whose removed entries are zero.
            What does not agree is frozen, and the rest tried again.

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
    coupling = find_coupling(model, example_inputs, modes=modes, more_inputs=more_inputs)
    inputs = [example_inputs, *more_inputs]
    minimum: dict[Axis, int] = {}  # fewer would turn a comparison in the code
    while True:
        groups = _chosen(coupling, include, keep)
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
                example_inputs=example_inputs,
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
            break
        coupling.freeze(wrong, "the smaller model computed something else")
    plan = plan_of(model, coupling, kept)
    carry_out(model, plan, optimizer)
    return model_given


# ---- choosing -------------------------------------------------------------------------------------------------------

_TARGETS = ("params", "macs", "memory", "latency", "units")


def _chosen(coupling: Coupling, include: str | Iterable[str] | None, keep: str | Iterable[str] | None) -> list[Group]:
    included = None if include is None else [include] if isinstance(include, str) else list(include)
    whole = [] if keep is None else [keep] if isinstance(keep, str) else list(keep)
    names = {name for group in coupling.groups for name, _ in group.members} | {name for name, _ in coupling.frozen}
    names |= {group.name for group in coupling.groups}
    for glob in (*(included or ()), *whole):
        if not any(fnmatchcase(name, glob) for name in names):
            raise ValueError(f"{glob!r} matches no tensor of the model.")

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
    allocate: Allocation | None,
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

    whole = _outer(coupling, groups) if allocate is None and target != "units" else set()

    def counts_at(share: float) -> dict[Axis, int]:
        ranked = {group.name: scores[group.name] for group in groups if group.tied not in whole}
        masks = make_masks(ranked, share, criterion=lambda weight: weight, allocate=allocate or uniform)
        counts = [int(masks[group.name].sum()) if group.name in masks else group.size for group in groups]
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
            counts = _handed_back(counts, groups, lambda more: cost(more) <= goal, round_to)
    kept = {}
    for group in groups:
        mask = keep_largest(scores[group.name].reshape(1, -1), counts[group.axis])
        kept[group.axis] = mask.reshape(-1).numpy()
    return kept


def _outer(coupling: Coupling, groups: Sequence[Group]) -> set[int]:
    """Which groups have, wherever they are, another that leaves within them: heads around the widths of heads.

    Both at one share would take its square; and of a small vision transformer at equal multiply-adds, what is left
    with all heads was right more often (`benchmarks/RESULTS.md`).
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

    def seconds(module: nn.Module) -> float:
        begin = time.perf_counter()
        run(module, example_inputs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    @torch.no_grad()
    def ratio(counts: Mapping[Axis, int]) -> float:
        smaller = copy.deepcopy(dense)
        kept = {axis: np.arange(axis.size) < count for axis, count in counts.items()}
        carry_out(smaller, plan_of(smaller, coupling, kept), None)
        seconds(smaller)
        seconds(dense)
        ratios: list[float] = []
        begin = time.perf_counter()
        while len(ratios) < 9 or (time.perf_counter() - begin < 0.3 and len(ratios) < 200):
            ratios.append(seconds(smaller) / seconds(dense))
        return float(np.median(ratios))

    return ratio


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
