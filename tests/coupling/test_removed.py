"""What stays in place of a module: zeros of what it returned, whose sizes follow the input's."""

import json

import torch
from torch import nn

from secateur.coupling import Removed, replacement


def test_removed_follows_its_input():
    zeros = [[0, 0, 1, 0, 1], [-1, 7, 1, 0, 1], [2, 0, 1, 1, 2]]
    form = {"was": "Conv1d", "input": 0, "returns": {"zeros": zeros, "whole": False}}
    gone = Removed(json.loads(json.dumps(form)))
    x = torch.randn(3, 5, 9)
    assert gone(x).shape == (3, 7, 5)
    assert gone(x).untyped_storage().nbytes() == 4
    gone.zeros_0.sizes = (0, 4, 0)  # as when channels leave
    assert gone(x).shape == (3, 4, 5)
    whole = Removed({**form, "returns": {"zeros": zeros, "whole": True}})
    whole(x).add_(1)
    assert gone(x.half()).dtype == torch.float16
    assert gone(torch.zeros(2, 3, 4, dtype=torch.long)).dtype == torch.float32
    kept = {"was": "A", "input": "h", "returns": {"dict": {"a": ["tuple", {"zeros": None}, None, ["list", True]]}}}
    assert Removed(kept)(h=x) == {"a": (torch.tensor(0.0), None, [True])}
    assert isinstance(replacement({"was": "ReLU", "returns": "input"}), nn.Identity)
    assert not list(gone.state_dict())
