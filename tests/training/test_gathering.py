"""Evidence of an update: from training steps what they show, from batches the rest."""

import pytest
import torch
from torch import nn

from secateur import criteria
from secateur.allocation import everywhere
from secateur.patterns import Unstructured
from secateur.training.choosing import Source, gathered
from secateur.training.rules import Rules
from secateur.training.state import Memory
from support.training import SGD, assert_zero_where_removed, batch, made_with, network, quiet, train, weights_of


@pytest.mark.parametrize(
    "criterion", [criteria.snip, criteria.wanda, criteria.grasp, criteria.synflow, criteria.taylor]
)
def test_evidence_from_batches(criterion):
    model = network()
    optimizer = SGD(model.parameters())
    pruner = quiet(
        model,
        optimizer,
        0.75,
        total_steps=10,
        every=3,
        criterion=criterion,
        batches=(batch(step) for step in range(3)),
        loss=nn.functional.mse_loss,
    )
    for _ in train(model, optimizer, 10):
        assert model.training
        assert model[0].weight.grad is not None
    assert_zero_where_removed(model, pruner)
    assert pruner.metrics()["sparsity"] == 0.75


def test_pruning_by_gradients_needs_some():
    model = network()
    pruner = made_with(model=model, criterion=lambda w, *, grad: grad.abs())
    with pytest.raises(ValueError, match="no gradients: prune after backward"):
        pruner.prune(0.3)


def shown(model, words, *, batches=(), memory=None, inputs_first=()):
    rules = Rules(criteria.magnitude, Unstructured(), everywhere, None, list(inputs_first), bool(batches))
    source = Source(model, batches, nn.functional.mse_loss, None)
    return gathered(words, weights_of(model), rules, memory or Memory(0), source)


def test_what_steps_show_is_not_asked_of_batches():
    """Squares are the mean over the steps that were summed, before the first step zero."""
    model = network()
    model(batch(0)[0]).sum().backward()
    totals = {name: torch.rand_like(weight) for name, weight in weights_of(model).items()}
    found = shown(model, ["grad", "grad_sq"], memory=Memory(0, grad_sq=totals, grad_sq_steps=4))
    for name, weight in weights_of(model).items():
        assert found[name].keys() == {"grad", "grad_sq"}
        assert torch.equal(found[name]["grad"], weight.grad)
        assert torch.equal(found[name]["grad_sq"], totals[name] / 4)
    assert not any(each["grad_sq"].any() for each in shown(model, ["grad_sq"]).values())
