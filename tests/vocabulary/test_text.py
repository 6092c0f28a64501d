"""What is found in texts and numbers: scripts of letters, quotes of templates, fields with ids; and what is printed."""

import json
import os
import re
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur.vocabulary import ShrunkVocabulary, Unseen
from secateur.vocabulary.axes import numbers_in, renumbered
from secateur.vocabulary.choosing import check_scripts, is_of, script_of
from secateur.vocabulary.files import _parts, _quoted, templates_in, templates_of, words_of


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 1}),
        ({"eos_token_id": [5, 9, -1, 6]}, {"eos_token_id": [1, 2, -1, 6]}),
        ({"suppress_tokens": [5, 9]}, {"suppress_tokens": [1, 2]}),
        ({"begin_suppress_tokens": [9]}, {"begin_suppress_tokens": [2]}),
        ({"bad_words_ids": [[5, 9], [9]]}, {"bad_words_ids": [[1, 2], [2]]}),
        ({"forced_decoder_ids": [[5, 9], [9, None]]}, {"forced_decoder_ids": [[5, 2], [9, None]]}),
        ({"sequence_bias": [[[5, 9], 5.0]]}, {"sequence_bias": [[[1, 2], 5.0]]}),
        ({"lang_to_id": {"<|de|>": 9}}, {"lang_to_id": {"<|de|>": 2}}),
        ({"image_token_index": 9, "video_token_id": 5}, {"image_token_index": 2, "video_token_id": 1}),
        ({"mask_index": 9, "pad_index": 5}, {"mask_index": 2, "pad_index": 1}),
        ({"added_tokens_decoder": {"9": {"id": 9}}}, {"added_tokens_decoder": {"2": {"id": 9}}}),
        ({"task_specific_params": {"de": {"pad_token_id": 9}}}, {"task_specific_params": {"de": {"pad_token_id": 2}}}),
    ],
)
def test_forms_of_fields(values, expected):
    assert renumbered(values, {5: 1, 9: 2}) == expected
    assert numbers_in(values) & {5, 9}


OTHERS = ["vocab_size", "num_image_tokens", "max_new_tokens", "eos_token", "hidden_size", "id2label", "num_beams"]


@settings(max_examples=25)
@given(st.dictionaries(st.sampled_from(OTHERS), st.integers() | st.text()))
def test_other_fields_stay(values):
    assert renumbered(values, dict.fromkeys(range(99), 1)) == values
    assert numbers_in(values) == set()


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("aZéß", "Latin"), ("ЯЖ", "Cyrillic"), ("αω", "Greek"), ("漢字", "Han"), ("ひ", "Hiragana"), ("한", "Hangul"),
        ("अ", "Devanagari"),
    ],
)  # fmt: skip
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


@given(st.text("{}%#'\"\\a ", max_size=30))
def test_parts_are_what_a_regular_expression_finds(template):
    code = re.compile(r"\{%.*?%\}|\{\{.*?\}\}|\{#.*?#\}", re.DOTALL)
    assert _parts(template) == (code.split(template), code.findall(template))
    quoted = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)
    assert list(_quoted(template)) == [one or other for one, other in quoted.findall(template)]


def test_what_is_left_open_is_looked_at_once():
    """A regular expression would go to the end from each of these: hours."""
    assert words_of(["{%" * 500_000])[0] == "{%" * 500_000
    assert len(words_of(["{{ '" + r"\'" * 500_000 + "}}a"])) > 1


def test_templates_of_all_forms(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("one")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool.jinja").write_text("two")
    found = set(templates_in(tmp_path, {"chat_template": [{"name": "a", "template": "three"}]}))
    assert found == {"one", "two", "three"}
    assert list(templates_of({"a": "four"})) == ["four"]
    assert list(templates_of(json.loads('[1, {"template": 5}, null, {"template": "five"}]'))) == ["five"]
    assert list(templates_of(json.loads("null"))) == []
    os.mkfifo(tmp_path / "chat_template_x.jinja")
    with pytest.raises(ValueError, match="not a regular file"):
        list(templates_in(tmp_path, {}))
    (tmp_path / "chat_template_x.jinja").unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        list(templates_in(tmp_path, {}))


DONE = ShrunkVocabulary(
    np.array([0, 2]), "BPE", (4, 2), (100, 80), (400, 320), {}, {"a.weight": 0, "b": 0}, 10, (20, 25), 18,
    Unseen((10, 7), (100, 98), 5, 1), "proved on 3 of 3 texts", 1.0, 0.5, {"ro\x1bse": 2},
)  # fmt: skip


def test_what_is_printed():
    text = str(DONE)
    assert "50.0%" in text
    assert "80.0%" in text
    assert "2.000  2.500" in " ".join(text.replace("  ", " ").split(" ")).replace(" 2.500", "  2.500")
    assert "Of the text's 20 tokens, 90.0% stay." in text
    assert "70.0% of 10 passages are read as before, 98.0% of 100 tokens stay." in text
    assert "The other 2 become 5 smaller pieces; 1 become unknown." in text
    assert r"'ro\x1bse' 2" in text.replace("\\\\", "\\")
    assert "Proved on 3 of 3 texts." in text.splitlines()


def test_two_are_equal_if_the_same_tokens_stay():
    assert DONE == DONE
    assert DONE != "it"
