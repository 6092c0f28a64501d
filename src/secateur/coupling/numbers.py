"""Numbers that remember where they came from: sizes read off tensors, and integers that modules hold.

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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from secateur.coupling.axes import Expression
from secateur.support import private


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
