"""The matrix whose outputs are added up, and its least squares under a mask."""

import pytest
import torch
from torch import nn

from secateur.recovery.local import Gathered, adds_up


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def test_what_is_added_up_is_found_by_its_gradient():
    half, x = Half(), torch.randn(5, 4)
    names = [name for name, _ in half.named_parameters()]
    assert adds_up(half, names, lambda: half(x)) == "down"
    assert adds_up(half, ["up.weight"], lambda: half(x)) is None
    assert adds_up(half, names, lambda: half.norm(half(x))) is None, "not after a normalization"
    assert adds_up(half, names, lambda: half.last(half(x))) == "last", "the last one"
    assert adds_up(half, names, lambda: 2 * half(x)) is None
    with torch.no_grad():
        assert adds_up(half, names, lambda: half(x).detach()) is None


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
