"""Published formulas on a 3×4 matrix, worked out by hand; and one test an error message."""

import math

import pytest
import torch

from secateur import NM, Rows, criteria, make_masks, schedules
from secateur.allocation import check_sparsity, everywhere

W = torch.tensor([[1.0, -4.0, 0.5, 2.0], [3.0, -0.25, 6.0, -1.5], [-5.0, 0.75, -2.5, 0.1]])


def test_lamp_by_hand():
    scores = criteria.lamp(torch.tensor([[1.0, -2.0], [2.0, 4.0]]))
    # ascending squares 1, 4, 4, 16; of the two equal weights the first counts as the larger
    assert torch.allclose(scores, torch.tensor([[1 / 25, 4 / 20], [4 / 24, 1.0]], dtype=torch.float64))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):  # two ways to sort, one order
        weight = torch.randn(7, 9).mul(3).round().to(dtype)
        order = torch.sort(weight.abs().reshape(-1), descending=True, stable=True).indices
        assert torch.equal(criteria._descending(weight.abs().reshape(-1)), order)
    tiny = torch.tensor([1e-30, 2e-30], dtype=torch.float32)
    assert torch.allclose(criteria.lamp(tiny), torch.tensor([0.2, 1.0], dtype=torch.float64))


def test_lamp_never_empties_a_layer_first():
    masks = make_masks({"large": 100 * torch.randn(50, 50), "small": 0.001 * torch.randn(5, 5)}, 0.98,
                       criterion=criteria.lamp, allocate=everywhere)  # fmt: skip
    assert masks["small"].any()
    assert masks["large"].any()


def test_everywhere_keeps_some_of_every_tensor():
    weights = {"strong": 100 + torch.rand(1000), "weak": torch.rand(10), "zero": torch.zeros(10)}
    masks = make_masks(weights, 0.9)
    assert {name: int(mask.sum()) for name, mask in masks.items()} == {"strong": 100, "weak": 1, "zero": 1}
    assert masks["zero"].tolist() == [True] + [False] * 9

    def freely(scores, sparsity, pattern):
        return everywhere(scores, sparsity, pattern, min_kept=0)

    masks = make_masks(weights, 0.9, allocate=freely)
    assert {name: int(mask.sum()) for name, mask in masks.items()} == {"strong": 102, "weak": 0, "zero": 0}
    assert not any(mask.any() for mask in make_masks(weights, 1.0).values())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: check_sparsity(math.nan), "got nan"),
        (lambda: check_sparsity(True), "got True"),
        (lambda: check_sparsity(80), "For 80 percent write 0.8"),
        (lambda: check_sparsity("0.5"), "got '0.5'"),
        (lambda: check_sparsity(torch.tensor(0.5)), r"Pass a Python number: float\(sparsity\)"),
        (lambda: criteria.ln_norm(W, n=0), "positive and finite"),
        (lambda: schedules.linear(1.5, end=3), "final is a sparsity"),
        (lambda: schedules.cubic(0.5, initial=-1, end=3), "initial is a sparsity"),
        (lambda: schedules.cubic(0.5, begin=4, end=3), "0 <= begin <= end"),
        (lambda: schedules.exponential(1, end=3), "never reaches sparsity 1"),
        (lambda: make_masks({}, 0.5), "there are no weights"),
        (lambda: make_masks({"w": W}), "needs a sparsity"),
        (lambda: make_masks({"w": W}, 0.6, pattern=NM(2, 4)), "removes 0.5 of the weights, not 0.6"),
        (lambda: make_masks({"layer.3.weight": torch.zeros(10, 30)}, pattern=NM(2, 4)), r"layer\.3\.weight: 2:4 needs"),
        (lambda: make_masks({"a": W, "b": W}, 0.98), "leaves 0 of 24 units, too few for 1 in each of 2 tensors"),
        (lambda: make_masks({"w": W * math.nan}, 0.5), "w: a score is NaN"),
        (lambda: make_masks({"w": W * math.nan}, pattern=NM(2, 4)), "w: .*a score is NaN"),
        (lambda: make_masks({"w": W * math.nan}, 0.5, pattern=Rows()), "w: .*a score is NaN"),
    ],
)
def test_messages(call, message):
    with pytest.raises(ValueError, match=message):
        call()
