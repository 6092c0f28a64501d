"""The law of turns: in as many as there are units for each row, every unit is the best of some row."""

import math

import pytest
import torch

from secateur.coupling import in_turn


@pytest.mark.parametrize(("shape", "at"), [((3, 7), 1), ((7, 2, 2), 0), ((1, 7), -1)])
def test_each_has_its_turn(shape, at):
    scores = torch.randn(shape)
    rows = scores.numel() // 7
    places = torch.arange(7)
    best = {
        int(each)
        for turn in range(math.ceil(7 / rows))
        for each in in_turn(scores, at, places, turn).argmax(at).flatten()
    }
    assert best == set(range(7))


def test_others_keep_their_order_and_those_without_a_chance_have_none():
    scores = torch.tensor([[3.0, -1.0, 2.0, -math.inf]])
    found = in_turn(scores, 1, torch.arange(3), 1)
    assert found.argsort(-1, descending=True).tolist() == [[1, 0, 2, 3]]
    assert found[0, 3] == -math.inf


def test_two_models_of_other_counts_have_the_same_scores():
    scores = torch.randn(4, 6)
    stay = torch.tensor([0, 2, 5])
    whole, smaller = in_turn(scores, 1, stay, 3), in_turn(scores[:, stay], 1, torch.arange(3), 3)
    assert torch.equal(whole[:, stay], smaller)
