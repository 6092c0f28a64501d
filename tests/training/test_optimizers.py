"""Optimizers of all kinds, and what they remember of removed weights."""

import pytest
import torch

from secateur import schedules
from secateur.training.optimizers import check_state_goes_on, inner_optimizers
from support.training import SGD, assert_zero_where_removed, batch, network, quiet, run


def test_the_optimizers_state_of_removed_weights_is_zeroed_and_of_the_others_not():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run(model, optimizer, 3)
    pruner = quiet(model, optimizer, schedules.milestones({1: 0.5}))
    run(model, optimizer, 1)
    for name, mask in pruner.masks.items():
        for key in ("exp_avg", "exp_avg_sq"):
            value = optimizer.state[model.get_parameter(name)][key]
            assert (value[~mask] == 0).all()
            assert (value[mask] != 0).any()
        assert optimizer.state[model.get_parameter(name)]["step"] == 4


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_gradient_scaler_skips_are_not_counted(fused):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    pruner = quiet(model, optimizer, 0.5, total_steps=6)
    for step in range(8):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        scaler.scale((model(inputs) - targets).square().mean()).backward()
        if step in (2, 5):
            model[0].weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert_zero_where_removed(model, pruner)
    assert pruner.step == 6
    assert pruner.metrics()["sparsity"] == 0.5


def test_several_optimizers():
    model = network()
    first = SGD(model[0].parameters())
    second = torch.optim.AdamW([*model[3].parameters(), *model[5].parameters()], lr=0.01)
    pruner = quiet(model, [first, second], 0.5, total_steps=5)
    for step in range(5):
        inputs, targets = batch(step)
        (model(inputs) - targets).square().mean().backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        assert_zero_where_removed(model, pruner)
    assert pruner.step == 5


def test_the_optimizer_of_another_model():
    with pytest.warns(UserWarning, match="trains none of the 3 weights to be pruned"):
        quiet(network(), SGD(network().parameters()), 0.5, total_steps=3)


def test_wrappers_are_looked_into():
    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    optimizer = SGD(network().parameters())
    assert inner_optimizers([Wrapper(Wrapper(optimizer)), optimizer]) == [optimizer, optimizer]
    with pytest.raises(TypeError, match=r"takes torch\.optim optimizers, not a int"):
        inner_optimizers(Wrapper(5))


def test_a_state_to_go_back_to_has_what_the_optimizer_has():
    weight = torch.zeros(2)
    before = {weight: {"momentum_buffer": torch.zeros(2)}}
    check_state_goes_on(before, {weight: {"momentum_buffer": torch.ones(2)}}, {weight: "w"})
    check_state_goes_on(before, {}, {weight: "w"})  # from before the first step
    with pytest.raises(ValueError, match="w: the state to go back to has no momentum_buffer"):
        check_state_goes_on(before, {weight: {"step": 1}}, {weight: "w"})
    with pytest.raises(ValueError, match=r"w: momentum_buffer has shape \(3,\) in the state to go back to"):
        check_state_goes_on(before, {weight: {"momentum_buffer": torch.ones(3)}}, {weight: "w"})
