"""Results refuse what cannot be, and come back from their file."""

from pathlib import Path

import pytest

from secateur.report import Results, Run, load_results, save_results
from support.reports import make_results


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere; create it"):
        save_results(make_results(), tmp_path / "nowhere" / "results.json")


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    results = make_results()
    save_results(results, tmp_path / "results.json")
    assert load_results(tmp_path / "results.json") == results


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"title": "x", "runs": 3}', '{"title": "x", "runs": [{"a": 1}]}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json does not hold the results of a report"):
        load_results(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparsity": 90}, r"run of 'a' with seed 0: sparsity is a fraction in \[0, 1\), not 90; 90 % is written 0.9"),
        ({"sparsity": 1.0}, "sparsity"),
        ({"sparsity": float("nan")}, "sparsity"),
        ({"before": float("nan")}, "before is nan"),
        ({"after": float("inf")}, "after is inf"),
        ({"zipped": 0}, "zipped is 0"),
        ({"latency_ms": -1.0}, "latency_ms is -1"),
        ({"multiply_adds": 0}, "multiply_adds is 0"),
        ({"overall": 1.0}, r"overall is a fraction in \[0, 1\), not 1.0"),
        ({"before": None}, "neither before nor after was measured"),
    ],
)
def test_impossible_runs_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Run(**{"method": "a", "sparsity": 0.5, "before": 1.0, **change})  # type: ignore[arg-type]


def test_impossible_results_are_refused() -> None:
    with pytest.raises(ValueError, match="hold no runs"):
        Results("empty", ())
    with pytest.raises(ValueError, match="examples is 0; leave it out"):
        make_results(examples=0)
    with pytest.raises(TypeError, match="sequence of paragraphs"):
        make_results(text="one string")
