"""Penalties on units: strength 0 changes nothing, a step is its formula, and what they end at leaves without a loss."""

import copy
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from secateur import Pruner, schedules, shrink
from secateur.training import growing

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)
AdamW = functools.partial(torch.optim.AdamW, lr=0.01)
quiet = functools.partial(Pruner, verbose=False)
EXAMPLE = torch.zeros(2, 8)


class Residual(nn.Module):
    """Two blocks on a stream: entries that leave with a unit of the stream, with a hidden unit, and with both."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(8, 12)
        self.up, self.down = nn.Linear(12, 16), nn.Linear(16, 12)
        self.norm = nn.BatchNorm1d(12)
        self.head = nn.Linear(12, 4)
        self.to(dtype)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.norm(x + self.down(self.up(x).relu())))


def train(model, optimizer, steps, begin=0):
    for step in range(begin, begin + steps):
        inputs = torch.randn(12, 8, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :4] * inputs[:, 4:]).square().mean().backward()
        optimizer.step()


def same(model, other):
    return all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


# Strength 0


@given(
    st.sampled_from([SGD, AdamW, torch.optim.RMSprop]),
    st.integers(2, 5),
    st.sampled_from(
        [
            lambda steps: growing(0.0, EXAMPLE, end=steps),
            lambda steps: growing(0.5, EXAMPLE, ceiling=0.0, end=steps + 1),  # at its end the units leave in any case
            lambda steps: growing(0.5, EXAMPLE, begin=steps, end=steps + 1),
        ]
    ),
)
@settings(max_examples=10, deadline=None)
def test_without_strength_the_run_is_the_plain_one_bit_for_bit(make_optimizer, steps, rule):
    plain, model = Residual(), Residual()
    train(plain, make_optimizer(plain.parameters()), steps)
    optimizer = make_optimizer(model.parameters())
    torch.manual_seed(7)
    drawn = torch.get_rng_state()
    pruner = quiet(model, optimizer, regularize=rule(steps))
    train(model, optimizer, steps)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert same(plain, model)
    assert pruner.metrics()["sparsity"] == 0


# The formulas


def test_a_growing_step_by_hand():
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
        model[0].weight[1] = model[0].weight[3] = 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    pruner = quiet(
        model, optimizer, regularize=growing(0.5, torch.ones(1, 2), target="units", ceiling=0.4, begin=1, end=5)
    )
    model(torch.ones(1, 2)).sum().backward()
    factors = []
    for _ in range(5):
        optimizer.step()
        factors.append(model[0].bias[1].item())
        assert pruner.metrics()["penalty"] == pytest.approx([0, 0.1, 0.2, 0.3, 0][len(factors) - 1])
    expected = [1.0, 1 / 1.1, 1 / 1.1 / 1.2, 1 / 1.1 / 1.2 / 1.3, 0.0]
    assert factors == pytest.approx(expected)
    assert model[0].bias.tolist() == [1, 0, 1, 0]
    assert model[0].weight.tolist() == [[1, 1], [0, 0], [1, 1], [0, 0]]
    assert model[1].weight.tolist() == [[1, 0, 1, 0]] * 3
    assert model[1].bias.tolist() == [1, 1, 1]


def test_an_entry_in_two_units_is_penalized_by_both():
    model = Residual()
    before = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    pruner = quiet(model, optimizer, regularize=growing(0.5, EXAMPLE, target="units", ceiling=1.0, end=2))
    train(model, optimizer, 1)
    ratio = model.up.weight / before.up.weight
    assert sorted(set(ratio.detach().mul(360).round().int().flatten().tolist())) == [160, 240, 360]  # 4/9, 2/3, 1
    assert pruner.metrics()["leaving"] == pytest.approx(1 - _size(_shrunk(before)) / _size(before))


def _shrunk(model):
    return shrink(copy.deepcopy(model), EXAMPLE, 0.5, target="units").model


def _size(model):
    return sum(parameter.numel() for parameter in model.parameters())


# What it is for


@pytest.mark.parametrize("make_optimizer", [SGD, AdamW])
def test_what_was_chosen_leaves_and_nothing_changes(make_optimizer):
    model = Residual()
    wanted = shrink(copy.deepcopy(model), EXAMPLE, 0.5).model
    optimizer = make_optimizer(model.parameters())
    pruner = quiet(model, optimizer, regularize=growing(0.5, EXAMPLE), total_steps=10)
    train(model, optimizer, 10)  # four steps with momentum and weight decay after the end
    pruner.finish()
    model.eval()
    inputs = torch.randn(5, 8)
    before = model(inputs)  # its graph is alive while the model shrinks, as that of the last loss often is
    shrink(model, EXAMPLE, optimizer=optimizer)
    assert {name: value.shape for name, value in model.state_dict().items()} == {
        name: value.shape for name, value in wanted.state_dict().items()
    }
    torch.testing.assert_close(model(inputs), before)
    model.train()
    train(model, optimizer, 2)
    assert all(
        state["momentum_buffer"].shape == each.shape
        for each, state in optimizer.state.items()
        if "momentum_buffer" in state
    )


# Where it lives


@pytest.mark.parametrize(
    "rule",
    [
        functools.partial(growing, 0.5, begin=2, end=5),
        functools.partial(growing, 0.5, end=4),
    ],
)
def test_resuming_at_any_step_is_the_run_that_was_not_stopped(rule, tmp_path):
    def begin():
        model = Residual()
        optimizer = AdamW(model.parameters())
        return model, optimizer, quiet(model, optimizer, schedules.constant(0.25), regularize=rule(EXAMPLE))

    model, optimizer, pruner = begin()
    for step in range(7):
        torch.save([each.state_dict() for each in (model, optimizer, pruner)], tmp_path / f"{step}.pt")
        train(model, optimizer, 1, step)
    for step in range(7):
        resumed = begin()
        for each, state in zip(resumed, torch.load(tmp_path / f"{step}.pt", weights_only=True), strict=True):
            each.load_state_dict(state)
        train(resumed[0], resumed[1], 7 - step, step)
        assert same(model, resumed[0]), step
        assert pruner.metrics() == resumed[2].metrics()


def test_a_step_that_a_scaler_skips_is_none():
    model = Residual()
    optimizer = SGD(model.parameters())
    pruner = quiet(model, optimizer, regularize=growing(0.5, EXAMPLE, ceiling=1.0, end=5))
    before = copy.deepcopy(model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model.stem.weight.sum() * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert pruner.step == 0
    assert same(model, before)


def test_channels_last_tied_and_two_optimizers():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
            self.again = nn.Linear(8, 8)
            self.other = nn.Linear(8, 8)
            self.other.weight = self.again.weight
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            x = self.first(x).relu().mean((2, 3))
            return self.head(x + self.other(self.again(x).relu()))

    model, image = Tied(), torch.ones(2, 3, 4, 4)
    optimizers = [
        SGD(model.first.parameters()),
        AdamW([*model.again.parameters(), model.other.bias, *model.head.parameters()]),
    ]
    pruner = quiet(model, optimizers, regularize=growing(0.5, image, end=3, target="units"))
    for _ in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(image).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    pruner.finish()
    before = model(image)
    shrink(model, image)
    assert model.first.out_channels == 4
    torch.testing.assert_close(model(image), before)


def test_shrinking_under_a_pruner_says_what_to_do():
    model = Residual()
    optimizer = SGD(model.parameters())
    quiet(model, optimizer, regularize=growing(0.5, EXAMPLE, end=2))
    train(model, optimizer, 3)
    shrink(model, EXAMPLE, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"has another shape than when the Pruner was made: finish\(\) it before"):
        train(model, optimizer, 1)


def made_with(rule, *, freeze=None, total_steps=10, model=None, **options):
    model = Residual() if model is None else model
    if freeze:
        model.get_parameter(freeze).requires_grad_(False)
    return quiet(model, SGD(model.parameters()), regularize=rule, total_steps=total_steps, **options)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: growing(0.5, EXAMPLE, ceiling=-1), ValueError, "ceiling of a growing penalty is a finite number"),
        (lambda: growing(0.5, EXAMPLE, speed=2), TypeError, r"takes the options of shrink \(allocate, .*not 'speed'"),
        (lambda: growing(0.5, EXAMPLE, target="latency"), ValueError, "a measured latency differs between runs"),
        (lambda: made_with(growing(0.5, EXAMPLE), total_steps=None), ValueError, "0.6 is a fraction of the run"),
        (lambda: made_with(growing(0.5, EXAMPLE, end=20)), ValueError, "ends at step 20, after the run of 10 steps"),
        (lambda: made_with(growing(0.5, EXAMPLE, begin=3, end=3)), ValueError, "begins at step 3, and ends at step 3"),
        (lambda: made_with(growing(0.9999, EXAMPLE)), ValueError, "of the params can leave"),
        (
            lambda: made_with(growing(0.5, EXAMPLE), freeze="up.bias"),
            ValueError,
            r"up.bias should become smaller but no optimizer trains it: pass exclude='up.bias'",
        ),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("regularize"), "the Pruner has regularize, the state has not"),
        (
            lambda state: state["regularize"].update(kind="Growing"),
            "the state's regularize has names, dims, leaving, kind",
        ),
        (lambda state: state["regularize"]["names"].__setitem__(0, "x"), "x: the state has 12 slices of dimension 0"),
        (lambda state: state["regularize"]["dims"].__setitem__(0, 7), "slices of dimension 7, the model"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, message):
    model = Residual()
    pruner = quiet(model, SGD(model.parameters()), regularize=growing(0.5, EXAMPLE, end=5))
    state = copy.deepcopy(pruner.state_dict())
    before = pruner.metrics()
    change(state)
    with pytest.raises(ValueError, match=message):
        pruner.load_state_dict(state)
    assert pruner.metrics() == before


def test_a_state_of_a_regularized_run_needs_the_rule():
    model = Residual()
    state = quiet(model, SGD(model.parameters()), regularize=growing(0.5, EXAMPLE, end=5)).state_dict()
    other = quiet(model, SGD(model.parameters()), 0.5, total_steps=5)
    with pytest.raises(ValueError, match="the state has regularize, the Pruner has not"):
        other.load_state_dict(state)
