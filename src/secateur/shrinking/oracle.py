"""The reference for a model without some of its experts: the original, whose router can not choose them.

Law: a model without expert e equals the original whose router's logit for e is minus infinity: where the logit is made,
and wherever a value made from it is compared with others', such as behind a bias that was added to a share.
Beside the choices that the weights make, each expert that stays is preferred once: an expert that receives no token
would not be compared at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.coupling import Coupling, Kept, Spot, in_turn, kept_positions, leaves, tensors_of_tree
from secateur.shrinking.execution import zero
from secateur.shrinking.plan import Plan

__all__ = ["Oracle", "kept_by", "oracles", "without_chosen", "zero_all", "zeroed_of"]

_TURNS = 2  # choices in which others are preferred


@dataclass(frozen=True)
class Oracle:
    """Which units the router can not choose, and which it prefers.

    Attributes:
        looks: where scores are made and compared, ``{spot: (made, dimension, which stay)}``.
        gone: whether the others are still in the model, and have to be masked.
        turn: which of those that stay are preferred, one an entry after the other; None: those that are.
    """

    looks: Mapping[Spot, Sequence[tuple[bool, int, npt.NDArray[np.bool_]]]] = field(repr=False)
    gone: bool
    turn: int | None = None

    def compares(
        self, spot: Spot, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments of a call: those that are gone have a score of minus infinity."""
        if not self.gone or spot not in self.looks:
            return args, kwargs
        first = next(iter(tensors_of_tree((args, kwargs))), None)
        for made, at, stays in self.looks[spot]:
            if made or first is None or not first.is_floating_point() or first.shape[at] != len(stays):
                continue
            without = first.masked_fill(_along(~stays, first, at), -math.inf)
            args = tuple(without if each is first else each for each in args)
            kwargs = {key: without if each is first else each for key, each in kwargs.items()}
            first = without
        return args, kwargs

    def taken(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Any:
        """The result of a ``topk``. One that takes all only puts them in order, those without a chance last: each has
        the value that its logit of minus infinity gave it, such as a share of zero, and not minus infinity."""
        first = next(iter(tensors_of_tree((args, kwargs))))
        if not self.gone or out.values.shape != first.shape:
            return out
        at = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        return type(out)((first.gather(at, out.indices), out.indices))

    def made(self, spot: Spot, out: Any) -> Any:
        """The result of a call."""
        for made, at, stays in self.looks.get(spot, ()):
            if not made or not isinstance(out, Tensor):
                continue
            there = stays if self.gone else stays[stays]
            if out.shape[at] != len(there):
                continue
            if self.turn is not None:
                places = torch.from_numpy(np.flatnonzero(there)).to(out.device)
                out = in_turn(out, at, places, self.turn)
            if self.gone:
                out = out.masked_fill(_along(~stays, out, at), -math.inf)
        return out


def _along(mask: npt.NDArray[np.bool_], tensor: Tensor, at: int) -> Tensor:
    shape = [1] * tensor.dim()
    shape[at] = -1
    return torch.from_numpy(mask).reshape(shape).to(tensor.device)


def oracles(coupling: Coupling, kept: Kept) -> tuple[list[Oracle | None], list[Oracle | None]]:
    """Pairs of router masks to compare: for the original without the units that leave, and for the smaller model.
    [None] where no such units leave, and the example reaches all of them."""
    axes = {each.axis for each in coupling.groups if each.chosen and each.axis in kept and not kept[each.axis].all()}
    if not axes and not coupling.turns:
        return [None], [None]
    mine = {axis: mask for axis, mask in kept.items() if axis in axes}
    looks: dict[Spot, list[tuple[bool, int, npt.NDArray[np.bool_]]]] = {}
    for look in coupling.looks():
        looks.setdefault(look.spot, []).append((look.made, look.at, kept_positions(look.dim, mine)))
    turns = [None, *range(max(_TURNS, coupling.turns))]
    return (
        [Oracle(looks, gone=True, turn=turn) for turn in turns],
        [Oracle(looks, gone=False, turn=turn) for turn in turns],
    )


def zeroed_of(coupling: Coupling, kept: Kept) -> Kept:
    """What becomes zero in the original: not those that are chosen between, which have no chance."""
    chosen = {group.axis for group in coupling.groups if group.chosen}
    return {axis: mask for axis, mask in kept.items() if axis not in chosen}


def zero_all(tensors: Mapping[str, Tensor], plan: Plan) -> None:
    """The entries that a plan takes are zero, in copies of the data."""
    for name, (_, indices) in plan.tensors.items():
        if not isinstance(tensors[name], nn.Parameter):
            continue  # where a weight is zero, statistics and constants have no effect
        tensors[name].data = tensors[name].data.clone()
        for at, places in indices.items():
            gone = torch.ones(tensors[name].shape[at], dtype=torch.bool)
            gone[torch.from_numpy(places)] = False
            zero(tensors[name], at, gone)


def kept_by(coupling: Coupling, plan: Plan) -> dict[Any, npt.NDArray[np.bool_]]:
    """The units that a plan keeps of each group that a router chooses from."""
    found = {}
    for group in coupling.groups:
        if not group.chosen:
            continue
        for name, at in group.members:
            if at in plan.tensors.get(name, ((), {}))[1]:
                stays = coupling.indices(group, name, at)[plan.tensors[name][1][at]]
                mask = np.zeros(group.size, dtype=bool)
                mask[stays[stays >= 0]] = True
                found[group.axis] = mask
                break
    return found


def without_chosen(coupling: Coupling, plan: Plan) -> Plan:
    """What a plan takes of other dimensions than those of units that are chosen between."""
    axes = {group.axis for group in coupling.groups if group.chosen}
    tensors = {}
    for name, (shape, kept) in plan.tensors.items():
        cuts = dict(kept)
        for at in kept:
            if not axes.isdisjoint(leaves(coupling.dims(name)[at])):
                cuts[at] = _without(coupling, axes, name, at, kept[at])
        tensors[name] = (shape, cuts)
    return Plan(tensors, [])


def _without(
    coupling: Coupling, axes: Iterable[Any], name: str, at: int, indices: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The positions that stay of a dimension if all units stay that are chosen between."""
    dim = coupling.dims(name)[at]
    others = {}
    for group in coupling.groups:
        if group.axis not in axes and group.axis in leaves(dim):
            stays = coupling.indices(group, name, at)[indices]
            mask = np.zeros(group.size, dtype=bool)
            mask[stays[stays >= 0]] = True
            others[group.axis] = mask
    return np.flatnonzero(kept_positions(dim, others))
