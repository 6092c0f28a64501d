"""The words that chat templates put around messages, whose tokens stay.

Law: no template is run; what it could write of its own is read from its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from secateur.support import printable

__all__ = ["templates_in", "words_of"]

ROLES = ("system", "user", "assistant", "tool", "function", "developer", "model")
_CODE = re.compile(r"\{%.*?%\}|\{\{.*?\}\}|\{#.*?#\}", re.DOTALL)
_QUOTED = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)
_ESCAPED = {r"\n": "\n", r"\t": "\t", r"\'": "'", r"\"": '"', r"\\": "\\", r"\r": "\r"}


def templates_in(directory: Path, configured: Mapping[str, Any]) -> Iterator[str]:
    """The templates of a directory: in files of their own, and in ``tokenizer_config.json``."""
    for path in sorted([*directory.glob("chat_template*.jinja"), *directory.glob("additional_chat_templates/*.jinja")]):
        try:
            yield path.read_text("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{path}: a chat template that is not UTF-8 text.") from None
    yield from templates_of(configured.get("chat_template"))


def templates_of(value: Any) -> Iterator[str]:
    """One, a list of named ones, or an object of them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (each for each in value.values() if isinstance(each, str))
    elif isinstance(value, list):
        yield from (each["template"] for each in value if isinstance(each, Mapping) and "template" in each)


def words_of(templates: Iterable[str]) -> list[str]:
    r"""What templates may write: what is between their code, what is quoted in it, and roles with what follows them.

    >>> words_of(["{{ '<s>' + role + '\\n' }}Hi!"])[:3]
    ['Hi!', '<s>', '\n']
    """
    found: dict[str, None] = {}
    for template in templates:
        for text in _CODE.split(template):
            found[text] = None
        for code in _CODE.findall(template):
            for one, other in _QUOTED.findall(code):
                found[re.sub(r"\\.", lambda match: _ESCAPED.get(match[0], match[0]), one or other)] = None
    texts = [each for each in found if each]
    if not texts:
        return []
    around = [text for text in texts if not text.strip() or len(printable(text)) < 40]
    return [*texts, *(role + after for role in ROLES for after in ("", "\n", *around))]
