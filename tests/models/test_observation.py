"""What meets a block's weights when batches run: every batch, all of it finite, and nothing computed in vain."""

import pytest
import torch
from torch import nn

from secateur.models import oneshot
from secateur.solvers import sparsegpt
from support.stacks import MAGNITUDE, WANDA, Block2, Stack, data


@pytest.mark.parametrize("solver", [sparsegpt, WANDA, MAGNITUDE])
def test_inputs_that_are_infinite_are_an_error_that_names_the_weight(solver):
    batches = [*data(), torch.full((2, 5), torch.inf)]

    class Enters(Stack):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x.repeat(1, 2)[:, :8])
            return x

    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"layers\.0\.up\.weight: what it is multiplied with holds NaN or infinity"):
        oneshot(Enters(), batches, 0.5, solver=solver)


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = self.layers[0](x)
        if x.shape[0] > 2:
            x = self.layers[1](x)
        return self.layers[2](x)


def test_a_block_that_some_batches_do_not_run():
    with pytest.raises(ValueError, match=r"batch 1 does not run layers\.1"):
        oneshot(Sometimes(), [torch.randn(3, 4), torch.randn(2, 4)], 0.5)
    done = oneshot(Sometimes(), [torch.randn(2, 4)], 0.5)
    assert done.left_alone["in a block that the batches never ran"] == ("layers.1.weight",)


class Twice(Block2):
    """The last product is one that was there before, with another input."""

    def forward(self, x):
        return super().forward(super().forward(x))


@pytest.mark.parametrize("kind", [Block2, Twice])
def test_products_that_nothing_needs_are_not_computed(kind):
    torch.manual_seed(0)
    blocks, computed = nn.ModuleList(kind() for _ in range(2)), {}
    for name, module in blocks.named_modules():
        if isinstance(module, nn.Linear):
            computed[name] = 0
            module.register_forward_hook(lambda *_, name=name: computed.__setitem__(name, computed[name] + 1))
    model = nn.Sequential(*blocks)
    found = [torch.randn(3, 8) for _ in range(5)]
    inputs = [x.clone() for x in found]
    if kind is Twice:
        inputs += [blocks[0].down(blocks[0].up(x).relu()) + x for x in found]
    tokens = torch.cat(inputs)
    expected = tokens.T @ tokens
    computed |= dict.fromkeys(computed, 0)
    grams = []
    oneshot(
        model, found, 0.5, solver=lambda w, s, p, *, gram: grams.append(gram) or sparsegpt(w, s, p, gram=gram),
        stages=False,
    )  # fmt: skip
    torch.testing.assert_close(grams[0].cpu(), expected)
    if kind is Twice:
        assert computed == {"0.up": 22, "0.down": 22, "1.up": 12, "1.down": 12}
    else:  # one batch to see that no block runs twice; then each is seen and, before the last block, handed on
        assert computed == {"0.up": 11, "0.down": 7, "1.up": 6, "1.down": 2}
