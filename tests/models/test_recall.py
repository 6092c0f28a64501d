"""Passes in which finished modules return what they returned: the same bits, whatever a model does with them."""

import contextlib

import pytest
import torch
from torch import nn

from secateur import shrink
from secateur.models import Recall


class Residual(nn.Module):
    """Convolutions in a sum, with an activation in place, and a list of what was made so far, as detectors have."""

    def __init__(self, inplace=True):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace))
        self.first, self.second = nn.Conv2d(6, 6, 1), nn.Conv2d(6, 6, 3, padding=1)
        self.act, self.join = nn.ReLU(inplace), Join()
        self.last = nn.Conv2d(12, 4, 1)

    def forward(self, x):
        stem = self.stem(x)
        made = self.act(self.first(stem)) + stem
        made = self.act(self.second(made))
        return self.last(self.join([stem, made])).mean((2, 3))


class Join(nn.Module):
    def forward(self, parts):
        return torch.cat(parts, 1)


@pytest.fixture
def counted(monkeypatch):
    """How many convolutions were computed."""
    calls = []
    monkeypatch.setattr(nn.Conv2d, "_conv_forward", _counting(nn.Conv2d._conv_forward, calls))
    return calls


def _counting(original, calls):
    def forward(self, *args):
        calls.append(self)
        return original(self, *args)

    return forward


@pytest.mark.parametrize("inplace", [True, False])
def test_a_pass_gives_the_same_bits_while_weights_behind_change(inplace):
    torch.manual_seed(11)
    model, batches = Residual(inplace).eval(), [torch.randn(2, 3, 5, 5) for _ in range(2)]
    recall = Recall(model)
    order = [model.stem[0], model.first, model.second, model.last]
    with torch.no_grad():
        for at, layer in enumerate(order):
            opened = [each.weight for each in order[at:]]
            for _ in range(3):  # what is written to in place is known after one
                for number, x in enumerate(batches):
                    wanted = model(x)
                    with recall.opening(opened), recall.passing(number, x):
                        found = model(x)
                    assert torch.equal(found, wanted)
            layer.weight.mul_(1.5)


def test_what_is_finished_is_not_computed_again(counted):
    torch.manual_seed(12)
    model, x = Residual(inplace=False).eval(), torch.randn(2, 3, 5, 5)
    recall = Recall(model)
    with torch.no_grad():
        for _ in range(2):
            counted.clear()
            with recall.opening([model.second.weight, model.last.weight]), recall.passing(0, x):
                model(x)
        assert counted == [model.second, model.last]
        model.first.weight.add_(1)
        recall.forget([model.first.weight])
        counted.clear()
        with recall.opening([model.last.weight]), recall.passing(0, x):
            found = model(x)
    assert model.first in counted
    assert torch.equal(found, model(x))


def test_a_module_that_runs_twice_in_a_pass_runs_each_time():
    torch.manual_seed(13)
    layer = nn.Linear(3, 3)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = layer, nn.Linear(3, 2)

        def forward(self, x):
            return self.head(self.layer(self.layer(x)))

    model, x = Twice(), torch.randn(4, 3)
    recall = Recall(model)
    with torch.no_grad():
        for _ in range(3):
            with recall.opening([model.head.weight]), recall.passing(0, x):
                assert torch.equal(model(x), model.head(layer(layer(x))))


def test_a_pass_that_keeps_nothing_leaves_what_is_held(counted):
    torch.manual_seed(14)
    model, x = Residual(inplace=False).eval(), torch.randn(2, 3, 5, 5)
    recall = Recall(model)
    with torch.no_grad():
        with recall.opening([model.last.weight, model.second.weight]), recall.passing(0, x):
            model(x)
        held = recall.nbytes
        model.second.weight.data = model.second.weight * 2
        with recall.opening([model.second.weight], keeps=False), recall.passing(0, x):
            found = model(x)
        assert recall.nbytes == held > 0
        assert torch.equal(found, model(x))


def test_nothing_is_held_beyond_a_share_of_the_memory(monkeypatch):
    torch.manual_seed(15)
    monkeypatch.setattr("secateur.models.recall.free_memory", lambda _: 100)
    model, x = Residual().eval(), torch.randn(2, 3, 5, 5)
    recall = Recall(model)
    with torch.no_grad(), recall.opening([model.last.weight]), recall.passing(0, x):
        found = model(x)
    assert recall.nbytes == 0
    assert torch.equal(found, model(x))


def test_in_inference_mode_everything_runs(counted):
    torch.manual_seed(16)
    model, x = Residual().eval(), torch.randn(2, 3, 5, 5)
    recall = Recall(model)
    with torch.inference_mode():
        for _ in range(2):
            counted.clear()
            with recall.opening(), recall.passing(0, x):
                model(x)
    assert len(counted) == 4


@pytest.mark.parametrize("inplace", [True, False])
def test_shrink_gives_the_same_bits(monkeypatch, inplace):
    torch.manual_seed(17)
    model, batches = Residual(inplace).eval(), [torch.randn(8, 3, 6, 6) for _ in range(3)]
    state = {name: each.clone() for name, each in model.state_dict().items()}
    shrink(model, batches[0], 0.3, batches=batches)
    found = model.state_dict()
    other = Residual(inplace).eval()
    other.load_state_dict(state)
    monkeypatch.setattr(Recall, "opening", lambda *_args, **_how: contextlib.nullcontext())
    shrink(other, batches[0], 0.3, batches=batches)
    assert all(torch.equal(each, found[name]) for name, each in other.state_dict().items())
