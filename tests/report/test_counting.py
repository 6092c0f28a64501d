"""Multiply-adds by hand."""

import pytest
import torch
from torch import nn

from secateur.report import count_multiply_adds


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
