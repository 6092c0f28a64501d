"""The statistics are the averages of the batches', and nothing else changes."""

import copy

import pytest
import torch
import torch.distributed as distributed
from torch import nn

from secateur.pipeline import reestimate_batchnorm
from secateur.pipeline.batch_normalization import batchnorms
from support.forks import leave_group, on_ranks


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5)
    )


def images(count=3, size=4):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 3, 8, 8, generator=generator) * (1 + number) for number in range(count)]


def test_statistics_are_averages_over_the_batches():
    model, batches = network(), images()
    reestimate_batchnorm(model, iter(batches))
    inputs = [model[0](batch).movedim(1, 0).flatten(1) for batch in batches]
    torch.testing.assert_close(model[1].running_mean, torch.stack([x.mean(1) for x in inputs]).mean(0))
    torch.testing.assert_close(model[1].running_var, torch.stack([x.var(1) for x in inputs]).mean(0))
    assert model[1].num_batches_tracked == 3


def test_what_moved_is_told():
    model, batches = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(1)), [torch.tensor([[1.0, 2.0], [3.0, 2.0]])]
    model[0].running_mean.copy_(torch.tensor([2.0, 0.0]))
    model[0].running_var.copy_(torch.tensor([0.5, 4.0]))
    model[0].eps = 1e-12
    told = reestimate_batchnorm(model, batches, forward=lambda model, batch: model[0](batch))
    assert (told.batches, told.unreached) == (1, ("1",))
    [layer] = told.layers
    assert (layer.name, layer.channels) == ("0", 2)
    assert layer.mean == pytest.approx((1 / 2) ** 0.5)  # by none, and by one of its two
    assert layer.variance == pytest.approx(2.0)  # four times, and nothing of what became 0 times
    torch.testing.assert_close(model[0].running_var, torch.tensor([2.0, 0.0]))
    assert str(told).splitlines() == [
        "BatchNorm  Channels  Mean moved by σ  Variance times",
        "0                 2            0.707               2",
        "",
        "1 re-estimated from 1 batches.",
        "1: not reached, and left as it was.",
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_everything_else_stays(fails):
    model = network()
    model[1].eval()
    model[5].momentum = 0.3
    model[0].weight.grad = torch.ones_like(model[0].weight)
    momenta = [module.momentum for module in batchnorms(model).values()]
    modes = [module.training for module in model.modules()]
    weights = copy.deepcopy(dict(model.named_parameters()))
    statistics, generator = copy.deepcopy(dict(model.named_buffers())), torch.get_rng_state()
    buffers = {name: id(buffer) for name, buffer in model.named_buffers()}
    if fails:
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            reestimate_batchnorm(model, [*images(), torch.ones(1, 3, 5, 5)])
        assert all(torch.equal(buffer, statistics[name]) for name, buffer in model.named_buffers())
    else:
        reestimate_batchnorm(model, images())
        assert not torch.equal(model[1].running_mean, statistics["1.running_mean"])
    assert [module.momentum for module in batchnorms(model).values()] == momenta == [0.1, 0.3]
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())
    assert model[0].weight.grad.eq(1).all()
    assert model[4].weight.grad is None
    assert torch.equal(torch.get_rng_state(), generator)
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == buffers


def test_what_the_batches_never_reach_keeps_its_statistics():
    model = nn.ModuleDict({"used": nn.BatchNorm1d(2), "unused": nn.BatchNorm1d(2)})
    model["unused"].running_mean.fill_(7)
    reestimate_batchnorm(model, [torch.randn(4, 2) + 9], forward=lambda m, batch: m["used"](batch))
    assert model["unused"].running_mean.eq(7).all()
    assert model["used"].running_mean.gt(5).all()


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "there are no batches"),
        ([torch.full((4, 3, 8, 8), torch.inf)], "1: the statistics of the batches are not finite"),
    ],
)
def test_messages(batches, message):
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        reestimate_batchnorm(model, batches)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_model_without_any_is_warned_of():
    with pytest.warns(UserWarning, match="Linear has no BatchNorm with running statistics"):
        reestimate_batchnorm(nn.Linear(2, 2), [])


def on_each_rank(rank, folder):
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    batches, expected = images(4), network()
    reestimate_batchnorm(expected, batches)
    model = nn.parallel.DistributedDataParallel(network())
    reestimate_batchnorm(model.module if rank else model, batches[2 * rank : 2 * rank + 2])
    for name, buffer in model.module.named_buffers():
        if "num_batches" not in name:
            torch.testing.assert_close(buffer, expected.get_buffer(name))
    leave_group()


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore")
def test_ranks_agree(tmp_path):
    on_ranks(on_each_rank, str(tmp_path))
