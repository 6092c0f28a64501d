"""Laws of the warning: it is said where data would help, and there alone."""

import linecache
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from secateur import criteria
from secateur.coupling import find_coupling
from secateur.shrinking.request import Request, WithoutDataWarning, warn_without_data
from support.measured import text, words


class Residual(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x):
        return x + self.inner(x)


class Once(nn.Module):
    """A stream, and nothing that is repeated."""

    def __init__(self):
        super().__init__()
        self.first, self.up, self.down, self.last = (
            nn.Linear(4, 8), nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 2)
        )  # fmt: skip

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.down(self.up(x).relu()))


class Stacked(nn.Module):
    """Blocks between two layers."""

    def __init__(self, first, make, last):
        super().__init__()
        self.first, self.blocks, self.last = first, nn.ModuleList(make() for _ in range(2)), last

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def multiplied():
    return Residual(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))


def plain():
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))


def convolved():
    return Residual(nn.Conv2d(8, 12, 1), nn.ReLU(), nn.Conv2d(12, 8, 1))


def shrunken(model, inputs, **asked):
    """As `shrink` calls it: the call's caller is warned."""
    warn_without_data(model, find_coupling(model, inputs), Request(**asked))


def said(model, inputs, **asked):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        shrunken(model, inputs, **asked)
    assert all(each.category is WithoutDataWarning for each in found)
    return [linecache.getline(each.filename, each.lineno).strip() for each in found]


X = torch.ones(2, 4)
IMAGE = torch.ones(1, 3, 4, 4)
MODELS = {  # the model, its inputs, whether data would help
    "words": (words(), text()[0], True),
    "residual blocks": (Stacked(nn.Linear(4, 8), multiplied, nn.Linear(8, 2)), X, True),
    "blocks without a stream": (Stacked(nn.Linear(4, 8), plain, nn.Linear(8, 2)), X, False),
    "blocks of convolutions": (Stacked(nn.Conv2d(3, 8, 1), convolved, nn.Conv2d(8, 2, 1)), IMAGE, False),
    "no blocks": (nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), X, False),
    "a stream without blocks": (Once(), X, False),
}
WORDS = MODELS["words"][0], find_coupling(*MODELS["words"][:2])


@pytest.mark.parametrize("name", MODELS)
def test_only_blocks_whose_branches_multiply_with_matrices(name):
    model, inputs, helps = MODELS[name]
    assert said(model, inputs, sparsity=0.3) == ["shrunken(model, inputs, **asked)"] * helps


@given(
    st.sampled_from([None, 0.0, 1e-9, 0.3]),
    st.sampled_from([{}, {"blocks.0.up.weight": {"grad_sq": torch.ones(20, 12)}}]),
    st.sampled_from([criteria.magnitude, criteria.taylor]),
    st.sampled_from(["params", "macs", "units"]),
    st.booleans(),
)
def test_only_where_magnitude_alone_is_to_choose(sparsity, evidence, criterion, target, verify):
    model, coupling = WORDS
    asked = Request(sparsity=sparsity, evidence=evidence, criterion=criterion, target=target, verify=verify)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_without_data(model, coupling, asked)
    assert len(found) == bool(sparsity and not evidence and criterion is criteria.magnitude)


def test_it_says_what_to_do_and_can_be_filtered():
    model, coupling = WORDS
    with pytest.warns(WithoutDataWarning, match=r"Pass batches=.*filter secateur\.shrinking\.WithoutDataWarning"):
        warn_without_data(model, coupling, Request(sparsity=0.3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", WithoutDataWarning)
        warn_without_data(model, coupling, Request(sparsity=0.3))
    assert issubclass(WithoutDataWarning, UserWarning)
