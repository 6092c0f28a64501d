"""What a template may write is found without running it."""

import json

import pytest

from secateur.vocabulary.templates import templates_in, templates_of, words_of

TEMPLATE = """{% for m in messages %}{% if loop.first %}{{ '<|im_start|>system\\nBe kind.' }}{% endif %}
{{- "<|im_start|>" + m['role'] + '\\n' + m["content"] }}It\\'s{# not 'this' #}{% endfor %}"""


def test_all_that_is_quoted_or_between_is_found():
    found = words_of([TEMPLATE])
    assert {"<|im_start|>system\nBe kind.", "<|im_start|>", "\n", "role", "user\n", "assistant", "model"} <= set(found)
    assert any("It" in each for each in found)
    assert words_of([]) == []
    assert words_of([""]) == []


def test_templates_of_all_forms(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("one")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool.jinja").write_text("two")
    found = set(templates_in(tmp_path, {"chat_template": [{"name": "a", "template": "three"}]}))
    assert found == {"one", "two", "three"}
    assert list(templates_of({"a": "four"})) == ["four"]
    assert list(templates_of(json.loads("null"))) == []
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        list(templates_in(tmp_path, {}))
