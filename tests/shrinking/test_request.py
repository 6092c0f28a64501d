"""Laws of requests: words and values ask for the same, and what cannot be asked for is refused by name."""

import dataclasses
import inspect

import pytest

from secateur import allocation, criteria, shrink, shrink_checkpoint
from secateur.shrinking import Request
from secateur.shrinking.costs import TARGETS
from secateur.shrinking.request import request


def test_words_are_values():
    said = request(sparsity=0.5, criterion="magnitude", allocate="everywhere", include="a.*", exclude=["b", "c"])
    meant = request(
        sparsity=0.5, criterion=criteria.magnitude, allocate=allocation.everywhere, include=["a.*"],
        exclude=(each for each in "bc"),
    )  # fmt: skip
    assert said == meant
    assert (said.include, said.exclude, said.globs) == (("a.*",), ("b", "c"), ("a.*", "b", "c"))
    assert request() == Request()


def test_a_request_is_what_the_verbs_take():
    """A verb has no field without a use: a directory is uniform, takes no branches or experts, and no evidence."""
    fields = {each.name for each in dataclasses.fields(Request)}
    assert fields <= inspect.signature(shrink).parameters.keys()
    assert fields - inspect.signature(shrink_checkpoint).parameters.keys() == {
        "branches",
        "evidence",
        "experts",
        "rank_experts",
        "unreached_first",
        "uniform",
    }
    for verb in (shrink, shrink_checkpoint):
        for name, parameter in inspect.signature(verb).parameters.items():
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
        ({"branches": -0.5}, ValueError, r"got -0\.5"),
        ({"round_to": 0}, ValueError, "round_to must be at least 1, not 0"),
        ({"uniform": True, "branches": 0.5}, ValueError, "no configuration describes removed branches"),
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
