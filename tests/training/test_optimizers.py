"""Optimizers of all kinds, and what they remember of removed weights."""

import pytest
import torch
from torch import nn

from secateur import schedules
from secateur.training.optimizers import (
    check_state_goes_on,
    inner_optimizers,
    is_skipped,
    remembered_of,
    zero_remembered,
)
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


def test_what_is_remembered_of_entries_is_zeroed_and_nothing_else():
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state[layer.weight]
    assert {id(each) for each in remembered_of(optimizer, layer.weight)} == {
        id(state["exp_avg"]),
        id(state["exp_avg_sq"]),
    }
    mask = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    zero_remembered([optimizer], {"weight": layer.weight}, {"weight": mask})
    for word in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(state[word] != 0, mask != 0)
    assert int(state["step"]) == 1
    assert bool((optimizer.state[layer.bias]["exp_avg"] != 0).all())


def test_a_step_is_skipped_where_infinite_gradients_were_found():
    optimizer = SGD(network().parameters())
    assert not is_skipped(optimizer)
    for found, skipped in ((0.0, False), (1.0, True)):
        optimizer.found_inf = torch.tensor(found)
        assert is_skipped(optimizer) == skipped


def test_a_state_to_go_back_to_has_what_the_optimizer_has():
    weight = torch.zeros(2)
    before = {weight: {"momentum_buffer": torch.zeros(2)}}
    check_state_goes_on(before, {weight: {"momentum_buffer": torch.ones(2)}}, {weight: "w"})
    check_state_goes_on(before, {}, {weight: "w"})  # from before the first step
    with pytest.raises(ValueError, match="w: the state to go back to has no momentum_buffer"):
        check_state_goes_on(before, {weight: {"step": 1}}, {weight: "w"})
    with pytest.raises(ValueError, match=r"w: momentum_buffer has shape \(3,\) in the state to go back to"):
        check_state_goes_on(before, {weight: {"momentum_buffer": torch.ones(3)}}, {weight: "w"})
