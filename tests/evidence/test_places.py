"""Where a model holds its weights."""

import copy

from torch import nn

from secateur.evidence import collect
from support.evidence_models import close, cross_entropy, pairs


def test_two_parameters_over_one_memory_are_one_weight():
    model, batches = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)), pairs()
    tied = copy.deepcopy(model)
    tied[1].weight = tied[0].weight
    model.load_state_dict(tied.state_dict())
    model[1].weight = nn.Parameter(model[0].weight.data)
    words = ["grad", "grad_sq", "hessian_grad", "flow", "input_norm"]
    found, expected = (collect(each, batches, words, loss=cross_entropy) for each in (model, tied))
    assert list(found) == ["0.weight"]
    for word in words:
        close(found["0.weight"][word], expected["0.weight"][word])
    both = collect(model, batches, words, loss=cross_entropy, weights=dict(model.named_parameters()))
    assert all(both["1.weight"][word] is both["0.weight"][word] for word in words)
