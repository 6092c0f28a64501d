"""One small run of the demo for all tests that only read what it found."""

from pathlib import Path

import pytest
import torch

from secateur.demo import trials as measuring
from secateur.report import Results, load_results
from support.demos import run_small


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of timing, which otherwise takes most of the time of these tests."""
    monkeypatch.setattr(measuring, "ROUNDS", 5)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, bool]:
    """The page, what was printed, and whether the process was left as it was."""
    import contextlib
    import io
    import os

    out = tmp_path_factory.mktemp("demo") / "a new" / "folder"
    printed = io.StringIO()
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "COLUMNS", "80")
        patch.setattr(measuring, "ROUNDS", 5)
        page = run_small(out)
    untouched = torch.equal(state, torch.get_rng_state()) and threads == torch.get_num_threads()
    return page, printed.getvalue(), untouched


@pytest.fixture(scope="session")
def results(finished: tuple[Path, str, bool]) -> Results:
    return load_results(finished[0].with_name("results.json"))
