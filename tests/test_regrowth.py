"""How removed weights return: each rule against its paper, by hand or beside the plain formula."""

import pytest
import torch
from torch import nn

from secateur import NM, Pruner, criteria, regrowth, schedules


def layer(values):
    made = nn.Linear(len(values[0]), len(values), bias=False)
    with torch.no_grad():
        made.weight.copy_(torch.tensor(values))
    return made


def step_with(made, optimizer, gradient):
    made.weight.grad = torch.tensor(gradient)
    optimizer.step()


def test_rigl_by_hand():
    made = layer([[1.0, 2.0, 3.0, 4.0, 0.1, 0.2, 0.3, 0.4]])
    optimizer = torch.optim.SGD(made.parameters(), lr=0.0, momentum=0.5)
    rule = regrowth.rigl(fraction=0.5, until=100)
    pruner = Pruner(made, optimizer, schedules.constant(0.5), regrow=rule, every=1, total_steps=100, verbose=False)
    assert pruner.masks["weight"].tolist() == [[True] * 4 + [False] * 4]
    # half of the four: 1 and 2 go; the largest gradients among all that is not kept are of 2 and of 0.3
    step_with(made, optimizer, [[0.1, -9.0, 50.0, 50.0, 1.0, -2.0, 8.0, 3.0]])
    assert pruner.masks["weight"].tolist() == [[False, True, True, True, False, False, True, False]]
    # what is dropped and grown at once keeps its value, what had been removed starts at zero, with no momentum
    assert made.weight.tolist() == [[0.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0]]
    momentum = optimizer.state[made.weight]["momentum_buffer"]
    assert momentum.tolist() == [[0.0, -9.0, 50.0, 50.0, 0.0, 0.0, 0.0, 0.0]]
    assert pruner.metrics()["churn"] == 0.25


def test_rigls_fraction_falls_along_half_a_cosine_and_ends():
    rule = regrowth.rigl(fraction=0.4, until=0.5)
    assert [round(rule.share(step, 40), 4) for step in (0, 10, 20, 30, 40, 50)] == [0.4, 0.3414, 0.2, 0.0586, 0.0, 0.0]
    made = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    pruner = Pruner(made, optimizer, schedules.constant(0.5), regrow=rule, every=5, total_steps=40, verbose=False)
    changed = []
    for _ in range(40):
        before = pruner.masks["weight"]
        step_with(made, optimizer, torch.randn(16, 16).tolist())
        changed.append(bool((pruner.masks["weight"] != before).any()))
    assert [step + 1 for step, was in enumerate(changed) if was] == [5, 10, 15]


def test_set_grows_at_random_and_the_seed_says_which():
    def masks(seed):
        made = layer([[float(w) for w in range(1, 33)]])
        optimizer = torch.optim.SGD(made.parameters(), lr=0.0)
        rule = regrowth.sparse_evolutionary_training(fraction=0.25)
        pruner = Pruner(
            made, optimizer, schedules.constant(0.5), regrow=rule, every=1, total_steps=10, seed=seed, verbose=False
        )
        step_with(made, optimizer, [[0.0] * 32])
        return pruner.masks["weight"][0]

    first = masks(0)
    assert first.sum() == 16
    assert first[20:].all(), "the largest three quarters of the kept stay"
    assert torch.equal(first, masks(0))
    assert any(not torch.equal(first, masks(seed)) for seed in range(1, 4))


def test_sr_ste_is_zhous_update():
    torch.manual_seed(0)
    made = nn.Linear(16, 8, bias=False).double()
    dense = made.weight.detach().clone()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    pruner = Pruner(
        made, optimizer, pattern=NM(2, 4), schedule=schedules.constant(0.5), criterion=criteria.magnitude,
        regrow=regrowth.sr_ste(decay=0.02), verbose=False,
    )  # fmt: skip
    momentum = torch.zeros_like(dense)

    def masked(weight):
        kept = weight.abs().reshape(-1, 4).topk(2, dim=1).indices
        return torch.zeros(32, 4, dtype=torch.bool).scatter(1, kept, True).reshape(8, 16)

    for step in range(12):
        mask = masked(dense)
        torch.testing.assert_close(made.weight.detach(), dense * mask, msg="what the forward pass sees")
        inputs = torch.randn(5, 16, generator=torch.Generator().manual_seed(step)).double()
        optimizer.zero_grad()
        (made(inputs) - inputs[:, :8]).square().sum().backward()
        gradient = made.weight.grad.clone()
        optimizer.step()
        momentum = 0.9 * momentum + gradient + 0.02 * ~mask * dense
        dense = dense - 0.1 * momentum
        torch.testing.assert_close(made.weight + pruner._zeros.memory.held["weight"], dense)
    assert pruner.step == 12


@pytest.mark.parametrize("penalty", [0.0, 0.3])
def test_movement_is_sanhs(penalty):
    """Scores accumulate over all weights at the masked forward pass; removed weights keep their values and return."""
    torch.manual_seed(0)
    made = nn.Linear(10, 6, bias=False).double()
    weight = made.weight.detach().clone()
    scores = torch.zeros_like(weight)
    mask = torch.ones_like(weight, dtype=torch.bool)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.05)
    Pruner(
        made, optimizer, lambda step: 0.0 if step < 3 else 0.5, criterion=lambda _weight, *, movement: movement,
        regrow=regrowth.held(penalty=penalty), every=1, verbose=False,
    )  # fmt: skip
    returned = 0
    for step in range(20):
        inputs = torch.randn(5, 10, generator=torch.Generator().manual_seed(step)).double()
        optimizer.zero_grad()
        (made(inputs) - inputs[:, :6].roll(step, 1)).square().sum().backward()
        optimizer.step()

        leaf = (weight * mask).requires_grad_()
        (inputs @ leaf.T - inputs[:, :6].roll(step, 1)).square().sum().backward()
        scores = scores - leaf.grad * weight
        risen = scores.sigmoid()
        scores = scores - penalty * risen * (1 - risen)
        weight = weight - 0.05 * leaf.grad * mask
        if step >= 2:
            before = mask
            kept = scores.reshape(-1).topk(30).indices
            mask = torch.zeros(60, dtype=torch.bool).scatter(0, kept, True).reshape(6, 10)
            returned += int((mask & ~before).sum())
        torch.testing.assert_close(made.weight.detach(), weight * mask)
    assert returned > 0, "removed weights have come back, with their values"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: regrowth.rigl(fraction=1.0), "lies between 0 and 1; got 1.0"),
        (lambda: regrowth.sr_ste(decay=-1), "not negative; got -1"),
        (lambda: regrowth.held(penalty=-1), "not negative"),
        (lambda: regrowth.held(penalty=float("nan")), "finite"),
        (lambda: regrowth.sr_ste(decay=float("nan")), "finite"),
        (lambda: regrowth.Held(decay=0.1), "needs straight_through=True"),
        (lambda: regrowth.rigl(until="soon"), "got 'soon'"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        rule = make()
        made = nn.Linear(2, 2)
        Pruner(made, torch.optim.SGD(made.parameters(), lr=1), 0.5, regrow=rule, total_steps=5, verbose=False)


def test_straight_through_takes_one_optimizer():
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in made]
    with pytest.raises(ValueError, match="one optimizer"):
        Pruner(made, optimizers, schedules.constant(0.5), regrow=regrowth.sr_ste(), verbose=False)
