"""Copies that are trained in the place of parameters, and low-rank updates that are the merged weight at every step."""

import pytest
import torch
from torch import nn

from secateur.recovery.descent import Descent, Factors, Whole, movers_for, moving, widened_batch


def test_a_model_has_its_own_tensors_back_whatever_happens():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(torch.bfloat16)
    before = {name: (each, each.data_ptr(), each.clone()) for name, each in model.state_dict(keep_vars=True).items()}
    with pytest.raises(KeyboardInterrupt), moving(model, ["0.weight"], {}) as held:
        assert all(each.dtype == torch.float32 for each in (*model.parameters(), model[1].running_mean))
        held.parameters["0.weight"].data.fill_(7)
        raise KeyboardInterrupt
    for name, each in model.state_dict(keep_vars=True).items():
        same, place, value = before[name]
        assert each is same
        assert each.data_ptr() == place
        assert torch.equal(each, value)


@pytest.mark.parametrize("shape", [(6, 5), (3, 6, 5)])
def test_factors_follow_the_gradient_of_the_merged_weight(shape):
    start = torch.randn(shape, dtype=torch.float64)
    mask = torch.rand(shape) > 0.4
    start *= mask
    parameter = nn.Parameter(start.clone())
    factors = Factors(parameter, mask, 2, torch.Generator().manual_seed(0))
    with torch.no_grad():
        factors.up.normal_()
    factors.place()
    target = torch.randn(shape, dtype=torch.float64)
    (parameter - target).square().sum().backward()
    factors.gather()
    down, up = (each.detach().clone().requires_grad_() for each in (factors.down, factors.up))
    (start + mask * (up @ down) - target).square().sum().backward()
    assert torch.allclose(factors.down.grad, down.grad)
    assert torch.allclose(factors.up.grad, up.grad)
    assert torch.equal(parameter.detach(), start + mask * (up @ down).detach())
    assert parameter.grad is None


def test_a_convolution_has_one_pair_of_factors_and_what_is_tied_moves_once():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight = nn.Parameter(model[1].weight.data)  # another parameter of the same memory
    named = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(0)
    movers = movers_for(model, named, {}, rank=2, adapted={"0.weight"}, generator=generator)
    factors = movers[0]
    assert isinstance(factors, Factors)
    assert factors.down.shape == (2, 18)
    assert len(movers) == len(named) - 1
    tied = next(each for each in movers if isinstance(each, Whole) and each.others)
    before = model[1].weight.detach().clone()
    descent = Descent([tied], 1, rate=0.1)
    descent.step((model[1].weight * 2 + model[2].weight).sum())
    assert torch.allclose(model[1].weight, before - 0.1)
    assert model[2].weight.data_ptr() == model[1].weight.data_ptr()


def test_what_cannot_be_trained_is_refused():
    with (
        pytest.raises(ValueError, match="weight is on the meta device and has no values"),
        moving(nn.Linear(2, 2, device="meta"), ["weight"], {}),
    ):
        pass
    with torch.inference_mode():
        made = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"weight was made under torch\.inference_mode"), moving(made, ["weight"], {}):
        pass
    assert widened_batch(torch.ones(1).half()).dtype == torch.float32
    assert widened_batch(torch.ones(1).double()).dtype == torch.float64
