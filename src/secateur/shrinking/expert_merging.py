"""Experts that leave are merged into those that stay, as REAM does (arXiv:2604.04356), block after block.

Law: an expert that is merged with copies of it, in whatever order of their hidden units, is what it was, to rounding;
routers keep the rows of the experts that stay, and nothing else changes.

Of the experts that stay the one of the highest score takes in those that are nearest to it, up to a group of 16, then
the next, until all are taken in. Near are those whose mean outputs, times their shares of the router, point the same
way, and to which the router gives like scores. Within a group hidden units are paired by what they do and by their
weights, and the weights averaged by the scores. Later blocks see what the merged ones give.

Every expert is asked about every token: the mixture runs without the others, so few at a time that all are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from secateur.blockwise import Outputs, Piece, gathered
from secateur.coupling import Axis, Coupling, Group, tensors_of_tree
from secateur.shrinking.execution import carry_out
from secateur.shrinking.expert_rows import places_of, rows_of_experts
from secateur.shrinking.expert_streams import Beside
from secateur.shrinking.plan import plan_of
from secateur.support import Undo, mapped, tensors_in

__all__ = ["Merged", "Merging", "assigned", "groups_around", "merge", "merged_values"]

_GROUP = 16  # the most experts that become one
_SAMPLE = 1024  # tokens on which hidden units are compared
_MOST = 4096  # hidden units, beyond which they are paired greedily: an assignment takes the cube of their number

Given = tuple[tuple[Any, Any], Tensor | None]  # what a mixture is given, and which tokens are no padding
Array = npt.NDArray[np.float64]


@dataclass(eq=False)
class Merged:
    """Of each mixture, by the name of its router: which experts became one, the one that stays first; or why not."""

    groups: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Merging:
    """What is merged.

    Attributes:
        coupling: of the dense model.
        groups: its mixtures, by the names of their routers.
        kept: which of their experts stay.
        scores: of the experts, by the names of their routers.
    """

    coupling: Coupling
    groups: Mapping[str, Group]
    kept: Mapping[Axis, npt.NDArray[np.bool_]]
    scores: Mapping[str, Array]


@dataclass(eq=False)
class _Seen:
    """What experts do, summed over tokens.

    Attributes:
        gated: (experts, width), their outputs times their shares of the router's softmax, summed.
        logits: [(tokens, experts)], what the router's product gives.
        hidden: of each expert [(tokens, inputs)], what its last matrix is multiplied with, of a sample.
        pieces: where its last matrix lay in the mixture without others.
    """

    gated: Tensor | None = None
    logits: list[Tensor] = field(default_factory=list)
    hidden: dict[int, list[Tensor]] = field(default_factory=dict)
    pieces: dict[int, Piece] = field(default_factory=dict)


# ---- grouping -------------------------------------------------------------------------------------------------------


def groups_around(kept: Sequence[int], scores: Array, similarity: Array, size: int = _GROUP) -> list[list[int]]:
    """The experts that become one, the one that stays first; in the order of those that stay.

    >>> near = np.array([[1.0, 0.2, 0.9, 0.1], [0.2, 1.0, 0.8, 0.3], [0.9, 0.8, 1.0, 0.0], [0.1, 0.3, 0.0, 1.0]])
    >>> groups_around([0, 1], np.array([2.0, 3.0, 1.0, 0.0]), near, size=2)
    [[0, 3], [1, 2]]
    """
    left = [each for each in range(len(scores)) if each not in kept]
    found = {center: [center] for center in kept}
    for center in sorted(kept, key=lambda each: -scores[each]):
        near = sorted(left, key=lambda each: -similarity[center, each])[: size - 1]
        found[center] += near
        left = [each for each in left if each not in near]
    for each in left:  # of groups that are too small for all
        found[max(kept, key=lambda center: similarity[center, each])].append(each)
    return [found[center] for center in kept]


def similarity_of(gated: Tensor, logits: Tensor) -> Array:
    """(experts, experts), in [0, 1]: the mean of how far outputs and the router's scores are alike."""
    outputs = torch.nn.functional.normalize(gated.double(), dim=1)
    alike = (outputs @ outputs.T + 1) / 2
    columns = torch.nn.functional.normalize(logits.double().T, dim=1)
    apart = torch.cdist(columns, columns)
    routed = 1 - apart / apart.max().clamp(min=torch.finfo(torch.float64).tiny)
    return np.asarray((alike + routed).div(2).cpu().numpy())


def assigned(costs: Tensor) -> Tensor:
    """(rows,): the column of each row so that the sum of costs is the least there is; of very many rows nearly.

    By shortest augmenting paths (Jonker & Volgenant 1987), a row after the other.

    >>> assigned(torch.tensor([[4.0, 1.0, 3.0], [2.0, 0.0, 5.0], [3.0, 2.0, 2.0]])).tolist()
    [1, 0, 2]
    """
    table = costs.double().cpu().numpy()
    count = len(table)
    if count > _MOST:
        return _greedily(table)
    rows, columns = np.full(count, -1), np.full(count, -1)  # whose, of each column and of each row
    prices = np.zeros(count)
    for row in range(count):  # what is cheapest and free needs no path
        at = int(table[row].argmin())
        if rows[at] < 0:
            rows[at], columns[row] = row, at
    base = table.min(1)
    for start in np.flatnonzero(columns < 0):
        shortest, before = np.full(count, np.inf), np.full(count, -1)
        done = np.zeros(count, dtype=bool)
        row, length, reached = int(start), 0.0, -1
        seen = [row]
        while True:
            through = length + table[row] - base[row] - prices
            better = ~done & (through < shortest)
            shortest[better], before[better] = through[better], row
            at = int(np.where(done, np.inf, shortest).argmin())
            length = float(shortest[at])
            done[at] = True
            if rows[at] < 0:
                reached = at
                break
            row = int(rows[at])
            seen.append(row)
        gain = length - shortest[done]
        prices[done] -= gain
        base[start] += length
        owners = rows[done & (rows >= 0)]
        base[owners] += length - shortest[columns[owners]]
        while reached >= 0:
            row = int(before[reached])
            rows[reached], columns[row], reached = row, reached, columns[row]
            if row == start:
                break
    return torch.from_numpy(columns)


def _greedily(table: Array) -> Tensor:
    """Those that have most to lose choose first."""
    two = np.partition(table, 1, axis=1)[:, :2]
    found, free = np.empty(len(table), dtype=np.int64), np.zeros(len(table))
    for row in np.argsort(two[:, 0] - two[:, 1], kind="stable"):
        found[row] = int((table[row] + free).argmin())
        free[found[row]] = np.inf
    return torch.from_numpy(found)


# ---- merging --------------------------------------------------------------------------------------------------------


def merged_values(
    model: nn.Module,
    merging: Merging,
    name: str,
    givens: Callable[[], Iterable[Given]],
) -> tuple[dict[str, dict[int, Tensor]], list[list[int]]] | str:
    """Of a mixture of the dense model, whose block is there: ``{parameter: {place among those that stay: new row}}``,
    and which experts became one; or why it cannot be.

    Args:
        givens: what its mixture is given in the smaller model, ``(arguments, which tokens are no padding)``, batch by
            batch.
    """
    group = merging.groups[name]
    owned = _of_experts(model, group)
    if any(not np.array_equal(merging.coupling.indices(group, each, 0), range(group.size)) for each in owned):
        return "its router takes experts in sets, of which each leaves as a whole"
    seen = _look(model, merging.coupling, group, givens)
    if isinstance(seen, str):
        return seen
    assert seen.gated is not None
    last = next(iter(seen.pieces.values())).name
    inner = _inner(model, merging.coupling, seen.pieces[0], last)
    if inner is None:
        return "their hidden units are in no group that is free"
    kept = np.flatnonzero(merging.kept[group.axis]).tolist()
    gated, logits = _everywhere(seen)
    scores = np.where(merging.scores[name] > 0, merging.scores[name], np.inf)
    scores = np.where(np.isinf(scores), min(0.5, scores.min()), scores)  # of one that no token reached
    groups = groups_around(kept, scores, similarity_of(gated, logits))
    values: dict[str, dict[int, Tensor]] = {}
    for place, its in enumerate(groups):
        if len(its) == 1:
            continue
        share = torch.from_numpy(scores[its] / scores[its].sum())
        orders = [_order(seen, owned, merging.coupling, inner, its[0], other) for other in its]
        for each, parameter in owned.items():
            wide = torch.promote_types(parameter.dtype, torch.float32)
            total = torch.zeros_like(parameter[0], dtype=wide)
            for unit, order, weight in zip(its, orders, share.tolist(), strict=True):
                row = _turned(parameter[unit].detach().to(wide), merging.coupling, inner, each, order)
                total += weight * row
            values.setdefault(each, {})[place] = total.to(parameter.dtype)
    return values, groups


def merge(
    beside: Beside,
    merging: Merging,
    block: str,
    groups: Iterable[Group],
    done: Merged,
    *,
    undo: Undo | None = None,
    folder: Path | None = None,
) -> list[str]:
    """Merges the mixtures of a block whose weights are there in the smaller model, and puts the new values in place;
    the names of the parameters that changed. Of the smaller model the block goes while that of the dense one is there.
    """
    small, dense = beside.small, beside.dense
    changed: list[str] = []
    for group in groups:
        if block == places_of(small.model, group)[0]:
            done.whole[group.name] = "its router is the block's own"
            continue
        kept = Outputs(folder, "given")
        owns = []
        try:
            for number, (given, own) in enumerate(beside.givens(block, group)):
                kept.save("mixture", number, given)
                owns.append(own)

            def givens(kept: Outputs = kept, owns: Sequence[Tensor | None] = owns) -> Iterator[Given]:
                for number, own in enumerate(owns):
                    yield kept.load("mixture", number), own

            small.weights.unload(block)
            dense.weights.load(block, finished=False)
            found = merged_values(dense.model, merging, group.name, givens)
            dense.weights.unload(block)
            small.weights.load(block, finished=False)
        finally:
            kept.clear()
        if isinstance(found, str):
            done.whole[group.name] = found
            continue
        values, together = found
        done.groups[group.name] = tuple(tuple(its) for its in together if len(its) > 1)
        put(small.model, values, undo)
        changed += sorted(values)
    return changed


def put(model: nn.Module, values: Mapping[str, Mapping[int, Tensor]], undo: Undo | None = None) -> None:
    """The rows in their places in the smaller model."""
    with torch.no_grad():
        for name, rows in values.items():
            parameter = model.get_parameter(name)
            if undo is not None:
                undo.values(parameter)
            for place, row in rows.items():
                parameter[place] = row.to(parameter.device)


def _of_experts(model: nn.Module, group: Group) -> dict[str, nn.Parameter]:
    """The parameters of which each expert has a row, but for the router's."""
    parameters = dict(model.named_parameters())
    own = [name for name, at in group.members if at == 0 and name in parameters and parameters[name].dim() > 2]
    inside = {name.rpartition(".")[0] for name in own}
    return {
        name: parameters[name]
        for name, at in group.members
        if at == 0 and name in parameters and name.rpartition(".")[0] in inside and parameters[name].dim() > 1
        if name != group.name
    }


def _inner(model: nn.Module, coupling: Coupling, piece: Piece, last: str) -> Group | None:
    """The group of hidden units: of the dimension of the last matrices that is multiplied."""
    strides = model.get_parameter(last).stride()
    at = next((dim for dim in range(1, len(strides)) if strides[dim] == piece.strides[1]), None)
    return next((each for each in coupling.groups if not each.chosen and (last, at) in each.members), None)


def _order(
    seen: _Seen,
    owned: Mapping[str, nn.Parameter],
    coupling: Coupling,
    inner: Group,
    center: int,
    other: int,
) -> Tensor:
    """For each hidden unit of one expert that of another which is most like it."""
    if other == center:
        return torch.arange(inner.size)
    costs = torch.zeros(inner.size, inner.size, dtype=torch.float64)
    for sides in (
        [torch.cat(seen.hidden[unit]).T for unit in (center, other)],
        [_by_unit(owned, coupling, inner, unit) for unit in (center, other)],
    ):
        one, two = (torch.nn.functional.normalize(side.double(), dim=1) for side in sides)
        costs += torch.cdist(one, two).cpu()
    return assigned(costs)


def _by_unit(owned: Mapping[str, nn.Parameter], coupling: Coupling, inner: Group, unit: int) -> Tensor:
    """(hidden units, weights): all that one expert has of each."""
    parts = []
    for name, at in inner.members:
        if name not in owned:
            continue
        row = owned[name][unit].detach().movedim(at - 1, 0)
        its = coupling.indices(inner, name, at)
        parts += [row[each.to(row.device)].reshape(inner.size, -1).float() for each in _positions(its, inner.size)]
    return torch.cat(parts, 1)


def _positions(units: npt.NDArray[np.int64], size: int) -> list[Tensor]:
    """Of a dimension that has every unit several times: where each is for the first time, the second, ..."""
    order = np.argsort(units, kind="stable")
    order = order[units[order] >= 0]
    return [torch.from_numpy(each.copy()) for each in order.reshape(size, -1).T]


def _turned(row: Tensor, coupling: Coupling, inner: Group, name: str, order: Tensor) -> Tensor:
    """An expert's row of a parameter with its hidden units in another order."""
    for each, at in inner.members:
        if each != name or at == 0:
            continue
        source = torch.arange(row.shape[at - 1])
        for positions in _positions(coupling.indices(inner, name, at), inner.size):
            source[positions] = positions[order]
        row = row.index_select(at - 1, source.to(row.device))
    return row


# ---- what experts do ------------------------------------------------------------------------------------------------


def _look(
    model: nn.Module,
    coupling: Coupling,
    group: Group,
    givens: Callable[[], Iterable[Given]],
) -> _Seen | str:
    path = places_of(model, group)[0]
    module = model.get_submodule(path)
    chosen = coupling.least(group)
    seen = _Seen()
    counts: list[int] = []
    router = model.get_parameter(group.name)
    why = ""
    for given, own in givens():
        args, kwargs = mapped(given, lambda tensor: tensor.clone())
        with _Scores(router) as scores:
            out = module.forward(*args, **kwargs)
        rows = next(tensor for tensor in tensors_in(out) if tensor.is_floating_point()).shape[:-1].numel()
        if scores.found is None or scores.found.shape[:-1].numel() != rows:
            why = "the scores of its router are not seen"
            break
        logits = scores.found.reshape(rows, -1).float()
        own = own.reshape(-1) if own is not None and own.numel() == rows else None
        seen.logits.append(logits if own is None else logits[own.to(logits.device)])
        counts.append(len(seen.logits[-1]))
    every = sum(gathered(sum(counts)))
    for units, fresh in _in_turn(group.size, chosen) if not any(gathered(why)) else ():
        mask = np.zeros(group.size, dtype=bool)
        mask[units] = True
        # not of all tensors: a walk's model has those apart that are one in the model that the coupling is of
        plan = plan_of(model, coupling, {group.axis: mask}, {name for name, _ in group.members})
        undo = carry_out(model, plan, None)
        try:
            for number, (given, own) in enumerate(givens()):
                found = rows_of_experts(model, group, given, own, path)
                if found is None:
                    why = "what its experts give is not added up as it is"
                    break
                for one in found:
                    unit = units[one.unit]
                    if unit not in fresh:
                        continue  # seen before, and asked again to make up the number
                    if counts[number] and len(one.tokens) < counts[number] / 2 and one.features.ne(0).any():
                        why = "its router sends tokens to some experts alone, also where few are left"
                    _add(seen, unit, group.size, seen.logits[number], one, model, every)
        finally:
            undo()
        if why:
            break
    whys = [each for each in gathered(why) if each]
    if whys:
        return str(whys[0])
    for unit in range(group.size):
        if unit not in seen.pieces:
            return "not all of its experts were seen"
    return seen


def _add(seen: _Seen, unit: int, units: int, logits: Tensor, one: Any, model: nn.Module, every: int) -> None:
    share = logits.softmax(-1)[one.tokens.to(logits.device), unit]
    mean = (share[:, None] * one.features.float().to(share.device)).sum(0)
    matrix = one.piece.of(model.get_parameter(one.piece.name)).float()
    if seen.gated is None:
        seen.gated = torch.zeros(units, matrix.shape[0], device=matrix.device)
    seen.gated[unit] += matrix @ mean.to(matrix.device)
    seen.pieces[unit] = one.piece
    step = max(1, every // _SAMPLE)
    whole = torch.zeros(len(logits), one.features.shape[1])
    whole[one.tokens] = one.features.float().cpu()
    seen.hidden.setdefault(unit, []).append(whole[::step])


def _in_turn(size: int, chosen: int) -> Iterator[tuple[list[int], set[int]]]:
    """So many units at a time, and which of them were not there before."""
    for first in range(0, size, chosen):
        fresh = range(first, min(first + chosen, size))
        yield [*range(chosen - len(fresh)), *fresh], {*fresh}


def _everywhere(seen: _Seen) -> tuple[Tensor, Tensor]:
    """What all processes saw; of the router's scores by Gram matrices alone the same would come out."""
    assert seen.gated is not None
    gated = torch.from_numpy(sum(gathered(seen.gated.cpu().numpy())))
    logits = torch.cat([torch.from_numpy(each) for each in gathered(torch.cat(seen.logits).cpu().numpy())])
    for unit, parts in seen.hidden.items():
        seen.hidden[unit] = [torch.from_numpy(each) for each in gathered(torch.cat(parts).numpy())]
    return gated, logits


class _Scores(TorchFunctionMode):
    """Sees what a router's product gives."""

    def __init__(self, router: Tensor) -> None:
        super().__init__()
        self.router = router
        self.found: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        theirs = self.router.untyped_storage().data_ptr()
        if (
            self.found is None
            and isinstance(out, Tensor)
            and out.is_floating_point()
            and out.dim() > 1
            and out.shape[-1] == len(self.router)
            and out.untyped_storage().data_ptr() != theirs
            and any(each.untyped_storage().data_ptr() == theirs for each in tensors_of_tree((args, kwargs or {})))
        ):
            self.found = out.detach()
        return out
