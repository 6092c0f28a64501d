"""What solvers share when they choose a mask."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from secateur import NM, Rows, Unstructured
from secateur.solvers import best_mask, check_pattern, sparsegpt
from secateur.solvers.search import scaled, untouched
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_problem_in_units_of_its_inputs(dtype):
    x, weight = torch.randn(30, 6, dtype=dtype) * torch.arange(1, 7), torch.randn(4, 6, dtype=dtype)
    H, scale, target = scaled(weight, 0.5, Unstructured(), x.T @ x, 0.0)
    assert H.dtype == scale.dtype == target.dtype == dtype
    torch.testing.assert_close(H.diagonal(), torch.ones(6, dtype=dtype))
    torch.testing.assert_close(target / scale, weight)
    mean = (x.T @ x).diagonal().mean()
    torch.testing.assert_close(target @ H @ target.T, weight @ (x.T @ x) @ weight.T / mean)


def test_of_a_weight_without_entries_all_of_none_is_kept():
    for shape in ((0, 6), (4, 0)):
        empty = torch.zeros(shape)
        assert scaled(empty, 0.5, Unstructured(), torch.eye(shape[1]), 0.0)[2].numel() == 0
        new, mask = untouched(empty)
        assert new.shape == mask.shape == shape
        assert mask.dtype == torch.bool


def test_a_pattern_is_checked_before_any_work():
    check_pattern(NM(2, 4), None, torch.Size([3, 8]))
    with pytest.raises(ValueError, match="divisible by 4"):
        check_pattern(NM(2, 4), None, torch.Size([3, 6]))
    with pytest.raises(ValueError, match="pass None as the sparsity"):
        check_pattern(NM(2, 4), 0.4, torch.Size([3, 8]))
    with pytest.raises(ValueError, match=r"Rows\(\) needs a sparsity"):
        check_pattern(Rows(), None, torch.Size([3, 8]))
