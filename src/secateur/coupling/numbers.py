"""Numbers that remember where they came from: sizes read off tensors, and integers that modules hold. Units that
numbers of Python name.

Law: a number that remembers is that number in all arithmetic; where its use needs it to be another's equal, that is
written down.

``x.shape[1] // self.heads`` is such a number: while a forward pass is watched, sizes read off tensors and integers held
by modules are `Known`. Where the code uses one in a view, a slice or a comparison, an equation is written down, of
which `equations` says what may leave.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from secateur.coupling.axes import Expression, Sum, concatenated, cut, freeze, leaves, look, resolved, size_of, unify
from secateur.support import private

if TYPE_CHECKING:
    from secateur.coupling.trace import Trace


@dataclass(frozen=True, eq=False)
class Attribute:
    """An integer that an object of the model holds: ``place`` is the path of a module, then names, keys, indices."""

    place: tuple[str | int, ...]
    value: int

    def __repr__(self) -> str:
        return ".".join(str(part) for part in self.place if part != "")


# A formula: a number, an expression (its size), an attribute, or (operator, formula, formula).
Formula = int | Expression | Attribute | tuple[str, Any, Any]


@dataclass(frozen=True)
class Equation:
    """Two formulas that the forward pass needs to be equal, and why."""

    left: Formula
    right: Formula
    why: str


@dataclass(frozen=True)
class Outcome:
    """A comparison of two formulas that were not equal: the code goes the way that it was watched on if it stays so."""

    left: Formula
    right: Formula
    compare: Callable[[int, int], bool]
    result: bool


class Log(list[Equation | Outcome]):
    """What the use of numbers asks for; ``tells`` says of a comparison with a plain number whether that says more."""

    tells: Callable[[Any, int], bool] | None = None


class Known(int):
    """An integer with the formula that it follows; ``log`` collects the equations that its use asks for.

    >>> from secateur.coupling import Axis
    >>> width = Known(6, Axis(6), [])
    >>> half = width // 2
    >>> half, half.formula
    (3, ('//', Axis(6), 2))
    """

    formula: Formula
    log: list[Equation | Outcome]

    def __new__(cls, value: int, formula: Formula, log: list[Equation | Outcome]) -> Self:
        made = super().__new__(cls, value)
        made.formula = formula
        made.log = log
        return made

    def _with(self, sign: str, value: int, left: Any, right: Any) -> Known:
        return Known(value, (sign, formula_of(left), formula_of(right)), self.log)

    def stays(self, why: str) -> int:
        """The plain number; it has to stay what it is."""
        self.log.append(Equation(self.formula, int.__index__(self), why))
        return int.__index__(self)

    def __add__(self, other: Any) -> Any:
        return self._exact("+", other, int.__add__)

    def __radd__(self, other: Any) -> Any:
        return self._exact("+", other, int.__radd__, swapped=True)

    def __sub__(self, other: Any) -> Any:
        return self._exact("-", other, int.__sub__)

    def __rsub__(self, other: Any) -> Any:
        return self._exact("-", other, int.__rsub__, swapped=True)

    def __mul__(self, other: Any) -> Any:
        return self._exact("*", other, int.__mul__)

    def __rmul__(self, other: Any) -> Any:
        return self._exact("*", other, int.__rmul__, swapped=True)

    def __floordiv__(self, other: Any) -> Any:
        return self._exact("//", other, int.__floordiv__)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._exact("//", other, int.__rfloordiv__, swapped=True)

    def __mod__(self, other: Any) -> Any:
        return self._exact("%", other, int.__mod__)

    def __rmod__(self, other: Any) -> Any:
        return self._exact("%", other, int.__rmod__, swapped=True)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __neg__(self) -> Known:
        return self._with("-", -int.__index__(self), 0, self)

    def __pos__(self) -> Known:
        return self

    def __truediv__(self, other: Any) -> Any:
        return self.stays("divided") / _plain(other)

    def __rtruediv__(self, other: Any) -> Any:
        return _plain(other) / self.stays("divided by")

    def __pow__(self, other: Any, modulus: Any = None) -> Any:
        return pow(self.stays("raised to a power"), _plain(other), modulus)

    def __rpow__(self, other: Any, modulus: Any = None) -> Any:
        return pow(_plain(other), self.stays("an exponent"), modulus)

    def __float__(self) -> float:
        return float(self.stays("used as a real number"))

    def __int__(self) -> int:
        return self.stays("turned into a plain number")

    def __trunc__(self) -> int:
        return self.stays("turned into a plain number")

    def __round__(self, digits: Any = None) -> int:
        return self.stays("turned into a plain number")

    def __eq__(self, other: object) -> Any:
        return self._compared(other, int.__eq__(self, other), equal=True)

    def __ne__(self, other: object) -> Any:
        return self._compared(other, int.__ne__(self, other), equal=False)

    def __lt__(self, other: Any) -> Any:
        return self._ordered(other, operator.lt)

    def __le__(self, other: Any) -> Any:
        return self._ordered(other, operator.le)

    def __gt__(self, other: Any) -> Any:
        return self._ordered(other, operator.gt)

    def __ge__(self, other: Any) -> Any:
        return self._ordered(other, operator.ge)

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __reduce__(self) -> Any:
        return int, (int.__index__(self),)

    def __deepcopy__(self, memo: Any) -> int:
        return int.__index__(self)

    def __copy__(self) -> int:
        return int.__index__(self)

    def _exact(self, sign: str, other: Any, compute: Any, *, swapped: bool = False) -> Any:
        if isinstance(other, float):
            self.stays("used with a real number")
        if not isinstance(other, int):
            return NotImplemented
        value = compute(self, other)
        return self._with(sign, value, *((other, self) if swapped else (self, other)))

    def _compared(self, other: object, outcome: Any, *, equal: bool) -> Any:
        if outcome is NotImplemented or not isinstance(other, int):
            return outcome
        if bool(outcome) is equal:  # they are equal, and have to stay so
            self.log.append(Equation(self.formula, formula_of(other), "compared"))
        else:
            self.log.append(Outcome(self.formula, formula_of(other), operator.eq, result=False))
        return outcome

    def _ordered(self, other: Any, compare: Callable[[Any, Any], bool]) -> Any:
        if isinstance(other, float):
            return compare(self.stays("compared"), other)
        if not isinstance(other, int):
            return NotImplemented
        outcome = compare(int.__index__(self), int.__index__(other))
        tells = getattr(self.log, "tells", None)
        if type(other) is int and tells is not None and tells(self, other):
            return outcome
        self.log.append(Outcome(self.formula, formula_of(other), compare, outcome))
        return outcome


def formula_of(number: int) -> Formula:
    """What a number follows: itself, where it was written in the code."""
    return number.formula if isinstance(number, Known) else int(number)


def parts_of(equation: Equation | Outcome) -> Iterator[Attribute | Expression]:
    """The attributes and dimensions in it."""
    waiting: list[Any] = [equation.left, equation.right]
    while waiting:
        formula = waiting.pop()
        if isinstance(formula, tuple):
            waiting += formula[1:]
        elif not isinstance(formula, int):
            yield formula


@contextlib.contextmanager
def numbers_that_remember(model: nn.Module, log: list[Equation | Outcome]) -> Iterator[None]:
    """Within, the integers that the modules of a model hold are `Known`, with an `Attribute` as their formula.

    Integers held directly, in tuples, lists and dicts, and in the fields of objects such as configurations.

    >>> class Heads(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.heads = 4
    >>> model = Heads()
    >>> with numbers_that_remember(model, []):
    ...     print(model.heads.formula, model.heads, type(model.heads).__name__)
    heads 4 Known
    >>> type(model.heads).__name__
    'int'
    """
    undo: list[Callable[[], Any]] = []
    seen: set[int] = set()

    def walk(held: dict[str, Any], place: tuple[str | int, ...], skip: Iterable[str] = ()) -> None:
        for key, value in list(held.items()):
            if key in skip or not isinstance(key, str):
                continue
            replaced = remembering(value, (*place, key))
            if replaced is not value:
                undo.append(functools.partial(held.__setitem__, key, value))
                held[key] = replaced

    def remembering(value: Any, place: tuple[str | int, ...]) -> Any:
        if type(value) is int and abs(value) > 1:
            return Known(value, Attribute(place, value), log)
        if type(value) in (tuple, list, torch.Size) and value and all(type(each) is int for each in value):
            return type(value)([remembering(each, (*place, number)) for number, each in enumerate(value)])
        if id(value) not in seen and (type(value) is dict or _has_fields(value)):
            seen.add(id(value))
            walk(value if type(value) is dict else vars(value), place)
        return value

    try:
        for path, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                walk(vars(module), (path,), _OF_EVERY_MODULE)
        yield
    finally:
        for each in reversed(undo):
            each()


_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | private.OF_RECURRENT


def _has_fields(value: Any) -> bool:
    """An object of a class of the user's or a library's that holds values, such as a configuration."""
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, nn.Module | Tensor | type | types.FunctionType | types.ModuleType | enum.Enum)
        and kind.__module__.split(".")[0] not in ("builtins", "torch", "functools", "logging", "threading", "weakref")
    )


def _plain(number: Any) -> Any:
    return number.stays("used with a real number") if isinstance(number, Known) else number


# ---- Units that Python's own numbers name: the place of an expert that became an integer, and lists along a dimension.
#
# Law: a place that became a number of Python's leaves its dimension free only where the same call of a module's code
# takes the thing of that number out of a dimension of as many things, or tells it from others by a size that a module
# holds. A number that is counted by a loop says nothing, unless what it takes meets, for each thing, the part of a
# tensor that was split by a list along the dimension. What else Python does with a number the proof sees.

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
