"""A word that means nothing is an error that lists those that do, and names the nearest."""

import pytest

from secateur.support import function_of, unknown

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
