"""Times in turns: what counts, what does not, and how long it goes on; by a clock that the calls themselves move."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secateur.support import alternating, in_turns, ratio, ratios, seconds_of
from secateur.support import machine as timing


class Clock:
    """A clock that stands still but for what is called."""

    def __init__(self):
        self.now, self.told = 0.0, []

    def __call__(self):
        return self.now

    def taking(self, name, seconds):
        def call():
            self.told.append(name)
            self.now += seconds

        return call


@pytest.fixture
def clock():
    return Clock()


def test_calls_take_turns_and_the_first_round_does_not_count(clock):
    first = [100.0]  # what a first call takes beyond: loading, compiling

    def cold():
        clock.taking("a", 1.0 + (first.pop() if first else 0.0))()

    times = alternating({"a": cold, "b": clock.taking("b", 2.0)}, 3, clock=clock)
    assert times == {"a": [1.0] * 3, "b": [2.0] * 3}
    assert clock.told == ["a", "b"] * 4


def test_a_turn_counts_as_the_mean_of_its_calls(clock):
    times = alternating({"a": clock.taking("a", 2.0)}, 2, repeats=5, clock=clock)
    assert times == {"a": [2.0, 2.0]}
    assert len(clock.told) == 15


def test_a_turn_is_filled_with_calls(clock):
    times = alternating(
        {"fast": clock.taking("f", 1.0), "slow": clock.taking("s", 50.0)}, 1, at_least=10.0, clock=clock
    )
    assert times == {"fast": [1.0], "slow": [50.0]}
    assert clock.told.count("f") == 20
    assert clock.told.count("s") == 2


@pytest.mark.parametrize(("each", "count"), [(1.0, 30), (100.0, 4), (0.001, timing.MOST_ROUNDS)])
def test_rounds_go_on_for_some_seconds(clock, each, count):
    assert len(alternating({"a": clock.taking("a", each)}, 4, seconds=30.0, clock=clock)["a"]) == count


def test_a_device_is_waited_for_before_the_clock_stops_and_before_it_starts(clock):
    pending = [7.0]  # of what was called before

    def finish():
        clock.now += sum(pending)
        pending.clear()

    assert seconds_of(lambda: pending.append(3.0), repeats=2, finish=finish, clock=clock) == 3.0


def test_each_round_begins_with_another_when_asked(clock):
    told = []
    in_turns({name: lambda name=name: told.append(name) or 1.0 for name in "abc"}, 3, warm_up=0, rotate=True)
    assert "".join(told) == "abcbcacab"


def test_progress_changes_nothing(clock):
    assert alternating({"a": clock.taking("a", 1.0)}, 2, clock=clock, told="timing") == {"a": [1.0, 1.0]}
    assert clock.told == ["a"] * 3


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.5, 2)), min_size=1))
def test_what_slows_the_machine_for_a_while_slows_both(rounds):
    rival = [slow for slow, _ in rounds]
    ours = [slow / faster for slow, faster in rounds]
    assert ratios(ours, rival) == pytest.approx([faster for _, faster in rounds])
    assert ratio(ours, rival) == pytest.approx(statistics.median(faster for _, faster in rounds))


def test_rounds_without_a_partner_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        ratio([1.0, 1.0], [1.0])
