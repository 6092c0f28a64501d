"""What `settle` leaves free satisfies every equation between sizes, and as much stays free as can."""

import operator

from hypothesis import given
from hypothesis import strategies as st

from secateur.coupling import Axis, Product, counted, evaluated, representative, resolved
from secateur.coupling.axes import Sum
from secateur.coupling.equations import axes_of, holds, is_frozen, settle
from secateur.coupling.numbers import Attribute, Equation, Known, Outcome, formula_of


@given(st.data())
def test_formulas_follow_the_counts(data):
    """What an exact formula evaluates to at other counts is what the code would compute there."""
    axes = [Axis(data.draw(st.integers(2, 6))) for _ in range(3)]
    numbers = [Known(axis.size, axis, []) for axis in axes]
    counts = {axis: data.draw(st.integers(1, axis.size)) for axis in axes}
    values = [counts[axis] for axis in axes]
    for _ in range(data.draw(st.integers(1, 4))):
        operation = data.draw(st.sampled_from([operator.add, operator.sub, operator.mul]))
        a, b = data.draw(st.integers(0, len(numbers) - 1)), data.draw(st.integers(0, len(numbers) - 1))
        numbers.append(operation(numbers[a], numbers[b]))
        values.append(operation(values[a], values[b]))
    target = Attribute(("it",), int(numbers[-1]))
    found = settle([Equation(target, formula_of(numbers[-1]), "a test")])
    assert evaluated(found[target], counts) == values[-1] if target in found else values[-1] == int(numbers[-1])


@given(st.data())
def test_a_comparison_comes_out_as_the_code_would_at_other_counts(data):
    """Also of quotients and remainders, which are no polynomials."""
    axes = [Axis(data.draw(st.integers(2, 9))) for _ in range(2)]
    counts = {axis: data.draw(st.integers(1, axis.size)) for axis in axes}
    first, second, compare = (
        data.draw(st.sampled_from(some))
        for some in (
            (operator.add, operator.mul, operator.floordiv, operator.mod),
            (operator.sub, operator.floordiv, operator.mod),
            (operator.eq, operator.ne, operator.lt, operator.ge),
        )
    )
    number = data.draw(st.integers(1, 4))

    def computed(one, other):
        return compare(second(first(one, other), number), 1)

    log = []
    watched = computed(*(Known(axis.size, axis, log) for axis in axes))
    now = computed(*(counts[axis] for axis in axes))
    asked = [each for each in log if isinstance(each, Outcome)]
    assert {holds(each, {}, counts) for each in asked} <= {watched == now}
    assert asked or watched is (compare is not operator.ne)  # what was equal is an equation


def test_a_quotient_that_is_a_dimension_holds():
    heads, width = Axis(4), Axis(6)
    whole = Known(24, Product((heads, width)), [])
    attribute = Attribute(("heads",), 4)
    found = settle(
        [Equation(attribute, heads, "a view"), Equation(formula_of(whole // Known(4, attribute, [])), width, "a view")]
    )
    assert found == {attribute: {(heads,): 1}}
    assert not is_frozen(width)


def test_halves_of_a_padding_that_is_odd_say_nothing_of_the_kernel():
    """As timm pads: 5 is 2 and 3. By exact halves the kernel of 7 would be 6, or 8, and no equation would hold."""
    kernel, width = Attribute(("conv", "kernel_size"), 7), Axis(8)
    padding = ("-", kernel, 2)
    before, after = ("//", padding, 2), ("-", padding, ("//", padding, 2))
    settled = settle([Equation(before, 2, "padding"), Equation(after, 3, "padding"), Equation(width, width, "a view")])
    assert settled == {}
    assert not is_frozen(width)


def test_what_does_not_hold_of_sizes_that_stay_ends():
    assert settle([Equation(("//", Axis(3, reasons=["an input"]), 0), 2, "a quotient by nothing")]) == {}


def test_an_axis_as_long_as_a_product_is_split_into_factors_that_keep_as_many():
    stream, width = Axis(24), Axis(6)
    settle([Equation(formula_of(Known(24, stream, []) // 4), width, "a view")])
    assert counted(stream) == {(width,): 4}
    assert not is_frozen(width)

    stream, heads, width = Axis(24), Axis(4), Axis(6)
    settle([Equation(stream, Product((heads, width)), "a view")])
    outer, inner = resolved(stream).factors
    assert (representative(outer), representative(inner)) == (heads, width)
    assert not is_frozen(heads)
    assert not is_frozen(width)


def test_an_axis_that_others_have_to_be_as_long_as_is_not_split():
    stream, other, heads, width = Axis(24), Axis(24), Axis(4), Axis(6)
    settle([Equation(stream, other, "chunks"), Equation(stream, Product((heads, width)), "a view")])
    assert all(map(is_frozen, (stream, other, heads, width)))


def test_two_products_that_have_to_be_as_long_keep_as_many_of_each():
    a, b, c, d = Axis(4), Axis(6), Axis(4), Axis(6)
    settle([Equation(Product((a, b)), Product((c, d)), "a view")])
    assert representative(a) is representative(c)
    assert representative(b) is representative(d)
    assert not any(map(is_frozen, (a, b, c, d)))


def test_a_number_in_the_code_freezes_what_it_is_the_size_of_and_nothing_else():
    a, b, c = Axis(4), Axis(2), Axis(5)
    settle(
        [
            Equation(8, Product((a, b)), "a view to 8"),
            Equation(formula_of(Known(3, Axis(3), []) + 2), Sum((Axis(3), Axis(2))), "x"),
        ]
    )
    assert is_frozen(a)
    assert a.reasons == ["a view to 8"]
    assert not is_frozen(c)


def test_the_order_of_equations_does_not_matter():
    for turned in (False, True):
        inner, outer = Axis(2), Axis(3)
        whole = Product((outer, inner))
        equations = [Equation(formula_of(Known(6, whole, []) // 2), outer, "half"), Equation(2, inner, "two")]
        settle(reversed(equations) if turned else equations)
        assert is_frozen(inner)
        assert not is_frozen(outer)


def test_a_remainder_is_none_or_fixes_the_size():
    log = []
    axis, odd = Axis(6), Axis(7)
    assert Known(12, Product((axis, Axis(2, reasons=["two"]))), log) % 2 == 0
    assert Known(7, odd, log) % 2 == 1
    settle(log)
    assert not is_frozen(axis)
    assert is_frozen(odd)


def test_unequal_numbers_may_change_as_long_as_the_comparison_comes_out_the_same():
    log = []
    axis, other = Axis(5), Axis(4)
    number = Known(5, axis, log)
    assert number != 1
    assert (number == 1) is False
    assert number > Known(4, other, log)
    values = settle(log)
    assert not is_frozen(axis)
    assert [holds(each, values, {axis: 2}) for each in log] == [True, True, False]
    assert [holds(each, values, {axis: 1, other: 3}) for each in log] == [False, False, False]
    assert [holds(each, values, {axis: 3, other: 2}) for each in log] == [True, True, True]
    assert axes_of(log[2], values) == {axis, other}


def test_a_comparison_with_a_real_number_fixes_the_size():
    log = []
    axis = Axis(5)
    assert Known(5, axis, log) > 2.5
    settle(log)
    assert is_frozen(axis)
