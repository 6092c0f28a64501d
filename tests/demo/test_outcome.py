"""The table of what is smaller and faster."""

import pytest

from secateur.report import Results, summarize


def test_channels_leave_as_many_as_asked(results: Results) -> None:
    """The network is smaller on disk and in work by what was asked, and fine-tuned and measured like the rest."""
    dense = next(run for run in results.runs if run.method == "dense")
    rows = summarize(results.shrunken)
    assert [(row.method, row.seeds) for row in rows] == [
        ("dense", 2), ("gradual (zeros)", 2), ("columns:16 (zeros)", 2), ("gradual, packed", 2),
        ("columns:16, packed", 2), ("channels (shrink)", 2), ("channels (shrink)", 2),
    ]  # fmt: skip
    assert dense.multiply_adds is not None
    assert dense.bytes is not None
    for row, left in zip(rows[-2:], (0.5, 0.25), strict=True):
        assert row.multiply_adds is not None
        assert row.bytes is not None
        assert row.multiply_adds / dense.multiply_adds == pytest.approx(left, abs=0.01)
        assert row.bytes < (left + 0.1) * dense.bytes  # statistics and names beside the weights
        assert row.after is not None
        assert row.before is not None
        assert row.after != row.before  # one epoch: whether it is better is chance
    for run in results.shrunken:
        assert (run.latency_ms is not None) == (run.batch_ms is not None) == (run.seed == 0)
        twin = [each for each in results.runs if f"{each.method} (zeros)" == run.method or each.method == run.method]
        assert all(each.after == run.after for each in twin if (each.seed, each.sparsity) == (run.seed, run.sparsity))
        assert bool(twin) == (run.method in ("dense", "gradual (zeros)"))
