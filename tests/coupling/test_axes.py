"""The algebra of axes: sizes never change, unified expressions keep the same positions, and what can't be is frozen."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur.coupling import Axis, Product, leaves, resolved, size_of
from secateur.coupling.axes import (
    Sum,
    concatenated,
    cut,
    factored,
    freeze,
    indices_of,
    kept_positions,
    multiplied,
    tie,
    unify,
)
from secateur.coupling.axes import representative as stands_for


@st.composite
def expressions(draw, size, depth=2):
    """Any sum of products of axes of a size."""
    kind = draw(st.sampled_from(["axis", "product", "sum"])) if depth and size > 1 else "axis"
    if kind == "product":
        divisors = [d for d in range(2, size) if size % d == 0]
        if divisors:
            inner = draw(st.sampled_from(divisors))
            return Product((draw(expressions(size // inner, depth - 1)), draw(expressions(inner, depth - 1))))
    if kind == "sum":
        at = draw(st.integers(1, size - 1))
        return Sum((draw(expressions(at, depth - 1)), draw(expressions(size - at, depth - 1))))
    return Axis(size)


SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 36])
PAIRS = SIZES.flatmap(lambda size: st.tuples(expressions(size), expressions(size)))


def chosen(axes, seed):
    random = np.random.default_rng(seed)
    return {axis: random.random(axis.size) < 0.6 for axis in axes if not axis.reasons and axis.size > 1}


@given(PAIRS, st.integers(0, 99))
@settings(max_examples=100)
@pytest.mark.long
def test_unified_expressions_keep_the_same_positions(pair, seed):
    one, other = pair
    size = size_of(one)
    unify(one, other)
    kept = chosen({*leaves(one), *leaves(other)}, seed)
    assert size_of(one) == size_of(other) == size == size_of(resolved(one))
    # whether they could be unified or had to be frozen
    assert np.array_equal(kept_positions(one, kept), kept_positions(other, kept))


@given(st.tuples(SIZES, SIZES, SIZES).flatmap(lambda s: st.tuples(*[expressions(math.prod(s))] * 3)), st.integers(0, 9))
@settings(max_examples=100)
@pytest.mark.long
def test_unifying_is_transitive_in_any_order(three, seed):
    a, b, c = three
    unify(a, b)
    unify(c, a)
    kept = chosen({*leaves(a), *leaves(b), *leaves(c)}, seed)
    masks = [kept_positions(each, kept) for each in three]
    assert np.array_equal(masks[0], masks[1])
    assert np.array_equal(masks[0], masks[2])


@given(SIZES.flatmap(expressions), st.integers(1, 40), st.integers(0, 99))
@settings(max_examples=100)
def test_cutting_and_factoring_change_nothing(expression, number, seed):
    size = size_of(expression)
    before = resolved(expression)
    pieces = cut(expression, number)
    if pieces is not None:
        assert [size_of(piece) for piece in pieces] == [number, size - number]
        kept = chosen(set(leaves(expression)), seed)
        both = [kept_positions(piece, kept) for piece in pieces]
        assert np.array_equal(np.concatenate(both), kept_positions(before, kept))
    parts = factored(expression, number)
    if parts is not None:
        assert size_of(parts[1]) == number
        kept = chosen(set(leaves(expression)), seed)
        outer, inner = (kept_positions(part, kept) for part in parts)
        assert np.array_equal(np.outer(outer, inner).reshape(-1), kept_positions(expression, kept))
    elif size % number:
        assert factored(Axis(size), number) is None


@given(SIZES.flatmap(expressions))
def test_indices_say_where_an_axis_is(expression):
    for axis in {axis for axis in leaves(expression) if axis.size > 1}:
        indices = indices_of(axis, expression)
        for index in range(axis.size):
            kept = np.ones(axis.size, dtype=bool)
            kept[index] = False
            assert np.array_equal(kept_positions(expression, {axis: kept}), indices != index)


def test_frozen_axes_stay_frozen_when_they_are_refined():
    axis = Axis(6)
    freeze(axis, "an output")
    factored(axis, 3)
    assert all(leaf.reasons == ["an output"] for leaf in leaves(axis))
    other = Axis(6)
    unify(axis, other)
    assert all(leaf.reasons for leaf in leaves(other))


def test_what_does_not_fit_is_frozen_with_its_reason():
    one, other = Product((Axis(4), Axis(9))), Product((Axis(9), Axis(4)))
    assert not unify(one, other, "a strange view")
    assert all(axis.reasons == ["a strange view"] for axis in (*leaves(one), *leaves(other)))
    with pytest.raises(ValueError, match="sizes 2 and 3"):
        unify(Axis(2), Axis(3))
    axis = Axis(6)
    assert not unify(axis, Product((axis, Axis(1), Axis(1)))) or resolved(axis) is axis


def test_counts_that_stay_equal():
    first, second, third = Axis(4), Axis(4), Axis(4)
    tie(first, second, "halves")
    tie(second, third, "halves")
    assert stands_for(first) is stands_for(second) is stands_for(third)
    assert not first.reasons
    tie(first, Product((Axis(2), Axis(2))), "halves")
    assert first.reasons == ["halves"]


def test_nothing_nested_and_nothing_of_size_one():
    a, b, c = Axis(2), Axis(3), Axis(1)
    assert multiplied([Product((a, c)), b]).factors == (a, b)
    assert multiplied([c, a]) is a
    assert concatenated([Sum((a, b)), Axis(0), c]).segments == (a, b, c)
    assert size_of(multiplied([])) == 1
    assert size_of(concatenated([])) == 0
