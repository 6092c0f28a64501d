"""Comparing narrow numbers with a wide threshold, exactly."""

import numpy as np
import pytest
import torch

from secateur.selection import thresholds

THRESHOLDS = [0.1, float(np.float32(0.1)), 0.0, -0.1, 1e-50, 1e300, -1e300, float("inf"), float("-inf")]


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_comparisons_are_those_of_float64(threshold, dtype):
    near = torch.tensor(THRESHOLDS, dtype=torch.float64).to(dtype)
    piece = torch.cat([near, near.nextafter(torch.full_like(near, torch.inf)), near.nextafter(-torch.ones_like(near))])
    above, equal = thresholds.above_and_equal(piece, threshold)
    assert torch.equal(above, piece.double() > threshold)
    assert torch.equal(equal, piece.double() == threshold)


@pytest.mark.parametrize("value", THRESHOLDS)
def test_a_number_is_rounded_to_the_side_that_is_asked_for(value):
    dtype = np.dtype(np.float32)
    down, up = (float(thresholds.rounded(value, dtype, up=up)) for up in (False, True))
    assert down <= value <= up
    with np.errstate(over="ignore"):
        assert np.nextafter(np.float32(down), np.float32(np.inf)) >= np.float32(up)
