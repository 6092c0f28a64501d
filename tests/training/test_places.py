"""The memory that masks act on, wherever it is."""

import pytest
import torch
from torch import nn

from secateur.training.zeros import Place, check_follower
from support.training import SGD, assert_zero_where_removed, network, quiet, removed, run


def test_convolutions_in_channels_last():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 2))
    model = model.to(memory_format=torch.channels_last)
    optimizer = SGD(model.parameters())
    pruner = quiet(model, optimizer, 0.75, total_steps=5)
    for step in range(5):
        inputs = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(inputs.to(memory_format=torch.channels_last)).square().mean().backward()
        optimizer.step()
    assert_zero_where_removed(model, pruner)
    assert pruner._zeros.memory.masks["0.weight"].stride() == model[0].weight.stride()
    total = sum(mask.numel() for mask in pruner.masks.values())
    assert removed(model) == round(0.75 * total)


def test_a_moved_model_is_followed():
    """The weights' memory changes under the same parameters, as when a model is moved to another device."""
    model = network()
    optimizer = SGD(model.parameters())
    pruner = quiet(model, optimizer, 0.8, total_steps=8)
    run(model, optimizer, 4)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    run(model, optimizer, 4, begin=4)
    assert_zero_where_removed(model, pruner)
    assert removed(model) == round(0.8 * (8 * 16 + 16 * 16 + 16 * 4))


def test_a_weight_of_another_shape_than_its_mask_is_named():
    with pytest.raises(ValueError, match=r"a has another shape than when the Pruner was made"):
        Place({"a": torch.ones(2)}).zero({"a": torch.ones(3)})


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(3), r"w has shape \(3,\) in the model that follows, \(2,\) here"),
        (torch.ones(2, device="meta"), "w is of torch.float32 on meta"),
        (torch.ones(2).long(), "w is of torch.int64 on cpu"),
    ],
)
def test_what_cannot_follow_is_refused(weight, message):
    check_follower("w", torch.ones(2).half(), torch.ones(2))
    with pytest.raises(ValueError, match=message):
        check_follower("w", weight, torch.ones(2))
