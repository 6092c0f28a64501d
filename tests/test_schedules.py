"""Schedules: moments in steps, epochs and fractions; the target is reached where the run is long enough, or refused."""

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from secateur import schedules
from secateur.schedules import milestones, resolve, step_of

MAKERS = [schedules.linear, schedules.cubic, schedules.cosine, schedules.exponential]


@given(
    st.sampled_from(MAKERS), st.integers(1, 500), st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.99),
)  # fmt: skip
def test_a_fraction_of_any_run_reaches_the_target(make, total, begin, end, final):
    begin, end = sorted([begin, end])
    schedule = resolve(make(final, begin=begin, end=end), total_steps=total)
    values = [schedule(step) for step in range(total + 1)]
    assert values[-1] == final, "exactly, however short the run"
    assert all(before <= after + 1e-12 for before, after in itertools.pairwise(values))


@pytest.mark.parametrize(
    ("moment", "step"),
    [
        (7, 7), (np.int64(7), 7), ("7st", 7), ("2ep", 100), ("0.5ep", 25), (0.25, 250), (1.0, 1000), (0.0, 0),
        ("0ep", 0),
    ],
)  # fmt: skip
def test_moments(moment, step):
    assert step_of(moment, 1000, 50) == step


def test_fractions_and_epochs_are_resolved_and_plain_functions_stay():
    schedule = schedules.cubic(0.9, begin="1ep", end=0.5)
    assert str(schedule) == "cubic from 0 to 0.9 between 1ep and 0.5"
    resolved = resolve(schedule, total_steps=400, steps_per_epoch=50)
    assert (resolved.begin, resolved.end, resolved.moments) == (50, 200, (200,))
    assert resolve(schedules.linear(0.9, initial=0.1, begin=3, end=9)).moments == (3, 9)

    def mine(step):
        return min(step / 10, 0.5)

    assert resolve(mine, total_steps=3) is mine


def test_milestones():
    schedule = resolve(milestones({"1ep": 0.5, 0.5: 0.7}, initial=0.1), total_steps=100, steps_per_epoch=10)
    assert [schedule(step) for step in (0, 9, 10, 49, 50, 100)] == [0.1, 0.1, 0.5, 0.5, 0.7, 0.7]
    assert schedule.moments == (10, 50)
    assert str(schedule) == "milestones 0.5 from 10, 0.7 from 50"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: schedules.cubic(0.9, end=0.6)(3), "cubic from 0 to 0.9 between 0 and 0.6 is not in steps yet"),
        (lambda: milestones({0.5: 0.9})(3), "not in steps yet"),
        (lambda: step_of(0.6, float("inf"), 50), "0.6 of total_steps=inf and steps_per_epoch=50 is no number of steps"),
        (lambda: resolve(schedules.cubic(0.9, end=0.6)), "0.6 is a fraction of the run: pass total_steps="),
        (lambda: resolve(schedules.cubic(0.9, end="6ep")), "'6ep' is in epochs: pass steps_per_epoch="),
        (lambda: resolve(schedules.cubic(0.9, end=60), total_steps=50), "step 60, but the run ends after 50"),
        (lambda: resolve(milestones({60: 0.9}), total_steps=50), "step 60, but the run ends after 50"),
        (lambda: resolve(schedules.cubic(0.9, begin=0.9, end=5), total_steps=50), "begins at step 45, after its end"),
        (lambda: schedules.cubic(0.9, end=600.0), "a fraction of the run .* got 600.0"),
        (lambda: schedules.cubic(0.9, end="12"), "got '12'"),
        (lambda: schedules.cubic(0.9, end=-1), "got -1"),
        (lambda: schedules.cubic(0.9, end=True), "got True"),
        (lambda: milestones({}), "at least one"),
        (lambda: milestones({3: 1.5}), "a milestone is a sparsity"),
        (lambda: milestones({5: 0.5, 3: 0.8}), "ascending order"),
        (lambda: resolve(milestones({"1ep": 0.5, 10: 0.8}), steps_per_epoch=10), "fall on one step"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@given(st.sampled_from(MAKERS), st.floats(0, 0.99), st.floats(0, 0.99))
def test_a_schedule_is_a_value(make, final, initial):
    """Made twice it is the same, and it goes to another process and back."""
    schedule = make(final, initial=initial, begin=0.1, end="3ep")
    assert schedule == make(final, initial=initial, begin=0.1, end="3ep")
    again = pickle.loads(pickle.dumps(schedule))
    assert again == schedule
    there, here = (resolve(each, total_steps=40, steps_per_epoch=10) for each in (again, schedule))
    assert [there(step) for step in range(41)] == [here(step) for step in range(41)]


def test_other_schedules_are_values_too():
    for schedule in (schedules.constant(0.5), milestones({10: 0.2, 20: 0.6})):
        assert pickle.loads(pickle.dumps(schedule)) == schedule
