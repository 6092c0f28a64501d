"""Every public pattern and criterion obeys the laws."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur import criteria, patterns
from support import laws

sparsities = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 0.99, 1.0]) | st.floats(0, 1)


def test_every_public_pattern_and_criterion_is_here():
    here = {type(pattern).__name__ for pattern in laws.PATTERNS}
    assert here == set(patterns.__all__) - {"Pattern", "parse", "word_of"}
    helpers = {"Scope", "compares", "elementwise", "parse", "scope_of"}
    said = {criterion.__name__ for criterion in laws.CRITERIA}
    assert said == set(criteria.__all__) - helpers, "a criterion says what its scores compare"


@pytest.mark.filterwarnings("ignore:.* scores the weights of one output")
@pytest.mark.parametrize("pattern", laws.PATTERNS, ids=laws.name)
@settings(max_examples=15)
@given(criterion=st.sampled_from(laws.CRITERIA), data=st.data(), low=sparsities, high=sparsities)
def test_pipeline(pattern, criterion, data, low, high):
    weight = data.draw(laws.weights(pattern))
    before = weight.clone()
    laws.counts_are_exact(pattern, criterion, weight, low)
    laws.masks_nest(pattern, criterion, weight, min(low, high), max(low, high))
    laws.same_seed_same_mask(pattern, criterion, weight, high)
    assert torch.equal(before, weight)


@pytest.mark.parametrize("criterion", laws.CRITERIA, ids=lambda c: c.__name__)
@settings(max_examples=12)
@given(data=st.data())
def test_scores(criterion, data):
    laws.scores_are_sound(criterion, data.draw(laws.weights(patterns.Unstructured())))


@pytest.mark.parametrize("criterion", laws.CRITERIA, ids=lambda c: c.__name__)
def test_scores_of_unusual_weights(criterion):
    for shape in [(0, 4), (4, 0), (1,), (7,), (1, 1), (2, 3, 4, 5, 6)]:
        for dtype in laws.DTYPES:
            laws.scores_are_sound(criterion, torch.randn(shape, dtype=torch.float64).to(dtype))
    laws.scores_are_sound(criterion, torch.zeros(2, 3))
    laws.scores_are_sound(criterion, torch.full((2, 3), 60000.0, dtype=torch.float16))


@pytest.mark.parametrize("criterion", [c for c in laws.CRITERIA if getattr(c, "elementwise", False)])
def test_elementwise_criteria_are(criterion):
    weight = torch.randn(4, 6)
    assert torch.equal(criterion(weight)[1:3, 2:5], criterion(weight[1:3, 2:5]))
