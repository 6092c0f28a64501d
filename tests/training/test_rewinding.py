"""Going back to saved weights: the states given serve again, and what does not fit changes nothing."""

import copy

import pytest
import torch

from secateur import schedules
from secateur.support import Undo
from secateur.training.optimizers import put_back
from support.training import SGD, assert_zero_where_removed, network, quiet, run, weights_of


def test_lottery_tickets_rewind():
    model = network()
    optimizer = SGD(model.parameters())
    run(model, optimizer, 2)
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    pruner = quiet(model, optimizer, schedules.constant(0.0))
    run(model, optimizer, 5)
    pruner.prune(0.5)
    pruner.rewind(*saved)
    for name, mask in pruner.masks.items():
        assert torch.equal(model.get_parameter(name), saved[0][name] * mask)
        momentum = optimizer.state[model.get_parameter(name)]["momentum_buffer"]
        assert (momentum[~mask] == 0).all()
        assert (momentum != 0).any()
    assert torch.equal(model[0].bias, saved[0]["0.bias"])
    run(model, optimizer, 3)
    assert_zero_where_removed(model, pruner)
    pruner.rewind(saved[0])
    assert not optimizer.state


def saved_after(steps):
    model = network()
    optimizers = [SGD(model[:3].parameters()), torch.optim.AdamW(model[3:].parameters())]
    for optimizer in optimizers:
        run(model, optimizer, steps)
    return model, optimizers, copy.deepcopy([model.state_dict(), optimizers[0].state_dict()])


def values(model, optimizers):
    remembered = [value for each in optimizers for state in each.state.values() for value in state.values()]
    return copy.deepcopy(
        [*model.state_dict().values(), *(each for each in remembered if isinstance(each, torch.Tensor))]
    )


def test_the_first_optimizer_gets_its_state_back_and_the_others_keep_theirs():
    model, optimizers, (weights, remembered) = saved_after(2)
    for optimizer in optimizers:
        run(model, optimizer, 2)
    other = copy.deepcopy(optimizers[1].state_dict())
    kept = copy.deepcopy([weights, remembered])
    with Undo() as undo:
        put_back(model, optimizers, weights_of(model), weights, remembered, undo)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    momentum = optimizers[0].state_dict()["state"][0]["momentum_buffer"]
    assert torch.equal(momentum, remembered["state"][0]["momentum_buffer"])
    assert str(optimizers[1].state_dict()) == str(other)
    run(model, optimizers[0], 2)  # trains on in memory of its own
    assert str([weights, remembered]) == str(kept)


@pytest.mark.parametrize("fails", ["in it", "after it"])
def test_the_undo_is_told_of_all_that_changes(fails):
    model, optimizers, (weights, remembered) = saved_after(2)
    for optimizer in optimizers:
        run(model, optimizer, 1)
    before = values(model, optimizers)
    if fails == "in it":
        remembered["state"][0]["momentum_buffer"] = torch.zeros(3)
    with pytest.raises((ValueError, KeyboardInterrupt)), Undo() as undo, torch.no_grad():
        put_back(model, optimizers, weights_of(model), weights, remembered, undo)
        for weight in weights_of(model).values():
            weight.zero_()
        raise KeyboardInterrupt
    assert all(map(torch.equal, before, values(model, optimizers)))
