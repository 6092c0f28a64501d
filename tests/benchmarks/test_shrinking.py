"""The benchmark of `shrink`: its comparison tells right from wrong, and its parts run.

Law: a model that lost one entry too many, or in another place, is told from the right one.
"""

import copy
import math

import pytest
import torch
from torch import nn

from benchmarks.shrinking import accuracy, correctness, effect, peers
from benchmarks.shrinking.comparison import agreement, distinct, gap, kept_by_value, with_zeros
from benchmarks.shrinking.networks import ViT
from benchmarks.shrinking.sizes import multiply_adds
from secateur import shrink


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3)).double()


def without(model, kept):
    smaller = copy.deepcopy(model)
    first, norm, _, last = smaller
    for module in (first, norm):
        module.weight.data, module.bias.data = module.weight[kept].detach(), module.bias[kept].detach()
    norm.normalized_shape = (len(kept),)
    last.weight.data = last.weight[:, kept].detach()
    return smaller


def test_statistics_are_compared_as_sums():
    model, kept, x = network(), torch.tensor([0, 2, 5]), torch.randn(2, 4)
    gone = {"0.weight": [kept, torch.arange(4)], "0.bias": [kept], "1.weight": [kept], "1.bias": [kept]}
    masked = with_zeros(model, {**gone, "3.weight": [torch.arange(3), kept]})
    form, exact = agreement(masked, without(model, kept), x)
    assert form == "sums"
    assert exact > 1e-3


@pytest.mark.parametrize("wrong", [[0, 2, 4], [2, 0, 5], [0, 2, 3, 5]])
def test_other_channels_are_told_apart(wrong):
    model, kept, x = network(), torch.tensor([0, 2, 5]), torch.randn(2, 4)
    gone = {"0.weight": [kept, torch.arange(4)], "0.bias": [kept], "1.weight": [kept], "1.bias": [kept]}
    smaller = without(model, torch.tensor(wrong))
    smaller[3].weight.data = model[3].weight[:, [*kept.tolist(), 4][: len(wrong)]].detach()
    form, _ = agreement(with_zeros(model, gone), smaller, x)
    assert form is None


def test_gap_of_other_shapes_is_infinite():
    assert gap([torch.zeros(2)], [torch.zeros(3)]) == math.inf
    assert gap([torch.tensor([1, 2])], [torch.tensor([1, 3])]) == math.inf
    assert gap([torch.tensor([2.0])], [torch.tensor([3.0])]) == 0.5


def test_kept_indices_are_read_off_the_values():
    torch.manual_seed(0)
    before = torch.randn(5, 4, 3)
    found = kept_by_value(before, before[[1, 4]][:, :, [0, 2]])
    assert [each.tolist() for each in found] == [[1, 4], [0, 1, 2, 3], [0, 2]]
    assert kept_by_value(before, torch.randn(2, 4, 3)) is None
    flat = before.flatten().clone()
    assert kept_by_value(before, flat[torch.randperm(60)][:24].reshape(2, 4, 3)) is None


def test_entries_are_made_distinct():
    model = nn.BatchNorm1d(40)  # ones and zeros
    distinct(model)
    assert len(model.weight.unique()) == 40
    assert len(model.bias.unique()) == 40


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


def test_effect_runs(monkeypatch, capsys):
    monkeypatch.setattr(peers, "tp", None)
    dense, smaller, rounded = effect.effect(rounds=2, narrow=48, wide=96)["rows"]
    assert smaller["multiply-adds"] == pytest.approx(0.5 * dense["multiply-adds"], rel=0.02)
    assert all(width % 16 == 0 for width in rounded["channels"])
    assert "ms at 16" in capsys.readouterr().out
