"""Training: it learns, keeps zeros, and draws nothing from the global generator."""

import copy

import pytest
import torch
from torch import nn

from secateur import sparsify, sparsity_of
from secateur.demo import load_digits
from secateur.demo.trials import BATCH, DigitsNet, accuracy, train
from secateur.training import Pruner


@pytest.mark.long
def test_it_learns_and_keeps_what_is_pruned_at_zero() -> None:
    data = load_digits()
    torch.manual_seed(0)
    model = DigitsNet()
    train(model, data, epochs=6, rate=0.2, seed=0)
    assert accuracy(model, data.test_images, data.test_labels) > 90
    masks = sparsify(model, 0.8)
    seen: list[float] = []
    train(model, data, epochs=2, rate=0.2, seed=1, masks=masks, after_epoch=lambda: seen.append(sparsity_of(model)))
    assert len(seen) == 2
    assert all(sparsity == pytest.approx(0.8, abs=1e-4) for sparsity in seen)
    for name, mask in masks.items():
        assert not model.get_parameter(name)[~mask].any()


def test_a_pruner_is_made_with_the_optimizer_and_sees_every_step() -> None:
    data = load_digits()
    data = data._replace(train_images=data.train_images[: 2 * BATCH], train_labels=data.train_labels[: 2 * BATCH])
    torch.manual_seed(0)
    model = DigitsNet(4, 4)
    pruners: list[Pruner] = []

    def begin(optimizer: torch.optim.Optimizer, steps: int) -> None:
        pruners.append(Pruner(model, optimizer, 0.75, total_steps=steps, verbose=False))

    seen: list[float] = []
    train(
        model, data, epochs=3, rate=0.1, seed=0, begin=begin,
        after_step=lambda: seen.append(pruners[0].metrics()["step"]),
    )  # fmt: skip
    assert seen == [1, 2, 3, 4, 5, 6]
    assert sparsity_of(model) == pytest.approx(0.75, abs=1e-3)


def test_training_draws_nothing_from_the_global_generator() -> None:
    data = load_digits()
    data = data._replace(train_images=data.train_images[:BATCH], train_labels=data.train_labels[:BATCH])
    model = DigitsNet(4, 4)
    twin = copy.deepcopy(model)
    state = torch.get_rng_state()
    train(model, data, epochs=2, rate=0.1, seed=5)
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(3)
    train(twin, data, epochs=2, rate=0.1, seed=5)
    for one, two in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(one, two)


def test_accuracy_is_a_percentage_and_leaves_the_mode() -> None:
    model = nn.Flatten()  # the logits are the images
    images = torch.eye(4).reshape(4, 1, 2, 2)
    assert accuracy(model, images, torch.tensor([0, 1, 2, 0])) == 75
    assert model.training
