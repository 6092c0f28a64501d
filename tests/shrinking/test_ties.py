"""Laws of ties: groups that are tied keep the same share, in whole steps and never less than they may."""

import itertools
import math
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from secateur.shrinking.costs import TiedGroups, by_tie

NUMBERS = itertools.count()


@dataclass(eq=False)
class Group:
    """As much of a group as its counts need."""

    size: int
    tied: int = 0
    name: str = field(default_factory=lambda: f"group {next(NUMBERS)}")
    multiple: int = 1


sizes = st.lists(st.integers(1, 60), min_size=1, max_size=4)


@given(sizes, st.integers(1, 70), st.none() | st.integers(1, 9), st.data())
def test_counts_are_one_share(sizes, parts, round_to, data):
    groups = [Group(size) for size in sizes]
    least = {each.name: data.draw(st.integers(1, each.size)) for each in groups}
    tied = TiedGroups(groups, round_to, least)
    counts = tied.counts(parts)
    shares = {counts[each.name] * tied.parts / each.size for each in groups}
    assert len(shares) == 1
    assert all(least[each.name] <= counts[each.name] <= each.size for each in groups)
    assert math.isclose(tied.mean(counts), shares.pop())
    if round_to is not None:
        stepped = tied.counts(tied.least + tied.step - tied.least % tied.step)
        assert all(stepped[each.name] % round_to == 0 or stepped[each.name] == each.size for each in groups)


@given(sizes)
def test_all_is_all_and_nothing_is_one_step(sizes):
    groups = [Group(size) for size in sizes]
    tied = TiedGroups(groups, 1, {})
    assert tied.counts(tied.parts) == {each.name: each.size for each in groups}
    assert all(count >= 1 for count in tied.counts(0).values())


def test_large_groups_go_by_sixteen():
    small, large = Group(63), Group(64)
    assert (TiedGroups([small], None, {}).step, TiedGroups([large], None, {}).step) == (1, 16)


def test_groups_of_one_tie_come_together():
    one, two, other = Group(4, 0), Group(6, 0), Group(8, 1)
    assert by_tie([one, other, two]) == [[one, two], [other]]
