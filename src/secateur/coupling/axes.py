"""The algebra behind coupled channels: every dimension of a tensor is a sum of products of axes.

Law: two expressions that were unified choose the same positions, whatever is kept of their axes; what can't be unified
is frozen, with the reason.

An axis is a set of things that live or die one by one; one thing alone never leaves. ``Product((a, b))`` is what a
reshape of (a, b) to one dimension makes, ``Sum((a, b))`` what concatenation makes. An axis is refined when a view
splits it or a slice cuts it: it is then bound to the product or sum of finer axes, and all tensors that have it see
that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_numbers = itertools.count()


@dataclass(eq=False)
class Axis:
    """A set of positions that may be removed one by one, unless the axis is frozen or was refined.

    >>> heads = Axis(4)
    >>> size_of(heads), size_of(multiplied([heads, Axis(8)]))
    (4, 32)
    """

    size: int
    bound: Expression | None = None
    reasons: list[str] = field(default_factory=list)  # why nothing may leave; empty: free
    looks: list[str] = field(
        default_factory=list
    )  # what compares its things; why it stays unless they are chosen between
    tied: Axis | None = None  # another whose number of things must stay equal; a chain to the first of them
    number: int = field(default_factory=lambda: next(_numbers))

    def __repr__(self) -> str:
        return f"Axis({self.size}{', frozen' if self.reasons else ''})"


@dataclass(frozen=True, eq=False)
class Product:
    """A dimension that is a product of axes, row-major: the last factor runs fastest.

    >>> size_of(Product((Axis(4), Axis(8))))
    32
    """

    factors: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Sum:
    """One segment after the other."""

    segments: tuple[Expression, ...]


Expression = Axis | Product | Sum


def size_of(expression: Expression) -> int:
    """The number of positions of an expression of axes.

    >>> size_of(Product((Axis(3), Sum((Axis(2), Axis(5))))))
    21
    """
    if isinstance(expression, Axis):
        return expression.size
    if isinstance(expression, Product):
        return math.prod(size_of(factor) for factor in expression.factors)
    return sum(size_of(segment) for segment in expression.segments)


def resolved(expression: Expression) -> Expression:
    """An expression with refined axes replaced by their definitions, flattened, without factors of size 1.

    >>> axis = Axis(6)
    >>> factored(axis, 3)
    (Axis(2), Axis(3))
    >>> resolved(axis)
    Product(factors=(Axis(2), Axis(3)))
    """
    if isinstance(expression, Axis):
        if expression.bound is None:
            return expression
        expression.bound = resolved(expression.bound)  # the next time the way is short
        return expression.bound
    if isinstance(expression, Product):
        return multiplied(resolved(factor) for factor in expression.factors)
    return concatenated(resolved(segment) for segment in expression.segments)


def multiplied(factors: Iterable[Expression]) -> Expression:
    """The product of expressions of axes, flattened, without factors of size 1.

    >>> heads = Axis(4)
    >>> multiplied([heads, Axis(1)]) is heads
    True
    """
    flat: list[Expression] = []
    for factor in factors:
        flat += factor.factors if isinstance(factor, Product) else [factor]
    many = [factor for factor in flat if size_of(factor) != 1]
    if not many:
        return flat[0] if flat else Axis(1)
    return many[0] if len(many) == 1 else Product(tuple(many))


def concatenated(segments: Iterable[Expression]) -> Expression:
    """The concatenation of expressions of axes, flattened, without empty segments.

    >>> size_of(concatenated([Axis(3), Axis(0), Axis(5)]))
    8
    """
    flat: list[Expression] = []
    for segment in segments:
        flat += segment.segments if isinstance(segment, Sum) else [segment]
    some = [segment for segment in flat if size_of(segment)]
    if not some:
        return flat[0] if flat else Axis(0)
    return some[0] if len(some) == 1 else Sum(tuple(some))


def leaves(expression: Expression) -> Iterator[Axis]:
    """The axes in an expression, in order; one that occurs twice comes twice.

    >>> [axis.size for axis in leaves(concatenated([Axis(3), multiplied([Axis(4), Axis(8)])]))]
    [3, 4, 8]
    """
    whole = resolved(expression)
    if isinstance(whole, Axis):
        yield whole
        return
    for part in whole.factors if isinstance(whole, Product) else whole.segments:
        yield from leaves(part)


def freeze(expression: Expression, reason: str) -> None:
    """Nothing of it may leave, and why."""
    for axis in leaves(expression):
        if reason not in axis.reasons:
            axis.reasons.append(reason)


def look(expression: Expression, reason: str) -> None:
    """The things are compared with each other: that freezes them, unless it turns out that they are chosen between."""
    for axis in leaves(expression):
        if reason not in axis.looks:
            axis.looks.append(reason)


def tie(first: Expression, second: Expression, reason: str) -> None:
    """As many of the one stay as of the other, where both are plain axes; otherwise both are frozen."""
    one, other = resolved(first), resolved(second)
    if isinstance(one, Axis) and isinstance(other, Axis) and one.size == other.size:
        one, other = representative(one), representative(other)
        if one is not other:
            other.tied = one
        return
    freeze(one, reason)
    freeze(other, reason)


def representative(axis: Axis) -> Axis:
    """The representative of all axes whose counts are tied to this one's.

    >>> from secateur.coupling import representative
    >>> axis = Axis(8)
    >>> representative(axis) is axis
    True
    """
    while axis.tied is not None:
        following = axis.tied
        if following.bound is not None:  # refined since
            found = resolved(following)
            if not isinstance(found, Axis):
                return axis
            following = found
        axis = following
    return axis


def unify(first: Expression, second: Expression, reason: str = "") -> bool:
    """Make two expressions of one size choose the same positions; False, and both frozen, where that can't be.

    >>> first, second = Axis(8), Axis(8)
    >>> unify(first, second), resolved(first) is resolved(second)
    (True, True)
    """
    one, other = resolved(first), resolved(second)
    if one is other:
        return True
    if size_of(one) != size_of(other):
        raise ValueError(f"sizes {size_of(one)} and {size_of(other)} can't be the same dimension.")
    if size_of(one) <= 1:
        return True
    if isinstance(one, Axis) and not any(axis is one for axis in leaves(other)):
        _bind(one, other)
        return True
    if isinstance(other, Axis) and not any(axis is other for axis in leaves(one)):
        _bind(other, one)
        return True
    done = False
    if isinstance(one, Product) and isinstance(other, Product):
        done = _unify_products(one, other, reason)
    elif isinstance(one, Sum) and isinstance(other, Sum | Product):
        done = _unify_sum(one, other, reason)
    elif isinstance(other, Sum) and isinstance(one, Product):
        done = _unify_sum(other, one, reason)
    if not done:
        why = reason or "two ways of splitting a dimension that do not fit each other"
        freeze(one, why)
        freeze(other, why)
    return done


def factored(expression: Expression, inner: int) -> tuple[Expression, Expression] | None:
    """Factors a dimension into (outer, inner), ``inner`` of that size running fastest, refining axes; None if it does
    not divide.

    >>> factored(Product((Axis(4), Axis(6))), 12)
    (Axis(2), Product(factors=(Axis(2), Axis(6))))
    """
    whole = resolved(expression)
    size = size_of(whole)
    if inner == 1:
        return whole, Axis(1)
    if inner == size:
        return Axis(1), whole
    if inner <= 0 or size % inner:
        return None
    if isinstance(whole, Axis):
        outer, fine = Axis(size // inner), Axis(inner)
        _bind(whole, Product((outer, fine)))
        return outer, fine
    if isinstance(whole, Product):
        taken: list[Expression] = []
        for at in reversed(range(len(whole.factors))):
            factor = whole.factors[at]
            have = math.prod(size_of(part) for part in taken)
            if have == inner:
                return multiplied(whole.factors[: at + 1]), multiplied(taken)
            if inner % (have * size_of(factor)) == 0:
                taken.insert(0, factor)
                continue
            if inner % have:
                return None
            split = factored(factor, inner // have)
            if split is None:
                return None
            return multiplied([*whole.factors[:at], split[0]]), multiplied([split[1], *taken])
        return None
    pieces = [factored(segment, inner) for segment in whole.segments]
    if any(piece is None for piece in pieces):
        return None
    split_pieces = [piece for piece in pieces if piece is not None]
    shared = split_pieces[0][1]
    if not all(unify(shared, piece[1]) for piece in split_pieces[1:]):
        return None
    return concatenated(piece[0] for piece in split_pieces), resolved(shared)


def cut(expression: Expression, at: int) -> tuple[Expression, Expression] | None:
    """Splits a dimension into (the first ``at`` positions, the rest), refining axes; None where a product has no such
    boundary.

    >>> cut(Product((Axis(4), Axis(6))), 6)
    (Axis(6), Product(factors=(Axis(3), Axis(6))))
    """
    whole = resolved(expression)
    size = size_of(whole)
    if at == 0:
        return Axis(0), whole
    if at == size:
        return whole, Axis(0)
    if not 0 < at < size:
        return None
    if isinstance(whole, Axis):
        first, rest = Axis(at), Axis(size - at)
        _bind(whole, Sum((first, rest)))
        return first, rest
    if isinstance(whole, Sum):
        before: list[Expression] = []
        for number, segment in enumerate(whole.segments):
            length = size_of(segment)
            if at <= length:
                split = cut(segment, at)
                if split is None:
                    return None
                after = [split[1], *whole.segments[number + 1 :]]
                return concatenated([*before, split[0]]), concatenated(after)
            before.append(segment)
            at -= length
        return None
    inner = multiplied(whole.factors[1:])
    if at % size_of(inner):
        return None
    split = cut(whole.factors[0], at // size_of(inner))
    if split is None:
        return None
    return multiplied([split[0], inner]), multiplied([split[1], inner])


def kept_positions(expression: Expression, kept: Mapping[Axis, npt.NDArray[np.bool_]]) -> npt.NDArray[np.bool_]:
    """Which positions of a dimension stay, given what stays of each axis; axes that are not named stay whole.

    >>> a, b = Axis(2), Axis(2)
    >>> kept_positions(Product((a, b)), {b: np.array([True, False])}).tolist()
    [True, False, True, False]
    """
    whole = resolved(expression)
    if isinstance(whole, Axis):
        return kept[whole] if whole in kept and whole.size > 1 else np.ones(whole.size, dtype=bool)
    if isinstance(whole, Sum):
        return np.concatenate([kept_positions(segment, kept) for segment in whole.segments])
    mask = np.ones(1, dtype=bool)
    for factor in whole.factors:
        mask = (mask[:, None] & kept_positions(factor, kept)[None, :]).reshape(-1)
    return mask


def indices_of(axis: Axis, expression: Expression) -> npt.NDArray[np.int64]:
    """For each position of a dimension the index along one axis, or -1 where that axis has no part in it.

    >>> a, b = Axis(2), Axis(3)
    >>> indices_of(b, Sum((Product((a, b)), Axis(1)))).tolist()
    [0, 1, 2, 0, 1, 2, -1]
    """
    whole = resolved(expression)
    if isinstance(whole, Axis):
        return np.arange(whole.size) if whole is axis else np.full(whole.size, -1)
    if isinstance(whole, Sum):
        return np.concatenate([indices_of(axis, segment) for segment in whole.segments])
    found = np.full(1, -1)
    for factor in whole.factors:
        its = indices_of(axis, factor)
        found = np.where(its[None, :] >= 0, its[None, :], found[:, None]).reshape(-1)
    return found


def occurrences_of(axis: Axis, expression: Expression) -> list[npt.NDArray[np.int64]]:
    """`indices_of` for each time that an axis is a factor: pairs of its things belong to two of them.

    >>> a = Axis(2)
    >>> [each.tolist() for each in occurrences_of(a, Product((a, a)))]
    [[0, 0, 1, 1], [0, 1, 0, 1]]
    """
    whole = resolved(expression)
    factors = whole.factors if isinstance(whole, Product) else (whole,)
    if sum(axis in leaves(factor) for factor in factors) < 2:
        return [indices_of(axis, whole)]
    found = []
    for number, factor in enumerate(factors):
        if axis in leaves(factor):
            others: list[Expression] = [Axis(size_of(each)) for each in factors]
            others[number : number + 1] = [factor]
            found.append(indices_of(axis, Product(tuple(others))))
    return found


def terms_of(expression: Expression) -> list[tuple[tuple[Axis, ...], npt.NDArray[np.int64]]]:
    """The sum of products that a dimension is: the axes of each term, and its positions, with a dimension for each.

    >>> a, b = Axis(2), Axis(3)
    >>> [(axes == (a, b), places.tolist()) for axes, places in terms_of(Sum((Product((a, b)), b)))]
    [(True, [[0, 1, 2], [3, 4, 5]]), (False, [6, 7, 8])]
    """
    whole = resolved(expression)
    if isinstance(whole, Axis):
        return [((whole,), np.arange(whole.size))]
    if isinstance(whole, Sum):
        starts = np.cumsum([0, *map(size_of, whole.segments)])
        return [
            (axes, places + start)
            for start, segment in zip(starts, whole.segments, strict=False)
            for axes, places in terms_of(segment)
        ]
    found: list[tuple[tuple[Axis, ...], npt.NDArray[np.int64]]] = [((), np.zeros((), dtype=np.int64))]
    for factor in whole.factors:
        found = [
            ((*axes, *more), np.add.outer(places * size_of(factor), its))
            for axes, places in found
            for more, its in terms_of(factor)
        ]
    return found


def _bind(axis: Axis, expression: Expression) -> None:
    assert axis.bound is None
    axis.bound = expression
    for reason in axis.reasons:
        freeze(expression, reason)
    for reason in axis.looks:
        look(expression, reason)
    if axis.tied is not None:
        finer = resolved(expression)
        if isinstance(finer, Axis):
            tie(finer, axis.tied, "")
        else:
            freeze(expression, "its count has to equal another's")
            freeze(axis.tied, "its count has to equal another's")


def _unify_products(one: Product, other: Product, reason: str) -> bool:
    last, its_last = one.factors[-1], other.factors[-1]
    if size_of(last) > size_of(its_last):
        one, other, last, its_last = other, one, its_last, last
    if size_of(its_last) % size_of(last):
        return False
    split = factored(its_last, size_of(last))
    if split is None:
        return False
    return unify(last, split[1], reason) and unify(
        multiplied(one.factors[:-1]), multiplied([*other.factors[:-1], split[0]]), reason
    )


def _unify_sum(one: Sum, other: Sum | Product, reason: str) -> bool:
    first = one.segments[0]
    its_first = other.segments[0] if isinstance(other, Sum) else None
    if its_first is not None and size_of(its_first) < size_of(first):
        assert isinstance(other, Sum)
        return _unify_sum(other, one, reason)
    split = cut(other, size_of(first))
    if split is None:
        return False
    rest = concatenated(one.segments[1:])
    return unify(first, split[0], reason) and unify(rest, split[1], reason)
