"""Methods: chosen once, in one order; each runs and says what it is."""

from pathlib import Path

import pytest

from secateur.demo import DEFAULT_METHODS, METHODS, run_demo
from secateur.demo.methods import choose_methods
from secateur.report import load_results
from support.demos import WEIGHTS


def test_every_other_method_runs_and_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [name for name in METHODS if name not in DEFAULT_METHODS]
    assert others == ["wanda", "ria", "taylor", "snip", "grasp", "synflow", "rigl"]
    monkeypatch.setenv("COLUMNS", "200")
    settings = {"seeds": (3,), "sparsities": (0.8,), "epochs": 1, "tuning_epochs": 2}
    page = run_demo(tmp_path, methods=["wanda,ria", *others[2:]], training=True, **settings)  # type: ignore[arg-type]
    results = load_results(page.with_name("results.json"))
    runs = {run.method: run for run in results.runs}
    labels = [METHODS[name].label for name in [*others[:-1], "gradual", "rigl"]]
    assert list(runs) == ["dense", *labels]
    assert all(abs(runs[label].sparsity - 0.8) <= 1 / WEIGHTS for label in labels)
    from_scratch = {"SNIP", "GraSP", "SynFlow", "RigL", "gradual"}
    assert {label for label in labels if runs[label].before is None} == from_scratch
    [gradual, rigl] = results.histories
    assert (gradual.method, gradual.steps[-1]) == ("gradual", 16)
    assert (rigl.method, rigl.steps[-1]) == ("RigL", 24)  # three epochs: of dense training and of fine-tuning
    assert len(set(rigl.sparsity)) == 1
    assert [step for step, churn in zip(rigl.steps, rigl.churn, strict=True) if churn] == [16]
    notes = " ".join(results.notes)
    assert "Budgets differ: SNIP, GraSP, SynFlow, RigL never had a dense network" in notes
    for label in labels:
        assert label.casefold() in notes.casefold()
    assert results.command == "secateur demo " + " ".join(
        [f"--method {name}" for name in ["wanda,ria", *others[2:]]] + ["--train", "--out DIR"]
    )
    said = "Left out of this run: the random and the magnitude baseline"
    assert said in capsys.readouterr().out
    assert "No random and no magnitude baseline" in page.read_text(encoding="utf-8")
    assert results.checks[0].name == "Wanda as it is"


def test_methods_are_chosen_once_in_one_order() -> None:
    assert [method.name for method in choose_methods()] == list(DEFAULT_METHODS)
    assert [method.name for method in choose_methods(training=True)] == [*DEFAULT_METHODS, "rigl"]
    assert [method.name for method in choose_methods([" RigL,lamp", "lamp"])] == ["lamp", "rigl"]
    assert [method.name for method in choose_methods(["2:4"], training=True)] == ["2:4", "gradual", "rigl"]
    for name, method in METHODS.items():
        assert name == method.name
        assert len(method.line) < 80


def test_an_unknown_method_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no method 'lam'; there are magnitude, erk, .*, gradual, rigl\.$"):
        run_demo(tmp_path / "out", methods=["lam"])
    assert not list(tmp_path.iterdir())
