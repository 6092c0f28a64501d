"""Laws of steps: paths go down the convex hull, and from the end no single step leads nearer."""

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from secateur.coupling import Axis, Group
from secateur.shrinking.costs import CostPolynomial, TiedGroups, even
from secateur.shrinking.counting import CountSearch, path_by_loss, path_by_share

sizes = st.lists(st.integers(2, 40), min_size=2, max_size=4)
rounded = st.lists(st.sampled_from([1, 1, 2, 3, 8]), min_size=4, max_size=4)
shares = st.floats(0.01, 0.9)


def chain(sizes, round_to):
    """The matrices of a network, from each width to the next, and the ties of its widths."""
    axes = [Axis(size) for size in sizes]
    tied = [
        TiedGroups([Group("", axis, axis.size, (), at, ())], each, {})
        for at, (axis, each) in enumerate(zip(axes, round_to, strict=False))
    ]
    pairs = zip([Axis(3), *axes], [*axes, Axis(2)], strict=True)
    return CostPolynomial([(pair, 1) for pair in pairs], tied), tied


def lost(seed):
    """A loss that grows in leaps, differently for each tie."""

    def loss(tied, parts):
        leaps = np.random.default_rng([seed, tied.groups[0].tied]).exponential(size=tied.parts) ** 3
        return float(leaps[: tied.parts - parts].sum())

    return loss


def beside(tied, parts, is_possible=lambda parts: True):
    """All that is one step from there."""
    for at, each in enumerate(tied):
        choices = each.choices().tolist()
        for those in ([c for c in choices if c > parts[at]][::-1], [c for c in choices if c < parts[at]]):
            for count in those:
                found = parts.copy()
                found[at] = count
                if is_possible(found):
                    yield found
                    break


@given(sizes, rounded, st.integers(0, 99))
def test_a_path_goes_down_the_lower_convex_hull_of_each_tie(sizes, round_to, seed):
    amount, tied = chain(sizes, round_to)
    loss = lost(seed)
    path = path_by_loss(loss, tied, amount)
    whole = [each.parts for each in tied]
    assert path.start.tolist() == whole
    slopes = []
    for at, each in enumerate(tied):
        corners = [each.parts, *path.parts[path.ties == at].tolist()]
        assert corners == sorted(set(corners), reverse=True)
        assert corners[-1] == each.choices()[-1]  # with whole steps it leads to the end
        saved, losses = -amount.changes(whole, at, corners), np.array([loss(each, count) for count in corners])
        slopes.append(np.diff(losses) / np.diff(saved))
        assert (np.diff(slopes[-1]) >= -1e-9).all()
        choices = each.choices()
        under = np.interp(-amount.changes(whole, at, choices), saved, losses)
        assert (under <= [loss(each, int(count)) + 1e-9 for count in choices]).all()
    taken = np.array([slopes[at][(path.ties[:step] == at).sum()] for step, at in enumerate(path.ties)])
    assert (np.diff(taken) >= 0).all()  # the cheapest first


@given(sizes, rounded, st.data())
def test_what_is_left_of_a_path_leads_where_it_leads(sizes, round_to, data):
    amount, tied = chain(sizes, round_to)
    path = path_by_loss(even(amount, tied), tied, amount)
    one = data.draw(st.integers(0, len(path.ties)))
    two = data.draw(st.integers(one, len(path.ties)))
    assert path.after(0).tolist() == path.start.tolist()
    assert path.rest(one).after(two - one).tolist() == path.after(two).tolist()
    assert (path.after(two) <= path.after(one)).all()
    without = np.arange(len(tied)) == data.draw(st.integers(0, len(tied) - 1))
    rest = path.without(without)
    end = rest.after(len(rest.ties))
    assert (end == np.where(without, path.start, path.after(len(path.ties)))).all()
    at = int(np.flatnonzero(without)[0])
    count = int(data.draw(st.sampled_from(tied[at].choices().tolist())))
    through = path.through(at, count)
    assert through.start[at] == count
    assert (through.parts < through.start[through.ties]).all()


@given(sizes, rounded, shares, st.integers(0, 99))
@settings(max_examples=60)
def test_from_the_end_no_single_step_leads_nearer(sizes, round_to, share, seed):
    amount, tied = chain(sizes, round_to)
    goal = (1 - share) * amount([each.parts for each in tied])
    steps = CountSearch(tied, amount, goal)
    for path in (path_by_loss(lost(seed), tied, amount), path_by_share([each.parts * 0.7 for each in tied], tied)):
        for found in (
            steps.reached(path),
            *(steps.nearest(each, path) for each in (path.start, path.after(len(path.ties)))),
        ):
            assert all(count in each.choices() for each, count in zip(tied, found.tolist(), strict=True))
            missing = steps.missing(found)
            changes = [amount(each) - amount(found) for each in beside(tied, found)]
            toward = [abs(each) for each in changes if each * missing < 0]
            assert abs(missing) <= min(toward, default=np.inf) / 2 * (1 + 1e-9)
            assert steps.smallest(found) == min(map(abs, changes), default=0)


@given(st.integers(0, 99), st.integers(0, 40))
def test_of_steps_that_lead_equally_near_the_one_of_least_loss_is_taken(seed, count):
    """Ties of one size, so that the steps of the path are all alike: where what is asked lies in the midst of one, that
    is the one that is taken, as of a tie with units that are copies of others."""
    axes = [Axis(10) for _ in range(5)]
    tied = [TiedGroups([Group("", axis, 10, (), at, ())], 1, {}) for at, axis in enumerate(axes)]
    amount = CostPolynomial([((axis,), 1) for axis in axes], tied)
    slopes = np.sort(np.random.default_rng(seed).exponential(size=(5, 10)), axis=1)
    path = path_by_loss(lambda tie, parts: float(slopes[tie.groups[0].tied, : 10 - parts].sum()), tied, amount)
    assume(path.after(count).max() < 10)  # a tie that is whole stays so
    found = CountSearch(tied, amount, 50 - count - 0.7).reached(path)
    assert found.tolist() == path.after(count + 1).tolist()


@given(sizes, rounded, shares, st.integers(0, 99))
@settings(max_examples=60)
def test_the_two_beside_it_are_on_both_sides_of_the_goal(sizes, round_to, share, seed):
    amount, tied = chain(sizes, round_to)
    steps = CountSearch(tied, amount, (1 - share) * amount([each.parts for each in tied]))
    found = steps.reached(path_by_loss(lost(seed), tied, amount))
    less, more = steps.beside(found)
    assert found is less or found is more
    assert steps.missing(less) >= 0 or less is more
    assert steps.missing(more) <= 0 or less is more
    assert amount(less) >= amount(more)
    if less is more and steps.missing(found):  # there is nothing on the other side
        there = [steps.missing(each) for each in beside(tied, found)]
        assert all(each * steps.missing(found) > 0 for each in there)


@given(st.floats(0.1, 0.9))
def test_beside_it_is_what_a_large_step_leads_to_with_small_ones_given_back(share):
    """As of the heads of a small BERT, whose number is half of all there is, and the units of its MLPs."""
    axes = Axis(2), Axis(40)
    tied = [TiedGroups([Group("", axis, axis.size, (), at, ())], 1, {}) for at, axis in enumerate(axes)]
    amount = CostPolynomial([((axes[0],), 60), ((axes[1],), 1)], tied)
    goal = (1 - share) * amount([2, 40])
    steps = CountSearch(tied, amount, goal)
    found = steps.reached(path_by_loss(even(amount, tied), tied, amount))
    less, more = steps.beside(found)
    every = [60 * heads + units for heads in (1, 2) for units in range(1, 41)]
    assert amount(less) == min((each for each in every if each >= goal), default=amount(found))
    assert amount(more) == max((each for each in every if each <= goal), default=amount(found))


@given(st.integers(2, 5), shares, st.integers(0, 99))
@settings(max_examples=40)
def test_what_is_not_possible_is_not_reached_and_what_is_free_is_not_asked_for(multiple, share, seed):
    amount, tied = chain([30, 40], [1, 1])
    asked = []

    def is_possible(parts):
        asked.append(parts.tolist())
        return parts[0] % multiple == 30 % multiple

    steps = CountSearch(tied, amount, (1 - share) * amount([30, 40]), is_possible)
    del asked[:]
    found = steps.reached(path_by_loss(lost(seed), tied, amount))
    assert all(second == 40 for _, second in asked)
    assert is_possible(found)
    near = steps.near(np.array([29, 17]))
    assert is_possible(near)
    assert near[1] == 17
    missing = steps.missing(found)
    toward = [abs(amount(each) - amount(found)) for each in beside(tied, found, is_possible)]
    toward = [each for each in toward if each]
    assert abs(missing) <= min(toward) / 2 * (1 + 1e-9)


@given(sizes, rounded, st.floats(0, 1))
def test_a_path_by_share_begins_at_or_above_what_an_allocation_gives(sizes, round_to, share):
    _, tied = chain(sizes, round_to)
    ideal = [max(share * each.parts, int(each.choices()[-1])) for each in tied]
    path = path_by_share(ideal, tied)
    for each, start, count in zip(tied, path.start.tolist(), ideal, strict=True):
        assert start >= count - 1e-9
        assert not any(count <= choice < start for choice in each.choices())
    assert path.loss(np.array(ideal)) == 0
    assert path.after(len(path.ties)).tolist() == [each.choices()[-1] for each in tied]
