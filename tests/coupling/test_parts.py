"""What a trace is made of: numbers, spots, turns, and what stays in place of a branch."""

import copy
import json
import math
import operator
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from secateur.coupling import Axis, Removed, replacement
from secateur.coupling.equations import is_frozen, settle
from secateur.coupling.numbers import Known, numbers_that_remember

OPERATIONS = [operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod]


COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]


def known(value, log=None):
    return Known(value, Axis(value), [] if log is None else log)


@given(st.integers(1, 60), st.integers(1, 60), st.sampled_from(OPERATIONS + COMPARISONS), st.integers(0, 2))
def test_arithmetic_is_that_of_integers(left, right, operation, which):
    one = known(left) if which != 1 else left
    other = known(right) if which != 0 else right
    assert operation(one, other) == operation(left, right)


@given(st.integers(1, 60), st.floats(0.5, 4))
def test_arithmetic_with_real_numbers_gives_real_numbers_and_fixes_the_size(size, factor):
    log = []
    assert known(size, log) * factor == size * factor
    assert factor * known(size, log) == size * factor
    assert known(size, log) / factor == size / factor
    assert known(size, log) ** 0.5 == size**0.5
    assert math.sqrt(known(size, log)) == math.sqrt(size)
    assert len(log) == 4  # Python multiplies a float by any integer by itself: the proof finds what follows from that
    settle(log)
    assert all(size == 1 or is_frozen(equation.left) for equation in log)


def test_divmod_negation_and_numbers_that_are_copied():
    number = known(7)
    assert divmod(number, 2) == (3, 1)
    assert -number == -7
    assert +number == 7
    for copied in (copy.copy(number), copy.deepcopy(number), pickle.loads(pickle.dumps(number))):
        assert type(copied) is int
    assert {number: 1}[7] == 1
    assert number != "seven"
    with pytest.raises(TypeError):
        number + "seven"


def test_numbers_are_as_before_after_an_exception():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads, self.shape, self.options = 4, (3, 5), {"width": 7, "deep": [2, 9]}

    model = Holder()
    log = []
    with pytest.raises(RuntimeError), numbers_that_remember(model, log):
        assert repr(model.options["deep"][1].formula) == "options.deep.1"
        assert repr(model.shape[0].formula) == "shape.0"
        assert model.heads * 2 == 8
        raise RuntimeError
    assert (model.heads, model.shape, model.options) == (4, (3, 5), {"width": 7, "deep": [2, 9]})
    assert type(model.heads) is int
    assert type(model.shape[0]) is int
    assert type(model.options["deep"][1]) is int


def test_removed_follows_its_input():
    zeros = [[0, 0, 1, 0, 1], [-1, 7, 1, 0, 1], [2, 0, 1, 1, 2]]
    form = {"was": "Conv1d", "input": 0, "returns": {"zeros": zeros, "whole": False}}
    gone = Removed(json.loads(json.dumps(form)))
    x = torch.randn(3, 5, 9)
    assert gone(x).shape == (3, 7, 5)
    assert gone(x).untyped_storage().nbytes() == 4
    gone.zeros_0.sizes = (0, 4, 0)  # as when channels leave
    assert gone(x).shape == (3, 4, 5)
    whole = Removed({**form, "returns": {"zeros": zeros, "whole": True}})
    whole(x).add_(1)
    assert gone(x.half()).dtype == torch.float16
    assert gone(torch.zeros(2, 3, 4, dtype=torch.long)).dtype == torch.float32
    kept = {"was": "A", "input": "h", "returns": {"dict": {"a": ["tuple", {"zeros": None}, None, ["list", True]]}}}
    assert Removed(kept)(h=x) == {"a": (torch.tensor(0.0), None, [True])}
    assert isinstance(replacement({"was": "ReLU", "returns": "input"}), nn.Identity)
    assert not list(gone.state_dict())
