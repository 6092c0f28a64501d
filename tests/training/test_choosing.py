"""The masks of an update."""

import copy
import itertools

import pytest
import torch

from secateur import NM, Block, Channels, Rows, criteria, regrowth, schedules
from secateur.allocation import above, erk, everywhere, uniform
from secateur.patterns import Unstructured
from secateur.support import Undo
from secateur.training import choosing
from secateur.training.optimizers import put_back
from secateur.training.rules import Rules
from support.training import SGD, assert_zero_where_removed, network, quiet, run, train, weights_of


@pytest.mark.parametrize(
    ("pattern", "allocate"),
    [(Rows(), uniform), (Channels(), uniform), (Block(4, 4), erk), (Block(4, 1), uniform)],
)
def test_every_pattern_ends_at_its_units(pattern, allocate):
    model = network()
    optimizer = SGD(model.parameters())
    pruner = quiet(model, optimizer, 0.5, total_steps=10, pattern=pattern, allocate=allocate, exclude="5.weight")
    run(model, optimizer, 10)
    units = [pattern.pool(mask.float()).gt(0) for mask in pruner.masks.values()]
    assert sum(int(kept.sum()) for kept in units) == sum(kept.numel() for kept in units) / 2
    assert_zero_where_removed(model, pruner)


def test_n_of_m_goes_down_from_m_of_m():
    model = network()
    optimizer = SGD(model.parameters())
    pruner = quiet(model, optimizer, pattern=NM(2, 4), total_steps=20)
    seen = [pruner.metrics()["sparsity"] for _ in train(model, optimizer, 20)]
    assert sorted(set(seen)) == [0.0, 0.25, 0.5]
    assert seen == sorted(seen)
    for mask in pruner.masks.values():
        assert (mask.reshape(-1, 4).sum(1) == 2).all()


def test_drop_and_grow_keeps_each_tensors_count():
    model = network()
    optimizer = SGD(model.parameters())
    pruner = quiet(
        model, optimizer, schedules.constant(0.6), regrow=regrowth.rigl(until=1.0), every=1, total_steps=10,
        allocate=erk,
    )  # fmt: skip
    counts = {name: int(mask.sum()) for name, mask in pruner.masks.items()}
    moved = 0
    for (_, before), after in itertools.pairwise((None, pruner.masks) for _ in train(model, optimizer, 9)):
        assert {name: int(mask.sum()) for name, mask in after[1].items()} == counts
        moved += sum(int((before[name] != mask).sum()) for name, mask in after[1].items())
    assert moved > 0


def test_soft_movement_keeps_what_is_above_a_threshold():
    model = network()
    optimizer = SGD(model.parameters())
    pruner = quiet(
        model, optimizer, schedules.constant(0.995), criterion=criteria.soft_movement, allocate=above(0.45),
        regrow=regrowth.held(penalty=0.02),
    )  # fmt: skip
    seen = [pruner.metrics()["sparsity"] for _ in train(model, optimizer, 40)]
    assert seen[0] < 0.2
    assert seen[-1] > 0.5, "the penalty lowers all scores"
    for name, mask in pruner.masks.items():
        assert torch.equal(mask, pruner._zeros.memory.movement[name].double().sigmoid() > 0.45), name


def test_masks_of_units_within_which_to_go_on():
    """Channels of a narrow tensor are few weights: what is removed is counted in units."""
    model = network()
    within = {"5.weight": torch.tensor([False, False, False, True])[:, None].expand(4, 16)}
    optimizer = SGD(model.parameters())
    pruner = quiet(model, optimizer, schedules.constant(2 / 36), pattern=Channels(), within=within)
    assert [int(mask.any(1).sum()) for mask in pruner.masks.values()] == [16, 16, 1]
    later = quiet(model, optimizer, schedules.constant(6 / 36), pattern=Channels(), within=within)
    assert sum(int(mask.any(1).sum()) for mask in later.masks.values()) == 30


def rules(**changes):
    given = {"criterion": criteria.magnitude, "pattern": Unstructured(), "allocate": everywhere, "regrow": None}
    return Rules(**{**given, "inputs_first": [], "collects": False, **changes})


def nothing(words):
    return {}


def test_masks_nest_and_are_functions_of_their_arguments():
    weights = {"a": torch.randn(6, 8), "b": torch.randn(8, 4)}
    first = choosing.chosen(rules(), weights, {}, 0.5, evidence=nothing)
    again = choosing.chosen(rules(), weights, {}, 0.5, evidence=nothing)
    assert all(torch.equal(mask, again[name]) for name, mask in first.items())
    others = {name: -weight.exp() for name, weight in weights.items()}
    second = choosing.chosen(rules(), others, first, 0.75, evidence=nothing)
    assert not any(bool((second[name] & ~first[name]).any()) for name in first)
    assert choosing.share_removed(rules(), weights, second) == 0.75
    kept = choosing.chosen(rules(), weights, second, None, evidence=nothing)
    assert all(torch.equal(kept[name], second[name]) for name in second)


def test_what_drops_grows_elsewhere_and_the_count_stays():
    weights = {"a": torch.randn(10, 10)}
    grown = rules(regrow=regrowth.rigl())
    old = choosing.chosen(rules(), weights, {}, 0.5, evidence=nothing)
    new = choosing.chosen(grown, weights, old, None, evidence=lambda words: {"a": {"grad": 100 * ~old["a"]}}, share=0.2)
    assert int(new["a"].sum()) == int(old["a"].sum()) == 50
    assert int((new["a"] & ~old["a"]).sum()) == 10
    same = choosing.chosen(grown, weights, old, None, evidence=nothing, share=0.001)  # rounds to nothing
    assert torch.equal(same["a"], old["a"])


def test_sums_over_steps_are_those_of_the_formulas():
    weight, gradients = torch.randn(5), torch.randn(3, 5)
    movement = squares = None
    for grad in gradients:
        movement = choosing.movement_after(movement, weight, grad, 0.0)
        squares = choosing.squares_after(squares, grad)
    torch.testing.assert_close(movement, -(gradients * weight).sum(0))
    torch.testing.assert_close(squares, gradients.square().sum(0))
    soft = choosing.movement_after(None, weight, gradients[0], 0.5)
    plain = -(gradients[0] * weight)
    torch.testing.assert_close(soft, plain - 0.5 * plain.sigmoid() * (1 - plain.sigmoid()))
    assert choosing.movement_after(None, weight.half(), gradients[0].half(), 0.0).dtype == torch.float32
    assert choosing.squares_after(None, gradients[0].double()).dtype == torch.float64


# Going back to saved weights: the states given serve again, and what does not fit changes nothing.


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
