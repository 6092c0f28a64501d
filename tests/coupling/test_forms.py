"""What stays in place of a branch: what the module returned, or zeros of the sizes that it would have, at any size."""

import copy
import json
import math
import operator
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from secateur.coupling import Axis, Removed, find_coupling, replacement
from secateur.coupling.equations import is_frozen, settle
from secateur.coupling.numbers import Known, numbers_that_remember
from secateur.shrinking.apply import carry_out
from secateur.shrinking.plan import plan_without


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", [0, 1, "same", "valid"])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_shapes_of_convolutions(stride, padding, transposed):
    """At sizes other than the example's, too."""
    if isinstance(padding, str) and (transposed or stride > 1):
        padding = 2
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    size = {"output_padding": stride - 1} if transposed else {}
    conv = kind(6, 6, 3, stride=stride, padding=padding, dilation=(1, 2), **size)

    class Convolved(nn.Module):
        def __init__(self):
            super().__init__()
            self.short, self.first, self.second = copy.deepcopy(conv), conv, nn.Conv2d(6, 6, 1)

        def forward(self, x):
            out = self.second(F.relu(self.first(x)))
            out += self.short(x)
            return out

    model = Convolved()
    coupling = find_coupling(model, torch.randn(2, 6, 9, 11))
    assert [branch.name for branch in coupling.branches] == ["first"]
    expected = {size: model.short(torch.ones(1, 6, size, size + 2)) for size in (9, 12)}
    carry_out(model, plan_without(coupling.branches), None)
    for size, each in expected.items():
        torch.testing.assert_close(model(torch.ones(1, 6, size, size + 2)), each)


class Branch(nn.Module):
    """A sum of a stream and what a test puts beside it."""

    def __init__(self, beside):
        super().__init__()
        self.beside = beside

    def forward(self, x):
        return x + self.beside(x)


def removed(model, x):
    """The model without its branches, and what is in the place of each module."""
    coupling = find_coupling(model, x)
    forms = [branch.modules for branch in coupling.branches]
    carry_out(model, plan_without(coupling.branches), None)
    return forms


class Reshaped(nn.Module):
    """What it returns has the input's dimensions in another order."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x):
        return self.mix(x).transpose(0, 1)


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Reshaped()

    def forward(self, x):
        return self.inner(x).transpose(0, 1)


class Packed(Reshaped):
    def forward(self, x):
        return {"mixed": self.mix(x), "more": [None]}


class Unpacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Packed()

    def forward(self, x):
        return self.inner(x)["mixed"]


BESIDE = {
    "one layer": lambda: nn.Linear(4, 4),
    "another width between": lambda: nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 4)),
    "turned and back": Turned,
    "in a dict": Unpacked,
    "of a mean": lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Dropout(0.5)),
}


@pytest.mark.parametrize("name", BESIDE)
def test_without_its_branch_a_stream_is_itself_at_any_size(name):
    model = nn.Sequential(nn.Linear(4, 4), Branch(BESIDE[name]()), nn.Linear(4, 2)).eval()
    first, last = model[0], model[2]
    assert removed(model, torch.randn(2, 3, 4))
    for shape in ((2, 3, 4), (5, 1, 4), (1, 7, 4)):
        x = torch.randn(shape)
        torch.testing.assert_close(model(x), last(first(x)))
    assert any(isinstance(module, Removed) for module in model.modules())


def test_a_module_that_is_used_elsewhere_stays():
    """All of its calls would have to lie in the branch."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.both, self.down = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 4)

        def forward(self, x):
            return (x + self.down(self.both(self.up(x)))) @ self.both.weight[:4, :4] + self.both(F.pad(x, (0, 2)))[
                ..., :4
            ]

    model, x = Shared(), torch.randn(3, 4)
    coupling = find_coupling(model, x)
    assert all("both" not in place for branch in coupling.branches for place in branch.modules)
    both = copy.deepcopy(model.both)
    carry_out(model, plan_without(coupling.branches), None)
    assert type(model.both) is nn.Linear
    torch.testing.assert_close(model.both(torch.ones(1, 6)), both(torch.ones(1, 6)))


# ---- What a trace is made of: numbers, spots, turns, and what stays in place of a branch. ----


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
