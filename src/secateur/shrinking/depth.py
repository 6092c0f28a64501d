"""Blocks of a directory's model that can leave whole, and the configuration that says so.

Law: which fields count a stack's blocks is learnt by building the model with one less, never by their names. A model of
the new configuration, with the blocks that stay in their order, computes what the original does when the other blocks
return their inputs: proved on random weights in float64, on a narrow model of the class with as many blocks.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.blockwise import find_blocks
from secateur.shrinking.comparison import difference, probe_of
from secateur.shrinking.configuration import Described, same_constants
from secateur.shrinking.directory import PROVED
from secateur.shrinking.fields import Place, fields_in, integer_fields
from secateur.shrinking.proof import outputs
from secateur.support import mapped, tensors_in, track

__all__ = ["Stack", "narrowed", "passed_on", "passing", "prove_without", "renamed", "stacks_of"]

_NARROW = 16  # fields are not made smaller than this for a proof
_Sizes = dict[str, torch.Size]


@dataclass(frozen=True)
class Stack:
    """Blocks that a model runs one after the other.

    Attributes:
        name: the path of the list that they are in.
        blocks: their paths.
        place: the field of the configuration that counts them.
        lists: fields that have an entry for each of them.
    """

    name: str
    blocks: tuple[str, ...]
    place: Place
    lists: tuple[Place, ...]

    def stay(self, gone: Collection[str]) -> list[int]:
        """The numbers of the blocks that stay."""
        return [number for number, block in enumerate(self.blocks) if block not in gone]

    def fields(self, described: Described, gone: Collection[str]) -> dict[Place, Any]:
        """What the configuration says without some blocks."""
        stay = self.stay(gone)
        if len(stay) == len(self.blocks):
            return {}
        return {
            self.place: len(stay),
            **{place: [described.value(place)[number] for number in stay] for place in self.lists},
        }


def stacks_of(model: nn.Module, described: Described) -> list[Stack]:
    """The stacks of which a configuration can count fewer blocks.

    Raises:
        ValueError: there is none.
    """
    numbers: dict[str, list[int]] = {}
    for path in find_blocks(model):
        stack, _, number = path.rpartition(".")
        if number.isdecimal():
            numbers.setdefault(stack, []).append(int(number))
    found = []
    for stack, its in numbers.items():
        if len(its) > 1 and sorted(its) == list(range(len(its))):
            counted = _counted(model, described, stack, len(its))
            if counted is not None:
                found.append(Stack(stack, tuple(f"{stack}.{number}" for number in range(len(its))), *counted))
    if not found:
        raise ValueError(
            f"no field of the configuration of {type(model).__name__} counts its blocks, so none can leave."
        )
    return found


def _counted(model: nn.Module, described: Described, stack: str, count: int) -> tuple[Place, tuple[Place, ...]] | None:
    """The field that counts the blocks of a stack, and those that have an entry for each."""
    last = f"{stack}.{count - 1}."
    wanted = {name: size for name, size in _sizes(model).items() if not name.startswith(last)}
    known = list(fields_in(described.config, described.values))
    every = tuple(place for place, value in known if isinstance(value, list | tuple) and len(value) == count)
    for place, value in integer_fields(described.config, described.values):
        if value != count:
            continue
        for lists in dict.fromkeys((every, ())):
            changes = {place: count - 1, **{each: list(described.value(each))[:-1] for each in lists}}
            with contextlib.suppress(Exception):  # whatever a model raises for values that do not fit each other
                if _sizes(described.build(changes)) == wanted:
                    return place, lists
    return None


def _sizes(model: nn.Module) -> _Sizes:
    return {name: tensor.shape for name, tensor in model.named_parameters()}


def renamed(name: str, stacks: Sequence[Stack], gone: Collection[str], prefix: str = "") -> str | None:
    """What a tensor is called when blocks left; None where it left with one. In files the prefix of the base model may
    be there or not.

    >>> stack = Stack("model.layers", ("model.layers.0", "model.layers.1"), ("num_hidden_layers",), ())
    >>> names = ("layers.1.mlp.weight", "model.layers.0.mlp.weight", "model.norm.weight")
    >>> [renamed(name, [stack], {"model.layers.0"}, "model.") for name in names]
    ['layers.0.mlp.weight', None, 'model.norm.weight']
    """
    for stack in stacks:
        paths = {stack.name, prefix + stack.name, stack.name.removeprefix(prefix)}
        found = re.match(rf"({'|'.join(map(re.escape, paths))})\.(\d+)\.", name)
        if found is not None and int(found[2]) < len(stack.blocks):
            stay = stack.stay(gone)
            if int(found[2]) not in stay:
                return None
            return f"{found[1]}.{stay.index(int(found[2]))}.{name[found.end() :]}"
    return name


def passed_on(args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
    """The outputs of a block that adds nothing: the residual stream that it was given, in the place of its own.

    Raises:
        ValueError: it returns another shape.
    """
    given = next((each for each in tensors_in((args, dict(kwargs))) if each.is_floating_point()), None)
    first = next(tensors_in(output), None)
    if given is None or first is None or given.shape != first.shape:
        raise ValueError("a block returns another shape than it is given, so what leaves with it cannot be passed on.")
    return mapped(output, lambda tensor: given if tensor is first else tensor)


@contextlib.contextmanager
def passing(model: nn.Module, gone: Collection[str]) -> Iterator[None]:
    """A context in which these blocks return the stream that they are given."""

    def called(forward: Any, *args: Any, **kwargs: Any) -> Any:
        return passed_on(args, kwargs, forward(*args, **kwargs))

    blocks = [model.get_submodule(path) for path in gone]
    before = [vars(block).get("forward") for block in blocks]
    for block in blocks:
        block.forward = functools.partial(called, block.forward)
    try:
        yield
    finally:
        for block, forward in zip(blocks, before, strict=True):
            if forward is None:
                del block.forward
            else:
                block.forward = forward


# ---- the proof ------------------------------------------------------------------------------------------------------


def narrowed(described: Described, stacks: Sequence[Stack], most: int = PROVED) -> dict[Place, Any]:
    """Fields of a model of the class that has as many blocks, and at most so many parameters.

    Raises:
        ValueError: none was found.
    """
    deep = {place for stack in stacks for place in (stack.place, *stack.lists)}
    shallow: dict[Place, Any] = {}
    for stack in stacks:  # to look for sizes, two blocks are enough
        shallow |= stack.fields(described, stack.blocks[2:])

    def count(changes: Mapping[Place, Any]) -> float | None:
        try:
            built = described.build({**changes, **shallow})
        except Exception:  # whatever a configuration or a model raises for values that do not fit each other
            return None
        total = float(sum(each.numel() for each in built.parameters()))
        for stack in stacks:
            here = sum(each.numel() for path in stack.blocks[:2] for each in built.get_submodule(path).parameters())
            total += here * (len(stack.blocks) - 2) / 2
        return total

    found: dict[Place, Any] = {}
    now = count(found)
    while now is None or now > most:
        before = now
        for place, value in track(list(integer_fields(described.config, described.values)), "making a narrow one"):
            value = found.get(place, value)
            if place in deep or value < 2 * _NARROW or value % 2:
                continue
            left = count({**found, place: value // 2})
            if left is not None and (now is None or left < now):
                found[place], now = value // 2, left
        if now == before:
            raise ValueError("no narrow model of this class was found to prove it on.")
    return found


def prove_without(
    described: Described,
    stacks: Sequence[Stack],
    gone: Collection[str],
    example_inputs: Any,
    small: Mapping[Place, Any],
) -> str | None:
    """What differs, in words, between a model whose blocks pass on what they are given and one that is built without
    them; None where nothing does."""
    fields: dict[Place, Any] = {}
    for stack in stacks:
        fields |= stack.fields(described, gone)
    probe = probe_of(described.build(small, "cpu"))
    try:
        built = described.build({**small, **fields}, "cpu").double()
        state: dict[str, Tensor] = {}
        for name, tensor in probe.state_dict().items():
            new = renamed(name, stacks, gone)
            if new is not None:
                state[new] = tensor
        built.load_state_dict(state)
        same_constants(probe, built)
        for training in (False, True):
            with passing(probe, gone):
                expected = outputs(probe, example_inputs, training=training)
            words = difference(expected, outputs(built, example_inputs, training=training))
            if words is not None:
                return words
            if gone and difference(expected, outputs(probe, example_inputs, training=training)) is None:
                return "it computes the same with the blocks as without, so nothing can be compared"
    except Exception as error:  # whatever the model raises
        return f"it raises {type(error).__name__}: {error}"
    return None
