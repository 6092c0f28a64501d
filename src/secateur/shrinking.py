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
from secateur.axes import Axis, Expression, Product, leaves, resolved, size_of
from secateur.configurations import Configured, Place, tie_roles
from secateur.coupling import Coupling, Group, Kept, find_coupling, run
from secateur.criteria import magnitude
from secateur.masks import make_masks
from secateur.plans import carry_out, plan_of
from secateur.progress import track
from secateur.proof import wrong_groups
from secateur.selection import keep_largest

__all__ = ["TARGETS", "choose", "rows_at_once", "shrink"]

_TRIES = 64  # of counts that a configuration may allow
_PIECE = 1 << 17  # entries of a weight that are scored at a time: in cache


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
    uniform: bool = False,
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
        uniform: keep what the model's configuration can say, in general as many units in each layer, and change it, so
            that ``save_pretrained`` and ``from_pretrained`` need nothing else; a model without a configuration keeps
            equally many units in groups that play the same role. Which units leave is still each layer's own choice.
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
    coupling = find_coupling(model, example_inputs, modes=modes, more_inputs=more_inputs)
    inputs = [example_inputs, *more_inputs]
    configured: Configured | None = None
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

    kept = choose(
        model,
        coupling,
        sparsity,
        dict(model.named_parameters()),
        criterion=criterion,
        allocate=allocate,
        evidence=evidence,
        include=include,
        keep=keep,
        round_to=round_to,
        target=target,
        example_inputs=example_inputs,
        objections=objections,
        possible=None if configured is None else configured.is_possible,
    )
    changes: dict[Place, int] | None = None
    if configured is not None:
        changes = configured.fields({axis: int(mask.sum()) for axis, mask in kept.items()})
    plan = plan_of(model, coupling, kept)
    carry_out(model, plan, optimizer)
    if configured is not None and changes is not None:
        configured.adopt(model, changes)
    return model_given


# ---- choosing -------------------------------------------------------------------------------------------------------

TARGETS = ("params", "macs", "memory", "latency", "units")


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
    round_to: int | None,
    target: str,
    example_inputs: Any,
    objections: Callable[[Sequence[Group], Kept], tuple[list[Group], str]],
    possible: Callable[[Mapping[Axis, int]], bool] | None = None,
) -> dict[Axis, npt.NDArray[np.bool_]]:
    """Which units of each group stay. What there are objections to is frozen in the coupling, and the rest tried again.

    Of counts that are not ``possible`` one is raised until they are, if that can be.
    ``weights`` are the values of the model's parameters, of which one at a time is looked at: the model may be on meta.
    If they have a method ``blocks(name)``, a criterion that works value by value is given a weight in blocks of rows.
    """
    minimum: dict[Axis, int] = {}  # fewer would turn a comparison in the code
    groups = _chosen(coupling, include, keep)
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
        groups = _chosen(coupling, include, keep)


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
            counts = _handed_back(counts, tied, lambda more: cost(more) <= goal and is_possible(more))
    kept = {}
    for group in groups:
        mask = keep_largest(scores[group.name].reshape(1, -1), counts[group.axis])
        kept[group.axis] = mask.reshape(-1).numpy()
    return kept


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
