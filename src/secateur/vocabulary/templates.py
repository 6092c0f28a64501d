"""The words that chat templates put around messages, whose tokens stay.

Law: no template is run; what it could write of its own is read from its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from secateur.support import open_regular, printable

__all__ = ["templates_in", "words_of"]

ROLES = ("system", "user", "assistant", "tool", "function", "developer", "model")
_OPENS = re.compile(r"\{[%{#]")
_CLOSES = {"{%": "%}", "{{": "}}", "{#": "#}"}
_QUOTES = re.compile("['\"]")
_QUOTED = {quote: re.compile(rf"(?:[^{quote}\\]|\\.)*", re.DOTALL) for quote in "'\""}
_ESCAPED = {r"\n": "\n", r"\t": "\t", r"\'": "'", r"\"": '"', r"\\": "\\", r"\r": "\r"}


def templates_in(directory: Path, configured: Mapping[str, Any]) -> Iterator[str]:
    """The templates of a directory: in files of their own, and in ``tokenizer_config.json``."""
    for path in sorted([*directory.glob("chat_template*.jinja"), *directory.glob("additional_chat_templates/*.jinja")]):
        try:
            with open_regular(path) as file:
                yield file.read().decode("utf-8")
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
        yield from (each for part in value if isinstance(part, Mapping) for each in templates_of(part.get("template")))


def words_of(templates: Iterable[str]) -> list[str]:
    r"""What templates may write: what is between their code, what is quoted in it, and roles with what follows them.

    >>> words_of(["{{ '<s>' + role + '\\n' }}Hi!"])[:3]
    ['Hi!', '<s>', '\n']
    """
    found: dict[str, None] = {}
    for template in templates:
        around, codes = _parts(template)
        found |= dict.fromkeys(around)
        for quoted in (each for code in codes for each in _quoted(code)):
            found[re.sub(r"\\.", lambda match: _ESCAPED.get(match[0], match[0]), quoted)] = None
    texts = [each for each in found if each]
    if not texts:
        return []
    around = [text for text in texts if not text.strip() or len(printable(text)) < 40]
    return [*texts, *(role + after for role in ROLES for after in ("", "\n", *around))]


def _parts(template: str) -> tuple[list[str], list[str]]:
    """What is around the code of a template, and the code; each character is looked at once, whatever is left open."""
    around, codes = [], []
    begin = at = 0
    endless: set[str] = set()
    while opened := _OPENS.search(template, at):
        kind = opened[0]
        end = -1 if kind in endless else template.find(_CLOSES[kind], opened.end())
        if end < 0:
            endless.add(kind)
            at = opened.start() + 1
            continue
        around.append(template[begin : opened.start()])
        codes.append(template[opened.start() : end + 2])
        begin = at = end + 2
    return [*around, template[begin:]], codes


def _quoted(code: str) -> Iterator[str]:
    """What is between quotes, escapes as they are written."""
    at = 0
    endless: set[str] = set()
    while opened := _QUOTES.search(code, at):
        at, quote = opened.end(), opened[0]
        if quote in endless:
            continue
        inside = _QUOTED[quote].match(code, at)
        assert inside is not None  # of nothing, too
        if code.startswith(quote, inside.end()):
            yield inside[0]
            at = inside.end() + 1
        else:
            endless.add(quote)
