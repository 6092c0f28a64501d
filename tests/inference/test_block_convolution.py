"""Convolutions whose zeros are blocks of outputs are the dense ones, and the verbs make such zeros; what a layer can do
beside is tested with `SparseConv2d`."""

import pytest
import torch
from torch import nn

from secateur import Pruner, oneshot, sparsify
from secateur.inference import BlockConv1d, BlockConv2d, SparseConv2d
from secateur.patterns import Block
from secateur.support import to_int8
from support.kernels import at_level, libraries


def network():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, 2), nn.Flatten(), nn.Linear(108, 4)
    )


def fours(weight):
    return weight.ne(0).reshape(weight.shape[0] // 4, 4, -1)


def of_blocks(module, share=0.3):
    with torch.no_grad():
        kept = torch.rand(module.weight.shape[0] // 4, 1, *module.weight.shape[1:]) < share
        module.weight.mul_(kept.repeat_interleave(4, 1).flatten(0, 1))
    return module.requires_grad_(False).eval()


def close(a, b, tolerance=1e-4):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("height", [4, 16])
@pytest.mark.parametrize("verb", ["sparsify", "Pruner", "oneshot"])
def test_the_verbs_make_blocks_of_outputs(verb, height):
    """And a layer stores no zero of them."""
    model, pattern = network(), Block(height, 1)
    if verb == "sparsify":
        sparsify(model, 0.75, pattern=pattern, include="2.weight")
    elif verb == "oneshot":
        oneshot(model, [torch.randn(4, 3, 8, 8)], 0.75, pattern=pattern, include="2.weight")
    else:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        Pruner(model, optimizer, 0.75, pattern=pattern, include="2.weight", total_steps=2)
        for _ in range(2):
            model(torch.randn(4, 3, 8, 8)).square().mean().backward()
            optimizer.step()
    weight = model[2].weight.detach()
    assert torch.equal(fours(weight).any(1), fours(weight).all(1))
    layer = BlockConv2d.from_module(model[2])
    assert layer.values.shape == (weight.count_nonzero() // 4, 4)
    x = torch.randn(2, 8, 8, 8)
    close(layer(x), model[2](x))


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d])
def test_values_in_int8(kind):
    form = BlockConv1d if kind is nn.Conv1d else BlockConv2d
    module = of_blocks(kind(6, 8, 3, padding=1, groups=2))
    x = torch.randn(2, 6, *[9] * (module.weight.dim() - 2))
    layer = form.from_module(module, values="int8")
    numbers, scales = to_int8(module.weight)
    rounded = numbers * scales.view(-1, *[1] * (numbers.dim() - 1))
    assert layer.values.dtype == torch.int8
    assert torch.equal(layer.weight, rounded)
    module.weight.copy_(rounded)
    for name in libraries():
        with at_level(name):
            close(layer(x), module(x))


def test_a_weight_whose_fours_are_not_whole_is_stored_with_zeros():
    module = nn.Conv2d(4, 8, 3).requires_grad_(False)
    module.weight.mul_(torch.rand_like(module.weight) < 0.2)
    layer, x = BlockConv2d.from_module(module), torch.randn(1, 4, 6, 6)
    assert layer.values.numel() == 4 * fours(module.weight).any(1).sum()
    assert torch.equal(layer.weight, module.weight)
    close(layer(x), module(x))


def test_what_is_refused():
    with pytest.raises(ValueError, match="6 outputs of a group are no multiple of the 4 that share places"):
        BlockConv2d.from_module(nn.Conv2d(4, 12, 3, groups=2))
    with pytest.raises(ValueError, match="each output reads one channel"):
        BlockConv2d.from_module(nn.Conv2d(4, 16, 3, groups=4))
    with pytest.raises(ValueError, match="a BlockConv2d takes its inputs as they are; a SparseConv2d rounds them"):
        BlockConv2d.from_module(nn.Conv2d(4, 8, 3), values="int8", inputs="int8")
    stored = SparseConv2d.from_module(nn.Conv2d(4, 8, 3))
    with pytest.raises(ValueError, match=r"indices for values of shape \(\d+,\)"):
        BlockConv2d._from_tensors(dict(stored.named_buffers()), stored._layout())
    stored = BlockConv2d.from_module(nn.Conv2d(4, 8, 3))
    with pytest.raises(ValueError, match=r"indices for values of shape \(\d+, 4\)"):
        SparseConv2d._from_tensors(dict(stored.named_buffers()), stored._layout())
