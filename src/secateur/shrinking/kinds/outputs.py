"""Outputs of a head that leave, such as classes that nobody asks for: what stays without them.

Law: what stays of the model's outputs is computed as before, whatever those that leave would have been. What reads
them inside the model, such as a softmax, is understood, or the call is refused.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from secateur.coupling import Coupling, Group, Scope, find_coupling
from secateur.kinds import Outputs
from secateur.shrinking.apply import Place, dotted
from secateur.shrinking.configuration import Described, has_configuration
from secateur.shrinking.plan import Plan, plan_of
from secateur.shrinking.proof import differs_without_heads, probe_of
from secateur.shrinking.request import PruningTarget, pruning_target
from secateur.shrinking.select import FreeUnits, Leaving, Left
from secateur.support import Undo, matched


def leave_outputs(leaving: Leaving, outputs: Outputs) -> Left:
    """The outputs of the named modules leave, but for those that are to stay.

    Raises:
        ValueError: there is no such module or output, or what stays would be another without those that leave.
    """
    model, passes = leaving.model, leaving.coupling.passes
    named = matched(outputs.name, [path for path, _ in model.named_modules() if path], "module") or ()
    paths = [path for path, _ in model.named_modules() if path in named]
    outer = [path for path in paths if not _within(path, [other for other in paths if other != path])]
    if not outputs.keep or (len(outer) > 1 and all(_is_single(model.get_submodule(path)) for path in outer)):
        return _without_heads(leaving, outer, outputs)
    coupling = find_coupling(
        model,
        leaving.inputs[0],
        modes=[mode for mode in (False, True) if all((at, mode) in passes for at in range(len(leaving.inputs)))],
        more_inputs=leaving.inputs[1:],
        outputs=paths,
    )
    groups = _returned(coupling, paths, outputs)
    stays = np.isin(np.arange(groups[0].size), outputs.keep)
    _check_kept(outputs, len(stays))
    kept = {group.name: stays for group in groups}
    proved_on = model if leaving.asked.verify else None
    subject = pruning_target(model, Scope.of(coupling), leaving.inputs, proved_on=proved_on)
    _check_proof(subject, groups, kept, outputs)
    plan = replace(plan_of(model, coupling, kept), outputs=tuple(paths))
    counts = {name: (len(mask), int(mask.sum())) for name, mask in kept.items()}
    configured, fields = _configuration(model, outputs.keep, len(stays))

    def rename(_: Coupling) -> Mapping[str, Any]:
        _rename(model, paths, outputs.keep, len(stays), leaving.undo)
        return {"unread": _unread(model, paths, len(stays))}

    return Left(plan, {"outputs": counts}, configured, fields, rename)


def _is_single(module: nn.Module) -> bool:
    """Whether the last layer gives a single output."""
    return [each.shape[0] for each in module.parameters() if each.dim()][-1:] == [1]


def _without_heads(leaving: Leaving, paths: Sequence[str], outputs: Outputs) -> Left:
    """Modules leave as a whole: None stays in their place, or nothing in a list or a dict of modules."""
    model, size = leaving.model, len(paths)
    if outputs.keep:
        _check_kept(outputs, size)
    gone = [path for number, path in enumerate(paths) if number not in outputs.keep]
    forms = {path: {"was": type(model.get_submodule(path)).__name__, "returns": "nothing"} for path in gone}
    plan = Plan({}, [], modules=forms)
    if words := differs_without_heads(probe_of(model), leaving.coupling, plan, leaving.inputs):
        raise ValueError(f"{', '.join(gone)} cannot leave the model as a whole: without it {words}.")

    def rename(_: Coupling) -> Mapping[str, Any]:
        _rename(model, paths, outputs.keep, size, leaving.undo)
        return {"unread": _unread(model, gone, size)}

    counts = {outputs.name: (size, len(outputs.keep))}
    return Left(plan, {"outputs": counts}, mend=rename) if outputs.keep else Left(plan, {"outputs": counts})


def _returned(coupling: Coupling, paths: Sequence[str], outputs: Outputs) -> list[Group]:
    """The groups whose units are outputs of the model, all of one size: heads of several scales, or one beside it."""
    groups = [group for group in coupling.groups if group.returned and not group.chosen]
    if not groups:
        inside = {(name, at): why for (name, at), why in coupling.frozen.items() if _within(name, paths) and at == 0}
        inside |= {(group.name, 0): "what chooses between others" for group in coupling.groups if group.returned}
        why = next(
            (f"{name}: {why}" for (name, _), why in [*inside.items()][::-1]),
            "the model returns none of them",
        )
        raise ValueError(
            f"the outputs of {outputs.name} cannot leave; {why}. What stays would be another, unless the model returns "
            "them as the module gives them: take what reads them, such as a softmax, out of the model, and apply it to "
            "what that returns."
        )
    if len({group.size for group in groups}) > 1:
        sizes = ", ".join(f"{group.size} of {group.name}" for group in groups)
        raise ValueError(f"{outputs.name} has outputs of several kinds, {sizes}; name the module of one.")
    return groups


def _within(name: str, paths: Sequence[str]) -> bool:
    return any(name.startswith(f"{path}.") for path in paths)


def _check_kept(outputs: Outputs, size: int) -> None:
    if wrong := [number for number in outputs.keep if not 0 <= number < size]:
        raise ValueError(f"{outputs.name} has outputs 0 to {size - 1}, and no {wrong[0]}.")
    if len(outputs.keep) == size:
        raise ValueError(f"{outputs.name} has {size} outputs, and keep= names all of them, so that none leaves.")


def _check_proof(
    subject: PruningTarget, groups: Sequence[Group], kept: Mapping[str, np.ndarray[Any, Any]], outputs: Outputs
) -> None:
    """Raises ValueError where what stays is not what it was."""
    if (less := FreeUnits(subject.scope).without_wrong(subject, groups, kept, at_once=True)) is not None:
        why = next(iter(less.scope.reasons.values()))
        raise ValueError(f"the outputs of {outputs.name} cannot leave: without them {why}, so others need them.")


# ---- What they are called: in a configuration, and where modules name them.
#
# Law: names are known by their form, one for each output, and never by what the field that holds them is called.


def _configuration(model: nn.Module, keep: Sequence[int], size: int) -> tuple[Described | None, dict[Place, Any]]:
    """The model's configuration, and what becomes of its fields that name outputs; None where none does."""
    if not has_configuration(model):
        return None, {}
    described = Described(model)
    found = {key: _renumbered(value, keep, size) for key, value in described.values.items()}
    fields: dict[Place, Any] = {(key,): value for key, value in found.items() if value is not None}
    with contextlib.suppress(Exception):  # whatever a class raises: then it cannot be built from its configuration
        described.build(fields)
        return (described, fields) if fields else (None, {})
    return None, {}


def _rename(model: nn.Module, paths: Sequence[str], keep: Sequence[int], size: int, undo: Undo) -> None:
    """The names of outputs that the modules around a head hold are those of what stays."""
    for path, key, value in _held_around(model, paths):
        new = _renumbered(value, keep, size)
        if new is not None:
            held = vars(model.get_submodule(path))
            undo.call(operator.setitem, held, key, value)
            held[key] = new


def _unread(model: nn.Module, paths: Sequence[str], size: int) -> dict[str, int]:
    """The integers that still are as many as there were outputs: no pass read them, so that nothing says what they
    count."""
    return {
        dotted((path, key)): value
        for path, key, value in _held_around(model, paths)
        if type(value) is int and value == size
    }


def _held_around(model: nn.Module, paths: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    """What the modules around the heads hold, and these themselves: path, name, value."""
    for path, module in model.named_modules():
        if any(f"{head}.".startswith(f"{path}." if path else "") for head in paths):
            yield from ((path, key, value) for key, value in [*vars(module).items()] if not key.startswith("_"))


def _renumbered(names: Any, keep: Sequence[int], size: int) -> Any:
    """The names of what stays under its new numbers; None where this is not one name for each number.

    >>> _renumbered({0: "cat", 1: "dog", 2: "eel"}, [0, 2], 3), _renumbered({"cat": 0, "dog": 1}, [1], 2)
    ({0: 'cat', 1: 'eel'}, {'dog': 0})
    >>> _renumbered(["cat", "dog", "eel"], [1], 3), _renumbered({"a": 8}, [0], 1)
    (['dog'], None)
    """
    if isinstance(names, list | tuple):
        named = len(names) == size and all(isinstance(name, str) for name in names)
        return type(names)([names[number] for number in keep]) if named else None
    if not isinstance(names, dict) or len(names) != size:
        return None
    for kind in (int, str):
        numbers = [kind(number) for number in range(size)]
        if names.keys() == {*numbers} and all(isinstance(name, str) for name in names.values()):
            return {kind(new): names[kind(number)] for new, number in enumerate(keep)}
    if all(isinstance(name, str) for name in names) and sorted(map(str, names.values())) == sorted(
        map(str, range(size))
    ):
        return {name: keep.index(number) for name, number in names.items() if number in keep}
    return None
