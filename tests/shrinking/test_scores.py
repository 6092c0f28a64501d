"""Laws of scores: a unit is worth what its entries are together, and blocks of rows what the whole is."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zoo
from secateur.coupling import Scope, find_coupling
from secateur.criteria import magnitude
from secateur.shrinking.request import pruning_target, request
from secateur.shrinking.select import rows_at_once, scores_of


def subject(width=12):
    model, x = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3)), torch.zeros(1, 4)
    return pruning_target(model, Scope.of(find_coupling(model, x)), [x])


def scored(subject, **given):
    groups = subject.coupling.groups
    return scores_of(subject, groups, request(**given))[groups[0].name]


def test_a_unit_is_worth_the_entries_of_its_matrices():
    it = subject()
    up, _, down = it.model
    by_hand = (up.weight.abs().sum(1) + down.weight.abs().sum(0)).double()  # no bias: there are matrices
    torch.testing.assert_close(scored(it), by_hand / by_hand.mean())


def test_where_there_are_only_vectors_they_count():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

        def forward(self, x):
            return self.down(self.norm(self.up(x)))

    model, x = Scale(), torch.zeros(2, 4)
    whole = pruning_target(model, Scope.of(find_coupling(model, x)), [x])
    vectors = replace(whole, weights={name: each for name, each in whole.weights.items() if each.dim() == 1})
    vectors = replace(vectors, blocks=lambda name: [vectors.weights[name].detach()])
    by_hand = (model.up.bias.abs() + model.norm.weight.abs() + model.norm.bias.abs()).double()
    torch.testing.assert_close(scored(vectors), by_hand.detach() / by_hand.mean().detach())


@given(st.integers(1, 9), st.integers(1, 60))
def test_blocks_are_worth_what_the_whole_is(rows, piece):
    it = subject()

    def blocks(name):
        weight = it.weights[name].detach()
        yield from torch.split(weight, rows * rows_at_once(weight.shape))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secateur.shrinking.select._PIECE", piece)
        assert torch.equal(scored(replace(it, blocks=blocks)), scored(it))


def test_evidence_goes_to_the_weight_of_its_name():
    it = subject(5)
    evidence = {name: {"grad": torch.full_like(each, 2.0)} for name, each in it.weights.items()}
    seen = []

    def criterion(weight, *, grad):
        seen.append(grad)
        return magnitude(weight) * grad

    torch.testing.assert_close(scored(it, criterion=criterion, evidence=evidence), scored(it))
    assert [each.shape for each in seen] == [(5, 4), (3, 5)]


def test_a_score_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match=r"a score of 0\.weight is NaN; correct the weights"):
        scored(subject(), criterion=lambda weight: weight * torch.nan)


def test_a_key_of_pairs_is_worth_what_leaves_with_it():
    model, x = zoo.ZOO["mixture_of_pairs"]()
    it = pruning_target(model, Scope.of(find_coupling(model, x)), [x])
    (keys,) = [group for group in it.coupling.groups if group.chosen]
    held = sum(each.detach().abs().sum((1, 2)).double() for each in (model.held.up, model.held.down)).view(4, 4)
    by_hand = held.sum(0) + held.sum(1) + model.router.weight.detach().abs().sum(1).double().view(2, 4).sum(0)
    torch.testing.assert_close(scores_of(it, [keys], request())[keys.name], by_hand / by_hand.mean())
