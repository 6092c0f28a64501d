"""Columns that leave a layer: what they cost is what least squares says, and the others move to its solution."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur.solvers import Elimination, aimed, eliminated
from support.solving import layer

LIGHT = 1e-5  # of each input's own squares, while columns leave


def least(weight, gram, gone, damping=0.0, target=None):
    """The weight without some columns whose outputs are nearest to those of the target, what that costs, and how much
    of it the outputs lose; by the normal equations of the columns that stay. Damping, one number or one for each
    input, pulls each column, gone or not, towards the target's."""
    weight, undamped = (weight if target is None else target).double(), gram.double()
    gram = undamped + damping * torch.eye(len(undamped), dtype=torch.float64)
    stay = [column for column in range(len(gram)) if column not in gone]
    new = torch.zeros_like(weight)
    new[:, stay] = torch.linalg.solve(gram[stay][:, stay], (weight @ gram)[:, stay].T).T
    change = weight - new
    return new, float((change @ gram * change).sum()), float((change @ undamped * change).sum())


def light(gram):
    return LIGHT * gram.diagonal()


def exact(outputs, inputs, seed=0):
    """A layer whose Gram matrix is rounded to float64 only."""
    weight, gram = layer(outputs, inputs, seed=seed, dtype=torch.float64)
    return weight, gram.double()


def some(data, size, least=1):
    return data.draw(st.lists(st.integers(0, size - 1), min_size=least, max_size=size - 1, unique=True), "columns")


@given(st.data(), st.integers(0, 99), st.integers(2, 9), st.integers(1, 5))
@settings(max_examples=40)
def test_what_leaves_costs_what_least_squares_says(data, seed, inputs, outputs):
    weight, gram = exact(outputs, inputs, seed=seed)
    gone = some(data, inputs)
    found = Elimination(weight, gram)
    expected, cost, loss = least(weight, gram, gone, light(gram))
    torch.testing.assert_close(float(found.costs([gone])[0]), cost, rtol=1e-5, atol=1e-9)
    found.remove(gone)
    torch.testing.assert_close(found.weight, expected, rtol=1e-5, atol=1e-6)
    assert found.loss == pytest.approx(loss, rel=1e-5, abs=1e-9 * cost + 1e-9)
    assert (found.weight[:, gone] == 0).all()


@given(st.data(), st.integers(0, 99), st.integers(3, 9))
@settings(max_examples=25)
def test_one_after_the_other_is_all_at_once(data, seed, inputs):
    weight, gram = exact(3, inputs, seed=seed)
    gone = some(data, inputs)
    at_once, in_turn = Elimination(weight, gram), Elimination(weight, gram)
    together, total = float(at_once.costs([gone])[0]), 0.0
    at_once.remove(gone)
    for column in data.draw(st.permutations(gone), "order"):
        total += float(in_turn.costs([[column]])[0])
        in_turn.remove([column])
    assert total == pytest.approx(together, rel=1e-6)
    torch.testing.assert_close(in_turn.weight, at_once.weight, rtol=1e-6, atol=1e-9)
    assert in_turn.loss == pytest.approx(at_once.loss, rel=1e-6, abs=1e-9 * together)
    rest = [[column] for column in range(inputs) if column not in gone]
    torch.testing.assert_close(in_turn.costs(rest), at_once.costs(rest), rtol=1e-5, atol=1e-9)


@given(st.data(), st.integers(0, 99), st.integers(2, 7), st.sampled_from([0.5, 1.0]))
@settings(max_examples=25)
def test_what_lacks_is_aimed_at(data, seed, inputs, aim):
    weight, gram = exact(3, inputs, seed=seed)
    residual_cross = (
        torch.randn(3, inputs, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * gram.mean()
    )
    gone = some(data, inputs)
    found = Elimination(weight, gram, residual_cross=residual_cross, aim=aim, damping=0.01)
    found.remove(gone)
    target = aimed(weight, residual_cross, gram=gram, aim=aim, damping=0.01)
    expected, _, loss = least(weight, gram, gone, light(gram), target)
    torch.testing.assert_close(found.weight, expected, rtol=1e-5, atol=1e-6)
    assert found.loss == pytest.approx(loss, rel=1e-5)
    whole = Elimination(weight, gram, residual_cross=residual_cross, aim=0.0)
    assert torch.equal(whole.weight, weight)


def test_units_of_several_columns_cost_what_they_do_together():
    """As heads do; also those of which a part has left."""
    weight, gram = exact(5, 12)
    units = [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    found = Elimination(weight, gram)
    for unit, cost in zip(units, found.costs(units).tolist(), strict=True):
        assert cost == pytest.approx(least(weight, gram, unit, light(gram))[1], rel=1e-5)
    found.remove([5, 9])
    for unit, cost in zip(units, found.costs(units).tolist(), strict=True):
        more = least(weight, gram, [5, 9, *unit], light(gram))[1] - least(weight, gram, [5, 9], light(gram))[1]
        assert cost == pytest.approx(more, rel=1e-5)
    found.remove(units[1])
    assert found.costs([units[1]]).tolist() == [0.0]
    before = found.weight.clone(), found.loss
    found.remove(units[1])
    assert torch.equal(found.weight, before[0])
    assert found.loss == before[1]


def test_what_a_unit_gives_alone_is_what_zeros_cost():
    weight, gram = exact(5, 6)
    found = Elimination(weight, gram)
    for unit, cost in zip([[0], [1, 4], [5]], found.alone([[0], [1, 4], [5]]).tolist(), strict=True):
        change = torch.zeros_like(weight)
        change[:, unit] = weight[:, unit]
        assert cost == pytest.approx(float((change @ gram * change).sum()))
        assert cost >= float(found.costs([unit])[0]) * (1 - 1e-3)


def test_copies_and_combinations_leave_without_error():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    x = torch.cat([x, x[:, :1], x[:, 1:2] - 2 * x[:, 3:4]], 1)  # the fifth is the first, the sixth a combination
    weight = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    found = Elimination(weight, x.T @ x)
    left, curve = eliminated([(found, [[at] for at in range(6)])], 4)
    assert len({0, 4} & set(left)) == len({1, 3, 5} & set(left)) == 1
    assert curve[2][1] <= 1e-6 * float((x @ weight.T).square().sum())
    torch.testing.assert_close(x @ found.settled(60).T, x @ weight.T, rtol=1e-8, atol=1e-8)


def test_a_singular_matrix_is_damped_as_much_as_it_takes():
    """Fewer tokens than inputs, in float32, with next to no damping asked for."""
    weight, gram = layer(4, 40, tokens=3)
    found = Elimination(weight, gram, damping=1e-30)
    found.remove(list(range(30)))
    assert found.weight.isfinite().all()
    assert found.settled(3).isfinite().all()
    assert found.loss >= 0


def test_a_layer_is_the_same_whatever_its_strides():
    weight, gram = layer(4, 8, dtype=torch.float64)
    parameter = torch.nn.Parameter(weight.T.contiguous().T)  # as a Conv1D's lies
    found, plain = Elimination(parameter, gram.T), Elimination(weight, gram)
    for each in (found, plain):
        each.remove([0, 7])
    assert torch.equal(found.weight, plain.weight)
    assert not found.weight.requires_grad


def test_a_copy_is_one_of_its_own():
    weight, gram = layer(4, 8)
    first = Elimination(weight, gram)
    first.remove([1])
    other = first.copy()
    other.remove([2, 3])
    again = Elimination(weight, gram)
    again.remove([1])
    assert torch.equal(first.weight, again.weight)
    assert first.loss == again.loss < other.loss
    assert torch.equal(first.costs([[2]]), again.costs([[2]]))


def test_nothing_removed_changes_nothing():
    weight, gram = layer(4, 8, dtype=torch.float64)
    found = Elimination(weight, gram)
    found.remove([])
    assert torch.equal(found.weight, weight)
    assert found.loss == 0
    assert found.costs([]).shape == (0,)
    assert found.costs([[], [1]]).tolist()[0] == 0
    assert eliminated([(found, [[at] for at in range(8)])], 8) == ([], [(8, 0.0)])
    assert torch.equal(found.weight, weight)


def test_units_leave_all_their_layers_by_what_they_cost_together():
    """Such as the keys' and the values' consumers; the second layer decides here."""
    one, gram = exact(3, 4, seed=1)
    two, other = exact(5, 8, seed=2)
    first, second = Elimination(one, gram), Elimination(two, 100 * other)
    columns = [[0, 1], [2, 3], [4, 5], [6, 7]]
    together = first.costs([[0], [1], [2], [3]]) + second.costs(columns)
    left, curve = eliminated([(first, [[0], [1], [2], [3]]), (second, columns)], 2)
    assert left[0] == int(together.argmin())
    assert [count for count, _ in curve] == [4, 3, 2]
    assert curve[1][1] == pytest.approx(float(together.min()), rel=0.05)  # costs count damping
    assert curve[-1][1] == pytest.approx(first.loss + second.loss)
    assert (first.weight[:, left] == 0).all()
    assert all((second.weight[:, columns[at]] == 0).all() for at in left)


def eliminations(seed, inputs=9, *, constant=False):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, inputs, generator=generator) @ torch.randn(inputs, inputs, generator=generator)
    gram = x.double().T @ x.double()  # of float32 it would not be symmetric to more than that on every processor
    return Elimination(torch.randn(3, inputs, generator=generator), gram, constant=constant)


@given(st.integers(0, 1000), st.sets(st.integers(0, 7), max_size=7), st.data())
def test_what_is_restored_is_as_if_it_had_never_left(seed, gone, data):
    """Weight, loss and costs, whichever columns come back together; and that is what was said to be gained."""
    back = data.draw(st.sets(st.sampled_from(sorted(gone))) if gone else st.just(set()))
    found, plain = eliminations(seed, constant=True), eliminations(seed, constant=True)
    found.remove(sorted(gone))
    gains = found.gains([sorted(back), [8]])  # the constant never leaves, and so never comes back
    found.restore([*sorted(back), 8])
    plain.remove(sorted(gone - back))
    torch.testing.assert_close(found.weight, plain.weight, rtol=1e-4, atol=1e-5)
    assert found.loss == pytest.approx(plain.loss, rel=1e-4, abs=1e-4)
    units = [[at] for at in range(8)]
    torch.testing.assert_close(found.costs(units), plain.costs(units), rtol=1e-3, atol=1e-3)
    assert gains[1] == 0
    assert float(gains[0]) == pytest.approx(float(found.costs([sorted(back)])[0]), rel=1e-3, abs=1e-3)


def test_gains_of_units_of_several_columns_are_those_of_all_together():
    found = eliminations(0)
    found.remove([0, 1, 2, 5])
    one, other, none = found.gains([[0, 1], [5], [3]]).tolist()
    assert none == 0
    for unit, gain in (([0, 1], one), ([5], other)):
        again = found.copy()
        again.restore(unit)
        assert float(again.costs([unit])[0]) == pytest.approx(gain, rel=1e-4)


@given(st.integers(0, 1000), st.integers(1, 7), st.integers(1, 4))
def test_swaps_never_lose_more_and_as_many_leave(seed, keep, swaps):
    units = [[at] for at in range(9)]
    plain, found = eliminations(seed), eliminations(seed)
    _, curve = eliminated([(plain, units)], keep)
    left, swapped = eliminated([(found, units)], keep, 1, swaps)
    assert len({*left}) == 9 - keep
    assert swapped[-1][1] <= curve[-1][1] * (1 + 1e-6)
    again = eliminations(seed)
    again.remove(left)
    torch.testing.assert_close(found.weight, again.weight, rtol=1e-4, atol=1e-5)


def test_swaps_lie_between_the_greedy_order_and_the_best_set():
    units, sums = [[at] for at in range(9)], [0.0, 0.0, 0.0]
    for seed in range(10):
        greedy, swapped, best = eliminations(seed), eliminations(seed), []
        eliminated([(greedy, units)], 2)
        eliminated([(swapped, units)], 2, 1, 2)
        for gone in itertools.combinations(range(9), 7):
            each = eliminations(seed)
            each.remove(gone)
            best.append(each.loss)
        sums = [one + more for one, more in zip(sums, (greedy.loss, swapped.loss, min(best)), strict=True)]
    assert sums[2] <= sums[1] < 0.95 * sums[0]


def test_columns_that_left_with_something_else_stay_away():
    """Such as heads, before what is within all of them."""
    for seed in range(5):
        found = eliminations(seed)
        found.remove([0, 1, 2])
        units = [[at, at + 3, at + 6] for at in range(3)]
        left, _ = eliminated([(found, units)], 1, 1, 2)
        again = eliminations(seed)
        again.remove([0, 1, 2, *(column for at in left for column in units[at])])
        torch.testing.assert_close(found.weight, again.weight, rtol=1e-4, atol=1e-5)


def test_what_is_wrong_is_said_at_the_door():
    weight, gram = layer(4, 8)
    with pytest.raises(TypeError, match=r"floating dtypes; this one is torch\.int64"):
        Elimination(weight.long(), gram)
    with pytest.raises(ValueError, match=r"weight of shape \(outputs, inputs\), not \(8,\)"):
        Elimination(weight[0], gram)
    with pytest.raises(ValueError, match="NaN or infinite"):
        Elimination(weight * torch.nan, gram)
    with pytest.raises(ValueError, match=r"\(8, 8\)"):
        Elimination(weight, gram[:4])
    with pytest.raises(ValueError, match="NaN or infinite"):
        Elimination(weight, gram * torch.inf)
    with pytest.raises(ValueError, match="not positive semidefinite"):
        Elimination(weight, gram - 2 * gram.diagonal().mean() * (1 - torch.eye(8)))
    with pytest.raises(ValueError, match=r"residual_cross must have .*\(4, 8\), not \(4, 7\)"):
        Elimination(weight, gram, residual_cross=torch.zeros(4, 7), aim=0.5)
    with pytest.raises(ValueError, match=r"residual"):
        Elimination(weight, gram, residual_cross=torch.full((4, 8), torch.nan), aim=0.5)
    with pytest.raises(ValueError, match=r"counts.*\(3,\).*4 outputs"):
        Elimination(weight, gram, counts=torch.ones(3))
    with pytest.raises(ValueError, match=r"counts"):
        Elimination(weight, gram, counts=-torch.ones(4))
    with pytest.raises(ValueError, match=r"damping .*\(0, 1\].*-1"):
        Elimination(weight, gram, damping=-1.0)
    found = Elimination(weight, gram)
    for wrong in ([8], [-1]):
        with pytest.raises(ValueError, match=r"8 inputs"):
            found.remove(wrong)
        with pytest.raises(ValueError, match=r"8 inputs"):
            found.costs([wrong])
    assert found.loss == 0


@given(st.data(), st.integers(0, 99), st.integers(3, 8))
@settings(max_examples=20)
def test_what_is_noise_is_damped_as_asked_for(data, seed, inputs):
    """So is all with no more tokens than columns, where no share can be told."""
    weight, gram = exact(3, inputs, seed=seed)
    gone = some(data, inputs)
    found = Elimination(weight, gram, damping=1e-4)
    found.remove(gone)
    damped, _, _ = least(weight, gram, gone, 1e-4 * float(gram.diagonal().mean()))
    torch.testing.assert_close(found.settled(inputs - len(gone)), damped, rtol=1e-5, atol=1e-7)
    best, _, lost = least(weight, gram, gone)
    whole = float((weight[:, gone] @ gram.double()[gone][:, gone] * weight[:, gone]).sum())
    if lost / whole > 1e-4:
        torch.testing.assert_close(found.settled(1000), damped, rtol=1e-5, atol=1e-7)
    assert (found.settled(1000) - best).norm() <= (damped - best).norm() * (1 + 1e-4) + 1e-6


def test_what_others_can_give_they_give_to_rounding_whatever_the_damping():
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    x = torch.cat([x, 2 * x[:, :1], x[:, 1:2] - 2 * x[:, 3:4]], 1)
    weight = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    found = Elimination(weight, x.T @ x, damping=0.1)
    found.remove([4, 5])
    torch.testing.assert_close(x @ found.settled(60).T, x @ weight.T, rtol=1e-8, atol=1e-8)
    assert float((x @ found.settled(4).T - x @ weight.T).norm()) > 0.01  # of which nothing is known with 4 tokens
    assert (found.settled(60)[:, [4, 5]] == 0).all()
    whole = Elimination(weight, x.T @ x)
    assert torch.equal(whole.settled(60), weight)


def test_a_layer_that_is_finished_says_what_it_lost_and_loses_no_more():
    weight, gram = exact(3, 6)
    found = Elimination(weight, gram)
    found.remove([1])
    loss, settled = found.loss, found.settled(100)
    found.finish()
    assert found.loss == loss
    assert torch.equal(found.settled(100), settled)
    for more in (lambda: found.remove([2]), lambda: found.costs([[2]]), found.copy):
        with pytest.raises(ValueError, match="no column leaves after `finish`"):
            more()
