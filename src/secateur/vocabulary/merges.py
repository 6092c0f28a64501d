"""How the tokens of byte-pair encoding are made: of which two each is, when a text has it.

Law: a text whose tokens all stay is read as before if each of them keeps the two that it is made of, and these theirs:
merges happen lowest rank first, and of those that happened none is gone, of those that are gone none happened.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["Merges", "pairs_of"]


def pairs_of(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The merges of a ``tokenizer.json`` in their order, in either of the two forms in which they are written."""
    return [
        (each.partition(" ")[0], each.partition(" ")[2]) if isinstance(each, str) else (each[0], each[1])
        for each in model["merges"]
    ]


class Merges:
    """The merges of a model of byte pairs.

    >>> made = Merges({"vocab": {"a": 0, "b": 1, "ab": 2, "abb": 3}, "merges": ["a b", "ab b"]})
    >>> made.parents("abb"), made.parents("b")
    (('ab', 'b'), ())
    """

    def __init__(self, model: Mapping[str, Any]) -> None:
        self.vocabulary = model["vocab"]
        self.prefix = model.get("continuing_subword_prefix") or ""
        self.suffix = model.get("end_of_word_suffix") or ""
        self.pairs = pairs_of(model)
        self._ranks = {pair: rank for rank, pair in enumerate(self.pairs)}  # of one that is there twice the last counts
        self._parents: dict[str, tuple[str, ...]] = {}
        self._made: dict[str, list[tuple[str, str]]] = {}
        for pair in self._ranks:
            self._made.setdefault(self.merged(*pair), []).append(pair)

    def merged(self, first: str, second: str) -> str:
        """The token that a pair becomes."""
        return first + second[len(self.prefix) :]

    def parents(self, token: str) -> tuple[str, ...]:
        """The two that a token is made of; none of a character, or of one that no merges make."""
        if token not in self._parents:
            self._parents[token] = self._parents_of(token)
        return self._parents[token]

    def _parents_of(self, token: str) -> tuple[str, ...]:
        made = self._made.get(token, [])
        if len(made) < 2:
            return made[0] if made else ()
        last, whole = self._last_merge(token)
        if last is None:  # a character of it is no token: whichever way it is made, it stays so
            return tuple(part for pair in made for part in pair)
        return last if whole else ()

    def _last_merge(self, token: str) -> tuple[tuple[str, str] | None, bool]:
        """What is merged last where the token stands alone, and whether it then is one."""
        parts = self.characters(token)
        if not all(part in self.vocabulary for part in parts):
            return None, False
        last: tuple[str, str] = ("", "")
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            rank, at = min((self._ranks.get(pair, len(self.pairs)), at) for at, pair in enumerate(pairs))
            if rank == len(self.pairs):
                return last, False
            last = pairs[at]
            parts[at : at + 2] = [self.merged(*last)]
        return last, True

    def characters(self, token: str) -> list[str]:
        """What merging begins with.

        >>> Merges({"vocab": {}, "merges": [], "end_of_word_suffix": "</w>"}).characters("ab</w>")
        ['a', 'b</w>']
        """
        continued = bool(self.prefix) and token.startswith(self.prefix) and len(token) > len(self.prefix)
        body = token[len(self.prefix) :] if continued else token
        ended = bool(self.suffix) and body.endswith(self.suffix) and len(body) > len(self.suffix)
        parts = list(body[: -len(self.suffix)] if ended else body)
        if ended and parts:
            parts[-1] += self.suffix
        return [part if at == 0 and not continued else self.prefix + part for at, part in enumerate(parts)]

    def left(self, kept: Iterable[str]) -> list[tuple[str, str]]:
        """The merges, in their order, of which the two and what they become stay."""
        kept = frozenset(kept)
        return [pair for pair in self.pairs if pair[0] in kept and pair[1] in kept and self.merged(*pair) in kept]
