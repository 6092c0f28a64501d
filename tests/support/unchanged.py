"""Whether a call that failed left a model as it was: the same tensors, with the same values."""

import torch


def state_of(model):
    return {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}


def is_unchanged(model, state):
    now = model.state_dict(keep_vars=True)
    return now.keys() == state.keys() and all(
        now[name] is tensor and torch.equal(now[name], value) for name, (tensor, value) in state.items()
    )
