"""Adapters are short, enter the house by its doors, and a loop of one's own needs none."""

import ast
import importlib
import runpy
import sys
from pathlib import Path

import pytest
import torch

from support.loops import assert_same

ROOT = Path(__file__).parents[2]


def test_adapters_are_short():
    for path in (ROOT / "src/secateur/integrations").glob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        # a Pruner's and a teacher's each; of Ultralytics also what makes a detector smaller, and keeps it so
        assert len(lines) <= (345 if path.stem == "ultralytics" else 125), path.name
        assert "torchvision" not in path.read_text(encoding="utf-8")
    for name in ("accelerate_loop.py", "plain_loop.py"):
        assert len((ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()) < 80


@pytest.mark.parametrize("name", ["transformers", "lightning", "ultralytics"])
def test_adapters_enter_by_the_doors(name):
    text = (ROOT / "src/secateur/integrations" / f"{name}.py").read_text(encoding="utf-8")
    entered = {node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    ours = {module for module in entered if module.startswith("secateur")}
    assert "secateur.training" in ours
    assert ours <= {
        "secateur.training",
        "secateur.recovery",
        "secateur.support",
        "secateur.shrinking",
        "secateur.kinds",
    }


@pytest.mark.examples
@pytest.mark.parametrize("name", ["plain_loop.py", "accelerate_loop.py"])
def test_example_loops_resume_where_they_were_stopped(name, tmp_path, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(ROOT / "examples" / name))
        return capsys.readouterr().out.splitlines()

    whole = run(tmp_path / "whole.pt")
    run(tmp_path / "stopped.pt", "--stop-after", 4)
    resumed = run(tmp_path / "stopped.pt")
    assert whole[-1] == resumed[-1]
    assert whole[-1].startswith("90.0 % of the weights are zero")
    first, second = (torch.load(tmp_path / f"{stem}.pt", weights_only=True) for stem in ("whole", "stopped"))
    assert_same(first["model"], second["model"])


def test_detectors_say_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "ultralytics", None)
    monkeypatch.delitem(sys.modules, "secateur.integrations.ultralytics", raising=False)
    with pytest.raises(ImportError, match=r"detectors need Ultralytics .*: pip install 'secateur\[ultralytics\]'"):
        importlib.import_module("secateur.integrations.ultralytics")
