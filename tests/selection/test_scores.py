"""Scores that are computed on access."""

import numpy as np
import pytest
import torch

from secateur.selection import LazyScores, keep_largest_overall
from support.selecting import by_sorting, check


def test_lazy_scores_are_computed_piece_by_piece_only_when_elementwise(path):
    sizes = []

    def scored(weight):
        sizes.append(weight.numel())
        return weight.abs()

    weights = {"a": torch.randn(40, 50), "b": torch.randn(1000)}
    expected = {name: weight.abs() for name, weight in weights.items()}
    check(expected, 700, LazyScores(weights, scored, elementwise=True))
    if path != "plain":
        assert max(sizes) <= 192
    sizes.clear()
    check(expected, 700, LazyScores(weights, scored))
    assert set(sizes) == {2000, 1000}


def test_lazy_random_scores_are_the_same_at_every_access():
    torch.manual_seed(5)
    scores = LazyScores({"a": torch.zeros(7), "b": torch.zeros(7)}, lambda w: torch.rand(w.shape))
    first = {name: scores[name].clone() for name in scores}
    state = torch.get_rng_state()
    assert torch.equal(scores["a"], first["a"])
    assert torch.equal(scores["b"], first["b"])
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(first["a"], first["b"])


def test_what_an_elementwise_function_returns_is_checked(path):
    def arrays(weight):
        return (abs(weight) * 100).astype(int) if isinstance(weight, np.ndarray) else (abs(weight) * 100).long()

    arrays.on_arrays = True
    weights = {"w": torch.randn(3000)}
    found = keep_largest_overall(LazyScores(weights, arrays, elementwise=True), 1000)
    assert torch.equal(found["w"], by_sorting({"w": (weights["w"].abs() * 100).long()}, 1000)["w"])
    scale = torch.ones((), requires_grad=True)
    check({"w": weights["w"].abs()}, 1000, LazyScores(weights, lambda w: w.abs() * scale, elementwise=True))
    for function, error, message in (
        (lambda w: w.mean(), ValueError, r"w: the criterion returned scores of shape \(\)"),
        (lambda w: w.reshape(-1, 1), ValueError, r"w: the criterion returned scores of shape \(\d+, 1\)"),
        (lambda _: [1.0], TypeError, "w: the criterion returned a list, not a tensor"),
        (lambda w: w * 1j, ValueError, "w: complex scores have no order"),
    ):
        for elementwise in (True, False):
            with pytest.raises(error, match=message):
                keep_largest_overall(LazyScores(weights, function, elementwise=elementwise), 1000)
