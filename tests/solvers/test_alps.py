"""ALPS: its penalty, and its outcome beside that of the mask it began with."""

import pytest

from secateur import Rows
from secateur.solvers import alps, best_mask, output_error, refit
from support.solving import layer


def test_a_penalty_is_positive():
    weight, gram = layer(4, 8)
    with pytest.raises(ValueError, match="a penalty is positive; got 0"):
        alps(weight, 0.5, Rows(), gram=gram, penalty=0)


def test_the_mask_that_is_found_is_better_than_the_largest_weights_refitted():
    weight, gram = layer(32, 96)
    largest = refit(weight, best_mask(weight.abs(), 0.6, Rows()), gram=gram)
    assert output_error(weight, alps(weight, 0.6, Rows(), gram=gram)[0], gram) < output_error(weight, largest, gram)
