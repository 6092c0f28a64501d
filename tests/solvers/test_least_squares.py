"""Least squares for a mask: the normal equations, and each step lowers each row's error."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur import Rows, Unstructured
from secateur.solvers import best_mask, output_error, sparsegpt
from secateur.solvers.least_squares import refit
from support.solving import layer


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
