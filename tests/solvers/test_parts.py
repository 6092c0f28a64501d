"""What solvers are made of: Gram matrices and their inverses, least squares, the search of a mask, and words."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur import NM, Rows, Unstructured, criteria, solvers
from secateur.solvers import admm, aimed, alps, best_mask, check_pattern, output_error, parse, refit, sparsegpt
from secateur.solvers.admm import CORNER, _inverse
from secateur.solvers.gram import factor, once_for
from secateur.solvers.least_squares import scaled, untouched
from support.solving import Diagonals, layer


def test_penalties_are_positive_and_each_has_its_steps():
    weight, gram = layer(4, 8)
    with pytest.raises(ValueError, match="got 1 penalties, 2 steps"):
        admm(weight, 0.5, Rows(), gram=gram, penalties=(0.1,), steps=(1, 2))
    with pytest.raises(ValueError, match="penalties are positive and steps at least 1"):
        admm(weight, 0.5, Rows(), gram=gram, penalties=(0.1,), steps=(0,))


@pytest.mark.parametrize("size", [1, 2, CORNER, CORNER + 1, 2 * CORNER + 3])
def test_an_inverse_by_halves(size):
    _, gram = layer(1, size)
    matrix = gram / gram.diagonal().mean() + 0.1 * torch.eye(size)
    inverse = _inverse(matrix.clone())
    torch.testing.assert_close(inverse @ matrix, torch.eye(size), rtol=0, atol=1e-4)
    torch.testing.assert_close(inverse, inverse.T, rtol=0, atol=1e-4)


def test_a_penalty_is_positive():
    weight, gram = layer(4, 8)
    with pytest.raises(ValueError, match="a penalty is positive; got 0"):
        alps(weight, 0.5, Rows(), gram=gram, penalty=0)


def test_the_mask_that_is_found_is_better_than_the_largest_weights_refitted():
    weight, gram = layer(32, 96)
    largest = refit(weight, best_mask(weight.abs(), 0.6, Rows()), gram=gram)
    assert output_error(weight, alps(weight, 0.6, Rows(), gram=gram)[0], gram) < output_error(weight, largest, gram)


def test_the_factor_is_that_of_the_inverse():
    _, gram = layer(1, 50)
    R, dead = factor(gram, 0.01)
    H = gram.double() / gram.diagonal().double().mean() + 0.01 * torch.eye(50)
    torch.testing.assert_close(torch.linalg.inv(R.double()).T @ torch.linalg.inv(R.double()), torch.linalg.inv(H),
                               rtol=1e-3, atol=1e-3)  # fmt: skip
    assert not dead.any()


def test_what_layers_share_is_computed_once_for_a_live_tensor():
    calls = itertools.count()
    gram = torch.eye(3)
    assert [once_for(gram, "a", lambda: next(calls)) for _ in range(2)] == [0, 0]
    assert once_for(gram, "b", lambda: next(calls)) == 1
    assert once_for(gram.clone(), "a", lambda: next(calls)) == 2, "equal is not the same"
    assert once_for(gram, "a", lambda: next(calls)) == 3, "only the last is remembered"
    gram.mul_(2)
    assert once_for(gram, "a", lambda: next(calls)) == 4, "it has changed"
    del gram
    assert once_for(torch.eye(3), "a", lambda: next(calls)) == 5, "an address that was another's"
    with torch.inference_mode():
        counted = torch.eye(3)
        assert [once_for(counted, "a", lambda: next(calls)) for _ in range(2)] == [6, 7]


def test_refit_is_least_squares():
    """To the end, it is the solution of the normal equations of each row's kept inputs."""
    weight, gram = layer(6, 24)
    mask = best_mask(weight.abs(), 0.5, Unstructured())
    new = refit(weight.double(), mask, gram=gram.double(), iterations=200, tolerance=1e-14)
    for row in range(6):
        kept = mask[row].nonzero()[:, 0]
        right = gram.double()[kept] @ weight[row].double()
        expected = torch.linalg.solve(gram.double()[kept][:, kept], right)
        torch.testing.assert_close(new[row, kept], expected, rtol=1e-5, atol=1e-6)


@given(st.integers(0, 99), st.sampled_from([3, 200]), st.sampled_from([1e-20, 1.0, 1e20]))
@settings(max_examples=15)
def test_refit_lowers_the_error_of_every_row_with_every_iteration(seed, tokens, size):
    """Also where the Gram matrix is singular; 3 tokens for 40 inputs."""
    weight, gram = layer(5, 40, tokens=tokens, seed=seed)
    weight, gram = weight.double(), gram.double() * size
    mask = best_mask(weight.abs(), 0.6, Unstructured())
    steps = [refit(weight, mask, gram=gram, iterations=count, tolerance=0.0) for count in range(8)]
    errors = torch.stack([(((weight - new) @ gram) * (weight - new)).sum(1) for new in steps])
    assert bool((errors[1:] <= errors[:-1] + 1e-9 * errors[0]).all())
    assert bool((errors[-1] < errors[0]).all())


def test_refit_begins_where_it_is_told_and_ends_when_nothing_is_won():
    weight, gram = layer(6, 24)
    new, mask = sparsegpt(weight, 0.5, Rows(), gram=gram)
    torch.testing.assert_close(refit(weight, mask, gram=gram, start=new, iterations=0), new)
    best = refit(weight, mask, gram=gram, iterations=200, tolerance=1e-6)
    assert output_error(weight, best, gram) <= output_error(weight, new, gram)
    rough = refit(weight, mask, gram=gram, iterations=200, tolerance=0.5)
    assert output_error(weight, best, gram) < output_error(weight, rough, gram)


def test_refit_errors():
    weight, gram = layer(4, 8)
    mask = weight > 0
    with pytest.raises(TypeError, match=r"a mask is bool, True = kept; this one is torch.float32"):
        refit(weight, weight, gram=gram)
    with pytest.raises(ValueError, match=r"mask has shape \(2, 8\), and the weight \(4, 8\)"):
        refit(weight, mask[:2], gram=gram)
    with pytest.raises(ValueError, match=r"start has shape \(2, 8\)"):
        refit(weight, mask, gram=gram, start=weight[:2])
    with pytest.raises(ValueError, match="0 or more; got -1"):
        refit(weight, mask, gram=gram, iterations=-1)


def test_a_pattern_of_ones_own_that_spreads_wrongly():
    @dataclass(frozen=True)
    class Wrong(Diagonals):
        def spread(self, keep, shape):
            return keep

    with pytest.raises(TypeError, match=r"spread returned torch.bool of shape \(1, 8\), not a bool mask of shape"):
        sparsegpt(torch.ones(8, 8), 0.5, Wrong(), gram=torch.eye(8))


def test_a_pattern_is_checked_before_any_work():
    check_pattern(NM(2, 4), None, torch.Size([3, 8]))
    with pytest.raises(ValueError, match="divisible by 4"):
        check_pattern(NM(2, 4), None, torch.Size([3, 6]))
    with pytest.raises(ValueError, match="pass None as the sparsity"):
        check_pattern(NM(2, 4), 0.4, torch.Size([3, 8]))
    with pytest.raises(ValueError, match=r"Rows\(\) needs a sparsity"):
        check_pattern(Rows(), None, torch.Size([3, 8]))


@pytest.mark.parametrize("name", ["admm", "alps", "sparsegpt", "dsnot"])
def test_a_solvers_word_is_its_name(name):
    assert parse(name) is getattr(solvers, name)
    assert parse(getattr(solvers, name)) is getattr(solvers, name)


@pytest.mark.parametrize("name", ["magnitude", "wanda", "ria"])
def test_a_criterions_word_keeps_its_scope(name):
    assert parse(name).__name__ == f"from_criterion({name})"
    assert parse(name).compares == criteria.scope_of(getattr(criteria, name), "layer")


def test_what_is_no_solver_is_refused():
    with pytest.raises(ValueError, match="no solver is called 'admn'; did you mean admm"):
        parse("admn")
    with pytest.raises(TypeError):
        parse(5)


@pytest.mark.parametrize("place", [0, CORNER, 2 * CORNER + 1])
def test_a_matrix_that_is_not_positive_definite_has_no_inverse_by_halves(place):
    """Wherever its negative direction lies."""
    matrix = torch.eye(2 * CORNER + 2)
    matrix[place, place] = -1
    assert _inverse(matrix) is None


def test_of_a_weight_without_entries_all_of_none_is_kept():
    for shape in ((0, 6), (4, 0)):
        empty = torch.zeros(shape)
        assert scaled(empty, 0.5, Unstructured(), torch.eye(shape[1]), 0.0)[2].numel() == 0
        new, mask = untouched(empty)
        assert new.shape == mask.shape == shape
        assert mask.dtype == torch.bool


# The weight that is aimed at is that of least squares, as far as is asked.


def handed(tokens=40, inputs=6, outputs=3):
    x = torch.randn(tokens, inputs, dtype=torch.float64)
    return torch.randn(outputs, inputs, dtype=torch.float64), x, x.T @ x


@pytest.mark.parametrize("aim", [0.0, 0.25, 1.0])
def test_what_a_weight_can_give_is_given_as_far_as_is_asked(aim):
    weight, x, gram = handed()
    other = torch.randn_like(weight)
    residual_cross = (x @ other.T - x @ weight.T).T @ x
    found = aimed(weight, residual_cross, gram=gram, aim=aim, damping=0.0)
    torch.testing.assert_close(found, weight + aim * (other - weight))


def test_it_is_the_best_of_all_weights():
    weight, x, gram = handed()
    wanted = torch.randn(40, 3, dtype=torch.float64)
    found = aimed(weight, (wanted - x @ weight.T).T @ x, gram=gram, damping=0.0)
    best = torch.linalg.lstsq(x, wanted).solution.T
    torch.testing.assert_close(found, best)


def test_nothing_lacking_changes_no_bit_and_nothing_is_written_to():
    weight, _, gram = handed()
    kept = weight.clone(), gram.clone()
    assert torch.equal(aimed(weight, torch.zeros_like(weight), gram=gram), weight)
    assert torch.equal(weight, kept[0])
    assert torch.equal(gram, kept[1])


def test_inputs_that_never_were_leave_their_weights():
    weight, x, _ = handed()
    x[:, 2] = 0
    residual_cross = torch.randn(3, 40, dtype=torch.float64) @ x
    found = aimed(weight, residual_cross, gram=x.T @ x)
    assert torch.equal(found[:, 2], weight[:, 2])
    assert not torch.equal(found, weight)


def test_what_does_not_fit():
    weight, _, gram = handed()
    with pytest.raises(ValueError, match=r"residual_cross must have the weight's shape \(3, 6\), not \(2, 6\)"):
        aimed(weight, weight[:2], gram=gram)
    with pytest.raises(ValueError, match="not positive semidefinite"):
        aimed(weight, weight, gram=3 * torch.ones(6, 6) - 2 * torch.eye(6))
