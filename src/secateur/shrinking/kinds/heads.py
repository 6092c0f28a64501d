"""Attention heads that leave by their numbers: what stays without those that are named.

Law: what is named leaves, and nothing else, or the call is refused; a head is found as the units of the group that
stands around others in the layer, so that queries, keys, values and the output all lose it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import nn

from secateur.coupling import Coupling, Group, Scope, counts_kept, find_coupling
from secateur.kinds import Heads
from secateur.models import example_for, find_blocks
from secateur.shrinking.costs import ties_around
from secateur.shrinking.plan import Plan
from secateur.shrinking.request import PruningTarget, Request, pruning_target
from secateur.shrinking.select import Choice, FreeUnits, Leaving, Left, choice_of
from secateur.support import Fields


def leave_heads(leaving: Leaving, heads: Heads) -> Left:
    """The heads that are named leave."""
    subject = leaving.target()
    choice = choose_heads(subject, heads, leaving.asked)
    stay = {name: (len(mask), int(mask.sum())) for name, mask in choice.kept.items()}
    return Left(choice.plan, {"heads": stay}, subject.configured, choice.fields)


def choose_heads(subject: PruningTarget, heads: Heads, asked: Request) -> Choice:
    """What stays without the heads that are named.

    Raises:
        ValueError: there is no such layer or head, they cannot leave, or not by themselves.
    """
    coupling, blocks = subject.coupling, _blocks(subject.model)
    around = ties_around(coupling, subject.scope.groups)
    every = [group for group in subject.scope.groups if group.tied in around]
    kept: dict[str, npt.NDArray[np.bool_]] = {}
    named: dict[str, dict[str, set[int]]] = {}  # of each group, by the paths of the layers that share it
    for layer, numbers in heads.remove.items():
        path = _path_of(subject, layer, blocks)
        group, units = _units(coupling, _attention_of(subject, layer, path, every), layer, numbers)
        named.setdefault(group.name, {}).setdefault(path, set()).update(units)
        mask = kept.setdefault(group.name, np.ones(group.size, dtype=bool))
        mask[units] = False
        if not mask.any():
            raise ValueError(f"layer {layer!r}: all of its heads are to leave, and one stays at least.")
    groups = [group for group in every if group.name in kept]
    for group in groups:
        _check_sharing(group, named[group.name])
    counts = counts_kept(kept)
    _check_ties(every, counts)
    if not subject.is_possible(counts):
        raise ValueError("no configuration describes the model without these heads; leave out uniform=True.")
    if (less := FreeUnits(subject.scope).without_wrong(subject, groups, kept, at_once=True)) is not None:
        name, why = next((name, why) for name, why in less.scope.reasons.items() if name in kept)
        raise ValueError(f"{name}: these heads cannot leave; {why}.")
    return choice_of(subject, groups, kept, asked)


def _blocks(model: nn.Module) -> Sequence[str]:
    try:
        return list(find_blocks(model))
    except ValueError:
        return []  # layers have names all the same


def _path_of(subject: PruningTarget, layer: int | str, blocks: Sequence[str]) -> str:
    """The module that a layer is."""
    if isinstance(layer, int) and not 0 <= layer < len(blocks):
        raise ValueError(f"there is no layer {layer}: the model has {len(blocks)} blocks.")
    path = blocks[layer] if isinstance(layer, int) else layer
    if path not in dict(subject.model.named_modules()):
        raise ValueError(f"there is no module {path!r} whose heads could leave.")
    return path


def _attention_of(subject: PruningTarget, layer: int | str, path: str, every: Iterable[Group]) -> list[Group]:
    """The groups of heads in a layer: one, or two where several heads of queries share keys and values."""
    found = [group for group in every if any(_within(name, path) for name, _ in group.members)]
    if not found:
        why = [reason for (name, _), reason in subject.scope.frozen.items() if _within(name, path)]
        raise ValueError(f"layer {layer!r} has no heads that can leave{f': {why[0]}' if why else ''}.")
    if not set.intersection(*({*group.members} for group in found)):
        names = ", ".join(dict.fromkeys(group.name.rpartition(".")[0] for group in found))
        raise ValueError(f"layer {layer!r} has several attentions; name the module of one, such as of {names}.")
    return found


def _check_sharing(group: Group, named: Mapping[str, set[int]]) -> None:
    """Raises ValueError where layers share their heads, as T5's do by one table of biases, and some would keep them."""
    inside = {name for name, _ in group.members if any(_within(name, path) for path in named)}
    roles = {re.sub(r"\d+", "*", name) for name in inside}
    others = [name for name, _ in group.members if name not in inside and re.sub(r"\d+", "*", name) in roles]
    if others or len({*map(frozenset, named.values())}) > 1:
        places = ", ".join(dict.fromkeys([*named, *(name.rsplit(".", 2)[0] for name in others)]))
        raise ValueError(f"{places} share their heads, so they leave together; name the same heads of each.")


def _within(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def _units(
    coupling: Coupling, groups: Sequence[Group], layer: int | str, numbers: Sequence[int]
) -> tuple[Group, list[int]]:
    """The group of which these heads are whole units, and which: of a head all positions of its width leave, and those
    that share keys and values with others leave with them."""
    places = set.intersection(*({*group.members} for group in groups))
    stretches = (_stretches([coupling.indices(group, name, at) for group in groups]) for name, at in sorted(places))
    heads = min(stretches, key=len)  # in one matrix with keys and values they come three times
    if wrong := [number for number in numbers if not 0 <= number < len(heads)]:
        raise ValueError(f"layer {layer!r} has heads 0 to {len(heads) - 1}, and no {wrong[0]}.")
    together: list[list[int]] = []
    for at, group in enumerate(groups):
        units = {heads[number][at] for number in numbers}
        together.append([number for number, its in enumerate(heads) if its[at] in units])
        if {*together[-1]} == {*numbers}:
            return group, sorted(units)
    sets = " or ".join(map(str, sorted(together, key=len)))
    raise ValueError(f"layer {layer!r}: heads that share keys and values leave together, {sets}; not {list(numbers)}.")


def _stretches(units: Sequence[npt.NDArray[np.int64]]) -> list[tuple[int, ...]]:
    """Which unit of each group a head is: one for each stretch of positions.

    >>> _stretches([np.array([0, 0, 0, 0, 1, 1, 1, 1]), np.array([0, 0, 1, 1, 0, 0, 1, 1])])
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    every = [tuple(map(int, each)) for each in zip(*units, strict=True) if min(each) >= 0]
    return [each for each, before in zip(every, [None, *every], strict=False) if each != before]


def _check_ties(every: Sequence[Group], counts: Mapping[str, int]) -> None:
    """Raises ValueError where layers that keep the same share would not."""
    for name, count in counts.items():
        (mine,) = (group for group in every if group.name == name)
        for other in every:
            if other.tied == mine.tied and counts.get(other.name, other.size) * mine.size != count * other.size:
                raise ValueError(
                    f"{name} would keep {count} of {mine.size} heads and {other.name} "
                    f"{counts.get(other.name, other.size)} of {other.size}, which one number says; name as many in "
                    "each layer, or leave out uniform=True."
                )


# ---- `pruned_heads` of configurations of transformers 4, which version 5 does not read any more.


def pruned_heads(directory: Path) -> Heads | None:
    """The heads that left a model before it was saved there, by its ``config.json``; None where it names none."""
    try:
        found = Fields.read(directory / "config.json").optional("pruned_heads", dict) or {}
    except FileNotFoundError:
        return None
    heads: dict[int | str, list[int]] = {int(layer): list(its) for layer, its in found.items() if its}
    return Heads(heads) if heads else None


def plan_without_heads(model: nn.Module, heads: Heads) -> Plan:
    """The plan that takes these heads out of a model that is built, and of which no values are asked."""
    example = example_for(model)
    scope = Scope.of(find_coupling(model, example))
    return choose_heads(pruning_target(model, scope, [example]), heads, Request()).plan
