"""A word that means nothing is an error that lists those that do, and names the nearest; a record says settings too."""

import functools
from dataclasses import dataclass

import pytest
import torch

from secateur import allocation, criteria, solvers
from secateur.patterns import NM
from secateur.support import described, function_of, name_of, unknown

KNOWN = {"soft_max": max, "min": min}


@pytest.mark.parametrize("word", ["soft_max", "Soft-Max", "  SOFT_MAX "])
def test_case_hyphens_and_spaces_are_no_matter(word):
    assert function_of(word, KNOWN, "reduction") is max


def test_a_function_is_itself():
    assert function_of(sum, KNOWN, "reduction") is sum


def test_errors_say_what_there_is():
    with pytest.raises(
        ValueError, match="no reduction is called 'softmax'; did you mean soft_max\\? There are min and soft_max"
    ):
        function_of("softmax", KNOWN, "reduction")
    with pytest.raises(TypeError, match="reduction is a function, or the word for one such as 'min', not 3"):
        function_of(3, KNOWN, "reduction")
    assert str(unknown("zzz", KNOWN, "x")) == "no x is called 'zzz'. There are min and soft_max."


def test_names_are_those_of_what_is_called_in_the_end():
    assert name_of(functools.partial(functools.partial(torch.abs))) == "abs"
    assert name_of(NM(2, 4)) == str(NM(2, 4))


@dataclass(frozen=True)
class Own:
    """A function of one's own, as a value."""

    power: float
    then: object

    def __call__(self, weight):
        return weight.abs() ** self.power


class Plain:
    def __call__(self, weight):
        return weight


def function():
    return None


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (criteria.wanda, "wanda"),
        (abs, "abs"),
        (lambda weight: weight, "<lambda>"),
        (functools.partial(criteria.ria, power=1.0), "ria(power=1.0)"),
        (functools.partial(function, criteria.ria, key={"a": abs}), "function(ria, key={'a': abs})"),
        (solvers.from_criterion("wanda"), "from_criterion(wanda)"),
        (solvers.from_criterion(functools.partial(criteria.ria, power=1.0)), "from_criterion(ria(power=1.0))"),
        (solvers.with_refit("admm"), "with_refit(admm, iterations=20, tolerance=0.001)"),
        (
            solvers.with_refit(functools.partial(solvers.admm, iterations=5), iterations=3, tolerance=0.5),
            "with_refit(admm(iterations=5), iterations=3, tolerance=0.5)",
        ),
        (allocation.by_name({"head.*": 0.25}), "by_name(shares={'head.*': 0.25}, otherwise=None)"),
        (
            allocation.by_name({"head.*": allocation.above(1.5)}, otherwise=allocation.uniform),
            "by_name(shares={'head.*': above(threshold=1.5)}, otherwise=uniform)",
        ),
        (Own(0.5, abs), "Own(power=0.5, then=abs)"),
        (Plain(), "Plain"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_record_says_what_a_function_was_given(made, said):
    assert described(made) == said
