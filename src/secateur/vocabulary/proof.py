"""The proof on texts: the smaller tokenizer turns a text whose tokens all stay into the same tokens, renumbered.

Law: what is proved is said with how many texts it was proved on; one that is read otherwise is an error, not a number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from secateur.support import printable
from secateur.vocabulary.counting import encoded
from secateur.vocabulary.tokens import Ids, Tokens

__all__ = ["Encode", "agree", "encoding", "random_texts", "renaming", "together"]

Encode = Callable[[Sequence[str]], Sequence[Ids]]
RANDOM = 4000  # texts
_LONGEST = 12  # tokens or characters of a random text
_PLANES = ((0x20, 0x7F), (0xA0, 0x600), (0x600, 0x3000), (0x3000, 0xD800), (0xE000, 0x10000), (0x1F000, 0x1FB00))


def renaming(order: Ids, size: int) -> Ids:
    """The new number of each old one, -1 of what leaves.

    >>> renaming(np.array([0, 3]), 4)
    array([ 0, -1, -1,  1])
    """
    new = np.full(max(size, int(order.max(initial=-1)) + 1), -1, dtype=np.int64)
    new[order] = np.arange(len(order))
    return new


def agree(
    texts: Sequence[str], ids: Sequence[Ids], encode: Encode, new: Ids, what: str, *, hint: str = ""
) -> tuple[int, list[Ids]]:
    """How many texts have only tokens that stay, and what the smaller tokenizer makes of all texts.

    Raises:
        ValueError: of one of these texts it makes others.
    """
    found = list(encode(texts))
    old = together(ids)
    if (beyond := np.flatnonzero(old.numbers >= len(new))).size:
        text = texts[old.text_of(int(beyond[0]))]
        raise ValueError(f"{what} of {printable(repr(text), 80)} are beyond its own tokens{hint}.")
    expected = new[old.numbers]
    stays = old.each(expected >= 0)
    for at in np.flatnonzero(stays & ~old.same(expected, together(found))).tolist():
        wanted = expected[old.begins[at] : old.begins[at + 1]]
        raise ValueError(
            f"{what} of {printable(repr(texts[at]), 80)} would be {found[at].tolist()[:8]} and not "
            f"{wanted.tolist()[:8]}, though each of them stays: nothing was changed{hint}."
        )
    return int(stays.sum()), found


@dataclass(frozen=True)
class Together:
    """The tokens of texts, one after the other; those of text i are ``numbers[begins[i]:begins[i + 1]]``."""

    numbers: Ids
    begins: Ids

    def text_of(self, place: int) -> int:
        """The text that a place among the numbers is of."""
        return int(np.searchsorted(self.begins, place, side="right")) - 1

    def each(self, true: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """For each text whether this is true of all of its numbers."""
        wrong = np.concatenate([[0], np.cumsum(~true)])
        found: npt.NDArray[np.bool_] = wrong[self.begins[1:]] == wrong[self.begins[:-1]]
        return found

    def same(self, numbers: Ids, other: Together) -> npt.NDArray[np.bool_]:
        """For each text whether these numbers in place of its own are another's."""
        lengths, theirs = np.diff(self.begins), np.diff(other.begins)
        alike = np.repeat(lengths == theirs, lengths)
        equal = ~alike
        equal[alike] = numbers[alike] == other.numbers[np.repeat(lengths == theirs, theirs)]
        found: npt.NDArray[np.bool_] = (lengths == theirs) & self.each(equal)
        return found


def together(ids: Sequence[Ids]) -> Together:
    """The tokens of texts in one array.

    >>> together([np.array([3, 4]), np.array([], dtype=np.int64), np.array([5])]).begins
    array([0, 2, 2, 3])
    """
    begins = np.cumsum([0, *map(len, ids)])
    return Together(np.concatenate([*ids, np.zeros(0, dtype=np.int64)]).astype(np.int64, copy=False), begins)


def random_texts(tokens: Tokens, order: Ids, *, count: int | None = None, seed: int = 0) -> list[str]:
    """Texts of random characters of all of Unicode, and of random tokens that stay, one after the other."""
    return list(_drawn(tokens, order, RANDOM if count is None else count, np.random.default_rng(seed)))


def _drawn(tokens: Tokens, order: Ids, count: int, generator: np.random.Generator) -> Iterator[str]:
    backend = tokens.backend
    kept = np.array([number for number in order if int(number) in tokens.by_id], dtype=np.int64)

    @functools.cache
    def alone(number: int) -> str:
        return str(backend.decode([number], skip_special_tokens=False))

    for at in range(count):
        length = int(generator.integers(1, _LONGEST + 1))
        if at % 4 == 0:
            low, high = _PLANES[int(generator.integers(len(_PLANES)))]
            yield "".join(map(chr, generator.integers(low, high, size=length)))
        elif at % 4 == 1:
            points = [int(generator.integers(*_PLANES[int(generator.integers(len(_PLANES)))])) for _ in range(length)]
            yield "".join(map(chr, points))
        elif len(kept):
            chosen = generator.choice(kept, size=length).tolist()
            yield (" " if at % 4 == 2 else "").join(map(alone, chosen))


def encoding(backend: Any, *, special: bool = True) -> Encode:
    """What a tokenizer of the `tokenizers` library makes of texts, as `agree` asks for it."""
    return lambda texts: encoded(backend, texts, special=special)
