"""What `make matrix` runs, counts and writes, without installing anything."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import secateur
from matrix import run

ROWS = json.loads(run.ROWS.read_text())
ROW = {"python": "3.13.0", "torch": "2.9.1+cu128", "transformers": "5.0.0", "lightning": "2.6.6", "numpy": "2.4.6"}
ROW |= {"tests": "all", "passed": 3, "failed": 1, "failures": ["tests.a::test_c[x|.5]"], "seconds": 9, "commit": "01ab"}


def test_the_table_is_what_the_rows_say():
    text = run.PAGE.read_text()
    assert run.page(text, ROWS) == text, "the rows changed; write the page again: python tests/matrix/run.py --page"


def test_rows_are_of_what_was_committed():
    assert all(re.fullmatch("[0-9a-f]{8}", row["commit"]) for row in ROWS)


def test_a_row_takes_the_place_of_the_one_of_the_same_versions(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "PAGE", tmp_path / "page.md")
    run.PAGE.write_text(f"before\n{run.BEGIN}old\n{run.END}\nafter\n")
    older, again = ROW | {"torch": "2.10.0"}, ROW | {"passed": 4, "failed": 0, "failures": []}
    for row in (older, ROW, again, ROW | {"tests": "some"}):
        run.write(tmp_path / "rows.json", row)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows == [again, ROW | {"tests": "some"}, older]
    lines = run.PAGE.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "| 3.13.0 | 2.9.1 | 5.0.0 | 2.6.6 | 2.4.6 | all | 4 | 0 | 9 | 01ab |" in lines
    assert "Python 3.13.0, torch 2.9.1, failed:" in lines
    assert "- `test_c[x\\|.5]`" in lines


def test_some_tests_are_of_every_room():
    rooms = {path.parent.name for path in Path(secateur.__file__).parent.glob("*/__init__.py")}
    assert rooms <= {name.partition("/")[0] for name in run.QUICK}
    assert "support/test_private.py" in run.QUICK
    assert all((run.ROOT / "tests" / name).exists() for name in (*run.QUICK, *run.FEW))
    assert "support/test_private.py" in run.FEW


def test_the_oldest_are_those_that_are_declared():
    oldest = next(each for each in run.COMBINATIONS if each.lowest)
    pinned = dict(line.split("==") for line in run.pinned(oldest))
    for name in ("filelock", "lightning", "numpy", "rich", "torch", "transformers", "typer", "zstandard"):
        (line,) = re.findall(rf'"{name}>=([\d.]+)"', (run.ROOT / "pyproject.toml").read_text())
        assert pinned[name] == line
    assert "mkdocs" not in pinned
    assert pinned["pytest"] in (run.ROOT / "constraints.txt").read_text()


def test_what_is_asked_for_is_pinned_and_the_rest_is_the_newest():
    asked = run.with_pattern(run.Combination(python="3.13", torch="2.7.1", transformers="5.6", numpy="2"))
    packages = [line for line in run.pinned(asked) if line.partition("==")[0] in (*run.NAMES, "accelerate")]
    assert packages == ["torch==2.7.1", "transformers==5.6.*", "numpy==2.*"]


def test_a_python_that_is_not_there_is_said(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(OSError, match=r"no Python 2\.99 here"):
        run.interpreter("2.99")


def test_tests_are_counted_by_the_report():
    report = ElementTree.fromstring("""<testsuites><testsuite>
      <testcase classname="tests.a" name="passes"/>
      <testcase classname="tests.a" name="fails"><failure/></testcase>
      <testcase classname="tests.b" name="breaks"><error/></testcase>
      <testcase classname="tests.b" name="waits"><skipped/></testcase>
    </testsuite></testsuites>""")
    assert run.outcome(report) == {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "failures": ["tests.a::fails", "tests.b::breaks"],
    }


def test_the_workflow_has_the_same_combinations():
    text = (run.ROOT / ".github" / "workflows" / "matrix.yml").read_text()
    (listed,) = re.findall(r"combination: \[(.*)\]", text)
    assert listed.split(", ") == [each.name for each in run.COMBINATIONS]
    assert {each.python for each in run.COMBINATIONS} == set(re.findall(r"^ +(3\.\d+)$", text, re.MULTILINE))
