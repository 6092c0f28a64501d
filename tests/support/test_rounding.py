"""Weights as whole numbers times scales: nearest, found again, and refused where there is no number."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur.support import rounding_scales, to_int8


@settings(max_examples=60)
@given(data=st.data())
def test_each_is_the_nearest_and_zeros_stay(data):
    shape = data.draw(st.sampled_from([(5, 70), (3, 4, 2, 2), (1, 1), (4,), (0, 3), (3, 0)]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    weight = torch.randn(shape, generator=generator) * 10.0 ** data.draw(st.integers(-30, 30))
    weight = weight * (torch.rand(shape, generator=generator) < data.draw(st.sampled_from([0.0, 0.3, 1.0])))
    weight = weight.to(data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    numbers, scales = to_int8(weight)
    assert (numbers.dtype, numbers.shape, scales.dtype) == (torch.int8, weight.shape, torch.float32)
    assert not numbers[weight == 0].any()
    each = scales.view(-1, *[1] * (weight.dim() - 1))
    assert bool(((numbers * each - weight.float()).abs() <= 0.5001 * each).all())
    assert numbers.abs().amax() <= 127 if numbers.numel() else True
    again, same = to_int8(numbers * each)  # exact: a scale has 16 bits
    torch.testing.assert_close(again * same.view_as(each), numbers * each, rtol=0, atol=0)


@settings(max_examples=30)
@given(most=st.integers(1, 127), seed=st.integers(0, 999))
def test_a_grid_is_found_whatever_number_is_its_largest(most, seed):
    """After calibration the largest number of an output is not always 127."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(6, 80, generator=generator)
    scales = rounding_scales(weight)
    numbers = torch.randint(-most, most + 1, weight.shape, generator=generator)
    on_grid = numbers * scales[:, None]
    found, own = to_int8(on_grid)
    assert torch.equal(found * own[:, None], on_grid)


def test_half_of_the_smallest_numbers():
    """Of what is below any scale nothing is left but zeros; nothing is divided by 0."""
    numbers, scales = to_int8(torch.tensor([[1e-44, -1e-40], [0.0, -0.0]]))
    assert bool(scales.isfinite().all())
    assert bool((scales > 0).all())
    assert not numbers.any()


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_refused(odd):
    with pytest.raises(
        ValueError, match=r"a weight of shape \(2, 2\) holds NaN or infinity, which has no place in int8"
    ):
        to_int8(torch.tensor([[1.0, 2.0], [odd, 0.0]]))
