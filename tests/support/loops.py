"""What the tests of training loops compare: two states, and how many weights are zero."""

import torch


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def sparsity(model, names):
    weights = [model.get_parameter(name) for name in names]
    return sum(int((weight == 0).sum()) for weight in weights), sum(weight.numel() for weight in weights)
