"""The walk: a block is pruned by what the pruned blocks before it pass on."""

import pytest
import torch
from torch import nn

from secateur import NM, Rows
from secateur.models import oneshot
from secateur.solvers import sparsegpt
from support.stacks import WANDA, Block2, data, stack


@pytest.mark.parametrize("solver", [sparsegpt, WANDA], ids=["sparsegpt", "wanda"])
def test_each_block_is_pruned_by_what_the_pruned_blocks_before_it_pass_on(solver):
    model, by_hand = stack(), stack()
    oneshot(model, data(), 0.5, solver=solver, pattern=Rows(), stages=False)
    x = by_hand.enter(torch.cat(data())).detach()
    with torch.no_grad():
        for layer in by_hand.layers:
            hidden = layer.up(x).relu()  # both of a block's weights see its inputs in the dense block
            for module, inputs in ((layer.up, x), (layer.down, hidden)):
                words = {"gram": inputs.T @ inputs} if solver is sparsegpt else {"input_norm": inputs.norm(dim=0)[None]}
                module.weight.copy_(solver(module.weight, 0.5, Rows(), **words)[0])
            x = layer(x)
    for (name, one), other in zip(model.state_dict().items(), by_hand.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)


def test_a_pattern_that_no_weight_fits():
    model = nn.Sequential(Block2(), Block2())
    with pytest.raises(ValueError, match=r"no weight fits 2:5, such as 0\.up\.weight of shape \(12, 8\)"):
        oneshot(model, [torch.randn(3, 8)], pattern=NM(2, 5))
