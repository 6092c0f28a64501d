"""The words for evidence, and what a criterion names."""

import torch

from secateur.evidence import collect
from support.evidence_models import cross_entropy, network, pairs


def test_a_criterion_names_what_is_collected():
    def score(weight, *, grad, input_norm):
        return weight * grad * input_norm

    found = collect(network(), pairs(), score, loss=cross_entropy)
    assert {tuple(entry) for entry in found.values()} == {("grad", "input_norm")}
    assert collect(network(), [], ["grad"], weights={}) == {}
    assert collect(network(), [], torch.abs) == {"0.weight": {}, "2.weight": {}, "4.weight": {}}
