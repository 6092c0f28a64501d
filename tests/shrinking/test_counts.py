"""Laws of counts: what was asked leaves, in steps that pay, and no comparison in the code turns."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secateur import shrink
from secateur.allocation import by_name, everywhere


def small(width=16):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))


@pytest.mark.parametrize("target", ["params", "macs", "units"])
@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.7])
def test_the_asked_share_leaves_to_half_of_a_unit(target, sparsity):
    model, x = (
        nn.Sequential(nn.Linear(6, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 5)),
        torch.ones(1, 6),
    )

    def cost(model):
        linears = [model[0], model[2], model[4]]
        if target == "params":
            return sum(parameter.numel() for parameter in model.parameters())
        if target == "macs":
            return sum(linear.weight.numel() for linear in linears)
        return linears[0].out_features + linears[1].out_features

    before = cost(model)
    shrink(model, x, sparsity, target=target, round_to=1)
    unit = {"params": 6 + 1, "macs": 6, "units": 1}[target]  # of the first layer at least, and of the second, and more
    assert abs(1 - cost(model) / before - sparsity) <= (unit + model[2].out_features) / 2 / before + 1e-9


def test_include_exclude_and_allocations():
    def deep():
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))

    x = torch.ones(1, 4)
    assert [shrink(deep(), x, 0.5, target="units", include="0.weight").model[at].out_features for at in (0, 2)] == [
        8,
        12,
    ]
    assert [shrink(deep(), x, 0.5, target="units", exclude="0.*").model[at].out_features for at in (0, 2)] == [16, 6]
    uneven_model = shrink(deep(), x, 0.5, target="units", allocate=everywhere).model
    assert uneven_model[0].out_features + uneven_model[2].out_features == 14
    named = shrink(deep(), x, 0.5, target="units", allocate=by_name({"0.*": 0.25})).model
    assert [named[at].out_features for at in (0, 2)] == [12, 2]
    with pytest.raises(ValueError, match=r"no tensor or group matches '9\.\*'"):
        shrink(deep(), x, 0.5, exclude="9.*")


def test_units_that_are_zero_in_every_member_leave_and_outputs_stay():
    model, x = small(8), torch.randn(5, 4)
    with torch.no_grad():
        for tensor, at in ((model[0].weight, 0), (model[0].bias, 0), (model[2].weight, 1)):
            tensor.index_fill_(at, torch.tensor([1, 4, 6]), 0)
    expected = model(x)
    shrink(model, x)
    assert model[0].out_features == 5
    torch.testing.assert_close(model(x), expected)


def test_a_comparison_that_would_come_out_otherwise_stays():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 12), nn.Linear(12, 3)
            self.hidden, self.last = nn.Linear(3, 10), nn.Linear(10, 3)

        def forward(self, x):
            x = self.up(x)
            x = self.hidden(self.down(F.relu(x) if x.shape[-1] > 8 else x.sin()))
            return self.last(x if x.shape[1] == 1 else F.relu(x))

    model = shrink(Wide(), torch.randn(2, 4), 0.5, target="units", verify=False).model
    # half of 25 units were asked for, in the first layer 6: 9 is more than 8, and the others make it up
    assert model.up.out_features == 9
    assert 9 + model.down.out_features + model.hidden.out_features == 12
    model = shrink(Wide(), torch.randn(2, 4), 0.2, target="units", verify=False).model
    assert (model.up.out_features, model.hidden.out_features) == (10, 8)
