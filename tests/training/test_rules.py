"""What a Pruner is told, and what cannot go together."""

import pytest
import torch
from torch import nn

from secateur import criteria, regrowth
from secateur.allocation import everywhere
from secateur.patterns import NM, Unstructured
from secateur.training.rules import Rules
from support.training import made_with, network


def test_frozen_weights_have_no_gradient_to_go_by():
    model = network()
    model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"0\.weight is frozen"):
        made_with(model=model, criterion=lambda w, *, grad: grad.abs())
    with pytest.raises(ValueError, match=r"0\.weight is frozen"):
        made_with(model=model, regrow=regrowth.rigl())
    assert made_with(model=model).metrics()["sparsity"] == 0


def test_what_regrows_is_a_value():
    with pytest.raises(TypeError, match=r"regrow is what a function of secateur\.regrowth makes.*not 'rigl'"):
        made_with(regrow="rigl")
    with pytest.raises(TypeError, match=r"such as rigl\(\)"):
        made_with(regrow=regrowth.rigl)


def rules(criterion=criteria.magnitude, pattern=Unstructured(), regrow=None, collects=False):  # noqa: B008  frozen
    return Rules(criterion, pattern, everywhere, regrow, [], collects)


def by_movement(_weight, *, movement):
    return movement


def by_squares(weight, *, grad_sq, input_norm):
    return weight * grad_sq * input_norm


@pytest.mark.parametrize(
    ("given", "watched", "remembered"),
    [
        (rules(), set(), set()),
        (rules(by_movement, regrow=regrowth.held()), {"movement"}, {"movement", "held"}),
        (rules(by_movement, regrow=regrowth.held(), collects=True), {"movement"}, {"movement", "held"}),
        (rules(by_squares, collects=True), set(), set()),
        (rules(by_squares), {"grad_sq"}, {"grad_sq"}),
        (rules(regrow=regrowth.sr_ste()), set(), {"held"}),
        (rules(regrow=regrowth.rigl()), set(), set()),
    ],
)
def test_what_steps_show_and_what_goes_from_step_to_step(given, watched, remembered):
    assert (given.watched, given.remembered) == (watched, remembered)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (rules(by_movement), ValueError, "movement needs removed weights to be held"),
        (rules(by_squares), TypeError, "by_squares asks for input_norm, which no training step shows"),
        (rules(pattern=NM(2, 4), regrow=regrowth.rigl()), ValueError, "says how much each group keeps: use sr_ste"),
        (rules(regrow=regrowth.rigl()), ValueError, "w is frozen and has no gradient to score it by"),
    ],
)
def test_what_cannot_go_together_is_refused(given, error, message):
    frozen = nn.Parameter(torch.ones(2, 4), requires_grad="w is frozen" not in message)
    with pytest.raises(error, match=message):
        given.check({"w": frozen})
