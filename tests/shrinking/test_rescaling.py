"""Normalizations over a width that lost entries keep the scale of what stays."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from secateur import shrink
from secateur.models import InMemory
from secateur.shrinking import calibrated, repair
from secateur.shrinking.apply import carry_out
from secateur.shrinking.plan import Plan
from secateur.shrinking.repair import rescaled
from support.measured import answers, apart, text, words
from support.unchanged import is_unchanged, state_of

WIDTH, LEAVES = 8, 2


class ByHand(nn.Module):
    """As transformers writes it; Gemma multiplies with 1 + weight."""

    def __init__(self, width, one=0.0):
        super().__init__()
        self.weight, self.one = nn.Parameter(torch.ones(width) - one), one

    def forward(self, x):
        return (self.one + self.weight) * (x * (x.pow(2).mean(-1, keepdim=True) + 1e-12).rsqrt())


NORMS = {
    "rms": lambda width: nn.RMSNorm(width, eps=1e-12),
    "by hand": ByHand,
    "gemma": lambda width: ByHand(width, 1.0),
    "layer": nn.LayerNorm,
}


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.up, self.down = norm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Stream(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.enter = nn.Linear(5, WIDTH, bias=False)
        self.blocks, self.norm = nn.ModuleList(Block(norm) for _ in range(2)), norm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def stream(kind):
    """Of which two entries are zero, whatever comes."""
    torch.manual_seed(0)
    model = Stream(NORMS[kind]).double()
    with torch.no_grad():
        for weight in (model.enter.weight, *(block.down.weight for block in model.blocks)):
            weight[[1, 6]] = 0
        for module in model.modules():
            if hasattr(module, "weight") and module.weight.dim() == 1:
                module.weight += torch.rand(WIDTH) / 2
    return model


@pytest.mark.parametrize("kind", ["rms", "by hand", "gemma"])
def test_entries_that_were_always_zero_leave_and_nothing_else_changes(kind, monkeypatch):
    """The mean square of the others is larger by the share that left, and the weights make up for exactly that."""
    given = [torch.randn(30, 5).double() for _ in range(4)]
    model = stream(kind)
    dense = copy.deepcopy(model)
    wanted = answers(model, given)
    whole = {"target": "units", "include": "enter.weight", "batches": given, "round_to": 1}
    shrink(model, given[0], LEAVES / WIDTH, **whole)
    assert model.enter.out_features == WIDTH - LEAVES
    assert apart(model, given, wanted) < 1e-6
    monkeypatch.setattr(calibrated, "rescaled", lambda *_: {})
    shrink(dense, given[0], LEAVES / WIDTH, **whole)
    assert apart(dense, given, wanted) > 0.01


def rescale(model, plan, batches, **how):
    host = InMemory(model, batches, blocks={}, **how)
    host.change(rescaled(host, plan))


def cut(width, kept, *names, numbers=()):
    return Plan({name: ((width,), {0: np.array(kept)}) for name in names}, list(numbers))


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_stays_is_nearer_to_what_it_was(kind, dtype):
    torch.manual_seed(0)
    norm = NORMS[kind](WIDTH).to(dtype)
    kept = [0, 2, 3, 5, 7]
    scale = torch.linspace(0.5, 2, WIDTH)
    scale[[1, 4, 6]] = 0.2  # what leaves is small
    given = [((torch.randn(50, WIDTH) + 0.3) * scale).to(dtype) for _ in range(3)]
    numbers = [(("it", "normalized_shape", 0), WIDTH, len(kept))] if kind in ("rms", "layer") else []
    names = [f"it.{name}" for name, _ in norm.named_parameters()]
    plan = cut(WIDTH, kept, *names, numbers=numbers)
    lost = []
    for moves in (False, True):
        holder = nn.Sequential()
        holder.add_module("it", copy.deepcopy(norm))
        with torch.no_grad():
            wanted = [holder(each)[:, kept].double() for each in given]
            if moves:
                rescale(holder, plan, given)
            carry_out(holder, plan, None)
            found = [holder(each[:, kept]).double() for each in given]
        lost.append(float(sum((one - two).square().sum() for one, two in zip(found, wanted, strict=True))))
    assert lost[1] < 0.6 * lost[0]


def test_padding_does_not_count():
    torch.manual_seed(0)
    kept, found = [0, 1, 2, 4], []
    plan = cut(6, kept, "0.weight", numbers=[(("0", "normalized_shape", 0), 6, 4)])
    tokens = torch.randn(2, 5, 6)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    for padding in (0.0, 100.0):
        model = nn.Sequential(nn.RMSNorm(6))
        given = torch.where(mask.bool()[..., None], tokens, torch.tensor([padding, 0, 0, 1, 0, 0]))
        rescale(model, plan, [{"x": given, "attention_mask": mask}], forward=lambda model, batch: model(batch["x"]))
        found.append(model[0].weight.detach().clone())
    torch.testing.assert_close(*found)
    assert not torch.equal(found[0][kept], torch.ones(4))
    assert torch.equal(found[0][[3, 5]], torch.ones(2))  # they leave


@pytest.mark.parametrize("module", [nn.PReLU(6), nn.BatchNorm1d(6), ByHand(6)], ids=["prelu", "batch", "whole"])
def test_where_nothing_else_is_counted_nothing_moves(module):
    model = nn.Sequential(module)
    names = [f"0.{name}" for name, _ in module.named_parameters()]
    numbers = [(("0", "num_parameters"), 6, 4)] if isinstance(module, nn.PReLU) else []
    plan = cut(6, [0, 1, 2, 5], *names, numbers=numbers) if not isinstance(module, ByHand) else Plan({}, [])
    state = state_of(model)
    rescale(model, plan, [torch.randn(9, 6)])
    assert is_unchanged(model, state)


def test_a_stream_that_narrows_is_nearer_to_what_it_was(monkeypatch):
    """Of a model of words with layer normalizations; on other text of the same kind."""
    other, error = text(seed=7), []
    wanted = answers(words(), other)
    for without in (False, True):
        if without:
            monkeypatch.setattr(calibrated, "rescaled", lambda *_: {})
        model = words()
        shrink(model, text()[0], 0.25, target="units", include="embed.weight", batches=text(), round_to=1)
        error.append(apart(model, other, wanted))
    assert error[0] < error[1]


def test_outside_of_blocks_a_module_is_tried_once(monkeypatch):
    """To try it runs it: what watches it must not begin to try again."""
    norm, kept, tried = nn.Sequential(nn.LayerNorm(WIDTH)), [0, 2, 3, 5, 7], []
    smaller = repair._smaller
    monkeypatch.setattr(repair, "_smaller", lambda *given: tried.append(given[1]) or smaller(*given))
    plan = cut(WIDTH, kept, "0.weight", "0.bias", numbers=[(("0", "normalized_shape", 0), WIDTH, len(kept))])
    rescale(norm, plan, [torch.randn(9, WIDTH)])
    assert tried == ["0"]
