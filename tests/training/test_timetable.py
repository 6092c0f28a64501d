"""When masks are chosen anew."""

import pytest

from secateur import schedules
from secateur.patterns import NM, Unstructured
from secateur.training.timetable import Timetable, schedule_of
from support.training import SGD, network, quiet, train, weights_of


def test_by_default_a_number_is_cubic_over_six_tenths_with_lamp_everywhere():
    model = network()
    optimizer = SGD(model.parameters())
    pruner = quiet(model, optimizer, 0.9, total_steps=20)
    seen = [pruner.metrics()["sparsity"] for _ in train(model, optimizer, 20)]
    total = sum(weight.numel() for weight in weights_of(model).values())
    ramp = schedules.cubic(0.9, end=12)
    assert seen == [round(ramp(step) * total) / total for step in range(1, 21)]


def test_a_function_of_ones_own_is_followed_where_it_changes():
    model = network()
    optimizer = SGD(model.parameters())
    pruner = quiet(model, optimizer, lambda step: 0.0 if step < 3 else 0.25 if step < 6 else 0.75)
    seen = [round(pruner.metrics()["sparsity"], 6) for _ in train(model, optimizer, 8)]
    assert seen == [0.0, 0.0, 0.25, 0.25, 0.25, 0.75, 0.75, 0.75]


def test_milestones_are_met_whatever_the_interval():
    model = network()
    optimizer = SGD(model.parameters())
    schedule = schedules.milestones({"1ep": 0.25, 0.5: 0.75})
    pruner = quiet(model, optimizer, schedule, total_steps=10, steps_per_epoch=3, every=100)
    seen = [pruner.metrics()["sparsity"] for _ in train(model, optimizer, 10)]
    assert seen == [0.0] * 2 + [0.25] * 2 + [0.75] * 6


def test_there_is_an_update_at_every_moment_of_the_schedule_and_at_the_end():
    schedule = schedules.resolve(schedules.milestones({3: 0.25, 17: 0.8}), total_steps=25, steps_per_epoch=None)
    timetable = Timetable(schedule, until=0, total_steps=25, interval=4)
    assert [step for step in range(30) if timetable.updates_at(step)] == [0, 3, 4, 8, 12, 16, 17, 20, 24, 25, 28]
    assert timetable.target_at == 17
    assert not any(timetable.regrows_at(step) for step in range(30))
    regrowing = Timetable(schedule, until=10, total_steps=25, interval=4)
    assert [step for step in range(30) if regrowing.regrows_at(step)] == [0, 4, 8]


@pytest.mark.parametrize(
    ("until", "total_steps", "interval", "every"),
    [
        (0, None, None, 1),
        (0, 1000, None, 10),
        (0, 50, None, 1),
        (5000, None, None, 50),
        (50_000, None, None, 100),
        (9, 9, 7, 7),
    ],
)
def test_a_function_of_ones_own_is_asked_about_a_hundred_times(until, total_steps, interval, every):
    assert Timetable(lambda step: 0.5, until, total_steps, interval).every == every


def test_what_was_asked_for_becomes_a_schedule():
    own = lambda step: 0.5  # noqa: E731
    assert schedule_of(own, Unstructured(), regularized=False) is own
    assert schedule_of(None, Unstructured(), regularized=True)(7) == 0
    fixed = schedules.resolve(schedule_of(None, NM(2, 4), regularized=False), total_steps=10, steps_per_epoch=None)
    assert (fixed(0), fixed(6), fixed(10)) == (0, 0.5, 0.5)
