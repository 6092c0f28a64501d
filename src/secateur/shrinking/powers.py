"""Sizes as powers of numbers, and the solution of equations between them.

Law: a power is one of a few, found from two sizes; in logarithms powers are factors, and an equation is a row whose sum
is zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

__all__ = ["power_of", "row_echelon"]

_POWERS = (Fraction(1), Fraction(-1), Fraction(2), Fraction(-2), Fraction(1, 2), Fraction(-1, 2))


def power_of(size: float, before: float, field: int, field_before: int) -> Fraction | None:
    if size <= 0 or before <= 0:
        return None
    for power in _POWERS:
        if math.isclose(size / before, (field / field_before) ** float(power), rel_tol=1e-9):
            return power
    return None


def row_echelon(rows: Sequence[Mapping[Any, Fraction]], order: Sequence[Any]) -> dict[Any, dict[Any, Fraction]]:
    """The reduced row echelon form, ``{pivot: row}``; earlier variables become pivots first.

    >>> one = Fraction(1)
    >>> row_echelon([{"a": one, "b": one}, {"a": one, "b": -one, "c": 2 * one}], "abc") == {
    ...     "a": {"a": 1, "c": 1}, "b": {"b": 1, "c": -1}}
    True
    """
    solved: dict[Any, dict[Any, Fraction]] = {}
    left = [dict(row) for row in rows]
    for variable in order:
        having = next((row for row in left if variable in row), None)
        if having is None:
            continue
        left.remove(having)
        pivot = {each: value / having[variable] for each, value in having.items()}
        left = [reduced for row in left if (reduced := _without(row, variable, pivot))]
        solved = {each: _without(row, variable, pivot) for each, row in solved.items()}
        solved[variable] = pivot
    return solved


def _without(row: dict[Any, Fraction], variable: Any, pivot: Mapping[Any, Fraction]) -> dict[Any, Fraction]:
    if variable not in row:
        return row
    factor = row[variable]
    found = {each: row.get(each, Fraction(0)) - factor * pivot.get(each, Fraction(0)) for each in {**row, **pivot}}
    return {each: value for each, value in found.items() if value}
