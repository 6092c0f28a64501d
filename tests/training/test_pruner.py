"""The Pruner's laws: the target exactly, zeros that stay zero, plain parameters, and the same run after a resume."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from secateur import NM, criteria, prune, regrowth, schedules, sparsity_of
from secateur.allocation import erk
from secateur.pipeline.masks import masks_from_zeros
from secateur.targets import find_targets
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

# The target


@given(
    st.integers(1, 12),
    st.floats(0, 0.97),
    st.sampled_from([schedules.linear, schedules.cubic, schedules.cosine, schedules.exponential]),
    st.floats(0, 1),
    st.integers(1, 7),
    st.sampled_from([criteria.lamp, criteria.magnitude, criteria.random]),
)
@settings(max_examples=40)
def test_the_target_is_hit_to_the_unit_however_short_the_run(steps, sparsity, make, end, every, criterion):
    model = network()
    optimizer = SGD(model.parameters())
    pruner = quiet(model, optimizer, make(sparsity, end=end), total_steps=steps, every=every, criterion=criterion)
    run(model, optimizer, steps)
    total = sum(weight.numel() for weight in weights_of(model).values())
    kept = sum(int(mask.sum()) for mask in pruner.masks.values())
    assert total - kept == round(sparsity * total)
    assert_zero_where_removed(model, pruner)


def test_masks_nest():
    model = network()
    optimizer = SGD(model.parameters())
    pruner = quiet(model, optimizer, 0.9, total_steps=20)
    before = pruner.masks
    for _ in train(model, optimizer, 20):
        after = pruner.masks
        assert all(not (after[name] & ~before[name]).any() for name in after)
        before = after


def test_a_run_that_ends_early_is_finished():
    model = network()
    optimizer = SGD(model.parameters())
    pruner = quiet(model, optimizer, 0.75, total_steps=1000)
    run(model, optimizer, 5)
    assert pruner.metrics()["sparsity"] < 0.1
    masks = pruner.finish()
    assert removed(model) == 0.75 * sum(mask.numel() for mask in masks.values())
    assert not any(torch.signbit(weight[weight == 0]).any() for weight in weights_of(model).values())
    run(model, optimizer, 1)
    assert removed(model) == 0, "the optimizer is let go"


# Zeros stay zero

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": SGD,
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_zeros_stay_zero_with_every_optimizer(make):
    model = network()
    optimizer = make(model.parameters())
    run(model, optimizer, 3)  # momentum from before pruning
    pruner = quiet(model, optimizer, 0.8, total_steps=10)
    for step in train(model, optimizer, 10, begin=3):
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert_zero_where_removed(model, pruner)
    assert removed(model) == round(0.8 * (8 * 16 + 16 * 16 + 16 * 4))


def test_accumulated_gradients_count_once_a_step():
    model = network()
    optimizer = SGD(model.parameters())
    pruner = quiet(model, optimizer, 0.5, total_steps=4)
    for step in range(12):
        inputs, targets = batch(step)
        (model(inputs) - targets).square().mean().backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    assert pruner.step == 4
    assert pruner.metrics()["sparsity"] == 0.5


def test_a_closure_counts_one_step():
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    pruner = quiet(model, optimizer, 0.5, total_steps=2)

    def closure():
        optimizer.zero_grad()
        inputs, targets = batch(0)
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert pruner.step == 2
    assert_zero_where_removed(model, pruner)


def test_an_average_that_is_followed_has_the_same_zeros():
    model = network()
    optimizer = SGD(model.parameters())
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    pruner = quiet(model, optimizer, 0.8, total_steps=10)
    pruner.follow(average)
    for _ in train(model, optimizer, 10):
        average.update_parameters(model)
        assert_zero_where_removed(average.module, pruner)
    assert removed(average.module) == removed(model)
    with pytest.raises(KeyError, match=r"Linear has no weight '0\.weight'"):
        pruner.follow(nn.Linear(2, 2))


# Plain parameters


def test_nothing_but_values_changes():
    model = network()
    keys, parameters = list(model.state_dict()), [id(parameter) for parameter in model.parameters()]
    optimizer = SGD(model.parameters())
    quiet(model, optimizer, 0.8, total_steps=4)
    run(model, optimizer, 4)
    assert list(model.state_dict()) == keys
    assert [id(parameter) for parameter in model.parameters()] == parameters
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    twin = copy.deepcopy(model)
    assert removed(twin) == removed(model)
    copy.deepcopy(optimizer)
    exported = torch.export.export(model, (batch(0)[0],)).module()
    assert torch.equal(exported(batch(0)[0]), model(batch(0)[0]))


def test_one_graph_and_no_recompilation():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    model = network()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = SGD(model.parameters())
    pruner = quiet(compiled, optimizer, 0.8, total_steps=6)
    for step in range(6):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        (compiled(inputs) - targets).square().mean().backward()
        optimizer.step()
    assert len(graphs) == 1
    assert list(pruner.masks) == ["0.weight", "3.weight", "5.weight"], "the model's own names"
    torch._dynamo.reset()


def test_tied_weights_stay_tied_and_are_pruned_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Linear(8, 8)
            self.up = nn.Linear(8, 8)
            self.up.weight = self.down.weight

        def forward(self, x):
            return self.up(self.down(x).tanh())

    model = Tied()
    optimizer = SGD(model.parameters())
    pruner = quiet(model, optimizer, 0.5, total_steps=3)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step)[0]).square().mean().backward()
        optimizer.step()
    assert list(pruner.masks) == ["down.weight"]
    assert model.up.weight is model.down.weight
    assert int((model.up.weight == 0).sum()) == 32


# Starting sparse


def test_masks_within_which_to_go_on():
    model = network()
    optimizer = SGD(model.parameters())
    pruner = quiet(model, optimizer, 0.5, total_steps=4)
    run(model, optimizer, 4)
    found = masks_from_zeros(model)
    assert {name: mask.tolist() for name, mask in found.items()} == {
        name: mask.tolist() for name, mask in pruner.masks.items()
    }
    later = quiet(model, SGD(model.parameters()), 0.75, total_steps=4, within=found)
    assert later.metrics()["sparsity"] == 0.5
    second = SGD(model.parameters())
    later = quiet(model, second, 0.75, total_steps=4, within=found)
    run(model, second, 4)
    assert later.metrics()["sparsity"] == 0.75
    assert all(not (mask & ~found[name]).any() for name, mask in later.masks.items())


def test_masks_from_zeros():
    model = network()
    with torch.no_grad():
        model[0].weight[0] = -0.0
    assert list(masks_from_zeros(model)) == ["0.weight"]
    assert not masks_from_zeros(model, exclude="0.*")
    assert masks_from_zeros(dict(find_targets(model)))["0.weight"].sum() == 15 * 8
    assert not masks_from_zeros(dict(find_targets(model)), exclude="0.*")
    with pytest.raises(ValueError, match="no parameter matches 'x'"):
        masks_from_zeros({}, include="x")


# Going on after a stop

RUNS = {
    "default": {"schedule": 0.8},
    "every 3": {"schedule": 0.8, "every": 3},
    "random": {"schedule": 0.8, "criterion": criteria.random},
    "rigl": {"schedule": schedules.constant(0.8), "regrow": regrowth.rigl(), "allocate": erk, "every": 2},
    "set": {
        "schedule": schedules.constant(0.8),
        "criterion": criteria.random,
        "regrow": regrowth.sparse_evolutionary_training(),
        "every": 2,
    },
    "sr-ste": {"schedule": schedules.constant(0.5), "pattern": NM(2, 4), "regrow": regrowth.sr_ste()},
    "movement": {"schedule": 0.8, "criterion": lambda _weight, *, movement: movement},
    "grad_sq": {"schedule": 0.8, "criterion": lambda weight, *, grad_sq: weight**2 * grad_sq, "every": 4},
    "grad at step 0": {"schedule": schedules.constant(0.8), "criterion": lambda weight, *, grad: (weight * grad).abs()},
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("order", ["pruner last", "pruner first", "made before"])
def test_resuming_at_any_step_is_the_run_that_was_not_stopped(options, order, tmp_path):
    def begin():
        model = network()
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    model, optimizer = begin()
    pruner = quiet(model, optimizer, total_steps=9, **options)
    states = []
    for step in range(9):
        states.append(step)
        torch.save([model.state_dict(), optimizer.state_dict(), pruner.state_dict()], tmp_path / f"{step}.pt")
        run(model, optimizer, 1, begin=step)
        assert_zero_where_removed(model, pruner)
    for step in states:
        saved = torch.load(tmp_path / f"{step}.pt", weights_only=True)
        other, its_optimizer = begin()
        if order == "made before":
            its_pruner = quiet(other, its_optimizer, total_steps=9, **options)
        other.load_state_dict(saved[0])
        its_optimizer.load_state_dict(saved[1])
        if order != "made before":
            its_pruner = quiet(other, its_optimizer, total_steps=9, **options)
        its_pruner.load_state_dict(saved[2])
        if order == "pruner first":
            other.load_state_dict(saved[0])
            its_optimizer.load_state_dict(saved[1])
        assert its_pruner.metrics() == {**its_pruner.metrics(), "step": step}
        run(other, its_optimizer, 9 - step, begin=step)
        for name, value in model.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), (step, name)
        assert its_pruner.metrics() == pruner.metrics()


def test_the_state_holds_a_bit_a_weight():
    torch.manual_seed(0)
    model = nn.Linear(1024, 64)
    optimizer = SGD(model.parameters())
    pruner = quiet(model, optimizer, schedules.constant(0.9))
    state = pruner.state_dict()
    assert state["masks"].numel() * 8 == model.weight.numel()
    assert sum(value.numel() for value in state.values() if isinstance(value, torch.Tensor)) * 32 <= model.weight.nbytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("version"), "no Pruner's state of version 1"),
        (lambda state: state.update(version=2), "no Pruner's state of version 1"),
        (lambda state: state["shapes"].__setitem__(0, (3, 3)), r"0.weight: the state has a mask of shape \(3, 3\)"),
        (lambda state: state["names"].__setitem__(0, "x"), "x: .* the model has no such weight"),
        (lambda state: state.update(masks=state["masks"][:-1]), "bytes of torch.uint8, not"),
        (lambda state: state.update(held={"0.weight": torch.zeros(2)}), "has held, the Pruner has not"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, message):
    model = network()
    optimizer = SGD(model.parameters())
    pruner = quiet(model, optimizer, 0.8, total_steps=5)
    run(model, optimizer, 3)
    before, metrics = copy.deepcopy(model.state_dict()), pruner.metrics()
    state = copy.deepcopy(pruner.state_dict())
    change(state)
    with pytest.raises(ValueError, match=message):
        pruner.load_state_dict(state)
    assert pruner.metrics() == metrics
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


# What it says


def _attached():
    model = network()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    return model


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: made_with(total_steps=None), ValueError, "0.6 is a fraction of the run: pass total_steps="),
        (lambda: made_with(schedule=None), ValueError, r"Unstructured\(\) needs a sparsity or a schedule"),
        (lambda: made_with(schedule=0.9, pattern=NM(2, 4)), ValueError, "removes 0.5 of the weights, not 0.9"),
        (lambda: made_with(schedule=None, pattern=NM(2, 7)), ValueError, "0.weight: .*needs an input dimension div"),
        (lambda: made_with(schedule=1.5), ValueError, "final is a sparsity"),
        (lambda: made_with(model=_attached()), ValueError, r"0.weight_orig belongs to a mask that is attached: detach"),
        (lambda: made_with(model=nn.Sequential(nn.LSTM(2, 2))), ValueError, "no linear layer or convolution to prune"),
        (lambda: made_with(include="nothing"), ValueError, "no parameter matches 'nothing'"),
        (lambda: made_with(optimizer=object()), TypeError, "takes torch.optim optimizers, not a object"),
        (
            lambda: made_with(pattern=NM(2, 4), schedule=None, regrow=regrowth.rigl()),
            ValueError,
            "says how much each group keeps: use sr_ste",
        ),
        (
            lambda: made_with(criterion=lambda w, *, movement: movement, regrow=regrowth.rigl()),
            ValueError,
            "movement needs removed weights to be held",
        ),
        (
            lambda: made_with(criterion=lambda w, *, input_norm: w),
            TypeError,
            "input_norm, which no training step shows",
        ),
        (lambda: made_with(within={"x": torch.ones(1).bool()}), ValueError, "a mask for 'x', but it is not among"),
        (lambda: made_with(within={"0.weight": torch.ones(1).bool()}), ValueError, r"0.weight: a mask of shape \(1,\)"),
        (lambda: made_with(criterion=lambda w: w[:1]), Exception, "0.weight"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        pruner = make()
        optimizer = pruner._optimizers[0]
        run(pruner._model, optimizer, 3)


def test_a_failing_start_changes_nothing():
    model = network()
    optimizer = SGD(model.parameters())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="NaN"):
        quiet(model, optimizer, schedules.constant(0.5), criterion=lambda weight: weight * torch.nan)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not optimizer._optimizer_step_post_hooks


def test_all_of_the_regrowth_rules_leave_the_counts_to_the_schedule():
    for options in RUNS.values():
        model = network()
        optimizer = SGD(model.parameters())
        pruner = quiet(model, optimizer, total_steps=10, **options)
        run(model, optimizer, 10)
        total = sum(mask.numel() for mask in pruner.masks.values())
        kept = sum(int(mask.sum()) for mask in pruner.masks.values())
        assert total - kept == round(pruner.schedule(10) * total)
        assert sparsity_of(pruner.masks) == pytest.approx(1 - kept / total)


def test_weights_without_values():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="weight is on the meta device"):
        quiet(model, SGD(model.parameters()), 0.5, total_steps=3)
