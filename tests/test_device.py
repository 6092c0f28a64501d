"""Every verb on a device that is not the CPU gives what it gives on the CPU, from memory and from a directory.

Law: tests run on each device that is there: on the stand-in, where a C++ compiler is, whose results are the CPU's but
for the order of a few sums; and on a GPU. A tensor of the CPU that meets one of the device is an error on both.
"""

import copy
import ctypes
import os
import runpy
import shutil
import signal
import tempfile
import traceback
import warnings
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from benchmarks.oneshot.device import device_memory
from secateur import (
    Pruner,
    env,
    fit,
    load_compressed,
    oneshot,
    pack,
    recover,
    sensitivity,
    shrink,
    sparsify,
)
from secateur.coupling import find_coupling
from support import device as of_devices
from support.device import CPU, DEVICES, TOLERANCE, distance, let_go, on_device
from support.forks import forked

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
each_device = pytest.mark.parametrize("device", DEVICES)
standin_only = pytest.mark.parametrize("device", [name for name in DEVICES if name == "standin"])


@pytest.fixture(scope="module", autouse=True)
def _no_longer():
    yield
    let_go()


# ----------------------------------------------------------------------------------------------- what the device is


def meets_the_cpu(device):
    here, there = torch.ones(3), torch.ones(3, device=device)
    for wrong in (
        lambda: here + there,
        lambda: there.mul_(here),
        lambda: here.add_(there),
        lambda: torch.cat([here, there]),
        lambda: torch.stack([here, there]),
        lambda: nn.Linear(3, 2).to(device)(here),
        lambda: nn.Conv1d(3, 2, 1).to(device)(torch.ones(1, 3, 4)),
        lambda: there.index_select(0, torch.tensor([0])),
        lambda: torch.where(here > 0, there, there),
    ):
        with pytest.raises(RuntimeError, match=r"device|should be the same"):
            wrong()
    # what a GPU takes, too: single numbers and indices
    assert (there + torch.tensor(2.0)).tolist() == [3, 3, 3]
    assert there[torch.tensor([0, 2])].tolist() == [1, 1]
    with pytest.raises(TypeError, match="convert"):
        there.numpy()


def test_without_a_compiler_there_is_no_standin(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "standin" not in runpy.run_path(of_devices.__file__)["DEVICES"]


@each_device
def test_tensors_of_two_devices_do_not_meet(device):
    on_device(device, meets_the_cpu)


def reads_its_memory(device):
    status = forked(lambda: ctypes.string_at(torch.ones(3, device=device).data_ptr(), 4))
    assert os.WTERMSIG(status) == signal.SIGSEGV


@standin_only
def test_its_memory_cannot_be_read_from_elsewhere(device):
    on_device(device, reads_its_memory)


def is_a_device(device):
    x = torch.arange(24.0).reshape(2, 3, 4).to(device)
    assert x.transpose(0, 2)[1:, ::2].contiguous().tolist() == torch.arange(24.0).reshape(2, 3, 4).T[1:, ::2].tolist()
    view = x[0]
    view[1] = -1.0
    assert x.cpu()[0, 1].tolist() == [-1.0] * 4
    norm = copy.deepcopy(nn.BatchNorm1d(3)).to(device)
    norm(x)
    assert float(norm.running_mean.sum()) != 0.0
    y = (x * 2).requires_grad_()
    (y.softmax(-1) * x).sum().backward()
    assert y.grad.device == x.device
    assert torch.equal(y.grad.cpu(), slope_on_the_cpu(x.cpu()))


def slope_on_the_cpu(x):
    y = (x * 2).requires_grad_()
    (y.softmax(-1) * x).sum().backward()
    return y.grad


@standin_only
def test_it_computes_as_the_cpu(device):
    on_device(device, is_a_device)


def draws_and_waits(device):
    torch.manual_seed(3)
    of_device, here = torch.get_device_module(device), torch.get_rng_state()
    first, state = torch.rand(3, device=device), of_device.get_rng_state(device)
    dropped = nn.functional.dropout(torch.ones(64, device=device))
    assert torch.equal(torch.get_rng_state(), here), "the CPU's generator stays where it is"
    of_device.set_rng_state(state, device)
    assert torch.equal(nn.functional.dropout(torch.ones(64, device=device)), dropped)
    with torch.random.fork_rng([0], device_type=device.type):
        inside = torch.randn(4, device=device)
    assert torch.equal(torch.randn(4, device=device), inside)
    drawn = torch.randperm(9, generator=torch.Generator(device).manual_seed(5), device=device)
    assert torch.equal(torch.randperm(9, generator=torch.Generator(device).manual_seed(5), device=device), drawn)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(3, device=device), first)
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, generator=torch.Generator(), device=device)

    batch = torch.arange(4.0).pin_memory()
    assert (batch[1:].is_pinned(), torch.ones(2).is_pinned()) == (True, False)
    if device.type == "standin":  # which is late for sure
        there = batch.to(device, non_blocking=True)
        batch.zero_()
        assert there.tolist() == [0.0] * 4
        back = torch.ones(4, device=device).to("cpu", non_blocking=True)
        assert not back.isfinite().any()
        torch.accelerator.synchronize()
        assert back.tolist() == [1.0] * 4
    model = nn.Linear(4, 4).to(device)
    sparsify(model, 0.5, criterion="wanda", batches=[torch.randn(8, 4).pin_memory()])
    assert int((model.weight == 0).sum()) == 8


@each_device
def test_it_draws_from_a_generator_of_its_own_pins_memory_and_is_late(device):
    on_device(device, draws_and_waits)


# ------------------------------------------------------------------------------------------------------- every verb


def check(device, verb):
    raised = []

    def keep():
        raised.append(traceback.format_exc())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(env, "_CHECKS", {verb: env._CHECKS[verb]})
        (row,) = env.checked(device, on_error=keep)
    assert row.holds, "".join([str(row), *raised])
    if device.type == "standin" and not row.says.startswith("left out"):
        assert row.memory > 0
        assert row.distance <= TOLERANCE.get(verb, (0.0,))[0], row.distance


@each_device
@pytest.mark.parametrize("verb", env._CHECKS)
def test_a_verb_gives_what_it_gives_on_the_cpu(device, verb):
    on_device(device, check, verb)


def of_directories(device):
    warnings.simplefilter("ignore")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}

    def verb(each):
        found = {}
        with tempfile.TemporaryDirectory() as folder:
            dense, sparse, small, better = (Path(folder) / name for name in ("dense", "sparse", "small", "better"))
            MixtralForCausalLM(MixtralConfig(vocab_size=64, **sizes, **experts)).save_pretrained(dense)
            batches = env._tokens(2)
            shrink(dense, leave="experts:25%", batches=batches, out=small, device=each)
            oneshot(dense, batches, 0.5, solver="wanda", out=sparse, device=each, activations=Path(folder))
            recover(sparse, dense, batches, steps=3, local=1, out=better, device=each, teacher_on_disk=True)
            for out in (small, sparse, better):
                found |= {f"{out.name} {name}": value for name, value in dict(load_compressed(out)).items()}
        return found

    assert distance(device, verb) <= 0.02


@each_device
def test_experts_activations_on_disk_and_a_teacher_on_disk(device):
    on_device(device, of_directories)


class OnTwo(nn.Module):
    """Its last blocks are on another device than the first."""

    def __init__(self, device):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(3))
        for layer in self.layers[1:]:
            layer.to(device)

    def forward(self, x):
        for layer in self.layers:
            x = x.to(layer[0].weight.device)
            x = x + layer(x)
        return x


def on_two_devices(device):
    batches = [torch.randn(32, 16) for _ in range(3)]
    for verb in (
        lambda model: sparsify(model, 0.5, criterion="wanda", batches=batches),
        lambda model: oneshot(model, batches, 0.5),
        lambda model: shrink(model, sparsity=0.3, batches=batches),
        lambda model: recover(model, copy.deepcopy(model), batches, steps=2, local=1),
    ):

        def made(each, verb=verb):
            model = OnTwo(each)
            verb(model)
            assert {weight.device.type for weight in model.layers[2].parameters()} == {each.type}
            return model.state_dict()

        assert distance(device, made) <= 0.02


@each_device
def test_a_model_on_two_devices(device):
    on_device(device, on_two_devices)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def of_blocks():
    return nn.Sequential(OrderedDict((f"block{at}", Block()) for at in range(3)))


def trained(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    Pruner(model, optimizer, 0.5, total_steps=3, verbose=False)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


IN_MEMORY = {
    "sparsify": lambda model, batches: sparsify(model, 0.5, criterion="wanda", batches=batches),
    "oneshot": lambda model, batches: oneshot(model, batches, 0.5),
    "shrink": lambda model, batches: shrink(model, sparsity=0.3, batches=batches),
    "shrink, no data": lambda model, batches: shrink(model, batches[0], sparsity=0.3),
    "recover": lambda model, batches: recover(model, copy.deepcopy(model), batches, steps=2, local=1),
    "fit": lambda model, batches: fit(model, batches, budget={"params": 0.7}, shares=(0.25, 0.5), finals=1),
    "sensitivity": lambda model, batches: sensitivity(model, batches, shares=(0.5,)),
    "pack": lambda model, batches: pack(model, batches[0], at_least=1e-6, kernels_too=False),
    "Pruner": trained,
}


def by_device_map(device):
    batches, places = [torch.randn(32, 16) for _ in range(3)], {"cpu": CPU, str(device): device}
    devices = {"block0": "cpu", "block1": str(device), "block2": str(device)}
    for name, verb in IN_MEMORY.items():

        def made(each, verb=verb):
            model = of_blocks()
            if each is device:
                model = dispatch_model(model, devices, main_device="cpu", force_hooks=True)
            if verb is IN_MEMORY["pack"]:
                sparsify(model, 0.75, pattern="columns:8")
            done = verb(model, batches)
            for block, place in devices.items():
                kinds = {weight.device.type for weight in model.get_submodule(block).parameters()}
                assert kinds <= {places[place].type if each is device else "cpu"}, (name, block)
            scores = {name: torch.tensor(score) for name, score in getattr(done, "scores", {}).items()}
            return model.state_dict() | scores | {"outputs": model(batches[0])}

        # AdamW of `recover` makes sums in another order large where a slope is nearly zero
        assert distance(device, made) <= (1e-2 if name == "recover" else 1e-6), name


@each_device
def test_a_model_that_a_device_map_spreads(device):
    on_device(device, by_device_map)


def by_what_offloads(device):
    batches = [torch.randn(32, 16) for _ in range(3)]
    verbs = IN_MEMORY | {"find_coupling": lambda model, batches: find_coupling(model, batches[0])}
    for rest in ("disk", "cpu"):
        model, devices = of_blocks(), {"block0": rest, "block1": str(device), "block2": str(device)}
        wanted = model(batches[0])
        with tempfile.TemporaryDirectory() as folder:
            model = dispatch_model(model, devices, offload_dir=folder)
            for name, verb in verbs.items():
                said = r"^block0\.up\.weight is on the meta device .*, without a device_map that offloads them\.$"
                with pytest.raises(ValueError, match=said):
                    verb(model, batches)
                assert torch.allclose(model(batches[0]).cpu(), wanted, atol=1e-6), name
            assert model.block0.up.weight.is_meta


@each_device
def test_what_a_device_map_offloads_is_refused(device):
    on_device(device, by_what_offloads)


def memory(device):
    warnings.simplefilter("ignore")
    shallow, deep = device_memory(str(device), width=64, depths=[2, 4], tokens=16, verbs=["oneshot"])
    assert deep["model"] > 1.4 * shallow["model"]
    assert deep["oneshot"] <= 1.05 * shallow["oneshot"]


@each_device
@pytest.mark.long
def test_the_memory_of_a_device_does_not_grow_with_depth(device):
    on_device(device, memory)
