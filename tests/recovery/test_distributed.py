"""`recover` in several processes of gloo: whole models (DDP) and sharded ones (FSDP2) come to what one process does."""

import copy

import pytest
import torch
from torch import distributed, nn
from torch.distributed.tensor import Shard, distribute_tensor

from secateur import oneshot, pack, sensitivity, shrink
from secateur.recovery import Sampled, recover
from support.families import make
from support.forks import leave_group, on_ranks, prepared_by_accelerate
from support.measured import TwoStage

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not distributed.is_available(), reason="torch was built without torch.distributed"),
]

ASKED = {"steps": 12, "local": 0, "rate": 1e-2}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.blocks = nn.Linear(6, 8), nn.ModuleList(Block() for _ in range(2))
        self.write = nn.Linear(8, 5)

    def forward(self, x):
        x = self.read(x)
        for block in self.blocks:
            x = block(x)
        return self.write(x)


def subjects():
    torch.manual_seed(0)
    teacher = Model().requires_grad_(True)
    model = copy.deepcopy(teacher)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if each.dim() == 2:
                each.mul_(each.abs() > each.abs().median())
                assert bool(each.eq(0).any()), name
    return model, teacher


def batches(rows=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 6, generator=generator) for _ in range(5)]


def of_one(**more):
    model, teacher = subjects()
    done = recover(model, teacher, batches(more.pop("rows", 6)), **ASKED, **more)
    return model.state_dict(), done.losses, done.zeros, done.rows, done.judged


def sharded(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gathered(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_that_of_one(model, done, wanted):
    state, losses, zeros, rows, judged = wanted
    for name, value in model.state_dict().items():
        torch.testing.assert_close(gathered(value), state[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n} {m}")
        assert torch.equal(gathered(value).eq(0), state[name].eq(0)), name
    assert done.losses == pytest.approx(losses, rel=1e-4)
    assert (done.zeros, done.rows) == (zeros, rows)
    assert (done.judged.before, done.judged.after) == pytest.approx((judged.before, judged.after), rel=1e-4)


def as_places(model, batch):
    found = model(batch)[..., None]
    return {"scores": found[:, :3], "boxes": found[:, 3:]}


WAYS = {
    "kl": {"loss": "kl"},
    "mse": {"loss": "mse"},
    "cosine, few rows": {"loss": "cosine", "rows": 3},
    "detector, few rows": {"forward": as_places, "rows": 3},
}


def texts():
    """Token batches with padding; the second process's row of the last has less of it than the first's."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for padded in (0, 1, 5):
        ids = torch.randint(1, 64, (3, 8), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, 8 - padded :] = 0
        found.append({"input_ids": ids, "attention_mask": mask})
    return found


def writers():
    torch.manual_seed(0)
    teacher = make("llama")
    model = copy.deepcopy(teacher)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[::2] = 0
    return model, teacher


TEXT = {"share": 0.5, "adapters": 2, "steps": 6, "local": 0, "rate": 1e-2}


def of_text():
    model, teacher = writers()
    done = recover(model, teacher, texts(), **TEXT)
    return model.state_dict(), done.losses, done.zeros, done.rows, done.judged


SELECTING = {"steps": 6, "local": 0, "rate": 1e-2, "loss": "mse"}


class OneByOne(TwoStage):
    """Selects of each example by itself, so that a process selects as often as it has examples."""

    def select(self, x):
        both = [super(OneByOne, self).select(each[None]) for each in x]
        return tuple(map(torch.cat, zip(*both, strict=True)))


def choosers(kind=TwoStage):
    torch.manual_seed(0)
    teacher = kind()
    model = copy.deepcopy(teacher)
    with torch.no_grad():
        model.score.weight.normal_(std=0.2)
        model.features.weight[::2] = 0
    return model, teacher


def examples():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(3, 17, 6, generator=generator) for _ in range(3)]


def of_choosers():
    model, teacher = choosers()
    done = recover(model, teacher, examples(), **SELECTING)
    assert done.loss == "mse + what selects"
    return model.state_dict(), done.losses, done.zeros, done.rows, done.judged


def in_a_process(rank, folder, ranks, alone):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet{ranks}", rank=rank, world_size=ranks)
    for word, way in WAYS.items():
        way = dict(way)
        given = batches(way.pop("rows", 6))
        model, teacher = subjects()
        wrapped = nn.parallel.DistributedDataParallel(model)
        done = recover(wrapped, teacher, given, **ASKED, **way)
        assert_that_of_one(model, done, alone[word])
        model, teacher = map(sharded, subjects())
        part = model.blocks[0].up.weight
        done = recover(model, teacher, given, **ASKED, **way)
        assert_that_of_one(model, done, alone[word])
        assert model.blocks[0].up.weight is part
        assert part.to_local().numel() == part.numel() // ranks
        torch.testing.assert_close(gathered(model(given[0])), model(given[0]))
    model, teacher = writers()
    assert_that_of_one(model, recover(model, teacher, texts(), **TEXT), alone["text"])
    model, teacher = choosers()
    assert_that_of_one(model, recover(model, teacher, examples(), **SELECTING), alone["selecting"])
    done = recover(*choosers(OneByOne), examples(), **SELECTING)  # no process waits for one that selects less often
    assert done.judged.after < done.judged.before
    if ranks == 2:
        assert_refused(rank)
        model, teacher = subjects()
        prepared = prepared_by_accelerate(rank, model)
        assert_that_of_one(model, recover(prepared, teacher, batches(), **ASKED, **WAYS["kl"]), alone["kl"])
    leave_group()


def assert_whole_alone(model):
    """Verbs that look at whole weights say so of a sharded model, and change nothing."""
    given = batches()
    verbs = {
        "oneshot": lambda: oneshot(model, given, 0.5),
        "shrink": lambda: shrink(model, given[0], 0.3),
        "what makes levels": lambda: sensitivity(model, given),
        "pack": lambda: pack(model, given[0]),
    }
    before = {name: gathered(each).clone() for name, each in model.state_dict().items()}
    for word, verb in verbs.items():
        with pytest.raises(ValueError, match=f"read.weight is sharded over processes, and {word} looks at whole"):
            verb()
    assert all(torch.equal(gathered(each), before[name]) for name, each in model.state_dict().items())


def stopped(number, _loss):
    if number == 3:
        raise ValueError("enough")


def assert_refused(rank):
    """What can't be shared out is one line on every process, and changes nothing."""

    def refused(match, model, teacher, given=None, **more):
        before = {name: gathered(each).clone() for name, each in model.state_dict().items()}
        with pytest.raises(ValueError, match=match):
            recover(model, teacher, batches() if given is None else given, **{**ASKED, "loss": "kl", **more})
        assert all(torch.equal(gathered(each), before[name]) for name, each in model.state_dict().items())

    model, teacher = subjects()
    refused("2 processes train by the outputs alone: pass local=0", model, teacher, local=1)
    refused("batches are shared out|share out batches", model, teacher, Sampled())
    refused("a loss= of your own is taken of a whole batch", model, teacher, loss=lambda ours, theirs, _: ours.sum())
    refused("the processes have other batches", model, teacher, [each + rank for each in batches()])
    refused("no tensor with rows", model, teacher, [(0.5,)] * 3, forward=lambda model, _: model(batches()[0]))
    with torch.no_grad():
        model.write.bias.add_(rank)
    refused(r"the processes hold other weights of one Model \(write.bias\)", model, teacher)
    with torch.no_grad():
        model.write.bias.fill_(torch.nan if rank else 0.0)
    with pytest.raises(ValueError, match=r"write.bias: the weight of shape .5,. has entries that are NaN"):
        recover(model, teacher, batches(), **ASKED)
    model, teacher = map(sharded, subjects())
    refused("the loss of step 1 is nan", model, teacher, [each * 1e38 for each in batches()], loss="mse")
    refused("enough", model, teacher, on_step=stopped)
    refused("adapters= move whole weights, and these are sharded", model, teacher, adapters=2)
    refused("is sharded in torch.bfloat16: shard it in float32", sharded(subjects()[0].bfloat16()), teacher)
    assert_whole_alone(sharded(subjects()[0]))
    alone = subjects()[0]
    mesh = distributed.device_mesh.init_device_mesh("cpu", (2,))
    alone.write.weight = nn.Parameter(distribute_tensor(alone.write.weight.detach(), mesh, [Shard(0)]))
    refused("write.weight is sharded otherwise than by fully_shard over all 2 processes", alone, teacher)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.long
def test_processes_come_to_what_one_comes_to(tmp_path, ranks):
    alone = {word: of_one(**way) for word, way in WAYS.items()} | {"text": of_text(), "selecting": of_choosers()}
    on_ranks(in_a_process, tmp_path, ranks, alone, ranks=ranks)
