"""Pruning with two ranks: parameters sharded by ``fully_shard``, and copied by DistributedDataParallel (row 17)."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from secateur import prune
from secateur.support import times_the_mean
from support.forks import leave_group, on_ranks

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not distributed.is_available(), reason="torch was built without torch.distributed"),
]


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def start(rank: int, port: int, body: Callable[[int], None]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    body(rank)
    leave_group()


def on_two_ranks(body: Callable[[int], None]) -> None:
    on_ranks(start, free_port(), body)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5), nn.LayerNorm(5))


def whole(t: Any) -> Tensor:
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach()


def pairs(net: nn.Sequential) -> list[tuple[nn.Module, str]]:
    return [(net[0], "weight"), (net[2], "weight"), (net[3], "weight")]


def train(net: nn.Module, steps: int = 2) -> Tensor:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        net(x).square().sum().backward()
        for each in net.parameters():
            each.grad.div_(times_the_mean(each))
        optimizer.step()
    return net(x).detach()


METHODS: dict[str, Callable[[nn.Sequential], Any]] = {
    "l1": lambda net: [prune.l1_unstructured(module, name, 0.4) for module, name in pairs(net)],
    "random": lambda net: [prune.random_unstructured(module, name, 0.4) for module, name in pairs(net)],
    "ln": lambda net: [prune.ln_structured(net[i], "weight", 2, 2, 0) for i in (0, 2)],
    "random structured": lambda net: [prune.random_structured(net[i], "weight", 2, 1) for i in (0, 2)],
    "global": lambda net: prune.global_unstructured(pairs(net), prune.L1Unstructured, amount=0.4),
    "global random": lambda net: prune.global_unstructured(pairs(net), prune.RandomUnstructured, amount=0.4),
    "mask": lambda net: prune.custom_from_mask(net[0], "weight", torch.eye(9, 6)),
}


def sharded_after_wrapping(rank: int) -> None:
    """fully_shard first: parameters are DTensors, and so are the masks."""
    from torch.distributed.fsdp import fully_shard

    for label, method in METHODS.items():
        reference, net = model(), model()
        for layer in (net[0], net[2]):
            fully_shard(layer)
        fully_shard(net)
        kinds = [type(layer) for layer in net]
        # Ranks that draw differently must still agree, on what the first draws.
        torch.manual_seed(7)
        method(reference)
        torch.manual_seed(7 + rank)
        method(net)
        check_equal(label, reference, net)
        expected, out = train(reference), train(net)
        assert torch.allclose(out, expected, atol=1e-5), label
        torch.manual_seed(8)
        method(reference)
        torch.manual_seed(8 + rank)
        method(net)
        check_equal(label, reference, net)
        assert torch.allclose(train(net, 1), train(reference, 1), atol=1e-5), label
        for index, layer in enumerate(net):
            if prune.is_pruned(layer):
                prune.remove(layer, "weight")
                prune.remove(reference[index], "weight")
        net.reshard()  # the root's own parameters stay gathered after a forward
        assert [type(layer) for layer in net] == kinds
        assert [name for name, _ in net.named_parameters()] == [name for name, _ in reference.named_parameters()]
        for (name, left), right in zip(net.named_parameters(), reference.parameters(), strict=True):
            assert torch.allclose(whole(left), whole(right), atol=1e-5), (label, name)
            assert hasattr(left, "device_mesh")
        assert torch.allclose(train(net), train(reference), atol=1e-5), label


def check_equal(label: str, reference: nn.Module, net: nn.Module) -> None:
    assert list(net.state_dict()) == list(reference.state_dict())
    for (name, mask), (_, expected) in zip(net.named_buffers(), reference.named_buffers(), strict=True):
        assert torch.equal(whole(mask), expected), (label, name)
    for layer, other in zip(net, reference, strict=True):  # type: ignore[call-overload]
        if hasattr(layer, "weight_mask"):
            assert hasattr(layer.weight_mask, "device_mesh") == hasattr(layer.weight_orig, "device_mesh")
            assert torch.allclose(whole(layer.weight), other.weight, atol=1e-5), label


def sharded_before_wrapping(rank: int) -> None:
    """Pruned first, wrapped then: the mask is whole on each rank, and is cut where the parameter is."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    reference = model()
    METHODS["global"](reference)
    net = copy.deepcopy(reference)
    for layer in (net[0], net[2]):
        fully_shard(layer)
    fully_shard(net)
    assert isinstance(net[0], FSDPModule)
    assert hasattr(net[0].weight_orig, "device_mesh")
    assert torch.allclose(train(net), train(reference), atol=1e-5)
    assert torch.allclose(whole(net[0].weight), reference[0].weight, atol=1e-5)
    METHODS["global"](reference)
    METHODS["global"](net)
    for index in (0, 2, 3):
        assert torch.equal(whole(net[index].weight_mask), reference[index].weight_mask)
    assert torch.allclose(train(net), train(reference), atol=1e-5)
    for index in (0, 2, 3):
        prune.remove(net[index], "weight")
        prune.remove(reference[index], "weight")
        assert torch.allclose(whole(net[index].weight), reference[index].weight, atol=1e-5)
        assert net[index].weight is net[index]._parameters["weight"]
    assert torch.allclose(train(net), train(reference), atol=1e-5)


def copied(rank: int) -> None:
    """DistributedDataParallel, with a different seed on each rank; and a module of one rank's own."""
    for label in ("random", "random structured", "global random", "l1"):
        torch.manual_seed(0)
        net = nn.parallel.DistributedDataParallel(model())
        torch.manual_seed(rank)
        before = torch.get_rng_state()
        METHODS[label](net.module)
        if rank == 0 and label != "l1":
            expected = model()
            torch.set_rng_state(before)
            METHODS[label](expected)
            assert torch.equal(expected[0].weight_mask, net.module[0].weight_mask)
        train(net)
        METHODS[label](net.module)
        train(net)
        for tensor in (*net.module.state_dict().values(),):
            gathered = [torch.empty_like(tensor) for _ in range(2)]
            distributed.all_gather(gathered, tensor)
            assert torch.equal(*gathered), label
    if rank == 0:  # nothing waits for the other rank
        prune.random_unstructured(nn.Linear(3, 3), "weight", 0.5)


@pytest.mark.parametrize("body", [sharded_after_wrapping, sharded_before_wrapping, copied])
@pytest.mark.long
def test_row_17_two_ranks(body):
    on_two_ranks(body)
