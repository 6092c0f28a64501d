"""Numbers that remember where they came from: sizes as polynomials in the counts of axes.

Law: an equation between two sizes that holds as polynomials holds whatever leaves; any other freezes or ties what it is
about, until all hold.

``x.shape[1] // self.heads`` is such a number: while a forward pass is watched, sizes read off tensors and integers held
by modules are `Known`. Where the code uses one in a view, a slice or a comparison, an equation is written down;
`settle` then decides what may leave, and what the integers of modules have to become.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

from secateur.coupling.axes import Axis, Expression, Product, Sum, freeze, leaves, multiplied, resolved, tie, unify
from secateur.coupling.axes import tied_to as representative

__all__ = [
    "Attribute",
    "Equation",
    "Known",
    "Log",
    "Outcome",
    "Polynomial",
    "counted",
    "evaluated",
    "formula_of",
    "is_frozen",
    "parts_of",
    "representative",
    "settle",
]


@dataclass(frozen=True, eq=False)
class Attribute:
    """An integer that an object of the model holds: ``place`` is the path of a module, then names, keys, indices."""

    place: tuple[str | int, ...]
    value: int

    def __repr__(self) -> str:
        return ".".join(str(part) for part in self.place if part != "")


# A formula: a number, an expression (its size), an attribute, or (operator, formula, formula).
Formula = int | Expression | Attribute | tuple[str, Any, Any]
Variable = Axis | Attribute
Polynomial = dict[tuple[Variable, ...], Fraction]  # products of variables, sorted -> coefficient


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

    def holds(self, values: Mapping[Attribute, Polynomial], counts: Mapping[Axis, int]) -> bool:
        """Whether it comes out the same when so many stay of each axis."""
        left, right = _polynomial(self.left, values), _polynomial(self.right, values)
        if left is None or right is None:
            return False
        return self.compare(evaluated(left, counts), evaluated(right, counts)) is self.result


Log = list[Equation | Outcome]


class Known(int):
    """An integer with the formula that it follows; ``log`` collects the equations that its use asks for.

    >>> width = Known(6, Axis(6), [])
    >>> half = width // 2
    >>> half, half.formula
    (3, ('//', Axis(6), 2))
    """

    formula: Formula
    log: Log

    def __new__(cls, value: int, formula: Formula, log: Log) -> Self:
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
        self.log.append(Outcome(self.formula, formula_of(other), compare, outcome))
        return outcome


def formula_of(number: int) -> Formula:
    """What a number follows: itself, where it was written in the code."""
    return number.formula if isinstance(number, Known) else int(number)


def counted(expression: Expression) -> Polynomial:
    """The size of a dimension as a polynomial in the counts of its free axes.

    >>> free, frozen = Axis(4), Axis(3, reasons=["an output"])
    >>> counted(Product((frozen, free))) == {(free,): 3}
    True
    """
    whole = resolved(expression)
    if isinstance(whole, Axis):
        return _constant(whole.size) if whole.size <= 1 or is_frozen(whole) else {(representative(whole),): Fraction(1)}
    if isinstance(whole, Sum):
        return _total(counted(segment) for segment in whole.segments)
    found = _constant(1)
    for factor in whole.factors:
        found = _times(found, counted(factor))
    return found


def is_frozen(axis: Axis) -> bool:
    """Whether nothing of it may leave: because of itself, or of an axis of which it has to keep as many."""
    return bool(axis.reasons) or bool(representative(axis).reasons)


def settle(equations: Iterable[Equation | Outcome]) -> dict[Attribute, Polynomial]:
    """Freeze and tie axes until every equation holds whatever leaves; then the attributes that follow from sizes.

    >>> axis, heads = Axis(4), Attribute(("layer", "heads"), 4)
    >>> settle([Equation(heads, axis, "view")])[heads] == {(axis,): 1}
    True
    >>> settle([Equation(heads, axis, "view"), Equation(heads, 4, "used as a real number")])
    {}
    """
    known = [each for each in equations if isinstance(each, Equation)]
    while True:
        values = _defined(known)
        changed = False
        broken: list[tuple[Equation, Polynomial | None]] = []
        for equation in known:
            left, right = _polynomial(equation.left, values), _polynomial(equation.right, values)
            difference = None if left is None or right is None else _minus(left, right)
            if difference is None or difference:
                broken.append((equation, difference))
                if left is not None and right is not None and not (any(left) and any(right)):
                    # a number that stays is the size of something, so nothing of that may leave
                    changed |= _freeze_all({each for term in (*left, *right) for each in term}, equation.why)
        if changed:
            continue
        for equation, difference in broken:
            for pair in [] if difference is None else _equal_counts(difference):
                if representative(pair[0]) is not representative(pair[1]):
                    tie(*pair, equation.why)
                    changed = True
        if changed:
            continue
        if not broken:
            return {attribute: value for attribute, value in values.items() if any(value)}
        split = functools.partial(_split, equations=known, tied=_tied(known))
        if not _each_apart(broken, values, split):
            _each_apart(broken, values, functools.partial(_freeze_broken, values=values))


def _each_apart(
    broken: Iterable[tuple[Equation, Polynomial | None]],
    values: Mapping[Attribute, Polynomial],
    mend: Callable[[Equation, Polynomial | None], set[Variable]],
) -> bool:
    """Mends the first equation that can be, and those in which nothing is that others before have changed: of a stack
    of layers one in each, so that the number of rounds does not grow with the layers."""
    changed: set[Variable] = set()
    for equation, difference in broken:
        variables = (
            _variables(equation, values) if difference is None else {each for term in difference for each in term}
        )
        if variables.isdisjoint(changed):
            changed |= mend(equation, difference)
    return bool(changed)


def _freeze_broken(
    equation: Equation, difference: Polynomial | None, *, values: Mapping[Attribute, Polynomial]
) -> set[Variable]:
    variables = _variables(equation, values) if difference is None else _deciding(difference)
    return variables if _freeze_all(variables, equation.why) else set()


def axes_of(outcome: Outcome, values: Mapping[Attribute, Polynomial]) -> set[Axis]:
    """The free axes that a comparison depends on."""
    return {each for each in _variables(outcome, values) if isinstance(each, Axis) and not is_frozen(each)}


def evaluated(polynomial: Polynomial, counts: Mapping[Axis, int]) -> int:
    """The number, given how many stay of each axis; of those not named all do."""
    total = Fraction(0)
    for variables, coefficient in polynomial.items():
        term = coefficient
        for variable in variables:
            term *= counts.get(variable, variable.size) if isinstance(variable, Axis) else variable.value
        total += term
    assert total.denominator == 1, polynomial
    return int(total)


def _defined(equations: list[Equation]) -> dict[Attribute, Polynomial]:
    """What attributes are, by the equations in which each stands alone."""
    values: dict[Attribute, Polynomial] = {}
    waiting = [each for each in equations if any(isinstance(part, Attribute) for part in parts_of(each))]
    found = True
    while found:
        found = False
        for equation in list(waiting):
            left, right = (
                _polynomial(equation.left, values, open_=True),
                _polynomial(equation.right, values, open_=True),
            )
            if left is None or right is None:
                continue
            difference = _minus(left, right)
            unknown = {variable for term in difference for variable in term if isinstance(variable, Attribute)}
            if len(unknown) != 1:
                continue
            (attribute,) = unknown
            alone = difference.get((attribute,))
            if alone is None or any(attribute in term and term != (attribute,) for term in difference):
                continue
            rest = {term: -factor / alone for term, factor in difference.items() if term != (attribute,)}
            waiting.remove(equation)
            if all(factor.denominator == 1 for factor in rest.values()):
                values[attribute] = rest
                found = True
    return values


def _polynomial(formula: Formula, values: Mapping[Attribute, Polynomial], *, open_: bool = False) -> Polynomial | None:
    """A formula with the attributes' values put in; None where it is no polynomial. Those without a value are
    constants, or variables while they are being found."""
    if isinstance(formula, Attribute):
        if formula in values:
            return values[formula]
        return {(formula,): Fraction(1)} if open_ else _constant(formula.value)
    if isinstance(formula, int):
        return _constant(formula)
    if isinstance(formula, Axis | Product | Sum):
        return counted(formula)
    sign, first, second = formula
    left, right = _polynomial(first, values, open_=open_), _polynomial(second, values, open_=open_)
    if left is None or right is None:
        return None
    if sign == "+":
        return _total((left, right))
    if sign == "-":
        return _minus(left, right)
    if sign == "*":
        return _times(left, right)
    if not any(left) and not any(right):
        one, other = int(left.get((), 0)), int(right.get((), 0))
        return _constant(one // other if sign == "//" else one % other) if other else None
    quotient = _over(left, right)
    if quotient is None:
        return None
    if sign == "%":  # a remainder is known only where it is none
        return {} if all(factor.denominator == 1 for factor in quotient.values()) else None
    return quotient


def _over(left: Polynomial, right: Polynomial) -> Polynomial | None:
    """Exact division by a single term. A fraction of a count is left as it is: no size equals it, so it freezes."""
    if len(right) != 1:
        return None
    ((divisor, coefficient),) = right.items()
    found: Polynomial = {}
    for term, factor in left.items():
        rest = list(term)
        for variable in divisor:
            if variable not in rest:
                return None
            rest.remove(variable)
        found[tuple(rest)] = factor / coefficient
    return found


def _split(
    equation: Equation, difference: Polynomial | None, *, equations: Iterable[Equation], tied: set[Axis]
) -> set[Variable]:
    """Split an axis that has to be as long as a product of others is into as many factors, which keep as many.

    Returns the axis, if there is one. ``tied`` are those that others keep as many as, and gets those that now do.

    The width of a stream that attention's code divides by the number of heads, such as of `nn.MultiheadAttention`.
    """
    if difference is None or len(difference) != 2:
        return set()
    for (one, first), (others, second) in itertools.permutations(difference.items()):
        times = -second / first
        if len(one) != 1 or times.denominator != 1 or times < 1 or not others or one[0] in others:
            continue
        (whole,) = one
        axes = _in_order([each for each in others if isinstance(each, Axis)], equations)
        if not isinstance(whole, Axis) or len(axes) < len(others):
            continue
        if whole.size != times * math.prod(each.size for each in axes) or whole in tied:
            continue
        factors = [Axis(each.size) for each in axes]
        unify(whole, multiplied([Axis(int(times), reasons=[equation.why]), *factors]))
        for factor, axis in zip(factors, axes, strict=True):
            tie(axis, factor, equation.why)
            tied |= {axis, factor}
        return {whole}
    return set()


def _in_order(axes: list[Axis], equations: Iterable[Equation]) -> list[Axis]:
    """As the dimensions of the model have them, the outer before the inner."""
    if len(axes) < 2:
        return axes
    for equation in equations:
        for part in parts_of(equation):
            if isinstance(part, Axis | Product | Sum):
                found = [each for each in map(representative, leaves(part)) if each in axes]
                if sorted(map(id, found)) == sorted(map(id, axes)):
                    return found
    return axes


def _tied(equations: Iterable[Equation]) -> set[Axis]:
    """The axes of dimensions that another keeps as many as."""
    parts = (part for equation in equations for part in parts_of(equation) if isinstance(part, Axis | Product | Sum))
    return {representative(each) for part in parts for each in leaves(part) if representative(each) is not each}


def _number(variable: Variable) -> int:
    return variable.number if isinstance(variable, Axis) else -1


def _deciding(difference: Polynomial) -> set[Variable]:
    """The variables on which it depends whether a difference vanishes: not those that all of its terms have in common.

    ``8 * heads - width * heads`` does where the width stays 8, whatever becomes of the heads.
    """
    counts = [Counter(term) for term in difference]
    shared = functools.reduce(operator.and_, counts)
    return {variable for each in counts for variable in each - shared}


def _equal_counts(difference: Polynomial) -> list[tuple[Axis, Axis]]:
    """Pairs of axes that make a difference of two terms vanish by keeping equally many."""
    if len(difference) != 2:
        return []
    (one, first), (other, second) = difference.items()
    if first != -second:
        return []
    left = sorted((Counter(one) - Counter(other)).elements(), key=_number)
    right = sorted((Counter(other) - Counter(one)).elements(), key=_number)
    pairs = list(zip(left, right, strict=False))
    if len(left) == len(right) and all(_alike(*pair) for pair in pairs):
        return [(a, b) for a, b in pairs if isinstance(a, Axis) and isinstance(b, Axis)]
    return []


def _alike(one: Variable, other: Variable) -> bool:
    return isinstance(one, Axis) and isinstance(other, Axis) and one.size == other.size


def _freeze_all(variables: Iterable[Variable], why: str) -> bool:
    changed = False
    for variable in variables:
        if isinstance(variable, Axis) and not is_frozen(variable):
            freeze(variable, why)
            changed = True
    return changed


def _variables(equation: Equation | Outcome, values: Mapping[Attribute, Polynomial]) -> set[Variable]:
    found: set[Variable] = set()
    for part in parts_of(equation):
        if isinstance(part, Attribute):
            found |= {variable for term in values.get(part, {}) for variable in term}
        else:
            found |= {representative(axis) for axis in leaves(part) if axis.size > 1}
    return found


def parts_of(equation: Equation | Outcome) -> Iterator[Attribute | Expression]:
    """The attributes and dimensions in it."""
    waiting: list[Any] = [equation.left, equation.right]
    while waiting:
        formula = waiting.pop()
        if isinstance(formula, tuple):
            waiting += formula[1:]
        elif not isinstance(formula, int):
            yield formula


def _constant(value: int) -> Polynomial:
    return {(): Fraction(value)} if value else {}


def _total(polynomials: Iterable[Polynomial]) -> Polynomial:
    found: Polynomial = {}
    for polynomial in polynomials:
        for term, factor in polynomial.items():
            found[term] = found.get(term, Fraction(0)) + factor
    return {term: factor for term, factor in found.items() if factor}


def _minus(left: Polynomial, right: Polynomial) -> Polynomial:
    return _total((left, {term: -factor for term, factor in right.items()}))


def _times(left: Polynomial, right: Polynomial) -> Polynomial:
    return _total(
        {_sorted((*one, *other)): first * second} for one, first in left.items() for other, second in right.items()
    )


def _sorted(variables: tuple[Variable, ...]) -> tuple[Variable, ...]:
    return tuple(sorted(variables, key=lambda each: (isinstance(each, Attribute), id(each))))


def _plain(number: Any) -> Any:
    return number.stays("used with a real number") if isinstance(number, Known) else number
