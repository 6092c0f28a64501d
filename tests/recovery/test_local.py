"""Block by block: nearer to the teacher or as it was, one block at a time, and the rest of the model as it is."""

import copy

import pytest
import torch
from torch import nn

from secateur import sparsify
from secateur.models import find_blocks
from secateur.recovery import recover, recovering
from secateur.recovery.local import of_one_block, share_lost
from support.families import EVERY_FAMILY, batches, make


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_every_part_comes_nearer_or_stays(family):
    teacher = make(family)
    model = copy.deepcopy(teacher)
    sparsify(model, 0.5)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    done = recover(model, teacher, batches(family), steps=0, local=2)
    assert not done.left_out
    blocks = find_blocks(model)
    assert {part.block for part in done.parts} == set(blocks)
    assert all(part.after <= part.before for part in done.parts)
    assert sum(part.after < part.before for part in done.parts) > len(done.parts) // 2
    assert all(was == now for was, now in done.zeros.values())
    assert len(done.zeros) > 2
    inside = tuple(f"{name}." for name in blocks)
    for name, each in model.state_dict().items():
        if not name.startswith(inside):
            assert torch.equal(each, before[name]), f"{name} is in no block"


def test_a_token_counts_by_its_share():
    wanted = torch.randn(2, 3, 4)
    ours = wanted + torch.randn(2, 3, 4)
    big = wanted * torch.tensor([1.0, 1e4, 1.0])[:, None], ours * torch.tensor([1.0, 1e4, 1.0])[:, None]
    assert torch.allclose(share_lost(ours, wanted), share_lost(big[1], big[0]))
    mask = torch.tensor([[True, True, False]] * 2)
    assert torch.allclose(share_lost(ours, wanted, mask), share_lost(ours[:, :2], wanted[:, :2]))
    assert float(share_lost(wanted, wanted)) == 0
    assert torch.isfinite(share_lost(torch.zeros(1, 2), torch.zeros(1, 2)))


def test_what_blocks_share_is_not_for_one_of_them_to_move():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(3)))
    model[1][0].weight = model[0][0].weight
    model.head = model[2][0].weight
    names = [name for name, _ in model.named_parameters()]
    assert of_one_block(model, ["0", "1", "2"], names) == {"0.0.bias", "1.0.bias", "2.0.bias"}


def test_other_stacks_and_widths_are_left_out_and_the_outputs_compared():
    teacher = make("llama")
    config = copy.deepcopy(teacher.config)
    config.num_hidden_layers = 1
    config.layer_types = None
    fewer = type(teacher)(config)
    tokens = [{"input_ids": torch.randint(3, 64, (2, 8))}]
    done = recover(fewer, teacher, tokens, steps=2)
    assert done.left_out == (
        "the local part, since the model has 1 blocks and the teacher 2, and the weights do not say which of these "
        "model.layers.0 was",
    )
    assert done.steps == 2
    config = copy.deepcopy(teacher.config)
    config.hidden_size = 12
    config.head_dim = 4
    narrower = type(teacher)(config)
    done = recover(narrower, teacher, tokens, steps=2)
    assert "what model.layers.0 passes on has shape (2, 8, 12) here, and (2, 8, 16) in the teacher" in done.left_out[0]
    network = nn.Linear(4, 4)
    done = recover(network, nn.Linear(4, 4), [torch.randn(2, 4)], steps=1, loss="mse")
    assert "has no repeated blocks" in done.left_out[0]


@pytest.mark.parametrize("listed", [True, False])
def test_of_a_list_the_batches_are_spread_over_it(listed, monkeypatch):
    monkeypatch.setattr(recovering, "LOCAL_BATCHES", 4)
    teacher = make("llama")
    model = copy.deepcopy(teacher)
    sparsify(model, 0.5)
    tokens = [{"input_ids": torch.randint(3, 64, (2, length))} for length in range(3, 11)]
    seen = set()

    def forward(each, batch):
        seen.add(batch["input_ids"].shape[1])
        return each(**batch)

    loader = torch.utils.data.DataLoader(tokens, batch_size=None)
    recover(model, teacher, tokens if listed else loader, steps=0, forward=forward)
    assert seen == ({3, 5, 7, 9} if listed else {3, 4, 5, 6})


def test_a_block_that_runs_twice_is_left_out():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU())])

        def forward(self, x):
            return self.layers[0](self.layers[0](x))

    done = recover(Twice(), Twice(), [torch.randn(2, 4)], steps=1, loss="mse")
    assert "runs more than once in a forward pass" in done.left_out[0]


def test_an_error_of_the_models_own_is_none_to_go_on_after():
    model, teacher = make("llama"), make("llama")
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        recover(model, teacher, [{"nonsense": torch.ones(1)}], steps=0)
