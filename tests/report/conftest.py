"""One page for all tests that only read it."""

from pathlib import Path

import pytest

from support.reports import Page, make_results


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_results().report(tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture(scope="module")
def page(page_path: Path) -> Page:
    return Page(page_path.read_text(encoding="utf-8"))
