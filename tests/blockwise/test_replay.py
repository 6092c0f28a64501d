"""What blocks pass on, in memory or in files."""

import torch

from secateur.blockwise import oneshot
from secateur.blockwise.replay import Outputs
from support.stacks import data, stack


def test_activations_in_files_change_nothing(tmp_path):
    one, other = stack(), stack()
    oneshot(one, data(), 0.5)
    oneshot(other, data(), 0.5, activations=tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not list(tmp_path.iterdir())


def test_outputs_in_files_are_those_that_were_saved(tmp_path):
    outputs = Outputs(tmp_path)
    tree = (torch.randn(3, 4).bfloat16().t(), {"bias": torch.arange(3), "none": None}, torch.zeros(0, 2))
    outputs.save("blocks.0", 0, tree)
    outputs.save("blocks.0", 1, (torch.ones(1),))
    found = outputs.load("blocks.0", 0)
    assert torch.equal(found[0], tree[0])
    assert torch.equal(found[1]["bias"], tree[1]["bias"])
    assert found[1]["none"] is None
    assert found[2].shape == (0, 2)
    assert len(list(tmp_path.iterdir())) == 3
    outputs.drop("blocks.0", 0)
    assert not outputs.has("blocks.0", 0)
    assert torch.equal(outputs.load("blocks.0", 1)[0], torch.ones(1))
    outputs.clear()
    assert not list(tmp_path.iterdir())
