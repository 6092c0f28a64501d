"""How a model is run: what a batch and example inputs mean, and that it is afterwards as it was."""

import pytest
import torch
from torch import nn

from secateur import criteria, sparsify
from secateur.evidence import collect
from secateur.pipeline import reestimate_batchnorm
from secateur.support import in_mode, repeatable, restored, run_batch, tensors_in, tensors_of


class Sum(nn.Module):
    def forward(self, x, y=None):
        return x if y is None else x + y


@pytest.mark.parametrize("batch", [torch.ones(4, 2), {"input": torch.ones(4, 2)}, "ab"])
@pytest.mark.parametrize(
    "verb",
    [
        lambda _model, batches: repeatable(batches),
        lambda model, batches: collect(model, batches, "input_norm"),
        lambda model, batches: sparsify(model, 0.5, criterion=criteria.wanda, batches=batches),
        lambda model, batches: reestimate_batchnorm(model, batches),
    ],
)
def test_one_batch_is_not_taken_for_several(verb, batch):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = model[0].weight.clone()
    with pytest.raises(TypeError, match=r"batches is an iterable of batches, not a (Tensor|dict|str); pass \[batch\]"):
        verb(model, batch)
    assert torch.equal(model[0].weight, before)


def test_of_a_batch_the_target_is_split_off():
    one, two = torch.ones(2), torch.full((2,), 2.0)
    assert run_batch(Sum(), (one, two), None) is one
    assert run_batch(Sum(), [one, two], lambda model, batch: model(*batch)).tolist() == [3, 3]


@pytest.mark.parametrize("training", [True, False])
def test_modes_are_as_they_were_also_after_an_error(training):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[1].eval()
    with pytest.raises(RuntimeError, match="stop"), in_mode(model, training=training):
        assert model[0].training == model[1].training == training
        raise RuntimeError("stop")
    assert (model[0].training, model[1].training) == (True, False)


def test_buffers_are_as_they_were():
    model = nn.BatchNorm1d(2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with restored(model):
        model(torch.randn(4, 2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Remembering(nn.Module):
    """Computes a table at the first call, and remembers in a number that it did."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(4), persistent=False)
        self.known, self.ready = 0, False

    def forward(self, x):
        if self.known < len(x) or not self.ready:
            self.table[: len(x)] = torch.arange(len(x)) + 1.0
            self.known, self.ready = len(x), True
        return x * self.table[: len(x)]


def test_a_number_that_says_what_a_buffer_holds_is_as_it_was():
    model = Remembering()
    with restored(model):
        model(torch.ones(3))
    assert (model.known, model.ready) == (0, False)
    assert model(torch.ones(3)).tolist() == [1, 2, 3]


def test_tensors_each_once():
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, layer)
    assert list(tensors_of(model)) == ["0.weight", "0.bias"]
    one = torch.ones(1)
    nested = {"a": [one, (torch.zeros(1),)], "b": "text", "c": 3}
    assert [tensor.item() for tensor in tensors_in(nested)] == [1, 0]
