"""What is removed of weights, by itself: no schedule, no loop; a test says when."""

import pytest
import torch
from torch import nn

from secateur import criteria, regrowth, schedules
from secateur.allocation import everywhere
from secateur.patterns import Unstructured
from secateur.support import Undo
from secateur.training.choosing import EvidenceSource, gathered
from secateur.training.optimizers import check_state_goes_on, inner_optimizers
from secateur.training.rules import Rules
from secateur.training.state import Memory
from secateur.training.zeros import Place, Zeros, check_follower
from support.training import (
    SGD,
    assert_zero_where_removed,
    batch,
    made_with,
    network,
    quiet,
    removed,
    run,
    train,
    weights_of,
)


def zeros_of(model, optimizer=None, criterion=criteria.magnitude, regrow=None):
    rules = Rules(criterion, Unstructured(), everywhere, regrow, [], collects=False)
    optimizers = [SGD(model.parameters()) if optimizer is None else optimizer]
    return Zeros(weights_of(model), rules, optimizers, EvidenceSource(model, (), None, None), seed=0)


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


# The memory that masks act on, wherever it is.


def test_convolutions_in_channels_last():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 2))
    model = model.to(memory_format=torch.channels_last)
    optimizer = SGD(model.parameters())
    pruner = quiet(model, optimizer, 0.75, total_steps=5)
    for step in range(5):
        inputs = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(inputs.to(memory_format=torch.channels_last)).square().mean().backward()
        optimizer.step()
    assert_zero_where_removed(model, pruner)
    assert pruner._zeros.memory.masks["0.weight"].stride() == model[0].weight.stride()
    total = sum(mask.numel() for mask in pruner.masks.values())
    assert removed(model) == round(0.75 * total)


def test_a_moved_model_is_followed():
    """The weights' memory changes under the same parameters, as when a model is moved to another device."""
    model = network()
    optimizer = SGD(model.parameters())
    pruner = quiet(model, optimizer, 0.8, total_steps=8)
    run(model, optimizer, 4)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    run(model, optimizer, 4, begin=4)
    assert_zero_where_removed(model, pruner)
    assert removed(model) == round(0.8 * (8 * 16 + 16 * 16 + 16 * 4))


def test_a_weight_of_another_shape_than_its_mask_is_named():
    with pytest.raises(ValueError, match=r"a has another shape than when the Pruner was made"):
        Place({"a": torch.ones(2)}).zero({"a": torch.ones(3)})


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(3), r"w has shape \(3,\) in the model that follows, \(2,\) here"),
        (torch.ones(2, device="meta"), "w is of torch.float32 on meta"),
        (torch.ones(2).long(), "w is of torch.int64 on cpu"),
    ],
)
def test_what_cannot_follow_is_refused(weight, message):
    check_follower("w", torch.ones(2).half(), torch.ones(2))
    with pytest.raises(ValueError, match=message):
        check_follower("w", weight, torch.ones(2))


# Evidence of an update: from training steps what they show, from batches the rest.


@pytest.mark.parametrize(
    "criterion", [criteria.snip, criteria.wanda, criteria.grasp, criteria.synflow, criteria.taylor]
)
def test_evidence_from_batches(criterion):
    model = network()
    optimizer = SGD(model.parameters())
    pruner = quiet(
        model, optimizer, 0.75, total_steps=10, every=3, criterion=criterion,
        batches=(batch(step) for step in range(3)), loss=nn.functional.mse_loss,
    )  # fmt: skip
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
    source = EvidenceSource(model, batches, nn.functional.mse_loss, None)
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


# Optimizers of all kinds, and what they remember of removed weights.


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
