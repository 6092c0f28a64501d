"""Methods: chosen once, in one order; a run without baselines says so."""

from pathlib import Path

import pytest

from secateur.demo import METHODS, run_demo
from secateur.demo.trials import choose_methods
from secateur.report import load_results
from support.demos import WEIGHTS


@pytest.mark.long
def test_without_the_baselines_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    settings = {"seeds": (3,), "sparsities": (0.8,), "epochs": 1, "tuning_epochs": 2}
    page = run_demo(tmp_path, methods=["erk", "gradual"], **settings)  # type: ignore[arg-type]
    results = load_results(page.with_name("results.json"))
    runs = {run.method: run for run in results.runs}
    assert list(runs) == ["dense", "ERK", "gradual", "channels (shrink)"]
    assert all(abs(runs[label].sparsity - 0.8) <= 1 / WEIGHTS for label in ("ERK", "gradual"))
    assert results.command == "secateur demo --method erk --method gradual --out DIR"
    said = "No method is named random or magnitude, a baseline"
    assert said in capsys.readouterr().out
    assert said in page.read_text(encoding="utf-8")


def test_methods_are_chosen_once_in_one_order() -> None:
    assert [method.name for method in choose_methods()] == list(METHODS)
    assert [method.name for method in choose_methods([" Random,lamp", "lamp"])] == ["lamp", "random"]
    for name, method in METHODS.items():
        assert name == method.name
        assert len(method.line) < 80


def test_an_unknown_method_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no method 'lam'; there are magnitude, erk, .*, gradual\.$"):
        run_demo(tmp_path / "out", methods=["lam"])
    assert not list(tmp_path.iterdir())
