"""Laws of requests: words and values ask for the same, and what cannot be asked for is refused by name."""

import dataclasses
import inspect

import pytest

from secateur import allocation, criteria, shrink
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
        ({"leave": "branches:-50%"}, ValueError, "a kind and how much of it"),
        ({"leave": 0.5}, TypeError, r"leave= is Experts, Branches, Heads, Outputs or Blocks.*, not 0\.5"),
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
