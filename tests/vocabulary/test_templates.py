"""What a template may write is found without running it."""

import json
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secateur.vocabulary.templates import _parts, _quoted, templates_in, templates_of, words_of


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
