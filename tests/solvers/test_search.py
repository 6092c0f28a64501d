"""What solvers share when they choose a mask."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from secateur import NM, Rows, Unstructured
from secateur.solvers import best_mask, check_pattern, sparsegpt
from support.solving import Diagonals


def test_a_pattern_of_ones_own_that_spreads_wrongly():
    @dataclass(frozen=True)
    class Wrong(Diagonals):
        def spread(self, keep, shape):
            return keep

    with pytest.raises(TypeError, match=r"spread returned torch.bool of shape \(1, 8\), not a bool mask of shape"):
        sparsegpt(torch.ones(8, 8), 0.5, Wrong(), gram=torch.eye(8))


@given(
    outputs=st.integers(1, 7),
    inputs=st.integers(1, 20),
    sparsity=st.floats(0, 1),
    pattern=st.sampled_from([Unstructured(), Rows()]),
)
def test_the_best_of_each_group_stay_in_their_exact_number(outputs, inputs, sparsity, pattern):
    scores = torch.randn(outputs, inputs)
    kept, values = pattern.pool(best_mask(scores, sparsity, pattern)), pattern.pool(scores)
    assert (kept.sum(1) == kept.shape[1] - round(sparsity * kept.shape[1])).all()
    for row, mask in zip(values, kept, strict=True):
        assert not mask.any() or mask.all() or row[mask].min() >= row[~mask].max()


def test_a_pattern_is_checked_before_any_work():
    check_pattern(NM(2, 4), None, torch.Size([3, 8]))
    with pytest.raises(ValueError, match="divisible by 4"):
        check_pattern(NM(2, 4), None, torch.Size([3, 6]))
    with pytest.raises(ValueError, match="pass None as the sparsity"):
        check_pattern(NM(2, 4), 0.4, torch.Size([3, 8]))
    with pytest.raises(ValueError, match=r"Rows\(\) needs a sparsity"):
        check_pattern(Rows(), None, torch.Size([3, 8]))
