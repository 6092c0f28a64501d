"""Units that Python's own numbers name: the place of an expert that became an integer, and lists along a dimension.

Law: a place that became a number of Python's leaves its dimension free only where the same call of a module's code
takes the thing of that number out of a dimension of as many things, or tells it from others by a size that a module
holds. A number that is counted by a loop says nothing, unless what it takes meets, for each thing, the part of a tensor
that was split by a list along the dimension. What else Python does with a number is not seen: the proof sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from secateur.coupling.axes import Expression, Sum, concatenated, cut, freeze, leaves, look, resolved, size_of, unify
from secateur.coupling.numbers import Attribute, Known

if TYPE_CHECKING:
    from secateur.coupling.trace import Trace

_BY_NUMBER = "one of it is taken by its number"


class Along(list[int]):
    """Numbers of Python's, one for each thing of a dimension, as a tensor along it became a list."""

    def __init__(self, numbers: Iterable[int], dim: Expression) -> None:
        super().__init__(numbers)
        self.dim = dim

    def plain(self) -> list[int]:
        """Without saying what became of it."""
        return list(list.__iter__(self))

    def __iter__(self) -> Any:
        self._leaves()
        return super().__iter__()

    def __getitem__(self, at: Any) -> Any:
        self._leaves()
        return super().__getitem__(at)

    def __len__(self) -> int:
        self._leaves()
        return super().__len__()

    def _leaves(self) -> None:
        freeze(self.dim, "a list along it is used by Python")


@dataclass
class _Left:
    """The numbers of places that left torch in one call of a module's code."""

    visit: Any = field(repr=False)  # alive, so that its id is not another's
    dims: dict[int, Expression] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)


@dataclass
class _Take:
    """One thing of a parameter that a plain number took, and what it met; ``turns`` are numbers that the module of the
    code holds, as large as the dimension: one may say how many turns a loop has."""

    dim: Expression
    number: int
    turns: list[Known]
    out: Tensor = field(repr=False)
    met: list[Expression] = field(default_factory=list)


class Numbered:
    """Of one pass; see `Trace`."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._left: dict[int, _Left] = {}
        self._takes: dict[int, _Take] = {}  # ids of tensors that are one of a parameter
        self._pieces: dict[int, tuple[Tensor, Expression, int]] = {}  # ids of tensors -> whose part, and which

    def leaves(self, places: Expression, numbers: Iterable[int]) -> None:
        """Numbers of places became Python's."""
        if self._trace.where is None:
            freeze(places, "Python takes something by its numbers, such as modules in a list")
            return
        visit = self._trace.where.visits[-1]
        left = self._left.setdefault(id(visit), _Left(visit))
        for number in numbers:
            before = left.dims.get(number)
            if before is not None and number not in left.used and list(leaves(before)) != list(leaves(places)):
                freeze(before, "Python takes something by its numbers, such as modules in a list")
            left.dims[number] = places
            left.used.discard(number)

    def takes(self, dim: Expression, number: int, tensor: Tensor, out: Any, *, alone: bool) -> bool:
        """Whether a plain number takes a thing that it is known to mean, or may turn out to; else the dimension stays.

        ``alone``: the result is that thing of the tensor, and nothing else is taken of it.
        """
        left = self._meaning(number)
        if left is not None and self._chosen(dim, left.dims[number]):
            left.used.add(number)
            return True
        if alone and id(tensor) in self._trace.weights and number >= 0 and isinstance(out, Tensor):
            self._takes[id(out)] = _Take(dim, number, self._turns(size_of(dim), tensor), out)
            return True
        return False

    def split(self, dim: Expression, parts: Sequence[Tensor]) -> None:
        """These are the parts of a tensor, one for each thing of a dimension."""
        self._pieces |= {id(part): (part, dim, number) for number, part in enumerate(parts)}

    def meet(self, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """What one call is given: a part for a thing of a dimension, and what the same number took."""
        pieces = [found for each in tensors if (found := self._pieces.get(id(each))) is not None]
        if not pieces:
            return
        _, dim, number = pieces[0]
        for each in tensors:
            take = self._takes.get(id(each))
            if take is not None and take.number == number and size_of(take.dim) == size_of(dim):
                take.met.append(dim)
        if all(other == number for _, _, other in pieces):
            self._pieces |= {id(out): (out, dim, number) for out in outs}

    def compared(self, known: Known, number: int) -> bool:
        """Whether a size was compared with the number of a place: positions before it differ from those behind."""
        left = self._meaning(number)
        places = None if left is None else left.dims[number]
        end = int.__index__(known)
        told = places is not None and isinstance(known.formula, Attribute) and 0 < end <= size_of(places)
        parts = cut(places, end) if places is not None and told else None
        if parts is None:
            return False
        self._trace.agree(known, parts[0], f"compared with {end}")
        freeze(parts[1], "told from the others by its number")
        return True

    def settle(self) -> None:
        """At the end of a pass: what stays after all."""
        for left in self._left.values():
            for number, places in left.dims.items():
                if number not in left.used:
                    freeze(places, "Python takes something by its numbers, such as modules in a list")
        by_dim: dict[int, list[_Take]] = {}
        for take in self._takes.values():
            by_dim.setdefault(id(resolved(take.dim)), []).append(take)
        for takes in by_dim.values():
            self._settle_takes(takes)
        self.clear()

    def clear(self) -> None:
        """Forget a pass."""
        self._left.clear()
        self._takes.clear()
        self._pieces.clear()

    def _settle_takes(self, takes: Sequence[_Take]) -> None:
        dim = takes[0].dim
        in_order = {take.number for take in takes} == set(range(size_of(dim)))
        if not in_order or not all(take.met for take in takes):
            freeze(dim, _BY_NUMBER)
            return
        for take in takes:
            for places in take.met:
                self._chosen(dim, places)
            for turns in take.turns:
                self._trace.agree(turns, dim, f"{size_of(dim)} taken in turn")

    def _chosen(self, dim: Expression, places: Expression) -> bool:
        """Things of a dimension are those of the places, where there are as many, or as many as they were cut at."""
        size = size_of(dim)
        if size <= 1 or all(axis.reasons for axis in leaves(dim)):
            return False
        if size < size_of(places):
            head = _cut_before(places, size)
            if head is None:
                return False
            places = head
        if size_of(places) != size or not unify(dim, places):
            return False
        look(dim, _BY_NUMBER)
        self._trace.chosen.append(dim)
        return True

    def _meaning(self, number: int) -> _Left | None:
        """The innermost of the running modules' calls in which a number is one of a place."""
        visits = () if self._trace.where is None else reversed(self._trace.where.visits)
        found = (self._left.get(id(visit)) for visit in visits)
        return next((left for left in found if left is not None and number in left.dims), None)

    def _turns(self, size: int, tensor: Tensor) -> list[Known]:
        """The numbers of a size that the module that runs holds, or the one that holds a tensor."""
        if self._trace.where is None:
            return []
        running = self._trace.where.module
        holds = (each for each in running.modules() if any(tensor is its for its in each.parameters(recurse=False)))
        return [
            value
            for module in dict.fromkeys((running, *holds))
            for value in vars(module).values()
            if type(value) is Known and int.__index__(value) == size
        ]


def _cut_before(places: Expression, end: int) -> Expression | None:
    """The places before one at which they were cut already."""
    whole = resolved(places)
    if not isinstance(whole, Sum):
        return None
    for number in range(len(whole.segments)):
        head = concatenated(whole.segments[: number + 1])
        if size_of(head) == end:
            return head
    return None
