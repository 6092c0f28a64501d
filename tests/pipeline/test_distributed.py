"""Shards: the same masks as the whole tensor, on two gloo processes, with nothing but counts exchanged."""

import pytest
import torch
import torch.distributed as distributed
from torch import nn

from secateur import Channels, apply_, make_masks, sparsify, sparsity_of
from secateur.allocation import erk, uniform
from support.forks import leave_group, on_ranks

pytestmark = pytest.mark.distributed
RANKS = 2


def weights(kind):
    generator = torch.Generator().manual_seed(7)
    shapes = {"odd": (7, 5), "square": (12, 12), "thin": (1, 30), "conv": (6, 4, 3, 3)}
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if kind == "ties":
        return {name: tensor.mul(2).round() for name, tensor in drawn.items()}
    if kind == "equal":
        return {name: torch.ones_like(tensor) for name, tensor in drawn.items()}
    return drawn


def in_a_process(rank, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    for kind in ("normal", "ties", "equal"):
        whole = weights(kind)
        placements = {"odd": Shard(0), "square": Shard(1), "thin": Shard(0), "conv": Replicate()}
        sharded = {name: distribute_tensor(tensor, mesh, [placements[name]]) for name, tensor in whole.items()}
        sharded["plain"] = whole["plain"] = torch.linspace(-1, 1, 40)
        for sparsity in (0.0, 0.3, 0.7, 0.9, 1.0):
            for options in ({}, {"allocate": uniform}, {"allocate": erk}, {"pattern": Channels()}):
                expected = make_masks(
                    whole if "pattern" not in options else {"square": whole["square"]}, sparsity, **options
                )
                found = make_masks(
                    sharded if "pattern" not in options else {"square": sharded["square"]}, sparsity, **options
                )
                for name, mask in found.items():
                    if name != "plain":
                        assert isinstance(mask, DTensor)
                        assert mask.placements == sharded[name].placements
                        mask = mask.full_tensor()
                    assert torch.equal(mask, expected[name]), (kind, sparsity, options, name)
        changed = {name: tensor.clone() for name, tensor in sharded.items()}
        masks = make_masks(changed, 0.5)
        apply_(changed, masks)
        expected = make_masks(whole, 0.5)
        for name in expected:
            tensor = changed[name] if name == "plain" else changed[name].full_tensor()
            assert torch.equal(tensor, whole[name] * expected[name])

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 13), nn.ReLU(), nn.Linear(13, 5))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(9, 13), nn.ReLU(), nn.Linear(13, 5))
    fully_shard(model, mesh=mesh)
    masks, expected = sparsify(model, 0.6), sparsify(plain, 0.6)
    assert all(torch.equal(masks[name].full_tensor(), expected[name]) for name in expected)
    assert sparsity_of(model) == sparsity_of(plain) == sparsity_of(masks) == sparsity_of(expected)
    batch = torch.randn(3, 9)
    assert torch.allclose(model(batch), plain(batch))
    with pytest.raises(ValueError, match="a score is NaN"):
        make_masks({"w": distribute_tensor(torch.full((4, 4), torch.nan), mesh, [Shard(0)])}, 0.5)
    leave_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.long
def test_shards_give_the_masks_of_the_whole(tmp_path):
    on_ranks(in_a_process, str(tmp_path), ranks=RANKS)
