"""Equations between sizes: polynomials in the counts of axes, and what may leave such that all of them hold.

Law: an equation between two sizes that holds as polynomials holds whatever leaves; any other freezes or ties what it is
about, until all hold.

`settle` decides what may leave, and what the integers of modules have to become.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction

from secateur.coupling.axes import (
    Axis,
    Expression,
    Product,
    Sum,
    freeze,
    leaves,
    multiplied,
    representative,
    resolved,
    tie,
    unify,
)
from secateur.coupling.numbers import Attribute, Equation, Formula, Outcome, parts_of

Variable = Axis | Attribute
Polynomial = dict[tuple[Variable, ...], Fraction]  # products of variables, sorted -> coefficient


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
            return _that_move(values)
        split = functools.partial(_split, equations=known, tied=_tied(known))
        freeze_broken = functools.partial(_freeze_broken, values=values)
        if not _each_apart(broken, values, split) and not _each_apart(broken, values, freeze_broken):
            return _that_move(values)  # what does not hold is of sizes that all stay


def _that_move(values: Mapping[Attribute, Polynomial]) -> dict[Attribute, Polynomial]:
    return {attribute: value for attribute, value in values.items() if any(value)}


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


_SIGNS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}


def holds(outcome: Outcome, values: Mapping[Attribute, Polynomial], counts: Mapping[Axis, int]) -> bool:
    """Whether a comparison comes out the same when so many stay of each axis."""
    try:
        left, right = (_value(each, values, counts) for each in (outcome.left, outcome.right))
    except ZeroDivisionError:
        return False
    return outcome.compare(left, right) is outcome.result


def _value(formula: Formula, values: Mapping[Attribute, Polynomial], counts: Mapping[Axis, int]) -> int:
    """Of a formula when so many stay of each axis, also of one that is no polynomial."""
    if isinstance(formula, int | Attribute | Axis | Product | Sum):
        polynomial = _polynomial(formula, values)
        assert polynomial is not None  # an operation may be none
        return evaluated(polynomial, counts)
    sign, first, second = formula
    return _SIGNS[sign](_value(first, values, counts), _value(second, values, counts))


def axes_of(outcome: Outcome, values: Mapping[Attribute, Polynomial]) -> set[Axis]:
    """The free axes that a comparison depends on."""
    return {each for each in _variables(outcome, values) if isinstance(each, Axis) and not is_frozen(each)}


def evaluated(polynomial: Polynomial, counts: Mapping[Axis, int]) -> int:
    """The value of a polynomial, given how many units stay of each axis; of axes that are not named all stay."""
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
            # a quotient that was rounded, as of a padding of 5 in halves, says of a number what it is not
            if all(factor.denominator == 1 for factor in rest.values()) and evaluated(rest, {}) == attribute.value:
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
