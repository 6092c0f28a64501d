"""Which batch a model does not run on is said."""

import pytest
import torch
from torch import nn

from secateur.models.batches import which, with_batch_in_errors
from secateur.models.replay import LostOutputError


class Refusing(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        raise self.error


@pytest.mark.parametrize(
    "error", [RuntimeError("sizes"), IndexError("out of range"), ValueError("no\nsuch"), KeyError("a")]
)
def test_a_batch_is_named_by_its_number_and_its_shape(error):
    batches = [torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.int64)]
    with pytest.raises(ValueError, match=r"batch 1 of 2 \(shape \(2, 4\), int64\) \(.*Error: ") as raised:
        with_batch_in_errors(batches, None)(Refusing(error), batches[1])
    assert raised.value.__cause__ is error
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError("disk"), LostOutputError("block"), torch.OutOfMemoryError("full")]
)
def test_what_is_not_the_batchs_fault_passes(error):
    with pytest.raises(type(error)) as raised:
        with_batch_in_errors([], None)(Refusing(error), torch.zeros(1))
    assert raised.value is error


def test_a_batch_of_no_known_kind_is_told_as_ever():
    with pytest.raises(TypeError, match="a batch is a tensor"):
        with_batch_in_errors([3], None)(nn.Identity(), 3)


def test_a_forward_of_ones_own_raises_what_it_raises_with_a_note():
    batches = [(torch.zeros(2, 3), "name")]

    def forward(model, batch):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as raised:
        with_batch_in_errors(batches, forward)(nn.Identity(), batches[0])
    assert raised.value.__notes__ == ["This was batch 0 of 1 (shape (2, 3), float32)."]


def test_a_batch_without_tensors_is_named_by_its_kind():
    assert which([], "words") == "a batch of a str"
    assert which([[]], []) == "a batch of a list"
