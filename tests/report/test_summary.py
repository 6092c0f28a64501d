"""Means over seeds, their spread and their intervals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secateur.report import Results, Run, summarize
from secateur.report.results import wilson


def test_the_summary_by_hand() -> None:
    runs = [Run("a", 0.9, before, after, seed) for seed, (before, after) in enumerate([(1, 10), (2, 20), (6, 60)])]
    [row] = summarize([*runs])
    assert (row.before, row.before_range, row.after, row.after_range) == (3, (1, 6), 30, (10, 60))
    assert row.before_sd == pytest.approx(7**0.5)  # ((−2)² + (−1)² + 3²) / 2
    assert row.after_sd == pytest.approx(10 * 7**0.5)
    assert (row.seeds, row.bytes, row.latency_ms) == (3, None, None)


def test_wilsons_interval_by_hand() -> None:
    """9 of 10: (0.9 + 3.8416/20 ± 1.96·√(0.09/10 + 3.8416/400)) / (1 + 3.8416/10) = (1.09208 ± 0.26734) / 1.38416."""
    low, high = wilson(0.9, 10)
    assert low == pytest.approx((1.09208 - 0.26734) / 1.38416, abs=1e-5)
    assert high == pytest.approx((1.09208 + 0.26734) / 1.38416, abs=1e-5)
    assert wilson(1.0, 719)[1] == 1
    assert wilson(1.0, 719)[0] == pytest.approx(719 / (719 + 1.96**2))  # 1 / (1 + z²/n)


@given(st.floats(0, 1), st.integers(1, 10**6))
def test_laws_of_wilsons_interval(share: float, examples: int) -> None:
    """It holds the share, mirrors, narrows with more examples, and at its bounds the share is z deviations away."""
    low, high = wilson(share, examples)
    assert 0 <= low <= share + 1e-12
    assert share - 1e-12 <= high <= 1
    mirrored = wilson(1 - share, examples)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=1e-9)
    narrower = wilson(share, 4 * examples)
    assert narrower[1] - narrower[0] < high - low
    for bound in (low, high):
        deviation = (bound * (1 - bound) / examples) ** 0.5
        assert abs(share - bound) == pytest.approx(1.96 * deviation, abs=1e-6)


@pytest.mark.parametrize(("share", "examples"), [(1.1, 5), (-0.1, 5), (float("nan"), 5), (0.5, 0)])
def test_no_share_no_interval(share: float, examples: int) -> None:
    with pytest.raises(ValueError, match=r"a share in \[0, 1\] of one example or more has an interval; got"):
        wilson(share, examples)


@pytest.mark.parametrize("how", [{}, {"unit": "", "examples": 100}, {"before": 130.0, "examples": 100}])
def test_only_percentages_of_known_examples_have_intervals(how: dict[str, object]) -> None:
    runs = [Run("a", 0.5, how.pop("before", 90.0))]  # type: ignore[arg-type]
    assert "interval" not in Results("x", runs, **how).json()["runs"][0]  # type: ignore[arg-type]
    [row] = Results("x", [Run("a", 0.5, 90.0)], examples=10).json()["runs"]
    assert row["interval"] == [100 * bound for bound in wilson(0.9, 10)]


def test_a_mean_over_some_of_the_seeds_is_not_shown() -> None:
    [row] = summarize([Run("a", 0.9, 1, 10, 0), Run("a", 0.9, 2, None, 1)])
    assert (row.before, row.after, row.after_sd) == (1.5, None, None)
    [row] = summarize([Run("a", 0.9, 1, 10, 0), Run("a", 0.9, None, 20, 1)])
    assert (row.before, row.before_range, row.after) == (None, None, 15)


def test_sparsities_that_differ_by_rounding_share_a_row() -> None:
    assert len(summarize([Run("a", 0.90001, 1), Run("a", 0.89999, 2, seed=1), Run("a", 0.8, 3)])) == 2
