"""The plots: colours of the page, looks for as many methods as one likes, the reader's settings left alone."""

import re
from pathlib import Path

import pytest

from secateur.report import Results, Run, summarize, write_report
from support.reports import make_results


def test_colours_follow_the_page(page_path: Path) -> None:
    svg = re.findall(r"<svg.*?</svg>", page_path.read_text(encoding="utf-8"), re.DOTALL)
    assert len(svg) == 7  # before, after, size, work, history, two histograms
    for one in svg:
        assert "var(--ink)" in one
        assert "#01000" not in one
        assert "#0200" not in one
        assert "aria-label" in one


def test_the_readers_matplotlib_is_left_alone(tmp_path: Path) -> None:
    import matplotlib as mpl

    with mpl.rc_context({"font.size": 31.0, "axes.grid": False, "text.usetex": True}):
        before = dict(mpl.rcParams)
        write_report(make_results(networks=()), tmp_path / "report.html")
        assert dict(mpl.rcParams) == before


def test_as_many_methods_as_one_likes_have_looks_of_their_own(tmp_path: Path) -> None:
    from secateur.report.plots import _styles

    rows = summarize([Run(f"method {number}", 0.5, 50.0) for number in range(20)])
    assert len(set(_styles(rows).values())) == 20


@pytest.mark.parametrize("runs", [[Run("dense", 0.0, 99.0)], [Run("a", 0.5, 10.0, 10.0, zipped=5)]])
def test_a_single_run_is_enough(runs: list[Run], tmp_path: Path) -> None:
    assert "<svg" in write_report(Results("Mine", runs), tmp_path / "r.html").read_text("utf-8")
