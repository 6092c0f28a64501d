"""When masks are chosen anew."""

import pytest

from secateur import schedules
from secateur.training.rules import Timetable
from support.training import SGD, network, quiet, train


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
