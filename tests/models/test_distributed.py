"""Two processes that share the calibration batches come to what one process comes to."""

import os
import socket

import pytest
import torch
from torch import distributed, nn

from secateur.criteria import wanda
from secateur.models import oneshot
from secateur.models.jobs import reduced
from secateur.models.products import Products, Tokens
from secateur.solvers import from_criterion, sparsegpt
from secateur.support import broadcast, rank_and_world
from support.forks import leave_group, on_ranks

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not distributed.is_available(), reason="torch was built without torch.distributed"),
]


class Choosing(nn.Module):
    """Sends each token to one of three experts; the second process's tokens never reach the third."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(6, 6), nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        choice = (x[:, 0] > 0).long() + (x[:, 0] > 1).long()
        y = self.query(x) * self.key(x).sigmoid()
        return x + torch.stack([self.experts[c](row) for c, row in zip(choice.tolist(), y, strict=True)])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Choosing() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def batches():
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(10, 6, generator=generator) for _ in range(4)]
    for batch in made[1::2]:
        batch[:, 0] = batch[:, 0].clamp(max=0.5)
    return made


def pruned(solver):
    torch.manual_seed(0)
    model = Model()
    return model, oneshot(model, batches(), 0.5, solver=solver)


LONELY = (("one batch", "uniform"), ("one batch, by scores", "owl"))


def lonely(allocate):
    """One batch: of two processes, one has nothing to sum."""
    torch.manual_seed(0)
    model = Model()
    return model, oneshot(model, batches()[:1], 0.5, solver=sparsegpt, allocate=allocate)


def failing(weight, sparsity, pattern, *, gram):
    if weight.shape == (6, 6) and torch.distributed.get_rank() == 1:
        raise ValueError("no solution here")
    return sparsegpt(weight, sparsity, pattern, gram=gram)


def assert_that_of_one(model, state):
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, state[key], rtol=1e-4, atol=1e-5, msg=lambda m, key=key: f"{key} {m}")
        other = [torch.zeros_like(value) for _ in range(2)]
        distributed.all_gather(other, value)
        assert torch.equal(*other), "the same on both"


def start(rank, port, alone):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    for name, solver in (("sparsegpt", sparsegpt), ("wanda", from_criterion(wanda))):
        model, done = pruned(solver)
        assert_that_of_one(model, alone[name][0])
        layers = alone[name][1]
        for layer, (layer_name, tokens, error) in zip(done.layers, layers, strict=True):
            assert (layer.name, layer.tokens) == (layer_name, tokens)
            assert layer.error == pytest.approx(error, rel=1e-3)
    with pytest.raises(ValueError, match="no solution here"):
        pruned(failing)
    for name, allocate in LONELY:
        with pytest.warns(UserWarning, match="1 of 2 processes sum what they see, and the others help to solve"):
            model, done = lonely(allocate)
        state, layers = alone[name]
        assert_that_of_one(model, state)
        assert [(layer.name, layer.tokens) for layer in done.layers] == [layer[:2] for layer in layers]
    leave_group()


@pytest.mark.long
def test_two_processes_come_to_what_one_comes_to():
    alone = {}
    for name, solver in (("sparsegpt", sparsegpt), ("wanda", from_criterion(wanda))):
        model, done = pruned(solver)
        alone[name] = model.state_dict(), [(layer.name, layer.tokens, layer.error) for layer in done.layers]
    assert {tokens for _, tokens, _ in alone["wanda"][1][:2]} == {40}
    for name, allocate in LONELY:
        model, done = lonely(allocate)
        alone[name] = model.state_dict(), [(layer.name, layer.tokens, layer.error) for layer in done.layers]
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    on_ranks(start, port, alone)


# What processes share, where there is one; `test_distributed` has two.


def test_one_process_waits_for_nobody_and_hands_out_to_nobody():
    assert rank_and_world() == (0, 1)
    values = torch.ones(2)
    assert broadcast("said", [values], 0) == "said"
    assert torch.equal(values, torch.ones(2))
    with pytest.raises(ValueError, match="of one"):
        broadcast(ValueError("of one"), [values], 0)


def test_what_one_process_saw_is_its_own():
    layer = nn.Linear(3, 2)
    products = Products({"weight": layer.weight}, frozenset(["input_norm"]))
    with torch.no_grad(), products.watching(Tokens()):
        layer(torch.ones(4, 3))
    ((piece, met),) = reduced(products).items()
    assert piece.name == "weight"
    assert met is products.found()[piece]
    assert met.tokens == 4
