"""The demo on a small plan: a page and its numbers, the same again from the same seeds, nothing else touched."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from secateur.demo import run_demo
from secateur.report import Results, load_results
from support.demos import SMALL


def test_the_folder_holds_the_page_and_its_numbers(finished: tuple[Path, str, bool]) -> None:
    page, printed, _ = finished
    assert sorted(path.name for path in page.parent.iterdir()) == ["report.html", "results.json"]
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "report.html" in re.sub(r"\s", "", printed)


def test_everything_is_shown_on_the_way(finished: tuple[Path, str, bool]) -> None:
    for stage in ("Training 2 dense networks", "Pruning", "Shrinking", "Fine-tuning", "Timing", "channels (shrink)"):
        assert stage in finished[1]
    for stage in ("global magnitude", "±"):
        assert stage in finished[1]


def test_the_process_is_left_as_it_was(finished: tuple[Path, str, bool]) -> None:
    assert finished[2]


@pytest.mark.long
def test_the_same_seeds_give_the_same_figures_in_the_default_folder(
    results: Results, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever the global generator did before, and whichever seeds run beside this one."""
    torch.manual_seed(99)
    monkeypatch.chdir(tmp_path)
    page = run_demo(**{**SMALL, "seeds": (1,)})  # type: ignore[arg-type]
    assert page == Path("secateur-demo/report.html")
    again = load_results("secateur-demo/results.json")
    assert again.command == "secateur demo"
    first = [run for run in results.runs if run.seed == 1]
    for one, two in zip(first, again.runs, strict=True):
        assert (one.method, one.sparsity, one.seed) == (two.method, two.sparsity, two.seed)
        assert (one.before, one.after, one.zipped) == (two.before, two.after, two.zipped)


def test_results_name_no_path(finished: tuple[Path, str, bool], results: Results) -> None:
    assert results.command == "secateur demo --out DIR"
    assert str(finished[0].parent) not in finished[0].read_text(encoding="utf-8")
    assert "new/folder" not in json.dumps(finished[0].with_name("results.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("missing", ["sklearn", "matplotlib", "jinja2"])
def test_a_missing_extra_is_named_before_any_work(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"{missing}.*pip install 'secateur\[demo\]'"):
        run_demo(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_way_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("mine")
    with pytest.raises(NotADirectoryError, match="is a file; the demo needs a folder"):
        run_demo(path)
    assert path.read_text() == "mine"


@pytest.mark.examples
def test_the_example_tells_the_same_story(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["digits.py", "report.html"])
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "digits.py"), run_name="__main__")
    printed, errors = capsys.readouterr()
    assert errors == ""
    after = {words[0]: float(words[3]) for line in printed.splitlines() if (words := line.split())[1:2] == ["90.0%"]}
    assert set(after) == {"magnitude", "ERK", "LAMP", "random"}
    assert after["LAMP"] > 90
    assert "All methods and sparsities" in (tmp_path / "report.html").read_text(encoding="utf-8")
