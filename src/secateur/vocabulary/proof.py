"""The law, seen on texts: the smaller tokenizer makes of a text whose tokens all stay the same ones, renamed.

Law: what is proved is said with how many texts it was proved on; one that is read otherwise is an error, not a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from secateur.support import printable
from secateur.vocabulary.counting import encoded
from secateur.vocabulary.tokens import Ids, Tokens

__all__ = ["Encode", "agree", "encoding", "random_texts", "renaming"]

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
    right = 0
    for text, old, now in zip(texts, ids, found, strict=True):
        if (old >= len(new)).any():
            raise ValueError(f"{what} of {printable(repr(text), 80)} are beyond its own tokens{hint}.")
        expected = new[old]
        if (expected < 0).any():
            continue
        if not np.array_equal(expected, now):
            raise ValueError(
                f"{what} of {printable(repr(text), 80)} would be {now.tolist()[:8]} and not {expected.tolist()[:8]}, "
                f"though each of them stays: nothing was changed{hint}."
            )
        right += 1
    return right, found


def random_texts(tokens: Tokens, order: Ids, *, count: int = RANDOM, seed: int = 0) -> list[str]:
    """Texts of random characters of all of Unicode, and of random tokens that stay, one after the other."""
    return list(_drawn(tokens, order, count, np.random.default_rng(seed)))


def _drawn(tokens: Tokens, order: Ids, count: int, generator: np.random.Generator) -> Iterator[str]:
    backend = tokens.backend
    kept = np.array([number for number in order if int(number) in tokens.by_id], dtype=np.int64)
    for at in range(count):
        length = int(generator.integers(1, _LONGEST + 1))
        if at % 4 == 0:
            low, high = _PLANES[int(generator.integers(len(_PLANES)))]
            yield "".join(map(chr, generator.integers(low, high, size=length)))
        elif at % 4 == 1:
            points = [int(generator.integers(*_PLANES[int(generator.integers(len(_PLANES)))])) for _ in range(length)]
            yield "".join(map(chr, points))
        elif len(kept):
            chosen = [int(number) for number in generator.choice(kept, size=length)]
            separator = " " if at % 4 == 2 else ""
            yield separator.join(backend.decode([number], skip_special_tokens=False) for number in chosen)


def encoding(backend: Any, *, special: bool = True) -> Encode:
    """What a tokenizer of the `tokenizers` library makes of texts, as `agree` asks for it."""
    return lambda texts: encoded(backend, texts, special=special)
