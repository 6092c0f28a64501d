"""A letter has the script that its name says, and what is no letter has all."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secateur.vocabulary.scripts import check_scripts, is_of, script_of


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("aZéß", "Latin"),
        ("ЯЖ", "Cyrillic"),
        ("αω", "Greek"),
        ("漢字", "Han"),
        ("ひ", "Hiragana"),
        ("한", "Hangul"),
        ("अ", "Devanagari"),
    ],
)
def test_scripts_of_letters(text, script):
    assert {script_of(each) for each in text} == {script}
    assert check_scripts([script.lower()]) == {script}
    assert is_of(f"{text} 1, 🌹", frozenset({script}))
    assert not is_of(text, frozenset({"Arabic"}))


@given(st.characters())
def test_only_letters_and_marks_have_one(character):
    if script_of(character) is not None:
        assert unicodedata.category(character)[0] in "LM"
        assert check_scripts([script_of(character)])


def test_a_script_that_there_is_none_is_said():
    with pytest.raises(ValueError, match="'Elvish' is no script"):
        check_scripts(["Latin", "Elvish"])
