"""Arguments as rules read them: given once or for each, from the end, and without their origin."""

import pytest

from secateur.coupling.axes import Axis
from secateur.coupling.rules.pointwise import each_of, places, plain
from secateur.coupling.trace import Trace


@pytest.mark.parametrize(("given", "values"), [(3, [3, 3]), ((3, 4), [3, 4]), ((3,), [3, 3]), ("same", ["same"] * 2)])
def test_an_argument_is_given_once_or_for_each_dimension(given, values):
    assert [each_of(given, at) for at in range(2)] == values


@pytest.mark.parametrize(("given", "found"), [(None, {0, 1, 2}), (-1, {2}), ((0, -2), {0, 1}), ([1], {1}), ((), set())])
def test_places_count_from_the_end_too(given, found):
    assert places(given, 3) == found
    assert places(0, 0) == {0}


def test_a_plain_number_asks_for_no_equation():
    trace = Trace()
    number = trace.number(Axis(6))
    assert type(number) is not int
    assert type(plain(number)) is int
    assert plain(number) // 2 == 3
    assert type(each_of(number, 0)) is int
    assert not trace.equations
    assert plain(2.5) == 2.5
