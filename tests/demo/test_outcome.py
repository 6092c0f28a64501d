"""Networks that lost channels stand in the table with the others."""

import pytest

from secateur.report import Results, summarize


def test_channels_leave_as_many_as_asked(results: Results) -> None:
    """The network is smaller on disk and in work by what was asked, and fine-tuned and measured like the rest."""
    dense, *others = summarize(results.runs)
    rows = [row for row in others if row.method == "channels (shrink)"]
    assert [row.seeds for row in rows] == [2, 2]
    assert dense.multiply_adds is not None
    assert dense.bytes is not None
    for row, left in zip(rows, (0.5, 0.25), strict=True):
        assert row.multiply_adds is not None
        assert row.bytes is not None
        assert row.multiply_adds / dense.multiply_adds == pytest.approx(left, abs=0.01)
        assert row.bytes < (left + 0.1) * dense.bytes  # statistics and names beside the weights
        assert row.overall == pytest.approx(row.sparsity, abs=0.02)
        assert row.after is not None
        assert row.before is not None
        assert row.after != row.before  # one epoch: whether it is better is chance
