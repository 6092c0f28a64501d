"""A cache of measurements on a dense model, for several copies of it that are shrunken in turn.

Law: a cached measurement is used only for the same weights, groups and batches, bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from secateur.blockwise import digest
from secateur.coupling import Axis, Group
from secateur.shrinking.measuring import Measured
from secateur.support import tensors_of

__all__ = ["Memory", "recalled", "remember", "remembering"]


@dataclass(eq=False)
class Memory:
    """A cache of measurements, for models that are run by one ``forward``."""

    known: dict[tuple[Hashable, ...], tuple[tuple[Axis, ...], Measured]] = field(default_factory=dict)


_MEMORY: ContextVar[Memory | None] = ContextVar("secateur_measured", default=None)


@contextlib.contextmanager
def remembering(memory: Memory) -> Iterator[None]:
    """A context in which `shrink` with data takes measurements from the memory, and puts new ones there. A search
    finishes a dozen models that begin alike: only the differences are computed, and the numbers are the same.

    Whoever holds the memory runs all batches by the same ``forward``.
    """
    token = _MEMORY.set(memory)
    try:
        yield
    finally:
        _MEMORY.reset(token)


def recalled(
    model: nn.Module, groups: Sequence[Group], batches: Sequence[Any], way: Hashable = None
) -> Measured | None:
    """The cached measurement of this model, by the axes of these groups; None where there is none, or no cache is
    open.
    """
    memory = _MEMORY.get()
    found = None if memory is None else memory.known.get(_key(model, groups, batches, way))
    if found is None:
        return None
    before, measured = found
    axis = dict(zip(before, (group.axis for group in groups), strict=True))
    return replace(
        measured,
        scores={axis[each]: value for each, value in measured.scores.items()},
        curves={axis[each]: value for each, value in measured.curves.items()},
        consumers={axis[each]: value for each, value in measured.consumers.items()},
    )


def remember(
    model: nn.Module, groups: Sequence[Group], batches: Sequence[Any], measured: Measured, way: Hashable = None
) -> None:
    """Puts a measurement into the open cache, if there is one."""
    if (memory := _MEMORY.get()) is not None:
        memory.known[_key(model, groups, batches, way)] = tuple(group.axis for group in groups), measured


def _key(model: nn.Module, groups: Sequence[Group], batches: Sequence[Any], way: Hashable) -> tuple[Hashable, ...]:
    named = tuple((group.name, group.size, tuple(group.members)) for group in groups)
    return digest([dict(tensors_of(model))]), digest(batches), named, way
