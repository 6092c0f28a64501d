"""Every public pattern and criterion obeys the laws."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import laws
from secateur import criteria, patterns

sparsities = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 0.99, 1.0]) | st.floats(0, 1)


def test_every_public_pattern_and_criterion_is_here():
    here = {type(pattern).__name__ for pattern in laws.PATTERNS}
    assert here == set(patterns.__all__) - {"Pattern", "parse"}
    assert {criterion.__name__ for criterion in laws.CRITERIA} == set(criteria.__all__) - {"elementwise"}


@pytest.mark.parametrize("pattern", laws.PATTERNS, ids=laws.name)
@settings(max_examples=25)
@given(data=st.data(), seed=st.integers(0, 999))
def test_patterns(pattern, data, seed):
    shape = data.draw(laws.shapes(pattern))
    laws.spread_of_ones_is_true(pattern, shape)
    laws.ties_keep_the_first(pattern, shape)
    laws.pool_inverts_spread(pattern, shape, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("criterion", laws.CRITERIA, ids=lambda c: c.__name__)
@pytest.mark.parametrize("pattern", laws.PATTERNS, ids=laws.name)
@settings(max_examples=10)
@given(data=st.data(), low=sparsities, high=sparsities)
def test_pipeline(pattern, criterion, data, low, high):
    weight = data.draw(laws.weights(pattern))
    before = weight.clone()
    laws.counts_are_exact(pattern, criterion, weight, low)
    laws.masks_nest(pattern, criterion, weight, min(low, high), max(low, high))
    laws.same_seed_same_mask(pattern, criterion, weight, high)
    assert torch.equal(before, weight)


@pytest.mark.parametrize("criterion", laws.CRITERIA, ids=lambda c: c.__name__)
def test_criteria_have_the_weights_shape_and_read_only(criterion):
    for dtype in laws.DTYPES:
        weight = torch.randn(6, 5, dtype=torch.float64).to(dtype)
        before = weight.clone()
        scores = criterion(weight)
        assert scores.shape == weight.shape
        assert torch.equal(weight, before)
        assert not scores.requires_grad
    assert criterion(torch.zeros(0, 4)).shape == (0, 4)
    assert criterion(torch.zeros(2, 3)).isfinite().all()


@pytest.mark.parametrize("criterion", [c for c in laws.CRITERIA if getattr(c, "elementwise", False)])
def test_elementwise_criteria_are(criterion):
    weight = torch.randn(4, 6)
    assert torch.equal(criterion(weight)[1:3, 2:5], criterion(weight[1:3, 2:5]))
