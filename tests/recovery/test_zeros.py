"""Which entries are removed, and that they stay, to the bit."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from secateur import attach
from secateur.recovery.descent import count_zeros, groups_of, removed_of, settled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(st.integers(0, 1000), st.floats(1e-9, 1e3))
def test_zeros_afterwards_are_those_before(dtype, seed, size):
    torch.manual_seed(seed)
    old = torch.randn(30).mul(torch.rand(30) > 0.5).to(dtype)
    old[0] = -0.0
    new = torch.randn(30) * size
    new[3] = 0.0
    found = settled(old, new, old.ne(0))
    assert found.dtype == dtype
    assert torch.equal(found.eq(0), old.eq(0))
    assert torch.equal(found[old.eq(0)].signbit(), old[old.eq(0)].signbit())


def test_what_removes_is_a_zero_a_mask_that_is_given_or_one_that_is_attached():
    model = nn.Sequential(nn.Embedding(4, 4, padding_idx=0), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight[0] = 0
        model[3].weight[:, 1] = 0
    attach(model[2], {"weight": torch.tensor([True, False] * 8).view(4, 4)})
    found = removed_of(model, {"3.weight": torch.ones(4, 4, dtype=torch.bool)})
    assert list(found) == ["3.weight", "2.weight_orig", "1.weight"]
    assert {name: int((~mask).sum()) for name, mask in found.items()} == {
        "3.weight": 4,
        "2.weight_orig": 8,
        "1.weight": 4,
    }
    weights = {name: each for name, each in model.named_parameters() if name in found}
    assert count_zeros(weights, found) == {"1.weight": 4, "2.weight_orig": 8, "3.weight": 4}
    assert "0.weight" in removed_of(model, also=["0.weight"]), "an embedding, where it is asked for"


def test_a_pruner_has_masks_and_a_tied_weight_is_one():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    with torch.no_grad():
        model[0].weight[0] = 0

    pruner = SimpleNamespace(masks={"1.weight": torch.tensor([[False] * 3, [True] * 3, [True] * 3])})
    assert list(removed_of(model, pruner)) == ["0.weight"]
    assert groups_of(dict(model.named_parameters(remove_duplicate=False)))[0] == ["0.weight", "1.weight"]
    assert removed_of(nn.Embedding(3, 3)) == {}


def test_what_is_wrong_is_said():
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="there is a mask for 'other', but the model has no such parameter"):
        removed_of(layer, {"other": torch.ones(2, 2)})
    with pytest.raises(ValueError, match="weight: a mask of shape"):
        removed_of(layer, {"weight": torch.ones(2, 3, dtype=torch.bool)})
    with pytest.raises(ValueError, match="weight: the mask removes entries that are not zero; write the zeros first"):
        removed_of(layer, {"weight": torch.zeros(2, 2, dtype=torch.bool)})
    with pytest.raises(TypeError, match=r"masks= is \{name: mask\} or a Pruner, not a int"):
        removed_of(layer, 3)
    with pytest.raises(ValueError, match=r"a weight of shape \(1,\) grew beyond what torch.float16 holds; lower rate="):
        settled(torch.ones(1, dtype=torch.float16), torch.tensor([1e9]), None)
