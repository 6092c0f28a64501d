"""What blocks pass on, in memory or in files."""

import pytest
import torch
from torch import nn

from secateur.models import oneshot
from support.stacks import data, stack


def test_activations_in_files_change_nothing(tmp_path):
    one, other = stack(), stack()
    oneshot(one, data(), 0.5)
    oneshot(other, data(), 0.5, activations=tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not list(tmp_path.iterdir())


class Writing(nn.Module):
    """Writes to what its blocks return, or makes new tensors."""

    def __init__(self, in_place):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.in_place = in_place

    def forward(self, x):
        for block in self.blocks:
            y = block(x)
            x = y.zero_().add_(x) if self.in_place == "overwrites" else y.add_(1) if self.in_place else y + 1
        return x


@pytest.mark.parametrize("inference", [False, True])
def test_a_model_may_write_to_what_its_blocks_return(inference):
    """What stands for the outputs of blocks behind serves all of them, and is made anew when it was written to."""
    one, other = Writing(in_place=False), Writing(in_place=True)
    batches = [torch.randn(12, 6) for _ in range(3)]
    with torch.inference_mode(inference):
        for model in (one, other):
            if inference:
                for name, parameter in list(model.named_parameters()):
                    owner, key = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
                    setattr(owner, key, nn.Parameter(parameter.detach().clone(), requires_grad=False))
            oneshot(model, batches, 0.5)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert any((parameter == 0).any() for parameter in one.parameters())


def test_what_is_written_over_is_not_taken_for_what_was_lost():
    """Every block's output is overwritten with what reached it, so that nothing of it is needed."""
    model = Writing(in_place="overwrites")
    oneshot(model, [torch.randn(12, 6) for _ in range(2)], 0.5)
    assert all((block[0].weight == 0).float().mean() == 0.5 for block in model.blocks)
