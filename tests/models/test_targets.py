"""Which matrices of blocks are chosen, and why the others are not."""

from secateur.models import oneshot
from support.stacks import data, stack


def test_weights_that_are_shared():
    model = stack(width=12)
    model.layers[1].down.weight = model.layers[1].up.weight  # one matrix with the inputs of both
    model.layers[2].up.weight = model.layers[0].up.weight
    done = oneshot(model, data(), 0.5)
    tokens = {layer.name: layer.tokens for layer in done.layers}
    assert tokens == {"layers.0.down.weight": 24, "layers.1.up.weight": 48, "layers.2.down.weight": 24}
    assert done.left_alone["shared with another block"] == ("layers.0.up.weight",)
