"""Pruning while training on two gloo processes: replicated (DDP) and sharded (FSDP2), the masks of one process."""

import pytest
import torch
import torch.distributed as distributed
from torch import nn

from secateur import Pruner, criteria, regrowth, schedules
from secateur.allocation import erk
from secateur.training import growing
from support.forks import leave_group, on_ranks

pytestmark = pytest.mark.distributed
RANKS = 2
STEPS = 8
RULES = {
    "lamp": {"schedule": 0.8},
    "magnitude": {"schedule": 0.8, "criterion": criteria.magnitude},
    "random": {"schedule": 0.8, "criterion": criteria.random},
    "rigl": {"schedule": schedules.constant(0.7), "allocate": erk, "regrow": regrowth.rigl(until=1.0), "every": 2},
    "movement": {"schedule": 0.8, "criterion": criteria.movement},
    "growing penalty": {"regularize": growing(0.5, torch.zeros(2, 7))},
    "snip of batches": {"schedule": 0.8, "criterion": criteria.snip, "loss": nn.functional.mse_loss},
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def batch(step):
    inputs = torch.randn(8, 7, generator=torch.Generator().manual_seed(step))
    return inputs, inputs[:, :3].flip(1) * inputs[:, 3:6]


def train(model, optimizer, rank=None, begin=0):
    for step in range(begin, STEPS):
        inputs, targets = batch(step)
        if rank is not None:
            inputs, targets = inputs[rank::RANKS], targets[rank::RANKS]
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()


def optimizer_for(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def gathered(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def in_a_process(rank, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    for rule, options in RULES.items():
        model = network()
        replicated = nn.parallel.DistributedDataParallel(model)
        optimizer = optimizer_for(replicated)
        torch.manual_seed(rank)  # a rank's own random numbers
        if "loss" in options:  # what a rank sees differs; what it chooses does not
            options = {**options, "batches": [tuple(part[rank::RANKS] for part in batch(step)) for step in range(3)]}
        pruner = Pruner(replicated, optimizer, total_steps=STEPS, verbose=False, **options)
        assert list(pruner.masks) == ["0.weight", "2.weight", "4.weight"]
        train(replicated, optimizer, rank)
        for name, mask in pruner.masks.items():
            both = [torch.empty_like(mask) for _ in range(RANKS)]
            distributed.all_gather(both, mask)
            assert torch.equal(*both), (rule, name)
            assert (model.get_parameter(name)[~mask] == 0).all()
        for name, weight in model.named_parameters():
            both = [torch.empty_like(weight) for _ in range(RANKS)]
            distributed.all_gather(both, weight.detach())
            assert torch.equal(*both), (rule, name)

        if "regularize" in options:
            alone = network()
            its_optimizer = optimizer_for(alone)
            its_pruner = Pruner(alone, its_optimizer, total_steps=STEPS, verbose=False, **options)
            train(alone, its_optimizer)
            assert 0 < pruner.metrics()["leaving"] == its_pruner.metrics()["leaving"]
            fully_shard(alone, mesh=mesh)
            with pytest.raises(ValueError, match="is sharded: a unit's entries lie on several ranks"):
                Pruner(alone, optimizer_for(alone), total_steps=STEPS, verbose=False, **options)
        if "loss" in options or "regularize" in options:
            continue
        sharded = network()
        for part in (sharded[0], sharded[2], sharded):
            fully_shard(part, mesh=mesh)
        its_optimizer = optimizer_for(sharded)
        its_pruner = Pruner(sharded, its_optimizer, total_steps=STEPS, verbose=False, **options)
        train(sharded, its_optimizer, rank)
        masks = {name: gathered(mask) for name, mask in its_pruner.masks.items()}
        assert all(hasattr(mask, "placements") for mask in its_pruner.masks.values())
        total = sum(mask.numel() for mask in masks.values())
        assert sum(int(mask.sum()) for mask in masks.values()) == total - round(pruner.schedule(STEPS) * total)
        for name, mask in masks.items():
            assert (gathered(sharded.get_parameter(name))[~mask] == 0).all(), (rule, name)
        # the same decisions from the same weights: those of the whole model
        for name, mask in pruner.masks.items():
            assert torch.equal(mask, masks[name]), (rule, name)
        assert its_pruner.metrics() == pruner.metrics()

        # the state fits one process as well as two
        state = its_pruner.state_dict()
        single = network()
        its_optimizer = optimizer_for(single)
        alone = Pruner(single, its_optimizer, total_steps=STEPS, verbose=False, **options)
        alone.load_state_dict(state)
        assert alone.metrics() == its_pruner.metrics()
        for name, mask in alone.masks.items():
            assert torch.equal(mask, masks[name])
        its_pruner.load_state_dict(alone.state_dict())
        assert its_pruner.metrics() == alone.metrics()
    leave_group()


@pytest.mark.long
def test_replicas_and_shards_choose_what_one_process_would(tmp_path):
    on_ranks(in_a_process, str(tmp_path), ranks=RANKS)
