"""Blocks are found by structure."""

import copy

import torch
from torch import nn

from secateur.models import oneshot
from secateur.models.blocks import find_blocks
from support.families import make
from support.stacks import Block2, stack


def test_blocks():
    assert list(find_blocks(stack())) == ["layers.0", "layers.1", "layers.2"]
    assert list(find_blocks(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))) == ["0", "2"]
    mixed = nn.ModuleList([Block2(), nn.Sequential(nn.Linear(8, 8))])
    assert list(find_blocks(nn.ModuleDict({"layers": mixed}))) == ["layers.0", "layers.1"]
    plain = nn.Sequential(nn.Embedding(9, 8), Block2(), Block2(), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), Block2())
    assert list(find_blocks(plain)) == ["1", "2", "4"]
    assert list(find_blocks(nn.Sequential(plain, nn.Linear(8, 9)))) == ["0.1", "0.2", "0.4"]
    t5 = make("t5")
    assert list(find_blocks(t5)) == ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]


def test_a_plain_sequential_whose_blocks_stand_between_other_layers():
    model = nn.Sequential(nn.Embedding(9, 8), Block2(), Block2(), nn.Linear(8, 9))
    whole = copy.deepcopy(model)
    done = oneshot(model, [torch.randint(9, (4, 6)) for _ in range(3)], 0.5)
    assert done.left_alone == {"outside the blocks": ("0.weight", "3.weight")}
    assert {layer.name.split(".")[0] for layer in done.layers} == {"1", "2"}
    for layer in done.layers:
        assert (model.get_parameter(layer.name) == 0).double().mean() == 0.5
    for outside in (0, 3):
        assert torch.equal(model[outside].weight, whole[outside].weight)
