"""What is removed of weights, by itself: no schedule, no loop; a test says when."""

import pytest
import torch

from secateur import criteria, regrowth
from secateur.allocation import everywhere
from secateur.patterns import Unstructured
from secateur.support import Undo
from secateur.training.choosing import Source
from secateur.training.rules import Rules
from secateur.training.zeros import Zeros
from support.training import SGD, batch, network, weights_of


def zeros_of(model, optimizer=None, criterion=criteria.magnitude, regrow=None):
    rules = Rules(criterion, Unstructured(), everywhere, regrow, [], collects=False)
    optimizers = [SGD(model.parameters()) if optimizer is None else optimizer]
    return Zeros(weights_of(model), rules, optimizers, Source(model, (), None, None), seed=0)


def begun(zeros, target=0.0, within=None):
    with Undo() as undo, torch.no_grad():
        zeros.begin(within, target, undo)
    return zeros


def backward(model):
    inputs, targets = batch(0)
    model.zero_grad()
    (model(inputs) - targets).square().mean().backward()


def fraction(zeros):
    return 1 - sum(int(mask.sum()) for mask in zeros.masks.values()) / sum(map(torch.numel, zeros.masks.values()))


def test_a_start_is_remembered_until_a_step_or_until_somebody_writes():
    model = network()
    whole = {name: weight.detach().clone() for name, weight in weights_of(model).items()}
    zeros = begun(zeros_of(model), target=0.5)
    start = zeros.untouched_start()
    assert all(torch.equal(start[name], whole[name]) for name in whole)
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert start.keys() - zeros.untouched_start().keys() == {"0.weight"}
    zeros.stepped(counted=False)
    assert not zeros.untouched_start()
    assert zeros.memory.step == 0


@pytest.mark.parametrize("fails", [False, True])
def test_another_runs_memory_is_taken_or_nothing_changes(fails):
    model = network()
    whole = [weight.detach().clone() for weight in weights_of(model).values()]
    zeros, other = begun(zeros_of(model), target=0.5), begun(zeros_of(network(1)), target=0.75)
    own = zeros.masks
    try:
        with Undo() as undo, torch.no_grad():
            zeros.take(other.memory, undo)
            assert all(map(torch.equal, weights_of(model).values(), whole))  # what the start removed is back
            zeros.zero()
            assert not fails or 1 / 0
    except ZeroDivisionError:
        assert all(torch.equal(mask, own[name]) for name, mask in zeros.masks.items())
        assert zeros.untouched_start().keys() == own.keys()
    else:
        assert all(torch.equal(mask, other.masks[name]) for name, mask in zeros.masks.items())
        assert not zeros.untouched_start()
    assert all(torch.equal(weights_of(model)[name] != 0, mask) for name, mask in zeros.masks.items())


@torch.no_grad()
def test_what_optimizers_remember_of_removed_weights_is_zeroed():
    model = network()
    optimizer = SGD(model.parameters())
    with torch.enable_grad():
        backward(model)
    optimizer.step()
    zeros = begun(zeros_of(model, optimizer))
    zeros.update(0.5)
    for name, mask in zeros.masks.items():
        momentum = optimizer.state[weights_of(model)[name]]["momentum_buffer"]
        assert not momentum[~mask].any()
        assert momentum[mask].any()


@torch.no_grad()
def test_straight_through_trains_what_is_held_and_takes_it_out_again():
    """Between `observe` and `keep` the weights are dense; what the step adds to a removed one is held."""
    model = network()
    dense = {name: weight.clone() for name, weight in weights_of(model).items()}
    zeros = begun(zeros_of(model, regrow=regrowth.sr_ste()), target=0.5)
    with torch.enable_grad():
        backward(model)
    zeros.observe()
    assert zeros.opened
    for name, weight in weights_of(model).items():
        torch.testing.assert_close(weight, dense[name])
        weight.add_(1)
    zeros.keep()
    assert not zeros.opened
    for name, mask in zeros.masks.items():
        assert torch.equal(weights_of(model)[name] != 0, mask)
        torch.testing.assert_close(zeros.memory.held[name], (dense[name] + 1) * ~mask)
    zeros.forget_held()
    assert not any(held.any() for held in zeros.memory.held.values())


def test_masks_to_begin_with_are_of_pruned_weights():
    model = network()
    mask = torch.rand_like(model[0].weight) > 0.5
    with pytest.raises(ValueError, match="there is a mask for 'x', but it is not among"):
        begun(zeros_of(model), within={"x": mask})
    zeros = begun(zeros_of(model), within={"0.weight": mask})
    assert torch.equal(zeros.masks["0.weight"], mask)
    assert zeros.masks["3.weight"].all()
    assert zeros.memory.target == fraction(zeros)
