"""Outputs of a head that leave, such as classes that nobody asks for: what stays without them.

Law: what stays of the model's outputs is computed as before, whatever those that leave would have been. What reads
them inside the model, such as a softmax, is understood, or the call is refused.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import math
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from secateur.coupling import Coupling, Group, Scope, counts_kept
from secateur.kinds import Outputs
from secateur.shrinking.apply import Place, carry_out, dotted
from secateur.shrinking.configuration import Described, has_configuration
from secateur.shrinking.plan import Plan, plan_of
from secateur.shrinking.proof import coupling_of_outputs, differs_without_heads, probe_of
from secateur.shrinking.proof import outputs as run_outputs
from secateur.shrinking.request import pruning_target
from secateur.shrinking.select import Choice, FreeUnits, Leaving, Left
from secateur.support import Undo, matched, tensors_of


def leave_outputs(leaving: Leaving, outputs: Outputs) -> Left:
    """The outputs of the named modules leave, but for those that are to stay.

    Raises:
        ValueError: there is no such module or output, or what stays would be another without those that leave.
    """
    model, passes = leaving.model, leaving.coupling.passes
    described = Described(model) if has_configuration(model) else None
    paths = _paths(model, outputs, described)
    outer = [path for path in paths if not _within(path, [other for other in paths if other != path])]
    if not outputs.keep or (len(outer) > 1 and all(_is_single(model.get_submodule(path)) for path in outer)):
        return _without_heads(leaving, outer, outputs)
    choice = choose_outputs(
        model,
        outputs,
        leaving.inputs,
        described,
        modes=[mode for mode in (False, True) if all((at, mode) in passes for at in range(len(leaving.inputs)))],
        proved_on=model if leaving.asked.verify else None,
    )
    keep: list[int] = np.flatnonzero(next(iter(choice.kept.values()))).tolist()
    counted = {str(place[-1]) for place, *change in choice.plan.numbers if change == [size_of(choice), len(keep)]}
    reset = _reset(model, paths, size_of(choice), len(keep))

    def rename(_: Coupling) -> Mapping[str, Any]:
        _rename(model, paths, keep, size_of(choice), leaving.undo, counted, reset)
        return {"unread": _unread(model, paths, size_of(choice))}

    facts: dict[str, Any] = {"outputs": {name: (len(mask), len(keep)) for name, mask in choice.kept.items()}}
    if len(choice.scope.coupling.passes) < len(passes):
        facts["compared"] = True
        probe = probe_of(model)
        carry_out(probe, choice.plan, None)
        try:
            for number, training in passes:
                run_outputs(probe, leaving.inputs[number], training=training)
        except Exception as error:  # whatever the model raises
            why = f"it raises {type(error).__name__}: {error}"
            raise ValueError(f"the outputs of {_said(outputs)} cannot leave: without them {why}.") from error
    return Left(choice.plan, facts, described if choice.fields else None, choice.fields, rename)


def size_of(choice: Choice) -> int:
    """How many outputs there were."""
    return len(next(iter(choice.kept.values())))


def choose_outputs(
    model: nn.Module,
    outputs: Outputs,
    inputs: Sequence[Any],
    described: Described | None,
    *,
    modes: Sequence[bool] | None = None,
    proved_on: nn.Module | None,
) -> Choice:
    """Which slices stay without the outputs that leave, and what the configuration says then.

    Args:
        model: also on the meta device.
        described: the model's configuration, if it has one.
        modes: as for `find_coupling`.
        proved_on: the model with values on which the proof is made; None: there is no proof.

    Raises:
        ValueError: as for `leave_outputs`.
    """
    paths = _paths(model, outputs, described)
    coupling = coupling_of_outputs(model, inputs[0], paths, modes=modes, more_inputs=inputs[1:])
    groups = _returned(coupling, paths, outputs)
    names = _names_of(model, paths, described, groups[0].size)
    keep = _numbers(outputs, names, groups[0].size)
    stays = np.isin(np.arange(groups[0].size), keep)
    kept = {group.name: stays for group in groups}
    subject = pruning_target(model, Scope.of(coupling), inputs, proved_on=proved_on)
    if (less := FreeUnits(subject.scope).without_wrong(subject, groups, kept, at_once=True)) is not None:
        why = next(iter(less.scope.reasons.values()))
        raise ValueError(f"the outputs of {_said(outputs)} cannot leave: without them {why}, so others need them.")
    plan = replace(plan_of(model, coupling, kept), outputs=tuple(paths))
    fields = {} if described is None else _fields(described, keep, coupling, counts_kept(kept))
    left = _entries(model, coupling, counts_kept(kept)) / max(1, _entries(model, coupling, {}))
    return Choice(kept, Scope.of(coupling), plan, fields, left, (left, left))


def _entries(model: nn.Module, coupling: Coupling, counts: Mapping[str, int]) -> int:
    """Of all parameters, when so many stay of each group."""
    mine = {id(each) for each in model.parameters()}
    return sum(coupling.size(name, counts) for name, each in tensors_of(model).items() if id(each) in mine)


def _paths(model: nn.Module, outputs: Outputs, described: Described | None) -> list[str]:
    """The modules that give the outputs: those that are named, or those that a model of fewer labels has smaller."""
    if outputs.name:
        named = matched(outputs.name, [path for path, _ in model.named_modules() if path], "module") or ()
        return [path for path, _ in model.named_modules() if path in named]
    labels = [] if described is None else _labels(described)
    if described is None or not labels:
        raise ValueError(
            f"{type(model).__name__} has no configuration with a label for each output, so name the module that gives "
            "them: Outputs(MODULE, keep=...)."
        )
    keep = [each for each in _numbers(outputs, labels, len(labels)) if each < len(labels)]
    smaller = _sizes(described.build(_relabelled(described, keep)))
    changed = [name for name, sizes in _sizes(model).items() if smaller.get(name) != sizes]
    found = [*dict.fromkeys(name.rpartition(".")[0] for name in changed)]
    if not found:
        raise ValueError(f"no module of {type(model).__name__} has an output for each label of its configuration.")
    return found


def _sizes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(each.shape) for name, each in model.named_parameters()}


def _said(outputs: Outputs) -> str:
    """The modules that give them, as they were named."""
    return outputs.name if isinstance(outputs.name, str) else ", ".join(outputs.name)


def _is_single(module: nn.Module) -> bool:
    """Whether the last layer gives a single output."""
    return [each.shape[0] for each in module.parameters() if each.dim()][-1:] == [1]


def _without_heads(leaving: Leaving, paths: Sequence[str], outputs: Outputs) -> Left:
    """Modules leave as a whole: None stays in their place, or nothing in a list or a dict of modules."""
    model, size = leaving.model, len(paths)
    keep = _numbers(outputs, _names_of(model, paths, None, size), size) if outputs.keep else []
    gone = [path for number, path in enumerate(paths) if number not in keep]
    forms = {path: {"was": type(model.get_submodule(path)).__name__, "returns": "nothing"} for path in gone}
    plan = Plan({}, [], modules=forms)
    if words := differs_without_heads(probe_of(model), leaving.coupling, plan, leaving.inputs):
        raise ValueError(f"{', '.join(gone)} cannot leave the model as a whole: without it {words}.")

    def rename(_: Coupling) -> Mapping[str, Any]:
        _rename(model, paths, keep, size, leaving.undo)
        return {"unread": _unread(model, gone, size)}

    counts = {_said(outputs): (size, len(keep))}
    return Left(plan, {"outputs": counts}, mend=rename) if keep else Left(plan, {"outputs": counts})


def _returned(coupling: Coupling, paths: Sequence[str], outputs: Outputs) -> list[Group]:
    """The groups whose units are outputs of the model, all of one size: heads of several scales, or one beside it."""
    groups = [group for group in coupling.groups if group.returned and not group.chosen]
    if not groups:
        inside = {(name, at): why for (name, at), why in coupling.frozen.items() if _within(name, paths) and at == 0}
        inside |= {(group.name, 0): "what chooses between others" for group in coupling.groups if group.returned}
        why = next(
            (f"{name}: {why}" for (name, _), why in [*inside.items()][::-1]),
            "the model returns none of them, or they share a table with something else",
        )
        raise ValueError(
            f"the outputs of {_said(outputs)} cannot leave; {why}. What stays would be another, unless the model "
            "returns them as the module gives them: take what reads them, such as a softmax, out of the model, and "
            "apply it to what that returns."
        )
    if len({group.size for group in groups}) > 1:
        sizes = ", ".join(f"{group.size} of {group.name}" for group in groups)
        raise ValueError(f"{_said(outputs)} has outputs of several kinds, {sizes}; name the module of one.")
    return groups


def _within(name: str, paths: Sequence[str]) -> bool:
    return any(name.startswith(f"{path}.") for path in paths)


def _numbers(outputs: Outputs, names: Sequence[str], size: int) -> list[int]:
    """The numbers of those that stay, also where they are named, in ascending order.

    Where labels are named, what has none, such as a class of a detector that says that there is nothing, stays, too.
    """
    said, words = _said(outputs) or "the model", list(outputs.keep)
    found: list[int] = []
    while words:
        # a label may hold commas, at which a command takes its labels apart
        parts = next((n for n in range(len(words), 0, -1) if _number(words[:n], names) is not None), 1)
        number = _number(words[:parts], names)
        if number is None:
            raise ValueError(f"{said} has no output that is called {words[0]!r}{_near(str(words[0]), names)}")
        found.append(number)
        words = words[parts:]
    if any(isinstance(each, str) for each in outputs.keep) or not outputs.name:
        found += range(len(names), size) if names else ()
    if wrong := [number for number in found if not 0 <= number < size]:
        raise ValueError(f"{said} has outputs 0 to {size - 1}, and no {wrong[0]}.")
    if len({*found}) == size:
        raise ValueError(f"{said} has {size} outputs, and keep= names all of them, so that none leaves.")
    return sorted({*found})


def _number(words: Sequence[int | str], names: Sequence[str]) -> int | None:
    """Which output these words name together: as a whole, or by what stands between the commas of its label.

    >>> names = ["tench, Tinca tinca", "great white shark", "crane", "crane"]
    >>> [_number(words, names) for words in (["tench", " Tinca tinca"], ["Tench"], ["1"], [3], ["cat"])]
    [0, 0, 1, 3, None]
    """
    if not all(isinstance(each, str) for each in words):
        return int(words[0]) if len(words) == 1 else None
    word = ",".join(map(str, words)).strip()
    lower = [name.lower() for name in names]
    for mine, forms in (
        (word, [[each] for each in names]),
        (word.lower(), [[each, *each.split(", ")] for each in lower]),
    ):
        if at := [number for number, its in enumerate(forms) if mine in its]:
            if len(at) > 1:
                raise ValueError(f"{word!r} is what outputs {', '.join(map(str, at))} are called; give their numbers.")
            return at[0]
    return int(word) if word.isdecimal() else None


def _near(word: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, names, n=5, cutoff=0.5) or [*names[:5]]
    return f"; near are {', '.join(map(repr, near))}." if near else "; it has no names for them, so give numbers."


# ---- What they are called: in a configuration, and where modules name them.
#
# Law: names are known by their form, one for each output, and never by what the field that holds them is called.


def _names_of(model: nn.Module, paths: Sequence[str], described: Described | None, size: int) -> list[str]:
    """What the outputs are called; nothing where there is no such thing."""
    labels = [] if described is None else _labels(described)
    held = [names for _, _, value in _held_around(model, paths) if (names := _named(value)) and len(names) == size]
    return labels if 0 < len(labels) <= size else held[0] if held else []


def _labels(described: Described) -> list[str]:
    """What a configuration calls the outputs: the one field that numbers names."""
    found = [names for value in described.values.values() if isinstance(value, dict) and (names := _named(value))]
    return found[0] if found else []


def _relabelled(described: Described, keep: Sequence[int]) -> dict[Place, Any]:
    """The fields of a configuration in which the labels stand, of those that stay."""
    labels = _labels(described)
    keep = [number for number in keep if number < len(labels)]
    found: dict[Place, Any] = {}
    for key, value in described.values.items():
        if isinstance(value, dict) and _named(value) == labels:
            found[key,] = _renumbered(value, keep)
        elif (
            isinstance(value, dict) and value and value.items() <= {name: at for at, name in enumerate(labels)}.items()
        ):
            found[key,] = {labels[number]: new for new, number in enumerate(keep)}  # some labels are equal: fewer names
    return found


def _fields(
    described: Described, keep: Sequence[int], coupling: Coupling, counts: Mapping[str, int]
) -> dict[Place, Any]:
    """What becomes of the fields of a configuration that name outputs; nothing where it says no such model."""
    fields = _relabelled(described, keep) if _labels(described) else {}
    with contextlib.suppress(Exception):  # whatever a class raises: then it cannot be built from its configuration
        built = _sizes(described.build(fields))
        left = {name: math.prod(sizes) for name, sizes in built.items()}
        if fields and left == {name: coupling.size(name, counts) for name in built}:
            return fields
    return {}


def _rename(
    model: nn.Module,
    paths: Sequence[str],
    keep: Sequence[int],
    size: int,
    undo: Undo,
    counted: Collection[str] = (),
    reset: Collection[tuple[str, str]] = (),
) -> None:
    """What the modules around a head hold says what stays: names, integers that `_reset` found, and those that are
    called as one that a pass read, also in dicts such as the description that a model was built from."""

    def recounted(key: Any, value: Any) -> Any:
        return len(keep) if key in counted and type(value) is int and value == size else value

    for path, key, value in _held_around(model, paths):
        new = len(keep) if (path, key) in reset else recounted(key, value)
        if (names := _named(value)) is not None and len(names) == size:
            new = _renumbered(value, keep)
        elif type(value) is dict:
            new = {name: recounted(name, each) for name, each in value.items()}
        if new is not value and new != value:
            held = vars(model.get_submodule(path))
            undo.call(operator.setitem, held, key, value)
            held[key] = new


def _reset(model: nn.Module, paths: Sequence[str], size: int, left: int) -> set[tuple[str, str]]:
    """The integers that a model of timm changes where it is asked for so many classes: (path, name)."""
    if not callable(getattr(model, "reset_classifier", None)):
        return set()
    shared = {id(each): each for each in tensors_of(model).values()}
    asked: Any = copy.deepcopy(model, shared)
    with contextlib.suppress(Exception):  # whatever the model raises: then it does not say it
        asked.reset_classifier(left)
        now = {(path, key): value for path, key, value in _held_around(asked, paths)}
        held = [(path, key) for path, key, value in _held_around(model, paths) if type(value) is int and value == size]
        return {each for each in held if now.get(each) == left}
    return set()


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


def _named(value: Any) -> list[str] | None:
    """The names in the order of their numbers, of what has one name for each number; None for anything else.

    >>> _named({0: "cat", 1: "dog"}), _named({"cat": 0, "dog": 1}), _named(["cat", "dog"]), _named({"a": 8})
    (['cat', 'dog'], ['cat', 'dog'], ['cat', 'dog'], None)
    """
    if isinstance(value, list | tuple):
        return [*value] if value and all(isinstance(name, str) for name in value) else None
    if not isinstance(value, dict) or not value:
        return None
    for kind in (int, str):
        numbers = [kind(number) for number in range(len(value))]
        if value.keys() == {*numbers} and all(isinstance(name, str) for name in value.values()):
            return [value[number] for number in numbers]
    by_number = {str(number): name for name, number in value.items()}
    if all(isinstance(name, str) for name in value) and by_number.keys() == {*map(str, range(len(value)))}:
        return [by_number[str(number)] for number in range(len(value))]
    return None


def _renumbered(value: Any, keep: Sequence[int]) -> Any:
    """The names of what stays under its new numbers, in the same form.

    >>> _renumbered({0: "cat", 1: "dog", 2: "eel"}, [0, 2]), _renumbered({"cat": 0, "dog": 1}, [1])
    ({0: 'cat', 1: 'eel'}, {'dog': 0})
    """
    names = _named(value) or []
    if isinstance(value, list | tuple):
        return type(value)([names[number] for number in keep])
    first = next(iter(value))
    if value[first] in names:
        return {type(first)(new): names[number] for new, number in enumerate(keep)}
    return {names[number]: new for new, number in enumerate(keep)}
