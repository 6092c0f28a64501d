"""Laws of requests: words and values ask for the same, and what cannot be asked for is refused by name."""

import copy
import dataclasses
import inspect
import linecache
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from secateur import allocation, criteria, shrink
from secateur.coupling import find_coupling
from secateur.models import example_for, example_of, shorter
from secateur.shrinking.costs import TARGETS
from secateur.shrinking.request import Request, WithoutDataWarning, request, warn_without_data
from support.measured import ByParameters, text, words
from support.mixtures import batches, mixtral


def test_words_are_values():
    said = request(sparsity=0.5, criterion="magnitude", allocate="everywhere", include="a.*", exclude=["b", "c"])
    meant = request(
        sparsity=0.5, criterion=criteria.magnitude, allocate=allocation.everywhere, include=["a.*"],
        exclude=(each for each in "bc"),
    )  # fmt: skip
    assert said == meant
    assert (said.include, said.exclude, said.globs) == (("a.*",), ("b", "c"), ("a.*", "b", "c"))
    assert request() == Request()


def test_a_request_is_what_the_verb_takes():
    """A verb has no field without a use."""
    fields = {each.name for each in dataclasses.fields(Request)}
    assert fields <= inspect.signature(shrink).parameters.keys()
    for name, parameter in inspect.signature(shrink).parameters.items():
        if name in fields and parameter.default is not inspect.Parameter.empty:
            assert request(**{name: parameter.default}) == Request()


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_can_be_asked_for(target):
    assert request(target=target).target == target


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"target": "size"}, ValueError, "target must be one of 'params', .*, not 'size'"),
        ({"sparsity": 1.5}, ValueError, r"got 1\.5"),
        ({"leave": "branches:-50%"}, ValueError, "a kind and what of it"),
        ({"leave": 0.5}, TypeError, r"leave= is a value of Experts, .*, not 0\.5"),
        ({"leave": "experts:100%"}, ValueError, "a share is less than 100 %"),
        ({"leave": ["experts:1", "experts:2"]}, ValueError, "names Experts twice"),
        ({"round_to": 0}, ValueError, "round_to must be at least 1, not 0"),
        ({"uniform": True, "leave": "branches:50%"}, ValueError, "no configuration describes removed branches"),
        ({"criterion": "magnitud"}, ValueError, "magnitud"),
        ({"allocate": "evrywhere"}, ValueError, "evrywhere"),
        ({"keep": "a"}, TypeError, "keep"),
    ],
)
def test_what_cannot_be_asked_for(given, kind, words):
    with pytest.raises(kind, match=words):
        request(**given)


def test_the_old_word_is_an_error():
    with pytest.raises(TypeError, match="keep"):
        shrink(None, None, 0.5, keep="a")


# ---- Laws of examples: nothing is asked for beside the results, and a batch says what a model is called with. ----


def test_neither_a_cache_nor_scores_of_routers_are_asked_for():
    model = mixtral()
    nothing = {"use_cache": False, "output_router_logits": False}
    assert example_for(model).items() >= nothing.items()
    assert example_of(model, batches()[0]).items() >= nothing.items()
    assert example_of(model, {"input_ids": torch.ones(1, 2), "use_cache": True})["use_cache"] is False
    found = model(**example_for(model))
    assert [name for name, each in found.items() if each is not None] == ["logits"]


def test_a_batch_says_what_a_model_is_called_with():
    """As `run_batch` calls it, with the first rows of each of its tensors."""
    rows = torch.randn(5, 3)
    linear = nn.Linear(3, 2)
    assert torch.equal(example_of(linear, rows), rows[:2])
    assert torch.equal(example_of(linear, (rows, torch.zeros(5))), rows[:2])
    assert example_of(linear, rows, None) is rows
    given = {"x": rows, "y": torch.ones(4)}  # not of as many rows
    assert example_of(linear, given)["x"] is rows
    assert example_of(mixtral(), torch.ones(3, 4))["input_ids"].shape == (2, 4)


@pytest.mark.long
def test_shrink_takes_its_example_from_the_batches():
    """Also of a model that returns its routers' scores, which would keep the number of experts."""
    first = mixtral(output_router_logits=True)
    second = copy.deepcopy(first)
    given = {**shorter(batches()[0]), "use_cache": False, "output_router_logits": False}
    how = {"batches": batches(), "leave": "experts:25%", "uniform": True, "repair": False, "verify": False}
    mine, its = shrink(first, **how), shrink(second, given, **how)
    assert (mine.experts, mine.multiply_adds) == (its.experts, its.multiply_adds)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert first.config.num_local_experts == 3
    words = batches()[0]["input_ids"]
    assert first(words, labels=words).aux_loss.isfinite()


def test_what_is_timed_is_a_whole_batch():
    linear, rows = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2)), torch.randn(5, 3)
    timed = shrink(
        copy.deepcopy(linear), None, 0.5, batches=[rows], target="latency", runtime=ByParameters(), verify=False
    )
    assert timed.multiply_adds[0] == 5 * (3 * 16 + 16 * 2)
    assert shrink(linear, None, 0.5, batches=[rows], verify=False).multiply_adds[0] == 2 * (3 * 16 + 16 * 2)


@pytest.mark.parametrize("how", [{}, {"batches": [torch.ones(2, 3)], "forward": lambda model, batch: model(batch)}])
def test_what_says_no_example_is_refused(how):
    with pytest.raises(ValueError, match=r"^give example_inputs, what the model is called with; or batches= without"):
        shrink(nn.Linear(3, 2), sparsity=0.5, **how)


# ---- Laws of the warning: it is said where data would help, and there alone. ----


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


def said(model, inputs, **asked):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_without_data(model, find_coupling(model, inputs), Request(**asked))
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
    assert (
        said(model, inputs, sparsity=0.3)
        == ["warn_without_data(model, find_coupling(model, inputs), Request(**asked))"] * helps
    )


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
