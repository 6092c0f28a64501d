"""Laws of comparing: rounding is told from a difference, and what cannot be told is said to be so."""

import pytest
import torch
from torch import nn

from secateur.shrinking.plan import Plan
from secateur.shrinking.proof import (
    BLIND,
    IncomparableError,
    Unsure,
    certain,
    compared,
    difference,
    on_calm_probes,
    probe_of,
    would_show,
)
from support.unchanged import is_unchanged, state_of

A = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)


def test_nothing_differs_from_itself():
    for one in (A, A.long(), A > 2, A + 1j, torch.full((2,), torch.inf), A.half()):
        words = difference([one], [one.clone()])
        assert words is None or "no finite number" in words
    assert difference([], []) is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([], "0 tensors came out where 1 did before"),
        ([A.reshape(3, 2)], r"output 0 has shape \(3, 2\), it was \(2, 3\)"),
        ([A + 1e-4], "output 0 differs by 2e-05 of its largest number"),
        ([A / (A - 1)], "output 0 is not finite at other places"),
    ],
)
def test_a_difference_is_said_in_words(found, words):
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(difference([A], found))


def test_what_a_unit_in_the_last_place_does_is_no_difference():
    model = nn.Linear(3, 2).double()
    expected = [model(A).detach()]

    def chaotic():
        weight = next(model.parameters())
        return [expected[0] + 1e14 * (weight - original).abs().sum().detach()]

    original = next(model.parameters()).detach().clone()
    off = [expected[0] * 1.01]
    assert type(compared(model, expected, off, [lambda: expected])) is str
    state = state_of(model)
    words = compared(model, expected, off, [chaotic])
    assert isinstance(words, Unsure)
    assert is_unchanged(model, state)
    with pytest.raises(IncomparableError, match="by one unit in the last place"):
        certain(words)
    assert certain("output 0 differs") == "output 0 differs"
    assert certain(None) is None


def test_probes_are_random_and_the_model_stays():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    state = state_of(model)
    probe, calm = probe_of(model), probe_of(model, 0.5)
    assert is_unchanged(model, state)
    for one, other, own in zip(probe.parameters(), calm.parameters(), model.parameters(), strict=True):
        assert one.dtype == torch.float64
        assert not torch.equal(one, own.double())
        torch.testing.assert_close(other, 0.5 * one)


def test_the_least_calm_probe_decides():
    asked = []

    def compare(probe, calm):
        asked.append(calm)
        if calm > 0.5:
            raise IncomparableError(str(calm))
        return calm

    assert on_calm_probes(nn.Linear(2, 2), compare) == asked[-1] <= 0.5
    assert asked == sorted(asked, reverse=True)

    def never(*_):
        raise IncomparableError(BLIND)

    with pytest.raises(IncomparableError, match=f"no proof that it is wrong: {BLIND}; nor on smaller weights"):
        on_calm_probes(nn.Linear(2, 2), never)


def test_a_slice_that_has_no_effect_would_not_show():
    model = nn.Linear(3, 2, bias=False).double()
    plan = Plan({"weight": ((2, 3), {0: torch.arange(2).numpy()})}, [])
    assert would_show(model, plan, [lambda: [model(A).detach()]])
    assert not would_show(model, plan, [lambda: [A]])
    with torch.no_grad():
        model.weight[1] = model.weight[0]  # its neighbour's
    assert not would_show(model, plan, [lambda: [model(A).detach()]])
