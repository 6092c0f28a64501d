"""What is asked for is looked at before anything is run."""

import pytest
import torch
from torch import nn

from secateur.recovery.recovering import Request, names_to_train

ASKED = {"steps": 1, "local": 0, "loss": None, "adapters": None, "rate": 1e-3, "seed": 0, "share": 1.0,
         "autocast": None}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": -1}, "steps is a whole number, 0 or more; got -1"),
        ({"steps": 1.5}, "steps is a whole number, 0 or more; got 1.5"),
        ({"local": True}, "local is a whole number, 0 or more; got True"),
        ({"steps": 0}, "steps=0 and local=0: nothing is asked for"),
        ({"adapters": 0}, "adapters is the rank of the updates, 1 or more; got 0"),
        ({"rate": 0}, "rate is a number above 0; got 0"),
        ({"rate": float("nan")}, "rate is a number above 0; got nan"),
        ({"share": 1.5}, "share must be from 0 to 1, the teacher's part of the loss by the outputs; got 1.5"),
        ({"share": float("nan")}, "share must be from 0 to 1"),
        ({"seed": "1"}, "seed is a whole number; got '1'"),
        ({"loss": "no"}, "no loss is called 'no'"),
        ({"autocast": "float16"}, "autocast is bfloat16, or left out; got 'float16'"),
        ({"autocast": torch.float32}, "autocast is bfloat16, or left out; got torch.float32"),
    ],
)
def test_what_is_wrong_is_said(wrong, message):
    with pytest.raises(ValueError, match=message):
        Request(**{**ASKED, **wrong})


def test_what_moves_is_what_asks_for_gradients_or_is_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    assert names_to_train(model, None, None) == ["0.weight", "1.bias"]
    assert names_to_train(model, "*.bias", None) == ["0.bias", "1.bias"]
    assert names_to_train(model, None, "1.weight") == ["1.bias"], "by either of its names"
    with pytest.raises(
        ValueError, match="no parameter of Sequential is to be trained: include= and exclude= leave none"
    ):
        names_to_train(model, "0.*", "0.*")
    with pytest.raises(ValueError, match="is to be trained: none of them requires a gradient"):
        names_to_train(model.requires_grad_(False), None, None)
    with pytest.raises(ValueError, match="other"):
        names_to_train(model, "other", None)


def test_embeddings_stay_unless_they_are_a_heads_or_named_or_all_there_is():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9, bias=False))
    assert names_to_train(model, None, None) == ["1.weight"]
    assert names_to_train(model, "*", None) == ["0.weight", "1.weight"]
    assert names_to_train(nn.EmbeddingBag(9, 4), None, None) == ["weight"]
    model[1].weight = model[0].weight
    assert names_to_train(model, None, None) == ["0.weight"]
    assert names_to_train(model.requires_grad_(False), None, None, asking=False) == ["0.weight"]
