"""What a Pruner is told, and what cannot go together."""

import pytest
import torch
from torch import nn

from secateur import Pruner, criteria, regrowth, schedules
from secateur.allocation import everywhere
from secateur.patterns import Unstructured
from secateur.training.rules import Rules, Timetable
from support.training import SGD, made_with, network, quiet, train


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


# When masks are chosen anew.


def test_a_function_of_ones_own_is_followed_where_it_changes():
    model = network()
    optimizer = SGD(model.parameters())
    pruner = quiet(model, optimizer, lambda step: 0.0 if step < 3 else 0.25 if step < 6 else 0.75)
    seen = [round(pruner.metrics()["sparsity"], 6) for _ in train(model, optimizer, 8)]
    assert seen == [0.0, 0.0, 0.25, 0.25, 0.25, 0.75, 0.75, 0.75]


def test_milestones_are_met_whatever_the_interval():
    model = network()
    optimizer = SGD(model.parameters())
    schedule = schedules.milestones({"1ep": 0.25, 0.5: 0.75})
    pruner = quiet(model, optimizer, schedule, total_steps=10, steps_per_epoch=3, every=100)
    seen = [pruner.metrics()["sparsity"] for _ in train(model, optimizer, 10)]
    assert seen == [0.0] * 2 + [0.25] * 2 + [0.75] * 6


@pytest.mark.parametrize(
    ("until", "total_steps", "interval", "every"),
    [
        (0, None, None, 1), (0, 1000, None, 10), (0, 50, None, 1), (5000, None, None, 50), (50_000, None, None, 100),
        (9, 9, 7, 7),
    ],
)  # fmt: skip
def test_a_function_of_ones_own_is_asked_about_a_hundred_times(until, total_steps, interval, every):
    assert Timetable(lambda step: 0.5, until, total_steps, interval).every == every


# What a Pruner says of itself.


def test_defaults_leave_embeddings_recurrence_and_bare_parameters_alone(capsys):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions = nn.Parameter(torch.randn(4, 4))
            self.embedding = nn.Embedding(5, 4)
            self.recurrent = nn.LSTM(4, 4)
            self.attention = nn.MultiheadAttention(4, 2)
            self.convolution = nn.Conv1d(4, 4, 3)
            self.norm = nn.LayerNorm(4)

    model = Model()
    pruner = Pruner(model, SGD(model.parameters()), 0.5, total_steps=10)
    assert list(pruner.masks) == ["attention.in_proj_weight", "attention.out_proj.weight", "convolution.weight"]
    printed = capsys.readouterr().out
    assert printed == f"{pruner}\n"
    assert "112 weights in 3 tensors of " in printed
    assert "step        6  sparsity 0.5000" in printed
    assert "an update every 1 step; then recovery until step 10" in printed
    for reason in (
        "vectors and scalars",
        "1 × embeddings",
        "2 × normalizations",
        "2 × neither linear nor convolution (LSTM)",
        "1 × not named *.weight",
    ):
        assert reason in printed
    names = list(quiet(model, SGD(model.parameters()), 0.5, total_steps=10, include="recurrent.weight*").masks)
    assert names == ["recurrent.weight_ih_l0", "recurrent.weight_hh_l0"]
