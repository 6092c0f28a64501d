"""The benchmark of `shrink`: its comparison tells right from wrong, and its parts run.

Law: a model that lost one entry too many, or in another place, is told from the right one.
"""

import pytest
import torch

from benchmarks.shrinking import accuracy, correctness, effect, kept, peers
from benchmarks.shrinking.networks import ViT
from benchmarks.shrinking.sizes import multiply_adds
from secateur import shrink


@pytest.mark.parametrize("ratio", ["half", "uneven"])
@pytest.mark.parametrize("name", ["cnn_flatten", "mlp_mixer"])
def test_coverage_of_a_model(name, ratio):
    row = correctness.ours(name, ratio)
    assert row["class"] == "right"
    assert row["left"] < 0.8


def test_multiply_adds_are_those_of_shrink():
    model = ViT(width=16, layers=1)
    x = torch.randn(2, 1, 8, 8)
    before = multiply_adds(model, x)
    assert before == 16 * (4 * 16 + 4 * 16 * 16 + 2 * 16 * 32) + 2 * 16 * 16 * 16 + 16 * 10
    shrink(model, x, 0.5, target="macs")
    assert multiply_adds(model, x) == pytest.approx(0.5 * before, rel=0.02)


def test_accuracy_runs(monkeypatch, capsys):
    monkeypatch.setattr(accuracy, "SHARES", (0.5,))
    monkeypatch.setattr(accuracy, "NETWORKS", {"ViT": (lambda: ViT(width=16, layers=1), "adam", 0)})
    monkeypatch.setattr(peers, "tp", None)
    rows = accuracy.accuracy(seeds=1, tuning=0)["rows"]
    assert {row["method"] for row in rows} >= {"dense", "shrink"}
    assert "of macs that stay" in capsys.readouterr().out


def test_kept_runs(monkeypatch, capsys):
    monkeypatch.setattr(kept, "SHARES", (0.5,))
    dense, *rows = kept.kept(seeds=1, epochs=0)["rows"]
    assert len(dense["keep"]) == 3
    assert {row["method"] for row in rows} == {*kept.METHODS}
    assert all(row["left"] == pytest.approx(0.5, abs=0.05) for row in rows)
    assert "on the three digits" in capsys.readouterr().out


def test_effect_runs(monkeypatch, capsys):
    monkeypatch.setattr(peers, "tp", None)
    dense, smaller, rounded = effect.effect(rounds=2, narrow=48, wide=96)["rows"]
    assert smaller["multiply-adds"] == pytest.approx(0.5 * dense["multiply-adds"], rel=0.02)
    assert all(width % 16 == 0 for width in rounded["channels"])
    assert "ms at 16" in capsys.readouterr().out
