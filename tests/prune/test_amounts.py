"""How much is pruned: amounts, axes, norms, and which entries are the largest."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

from secateur import prune
from support.pruned import linear, zeros


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_row_08_norms_of_half_precision_do_not_overflow(dtype):
    layer = nn.Linear(64, 3).to(dtype)
    layer.weight.data = torch.tensor([[1.0], [300.0], [2.0]]).expand(3, 64).to(dtype).contiguous()
    prune.ln_structured(layer, "weight", 2, 2, 0)
    assert layer.weight_mask[:, 0].tolist() == [0, 1, 0]
    assert layer.weight_mask.dtype == dtype


@pytest.mark.parametrize("scores", [torch.float64, torch.float16, torch.int32])
def test_row_14_the_mask_has_the_dtype_of_the_parameter(scores):
    for call in (
        lambda m, s: prune.l1_unstructured(m, "weight", 3, s),
        lambda m, s: (
            prune.ln_structured(m, "weight", 1, 2, 0, s) if s.is_floating_point() else prune.identity(m, "weight")
        ),
        lambda m, s: prune.global_unstructured([(m, "weight")], prune.L1Unstructured, {(m, "weight"): s}, amount=2),
    ):
        layer = linear()
        for _ in range(2):
            call(layer, torch.arange(24).view(4, 6).to(scores))
            assert layer.weight_mask.dtype == torch.float32


@pytest.mark.parametrize("n", ["fro", torch.inf, -torch.inf, 1, 2, 0])
def test_row_14_norms_of_convolutions(n):
    conv = nn.Conv2d(3, 5, 2)
    flat = conv.weight.detach().transpose(0, 1).reshape(3, -1)
    norms = torch.linalg.vector_norm(flat, 2 if n == "fro" else n, dim=1)
    weakest = 2 if n == 0 else int(norms.argmin())  # all equal in number: the first are kept
    prune.ln_structured(conv, "weight", 1, n, 1)
    gone = (conv.weight_mask.sum(dim=(0, 2, 3)) == 0).nonzero().flatten().tolist()
    assert gone == [weakest]


def test_row_21_an_amount_of_true_counts_one():
    assert zeros(prune.l1_unstructured(linear(), "weight", True).weight_mask) == 1


def test_an_integer_beyond_floats_is_too_large_an_amount():
    for library in (torch_prune, prune):
        with pytest.raises(ValueError, match="should be smaller than the number of parameters"):
            library.l1_unstructured(nn.Linear(2, 2), "weight", amount=10**400)


def test_a_norm_of_order_none_is_the_euclidean_one():
    torch.manual_seed(0)
    layer = nn.Linear(4, 5)
    expected = torch_prune.ln_structured(copy.deepcopy(layer), "weight", amount=2, n=None, dim=0).weight_mask
    assert torch.equal(prune.ln_structured(layer, "weight", amount=2, n=None, dim=0).weight_mask, expected)
