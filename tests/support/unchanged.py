"""Whether a call that failed left a model as it was: the same tensors, with the same values; and what torch makes
tensors of and where, which a caller may have set otherwise, and which changes nothing."""

import contextlib

import torch


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "another device": lambda: torch.device("meta"),
}


def state_of(model):
    return {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}


def is_unchanged(model, state):
    now = model.state_dict(keep_vars=True)
    return now.keys() == state.keys() and all(
        now[name] is tensor and torch.equal(now[name], value) for name, (tensor, value) in state.items()
    )
