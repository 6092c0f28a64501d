"""ADMM: its penalties and steps, and the inverse by halves."""

import pytest
import torch

from secateur import Rows
from secateur.solvers import admm
from secateur.solvers.admm import CORNER, _inverse
from support.solving import layer


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
