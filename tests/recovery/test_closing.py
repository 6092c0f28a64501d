"""The matrix whose outputs are added up, and its least squares under a mask."""

import pytest
import torch
from torch import nn

from secateur.recovery.closing import Gathered


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_least_squares_leave_zeros_and_lack_less(bias, masked):
    layer = nn.Linear(6, 3, bias=bias)
    teacher = nn.Linear(6, 3)
    mask = torch.rand(3, 6) > 0.5 if masked else None
    if masked:
        layer.weight.data.mul_(mask)
    x = [torch.randn(4, 40, 6) for _ in range(3)]
    padding = torch.ones(4, 40, dtype=torch.bool)
    padding[:, 30:] = False
    x[0][~padding] = 1e4
    wanted = [teacher(each).detach() for each in x]
    wanted[0][~padding] = 1e6

    def lost():
        pairs = [(layer(each), aim) for each, aim in zip(x, wanted, strict=True)]
        shares = [((a - b).square().sum(-1) / b.square().sum(-1))[padding].sum() for a, b in pairs]
        return sum(float(each.detach()) for each in shares)

    before, gathered = lost(), Gathered(layer)
    for each, aim in zip(x, wanted, strict=True):
        gathered.run(lambda each=each: layer(each), aim, padding)
    values = gathered.solved(mask)
    assert set(values) == ({"weight", "bias"} if bias else {"weight"})
    heavy = gathered.solved(mask, 100.0)["weight"]
    assert (heavy - layer.weight).norm() < (values["weight"] - layer.weight).norm()
    layer.load_state_dict(values)
    assert lost() < before
    if masked:
        assert bool(layer.weight[~mask].eq(0).all())
    if bias and not masked:
        assert torch.allclose(layer.weight, teacher.weight, atol=0.1)
