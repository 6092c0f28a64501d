"""The cost of a model as a polynomial in the number of units that each tied group keeps.

Equal terms are merged, so that an evaluation is cheap.

Law: it equals a count by hand, and keeping more of a tie never costs less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from secateur.coupling import Axis, Expression, Product, resolved
from secateur.shrinking.ties import Tied

__all__ = ["Amount", "Amounts", "Factor", "Parts", "Term"]

Amounts = npt.NDArray[np.float64]
Parts = npt.NDArray[np.int64] | npt.NDArray[np.float64]  # of how many parts each tie keeps
Term = tuple[Sequence[Expression], int]  # dimensions whose sizes multiply, and how often that counts

Factor = tuple[tuple[tuple[int, ...], int], ...]  # a sum of products of ties, each so many times
_AT_ONCE = 256  # numbers of parts, for which all terms are held


class Amount:
    """The cost of a model: ``sum(times * product(dims))``, dimensions being given by how many parts each tie keeps.

    Attributes:
        terms: ``{factors: times}``; a factor is a sum of ``(ties, number)``: the number times what these ties keep.

    >>> from secateur.coupling import Group
    >>> rows, columns = Axis(6), Axis(4)
    >>> tied = [Tied([Group("", axis, axis.size, (), 0, ())], 1, {}) for axis in (rows, columns)]
    >>> weight = Amount([((rows, columns), 1), ((rows,), 1)], tied)  # a matrix and a bias
    >>> weight([6, 4]), weight([3, 4]), weight.changes([6, 4], 1, [1, 2]).tolist()
    (30.0, 15.0, [-18.0, -12.0])
    """

    def __init__(self, terms: Iterable[Term], tied: Sequence[Tied]) -> None:
        units = {group.axis: (at, group.size // each.parts) for at, each in enumerate(tied) for group in each.groups}
        known: dict[int, tuple[Expression, Factor]] = {}
        merged = Counter[tuple[Factor, ...]]()
        for dims, times in terms:
            factors: list[Factor] = []
            for dim in dims:
                whole = resolved(dim)
                if id(whole) not in known:  # and held, or another would get its id
                    known[id(whole)] = whole, _factor(whole, units)
                factor = known[id(whole)][1]
                if len(factor) == 1:  # its number is the term's: terms that differ in nothing else are one
                    ((product, number),) = factor
                    times *= number
                    factor = ((product, 1),) if product else ()
                if factor:
                    factors.append(factor)
            merged[tuple(sorted(factors))] += times
        self._settle(merged, len(tied))

    @classmethod
    def of(cls, terms: Mapping[tuple[Factor, ...], int], ties: int) -> Amount:
        """The one that has these `terms`, of so many ties."""
        found = cls.__new__(cls)
        found._settle(terms, ties)
        return found

    def _settle(self, merged: Mapping[tuple[Factor, ...], int], ties: int) -> None:
        self.terms = dict(merged)
        self._ties = ties
        self._all, self._sums = _Sum(merged, ties), dict[int, _Sum]()
        self._having: dict[int, dict[tuple[Factor, ...], int]] = {}
        for term, times in merged.items():
            for at in {at for factor in term for product, _ in factor for at in product}:
                self._having.setdefault(at, {})[term] = times

    def __call__(self, parts: Parts | Sequence[float]) -> float:
        """The cost when each tie keeps so many of its parts; fractions are allowed."""
        return float(self._all(np.asarray(parts, dtype=np.float64)[:, None])[0])

    def changes(self, parts: Parts | Sequence[float], at: int, values: Parts | Sequence[float]) -> Amounts:
        """The change of the cost when one tie keeps other numbers of parts."""
        here, values = np.asarray(parts, dtype=np.float64)[:, None], np.asarray(values, dtype=np.float64)
        having = self._of(at)
        found = np.empty(len(values))
        for start in range(0, len(values), _AT_ONCE):
            piece = values[start : start + _AT_ONCE]
            there = np.repeat(here, len(piece), axis=1)
            there[at] = piece
            found[start : start + _AT_ONCE] = having(there)
        return found - having(here)

    def _of(self, at: int) -> _Sum:
        """The terms that one tie is in."""
        if at not in self._sums:
            self._sums[at] = _Sum(self._having.get(at, {}), self._ties)
        return self._sums[at]


class _Sum:
    """Terms as tables of indices: for many numbers of parts at a time."""

    def __init__(self, terms: Mapping[tuple[Factor, ...], int], ties: int) -> None:
        places = {factor: at for at, factor in enumerate(dict.fromkeys(each for term in terms for each in term))}
        products = [product for factor in places for product in factor]
        self._starts = np.cumsum([0, *map(len, places)])[:-1].astype(np.int64)
        self._numbers = np.array([number for _, number in products], dtype=np.float64)
        self._products = _padded([product for product, _ in products], ties)
        self._factors = _padded([[places[each] for each in term] for term in terms], len(places))
        self._times = np.array(list(terms.values()), dtype=np.float64)

    def __call__(self, parts: Amounts) -> Amounts:
        """Of ``(ties, n)`` parts the n sums."""
        one = np.ones((1, parts.shape[1]))
        factors = one
        if len(self._starts):
            products = _multiplied(np.concatenate([parts, one]), self._products) * self._numbers[:, None]
            factors = np.concatenate([np.add.reduceat(products, self._starts), one])
        found: Amounts = self._times @ _multiplied(factors, self._factors)
        return found


def _multiplied(values: Amounts, rows: npt.NDArray[np.int64]) -> Amounts:
    found = np.ones((len(rows), values.shape[1]))
    for column in rows.T:
        found *= values[column]
    return found


def _padded(rows: Sequence[Sequence[int]], padding: int) -> npt.NDArray[np.int64]:
    """Rows of one length; at the end of the shorter the index of a one."""
    found = np.full((len(rows), max(map(len, rows), default=0)), padding, dtype=np.int64)
    for at, row in enumerate(rows):
        found[at, : len(row)] = row
    return found


def _factor(expression: Expression, units: Mapping[Axis, tuple[int, int]]) -> Factor:
    """The size of a dimension; of a sum of a hundred segments it stays one factor, or two would make ten thousand."""
    whole = resolved(expression)
    if isinstance(whole, Axis):
        at, number = units.get(whole, (None, whole.size))
        return (((() if at is None else (at,)), number),)
    found = Counter[tuple[int, ...]]()
    if isinstance(whole, Product):
        found[()] = 1
        for factor in whole.factors:
            before, found = found, Counter()
            for other, times in _factor(factor, units):
                for one, number in before.items():
                    found[tuple(sorted((*one, *other)))] += number * times
    else:
        for segment in whole.segments:
            for one, number in _factor(segment, units):
                found[one] += number
    return tuple(sorted(found.items()))
