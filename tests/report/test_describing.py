"""A network described: every weight counted once, multiply-adds by hand."""

import pytest
import torch
from torch import nn

from secateur.report import count_multiply_adds, describe


def test_multiply_adds_by_hand() -> None:
    """Weights that are not zero times the positions at which each is used."""
    ones = torch.ones(2, 4, 6, 6)
    plain = nn.Conv2d(4, 8, 3, stride=2, padding=1)  # 3 × 3 positions of 2 images
    assert count_multiply_adds(plain, ones) == 2 * 9 * 8 * 4 * 9
    grouped = nn.Conv2d(4, 8, 3, groups=2)  # 4 × 4 positions
    assert count_multiply_adds(grouped, ones) == 2 * 16 * 8 * 2 * 9
    transposed = nn.ConvTranspose2d(4, 3, 2, stride=2)  # each of 6 × 6 inputs meets every weight
    assert count_multiply_adds(transposed, ones) == 2 * 36 * 4 * 3 * 4
    linear = nn.Linear(6, 5)
    with torch.no_grad():
        linear.weight[:, 2:] = 0
    assert count_multiply_adds(linear, ones) == 2 * 4 * 6 * 5 * 2
    twice = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm2d(4))
    twice.append(twice[0])
    assert count_multiply_adds(twice, ones) == 2 * (2 * 4 * 6) * 36
    assert int(twice[1].num_batches_tracked) == 0
    assert all(module.training for module in twice.modules())


def test_the_model_is_called_with_example_inputs() -> None:
    """As `torch.export` calls it: a tuple is positional arguments, a mapping keyword arguments."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
            for _ in range(int(times)):
                self.layer(x)
            return x

    model, x, times = Two(), torch.ones(5, 3), torch.tensor(4)
    once = 5 * 6
    for inputs in ((x, times), [x, times], {"times": times, "x": x}):
        assert count_multiply_adds(model, inputs) == 4 * once
    assert count_multiply_adds(model.layer, x) == once


def test_counting_leaves_no_hook_after_a_failure() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout())
    model[1].eval()
    with pytest.raises(RuntimeError):
        count_multiply_adds(model, torch.ones(2, 4))
    assert not model[0]._forward_hooks
    assert [module.training for module in model.modules()] == [True, True, False]


def test_describe_counts_every_weight_once() -> None:
    torch.manual_seed(1)
    weights = {"a": torch.randn(5, 7).half(), "b": torch.randn(3, 2, 3, 3).mT, "no mask": torch.randn(4)}
    masks = {name: weights[name].abs() > 0.7 for name in ("a", "b")}
    network = describe("x", weights, masks, bins=7)
    assert sum(network.kept) == sum(int(mask.sum()) for mask in masks.values())
    assert sum(network.kept) + sum(network.removed) == 35 + 54
    assert [(layer.name, layer.shape, layer.weights) for layer in network.layers] == [
        ("a", (5, 7), 35),
        ("b", (3, 2, 3, 3), 54),
    ]
    assert network.edges[0] == -network.edges[-1] == pytest.approx(-max(float(weights[n].abs().max()) for n in masks))
    assert describe("zeros", {"z": torch.zeros(3)}, {"z": torch.ones(3, dtype=torch.bool)}, bins=2).kept == (0, 3)


def test_describe_names_what_does_not_fit() -> None:
    weight = torch.ones(2, 3)
    with pytest.raises(ValueError, match="a mask for b but no weight; weights has a"):
        describe("x", {"a": weight}, {"b": weight > 0})
    with pytest.raises(ValueError, match=r"mask of a has shape \(3, 2\), its weight \(2, 3\)"):
        describe("x", {"a": weight}, {"a": weight.T > 0})
    with pytest.raises(ValueError, match="a holds inf or NaN"):
        describe("x", {"a": weight / 0}, {"a": weight > 0})
