"""How the tokens of byte-pair encoding are made: of which two each is, when a text has it. A tokenizer as its
``tokenizer.json`` says it: which tokens there are, which have to stay, and a smaller one of them.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from secateur.support import printable

# ---- How the tokens of byte-pair encoding are made: of which two each is, when a text has it.
#
# Law: a text whose tokens all stay is read as before if each of them keeps the two that it is made of, and these
# theirs: merges happen lowest rank first, and of those that happened none is gone, of those that are gone none
# happened.


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


# A tokenizer as its ``tokenizer.json`` says it: which tokens there are, which have to stay, and a smaller one of
# them.
#
# Law: of a text whose tokens all stay the smaller tokenizer makes the same tokens under their new numbers. Merges
# lose what is made last and nothing that is made of it; of pieces with scores the worst stays, by which the unknown
# is scored; where the longest piece wins, a word that was unknown stays so.

Ids = npt.NDArray[np.int64]
BPE, UNIGRAM, WORDPIECE, WORDLEVEL = "BPE", "Unigram", "WordPiece", "WordLevel"
_MOST = 1 << 22  # numbers of tokens: arrays have an entry for each; the largest vocabularies are a sixteenth
_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def _byte_alphabet() -> dict[str, int]:
    """How byte-level tokenizers spell bytes: printable ones as themselves, the others from 256 on."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + at): byte for at, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Whatever a tokenizer raises for a text becomes a ValueError, also a panic of what is written in Rust."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic's class is no Exception
        why = printable(" ".join(str(error).split()), 150)
        raise ValueError(f"the tokenizer fails on a text ({why}).") from None


def backend_of(text: str) -> Any:
    """The tokenizer that ``tokenizer.json`` describes, without truncation and padding.

    Raises:
        ValueError: it is none that the `tokenizers` library reads.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # what is written in Rust panics with a class that is no Exception
        why = printable(" ".join(str(error).split()), 150)
        raise ValueError(f"is no tokenizer that the tokenizers library reads ({why})") from None
    return tokenizer


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of a tokenizer.

    Attributes:
        values: its ``tokenizer.json``.
        kind: of its model: "BPE", "Unigram", "WordPiece" or "WordLevel".
        model: the model's own tokens, ``{token: number}``.
        added: those that were added, which are looked for in a text first.
        backend: the tokenizer itself, without truncation and padding.
    """

    values: Mapping[str, Any]
    kind: str
    model: Mapping[str, int]
    added: Mapping[str, int]
    backend: Any

    @staticmethod
    def of(values: Mapping[str, Any], where: str = "the tokenizer") -> Tokens:
        """The tokens in a ``tokenizer.json``.

        Raises:
            ValueError: it is none, of a kind that is not known, or one that draws lots or cannot say "unknown".
        """
        try:
            _check_before_reading(values["model"] if isinstance(values.get("model"), Mapping) else {})
            backend = backend_of(json.dumps(values, ensure_ascii=False))
            kind = json.loads(backend.to_str())["model"]["type"]
            model = values["model"]["vocab"]
            ids = {each[0]: at for at, each in enumerate(model)} if kind == UNIGRAM else dict(model)
            added = {each["content"]: backend.token_to_id(each["content"]) for each in values.get("added_tokens") or ()}
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{where} {error if 'tokenizer' in str(error) else 'is damaged'}.") from None
        if kind not in (BPE, UNIGRAM, WORDPIECE, WORDLEVEL):
            raise ValueError(f"{where} is of the kind {printable(str(kind))}, which is not known.")
        found = Tokens(values, kind, ids, added, backend)
        if len(set(ids.values())) < len(ids):
            raise ValueError(f"{where} has two tokens of one number.")
        if left := [token for token, number in added.items() if number is None]:
            raise ValueError(f"{where} adds a token {left[0]!r} that the tokenizers library leaves out; remove it.")
        if values["model"].get("dropout"):
            raise ValueError(f"{where} draws lots (dropout), and reads no text twice alike; set it to null.")
        if kind in (WORDLEVEL, WORDPIECE) and not found.says_unknown:
            raise ValueError(f"{where} has no token for what is unknown, which words that leave would become; add one.")
        return found

    # ---- what there is ----------------------------------------------------------------------------------------------

    @cached_property
    def size(self) -> int:
        """One more than the highest number."""
        return 1 + max((*self.model.values(), *self.added.values()), default=-1)

    @cached_property
    def by_id(self) -> dict[int, str]:
        return {number: token for token, number in {**self.model, **self.added}.items()}

    @property
    def unknown(self) -> int | None:
        """The number of the token that stands for what is unknown."""
        model = self.values["model"]
        if self.kind == UNIGRAM:
            return None if model.get("unk_id") is None else int(model["unk_id"])
        return self.model.get(model.get("unk_token"), self.added.get(model.get("unk_token")))

    @property
    def says_unknown(self) -> bool:
        return self.unknown is not None or self.falls_back

    @cached_property
    def falls_back(self) -> bool:
        """Whether what is no token becomes bytes, so that nothing is unknown."""
        if self.is_byte_level:
            return all(each in self.model for each in _ALPHABET)
        return bool(self.values["model"].get("byte_fallback")) and self.model.keys() >= _BYTES

    @cached_property
    def is_byte_level(self) -> bool:
        return self.kind == BPE and any(
            _has_byte_level(self.values.get(key)) for key in ("pre_tokenizer", "normalizer")
        )

    def text_of(self, token: str) -> str | None:
        """The letters of a token of the model, without what its kind puts around them; None of a part of a letter."""
        model = self.values["model"]
        if self.is_byte_level and all(each in _ALPHABET for each in token):
            try:
                return bytes(_ALPHABET[each] for each in token).decode()
            except UnicodeDecodeError:
                return None
        if token in _BYTES:
            return ""
        prefix = model.get("continuing_subword_prefix") or ""
        suffix = model.get("end_of_word_suffix") or ""
        return token.removeprefix(prefix).removesuffix(suffix) or token

    # ---- what has to stay -------------------------------------------------------------------------------------------

    def needed(self) -> set[int]:
        """The numbers of tokens without which the tokenizer would be another: added and special ones, bytes, the
        unknown one, the one that pads, and the worst piece."""
        found = {*self.added.values(), *(number for number in [self.unknown] if number is not None)}
        found |= {self.model[each] for each in _BYTES if each in self.model}
        if self.is_byte_level:
            found |= {self.model[each] for each in _ALPHABET if each in self.model}
        found |= {self.model[each] for each in _named_by(self.values.get("post_processor")) if each in self.model}
        padding = self.values.get("padding")
        if isinstance(padding, Mapping) and padding.get("pad_id") in self.by_id:
            found.add(padding["pad_id"])
        if self.kind == UNIGRAM and self.model:
            scores = [score for _, score in self.values["model"]["vocab"]]
            found.add(int(np.argmin(scores)))  # what is unknown costs ten more than the worst
        return found

    def characters(self) -> set[int]:
        """The numbers of tokens of one letter, what others fall into; none where that is bytes, or nothing."""
        if self.falls_back or self.kind == WORDLEVEL:
            return set()
        return {number for token, number in self.model.items() if len(self.text_of(token) or "") == 1}

    def parents(self, numbers: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """Of which tokens each of these is made; all that has to stay for it is reached through them."""
        if self.kind != BPE:
            return {}
        merges = self.merges
        made = {number: merges.parents(self.by_id[number]) for number in numbers if number in self._of_model}
        return {number: tuple(self.model[part] for part in parts) for number, parts in made.items() if parts}

    @cached_property
    def merges(self) -> Merges:
        return Merges(self.values["model"])

    @cached_property
    def _of_model(self) -> frozenset[int]:
        return frozenset(self.model.values())

    def ranked(self) -> list[int]:
        """The model's own tokens, the most frequent of what the tokenizer was trained on first: merges by rank, pieces
        by score, others by number. What no merge makes comes behind the merges."""
        numbers = sorted(self.model.values())
        if self.kind == BPE:
            ranks = {self.merges.merged(*pair): at for at, pair in reversed([*enumerate(self.merges.pairs)])}
            return sorted(numbers, key=lambda number: ranks.get(self.by_id[number], len(ranks)))
        if self.kind == UNIGRAM:
            scores = [float(score) for _, score in self.values["model"]["vocab"]]
            return sorted(numbers, key=lambda number: -scores[number])
        return numbers

    def open_pieces(self) -> set[int]:
        """The numbers of pieces of WordPiece that would read words which are unknown now, once other pieces are gone.

        A word is unknown where the longest piece is followed by a letter that no piece begins with. Were that piece
        gone, a shorter one might be followed by a piece that has this letter inside. So a piece has to leave if a
        letter in it, but for its first, is no piece itself, and what is before that letter ends a longer piece.
        """
        if self.kind != WORDPIECE:
            return set()
        prefix = self.values["model"].get("continuing_subword_prefix", "##")
        continued = {token[len(prefix) :]: number for token, number in self.model.items() if token.startswith(prefix)}
        until = {
            each: max((at for at, letter in enumerate(each) if at and letter not in continued), default=0)
            for each in continued
        }
        if not any(until.values()):
            return set()
        texts = [token.removeprefix(prefix) for token in self.model]
        ends = {text[at:] for text in texts for at in range(1, len(text))}
        return {continued[each] for each, last in until.items() if any(each[:at] in ends for at in range(1, last + 1))}

    def unmade(self) -> set[int]:
        """The numbers of WordPiece's single letters that no text is read as: they continue a word, and the tokenizer
        makes a word of its own of each such letter, as of punctuation."""
        if self.kind != WORDPIECE:
            return set()
        prefix = self.values["model"].get("continuing_subword_prefix", "##")
        continued = ((token.removeprefix(prefix), at) for token, at in self.model.items() if token.startswith(prefix))
        return {at for letter, at in continued if len(letter) == 1 and not self._continues(letter)}

    def _continues(self, letter: str) -> bool:
        """Whether a letter is ever inside of a word, behind a letter, a digit or itself."""
        normal, words = self.backend.normalizer, self.backend.pre_tokenizer
        with reading():
            for text in (f"a{letter}a", f"1{letter}", letter * 2):
                read = text if normal is None else normal.normalize_str(text)
                parts = [read] if words is None else [part for part, _ in words.pre_tokenize_str(read)]
                if any(letter in part[1:] for part in parts):
                    return True
        return False

    def instead(self, number: int) -> tuple[int, ...]:
        """The numbers of the tokens that the text of one is read as without it, were all others there: what it is made
        of by merging, the best pieces by their scores, or the longest ones; nothing where it would be unknown."""
        token = self.by_id.get(number, "")
        if self.model.get(token) != number or self.kind == WORDLEVEL:
            return ()
        if self.kind == BPE:
            return self.parents([number]).get(number, ())
        return self._best(token) if self.kind == UNIGRAM else self._longest(token)

    def _longest(self, token: str) -> tuple[int, ...]:
        prefix = self.values["model"].get("continuing_subword_prefix", "##")
        before = prefix if token.startswith(prefix) and token != prefix else ""
        rest = token.removeprefix(before)
        found: list[int] = []
        while rest:
            ends = (end for end in range(len(rest), 0, -1) if before + rest[:end] != token or found)
            end = next((end for end in ends if before + rest[:end] in self.model), 0)
            if not end:
                return ()
            found.append(self.model[before + rest[:end]])
            before, rest = prefix, rest[end:]
        return tuple(found)

    @cached_property
    def _scores(self) -> dict[str, float]:
        return {piece: float(score) for piece, score in self.values["model"]["vocab"]}

    def _best(self, token: str) -> tuple[int, ...]:
        best: list[tuple[float, tuple[int, ...]] | None] = [(0.0, ())]
        for end in range(1, len(token) + 1):
            ways = [
                (way[0] + self._scores[piece], (*way[1], self.model[piece]))
                for begin in range(end)
                if (way := best[begin]) is not None and (piece := token[begin:end]) in self._scores and piece != token
            ]
            best.append(max(ways, default=None))
        last = best[-1]
        return () if last is None else last[1]

    # ---- the smaller one --------------------------------------------------------------------------------------------

    def order(self, kept: Iterable[int]) -> Ids:
        """What stays in its new order, which is the old one, but added tokens come behind those of the model."""
        kept = [int(number) for number in kept]
        behind = {number for token, number in self.added.items() if token not in self.model}
        without = {number for number in kept if number not in self.by_id}
        return np.array(sorted(kept, key=lambda number: (number in without, number in behind, number)), dtype=np.int64)

    def pruned(self, order: Ids) -> dict[str, Any]:
        """The ``tokenizer.json`` of the tokens that stay: ``order[new] = old``."""
        new = {int(old): at for at, old in enumerate(order)}
        values = copy.copy(dict(self.values))
        values["model"] = model = dict(self.values["model"])
        if self.kind == UNIGRAM:
            model["vocab"] = [each for at, each in enumerate(model["vocab"]) if at in new]
            if model.get("unk_id") is not None:
                model["unk_id"] = new[model["unk_id"]]
        else:
            tokens = sorted((new[number], token) for token, number in self.model.items() if number in new)
            model["vocab"] = {token: number for number, token in tokens}
        if self.kind == BPE:
            left = set(self.merges.left(model["vocab"]))
            model["merges"] = [
                form
                for form, pair in zip(self.values["model"]["merges"], self.merges.pairs, strict=True)
                if pair in left
            ]
        values["added_tokens"] = [
            {**each, "id": new[self.added[each["content"]]]} for each in self.values.get("added_tokens") or ()
        ]
        if values.get("post_processor") is not None:
            values["post_processor"] = self._renumbered(values["post_processor"], new)
        padding = values.get("padding")
        if isinstance(padding, dict) and padding.get("pad_id") in new:
            values["padding"] = {**padding, "pad_id": new[padding["pad_id"]]}
        return values

    def _renumbered(self, processor: Mapping[str, Any], new: Mapping[int, int]) -> dict[str, Any]:
        """A post-processor: lists of numbers, and pairs of a token and its number."""
        found = dict(processor)
        if isinstance(found.get("processors"), list):
            found["processors"] = [self._renumbered(each, new) for each in found["processors"]]
        if isinstance(found.get("special_tokens"), dict):
            found["special_tokens"] = {
                name: {**each, "ids": [new.get(number, number) for number in each["ids"]]}
                for name, each in found["special_tokens"].items()
            }
        for key in ("sep", "cls"):
            if isinstance(found.get(key), list | tuple) and len(found[key]) == 2:
                found[key] = [found[key][0], new.get(found[key][1], found[key][1])]
        return found


def _check_before_reading(model: Mapping[str, Any]) -> None:
    """Raises ValueError for what the tokenizers library would not tell of: it has an entry for each number, and cuts
    off a prefix that is not there. Either ends the process, with no error that could be caught."""
    vocabulary, merges = model.get("vocab"), model.get("merges")
    prefix = model.get("continuing_subword_prefix")
    for token, number in vocabulary.items() if isinstance(vocabulary, Mapping) else ():
        if type(number) is int and number >= _MOST:
            named = printable(repr(token), 60)
            raise ValueError(f"is no tokenizer: it gives {named} the number {number:,} (at most {_MOST:,} are known)")
    if not isinstance(prefix, str) or not prefix or not isinstance(merges, list):
        return
    for each in merges:
        second = each.partition(" ")[2] if isinstance(each, str) else each[1]
        if not str(second).startswith(prefix):
            merge = printable(str(each), 60)
            raise ValueError(f"is no tokenizer: the second part of {merge} does not begin with {printable(prefix, 20)}")


def _has_byte_level(part: object) -> bool:
    if isinstance(part, Mapping):
        return part.get("type") == "ByteLevel" or any(_has_byte_level(each) for each in part.values())
    return isinstance(part, Sequence) and not isinstance(part, str) and any(_has_byte_level(each) for each in part)


def _named_by(processor: object) -> set[str]:
    """The tokens that a post-processor puts around a text."""
    if not isinstance(processor, Mapping):
        return set()
    found = set()
    for each in processor.get("processors") or ():
        found |= _named_by(each)
    special = processor.get("special_tokens")
    if isinstance(special, Mapping):
        found |= {token for each in special.values() for token in each.get("tokens", ())}
    pairs = [processor.get(key) for key in ("sep", "cls")]
    return found | {each[0] for each in pairs if isinstance(each, list | tuple) and each}
