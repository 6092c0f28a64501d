"""Which scripts the letters of a token are of.

Law: what is no letter, a digit or a full stop, is of every script; the names are Unicode's.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Iterable

__all__ = ["check_scripts", "is_of"]

# Characters of several scripts have names that begin otherwise; Unicode calls Han what its names call CJK.
_SCRIPTS = {"CJK": "Han", "NKO": "Nko", "LATIN": "Latin"}


@functools.lru_cache(maxsize=1 << 16)
def script_of(character: str) -> str | None:
    """The script of a letter or of a mark of one script; None of what all scripts share.

    >>> [script_of(each) for each in "aé я漢ا1.ʼ"]
    ['Latin', 'Latin', None, 'Cyrillic', 'Han', 'Arabic', None, None, None]
    """
    if unicodedata.category(character)[0] not in "LM":
        return None
    first = unicodedata.name(character, "").partition(" ")[0].partition("-")[0]
    return first if first in _SCRIPTS.values() else _named().get(first)


@functools.cache
def _named() -> dict[str, str]:
    """``{first word of a character's name: script}``, of those that have at least ten letters."""
    counts: dict[str, int] = {}
    for point in range(0x1F000):
        character = chr(point)
        if unicodedata.category(character)[0] == "L":
            first = unicodedata.name(character, "").partition(" ")[0].partition("-")[0]
            counts[first] = counts.get(first, 0) + 1
    shared = {"MODIFIER", "FULLWIDTH", "HALFWIDTH", "MATHEMATICAL", "DOUBLE", "SCRIPT", "BLACK", "TURNED", "SQUARED"}
    return {
        word: _SCRIPTS.get(word, word.title()) for word, count in counts.items() if count >= 10 and word not in shared
    }


def check_scripts(scripts: Iterable[str]) -> frozenset[str]:
    """The scripts of these names.

    >>> check_scripts(["latin"])
    frozenset({'Latin'})
    >>> check_scripts(["Elvish"])
    Traceback (most recent call last):
    ValueError: 'Elvish' is no script that Unicode's names know; such as Latin, Cyrillic, Greek, Arabic, Han, Hiragana.
    """
    known = {script.casefold(): script for script in _named().values()}
    for script in scripts:
        if script.casefold() not in known:
            raise ValueError(
                f"{script!r} is no script that Unicode's names know; such as Latin, Cyrillic, Greek, Arabic, Han, "
                "Hiragana."
            )
    return frozenset(known[script.casefold()] for script in scripts)


def is_of(text: str, scripts: frozenset[str]) -> bool:
    """Whether all letters are of these scripts.

    >>> is_of("naïve 2", frozenset({"Latin"})), is_of("naïve я", frozenset({"Latin"}))
    (True, False)
    """
    return all(script_of(character) in (None, *scripts) for character in text)
