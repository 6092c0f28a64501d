"""How often a text has each token, and the text in passages, for what is proved and measured on it.

Law: every token of the text is counted once; passages are held up to a limit, and joined they are the beginning of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from secateur.support import track
from secateur.vocabulary.tokens import Ids, reading

__all__ = ["Counted", "count", "encoded", "passages"]

PASSAGE = 200  # characters that a passage has at least, where lines allow it
LONGEST = 20_000  # characters: what has no line ends is cut here
HELD = 64_000_000  # characters of passages that are held
_AT_ONCE = 512  # passages
_ENDS = re.compile(r"\n(?=\S)")  # of a line, where the next one is not empty and not indented


@dataclass
class Counted:
    """The token counts and passages of a text.

    Attributes:
        counts: how often it has each token, by number.
        words: how many words: what is between white space.
        passages: parts of it, up to a limit.
        ids: the tokens of each of these.
    """

    counts: npt.NDArray[np.int64]
    words: int = 0
    passages: list[str] = field(default_factory=list)
    ids: list[Ids] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())


def count(backend: Any, texts: Iterable[str], size: int) -> Counted:
    """Counts the tokens of documents; ``size`` is one more than their highest number.

    Raises:
        TypeError: something among them is no text.
        ValueError: there is no text at all, half of a surrogate pair in one, or the tokenizer fails on one.
    """
    if isinstance(texts, str):
        raise TypeError("texts are documents: pass a list of them, [text] for a single one.")
    found = Counted(np.zeros(size, dtype=np.int64))
    held = 0
    for some in _batches(passage for text in track(texts, "counting") for passage in passages(text)):
        every = encoded(backend, some)
        found.counts += np.bincount(np.concatenate(every), minlength=size)
        for passage, ids in zip(some, every, strict=True):
            found.words += len(passage.split())
            held += len(passage)
            if held <= HELD:
                found.passages.append(passage)
                found.ids.append(ids)
    if not found.tokens:
        raise ValueError("the text has no tokens: there is nothing to count.")
    return found


def passages(text: str) -> Iterator[str]:
    """A text in parts that begin with a line of their own.

    >>> [len(each) for each in passages(("word " * 30 + "\\n") * 4)]
    [302, 302]
    """
    if not isinstance(text, str):
        raise TypeError(f"texts are strings, not {type(text).__name__}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a text has half of a surrogate pair at character {error.start:,}, which is no text; "
            "text.encode('utf-8', 'replace').decode() replaces it."
        ) from None
    begin = 0
    for match in _ENDS.finditer(text):
        if match.end() - begin >= PASSAGE:
            yield from _cut(text[begin : match.end()])
            begin = match.end()
    yield from _cut(text[begin:])


def _cut(passage: str) -> Iterator[str]:
    for begin in range(0, len(passage), LONGEST):
        yield passage[begin : begin + LONGEST]


def _batches(items: Iterable[str]) -> Iterator[list[str]]:
    some: list[str] = []
    for item in items:
        some.append(item)
        if len(some) == _AT_ONCE:
            yield some
            some = []
    if some:
        yield some


def encoded(backend: Any, texts: Sequence[str], *, special: bool = False) -> list[Ids]:
    """The tokens of each text, by number."""
    with reading():
        found = backend.encode_batch_fast(list(texts), add_special_tokens=special)
    return [np.array(each.ids, dtype=np.int64) for each in found]
