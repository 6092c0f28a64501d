"""Which tokens stay: those that are needed, and the most frequent of the others; scripts, and distances of rows."""

from __future__ import annotations

import functools
import heapq
import unicodedata
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from secateur.checkpoints import Checkpoint
from secateur.vocabulary.tokens import Ids, Tokens

# ---- Which scripts the letters of a token are of.
#
# Law: what is no letter, a digit or a full stop, is of every script; the names are Unicode's.

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


# ---- How far a token is from what its text is read as without it: from the mean of the rows of these pieces.
#
# Law: 1 minus the cosine of its own row of the embedding and that mean; 1 where there are no pieces, or no rows of
# them. Rows are read one by one as they are asked for, and few are held.

_HELD = 2048  # rows: the same pieces are part of many tokens
_LEAST = 1e-6  # more than nothing, so that what the text has leaves behind what it does not have
Distance = Callable[[int], float]
Rows = Callable[[int], Tensor]


def distances(tokens: Tokens, rows: Rows, size: int) -> Distance:
    """Of a token, by its number; ``rows`` gives one of the ``size`` rows of the embedding, in float32."""
    rows = functools.lru_cache(_HELD)(rows)

    @functools.cache  # asked for again in the trial without the last tenth of a text
    def distance(number: int) -> float:
        pieces = tokens.instead(number)
        if not pieces or number >= size or any(piece >= size or piece == tokens.unknown for piece in pieces):
            return 1.0
        mean = torch.stack([rows(piece) for piece in pieces]).mean(0)
        found = float(1 - torch.nn.functional.cosine_similarity(rows(number), mean, dim=0))
        return max(found, _LEAST) if found == found else 1.0  # of a row of NaN

    return distance


def rows_of_tensor(embedding: Tensor) -> Rows:
    """The rows of an embedding in memory."""
    return lambda number: embedding[number].detach().cpu().float()


def rows_in_files(checkpoint: Checkpoint, names: Sequence[str]) -> Rows:
    """The rows of the first of these tensors that the files hold."""
    entry = next(checkpoint.entries[name] for name in names if name in checkpoint.entries)
    width, dtype = entry.nbytes // entry.shape[0], entry.torch_dtype
    assert dtype is not None  # what counts tokens is of a dtype that torch reads
    return lambda number: checkpoint.raw(entry.name, number * width, (number + 1) * width).view(dtype).float()


# ---- Which tokens stay: all that are needed, and of the others those that a text has most often.
#
# Law: what a token that stays is made of stays as well; the rarest leaves first, or that of which the least is lost,
# of equals the one with the highest number; as many stay as were asked for.

RANKS = ("count", "distance")


@dataclass(frozen=True)
class Asked:
    """Which tokens shall stay.

    Attributes:
        keep: how many at most; None for no limit.
        cover: the share of the text's tokens that stays; None for all.
        scripts: those that the letters of tokens are of; empty for all.
        multiple: what the number of tokens is a multiple of.
        rank: "count", or "distance": by what the next one that leaves is found.
        sample: whether the text is a sample, beside whose tokens some of the tokenizer's own order stay.
        first: how many of these.
    """

    keep: int | None = None
    cover: float | None = None
    scripts: frozenset[str] = frozenset()
    multiple: int = 1
    rank: str = "count"
    sample: bool = False
    first: int = 0


def asked(
    keep: int | None = None,
    cover: float | None = None,
    script: str | Iterable[str] | None = None,
    multiple: int | None = None,
    rank: str | None = None,
    *,
    exact: bool = False,
    with_text: bool,
) -> Asked:
    """What was asked for, checked.

    Raises:
        ValueError: a number out of range, a script that there is none, or nothing that says which tokens leave.

    >>> asked(cover=1.5, with_text=True)
    Traceback (most recent call last):
    ValueError: cover must be in (0, 1], not 1.5: the share of the text's tokens that stays.
    """
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ValueError(f"keep must be at least 1, not {keep}: how many tokens stay.")
    if cover is not None and not 0 < cover <= 1:
        raise ValueError(f"cover must be in (0, 1], not {cover}: the share of the text's tokens that stays.")
    if multiple is not None and (type(multiple) is not int or multiple < 1):
        raise ValueError(f"multiple must be at least 1, not {multiple}.")
    scripts = check_scripts([script] if isinstance(script, str) else script or ())
    if cover is not None and not with_text:
        raise ValueError("cover is the share of a text's tokens that stays: give the text as well.")
    if not with_text and keep is None and not scripts:
        raise ValueError("nothing says which tokens may leave: give a text, how many to keep, or a script.")
    if rank not in (None, *RANKS):
        raise ValueError(f"rank must be {' or '.join(map(repr, RANKS))}, not {rank!r}.")
    if rank == "distance" and not with_text:
        raise ValueError('rank="distance" weighs how often a text has each token: give the text as well.')
    if exact and (keep is not None or cover is not None or not with_text):
        raise ValueError("exact keeps the tokens that a text has: give a text, and neither keep nor cover.")
    sample = with_text and not exact and keep is None and cover is None
    return Asked(keep, cover, scripts, multiple or 1, rank or "count", sample)


def choose(
    tokens: Tokens,
    counts: npt.NDArray[np.int64] | None,
    asked: Asked,
    needed: Collection[int],
    rows: int,
    distance: Distance | None = None,
) -> Ids:
    """The numbers of the tokens that stay, ascending.

    Args:
        tokens: those that there are.
        counts: how often a text has each; None without one, and then the tokenizer's own order says what is rare.
        asked: what shall stay.
        needed: numbers that stay whatever was asked, perhaps of no token.
        rows: how many numbers the model knows.
        distance: how far each is from what would be read instead, by which its count is multiplied; None: as far.

    Raises:
        ValueError: more has to stay than was asked for.
    """
    numbers = {number for number in tokens.model.values() if number < rows}
    opened = tokens.open_pieces() - set(needed)
    fixed = set(needed) | (tokens.needed() - opened)
    characters = tokens.characters()
    foreign = set(opened)
    if asked.scripts:
        texts = {number: tokens.text_of(token) for token, number in tokens.model.items()}
        foreign |= {number for number in numbers if (text := texts[number]) is None or not is_of(text, asked.scripts)}
    fixed |= {number for number in tokens.ranked()[: asked.first] if number in numbers} - foreign
    fixed |= characters if not tokens.says_unknown else characters - foreign
    unmade = {number for number in tokens.unmade() if counts is None or not counts[number]}
    fixed -= (opened | unmade) - set(needed)
    order = _leaving(tokens, counts, numbers, fixed, foreign | unmade, distance)
    whole = len(numbers | fixed)
    leave = _how_many(order, counts, asked, whole, foreign | unmade)
    while leave and (whole - leave) % asked.multiple:
        leave -= 1
    left = {number for number, _ in order[:leave]}
    return np.array(sorted((numbers | fixed) - left), dtype=np.int64)


def _leaving(
    tokens: Tokens,
    counts: npt.NDArray[np.int64] | None,
    numbers: Collection[int],
    fixed: Collection[int],
    foreign: Collection[int],
    distance: Distance | None,
) -> list[tuple[int, int]]:
    """All that may leave, in order, each with how often the text had it, or had what it had been part of.

    Only what nothing else is made of leaves; what it was made of is then had as often more.
    """
    parents = tokens.parents(numbers)
    children = dict.fromkeys(numbers, 0)
    for number, parts in parents.items():
        for part in set(parts):
            children[part] = children.get(part, 0) + (part != number)
    had = {number: 0 if counts is None else int(counts[number]) for number in numbers}
    last = {number for number in foreign if number not in fixed}

    def next_one(number: int) -> tuple[bool, float, int]:
        far = 1.0 if distance is None or not had[number] else distance(number)
        return number not in last, had[number] * far, -number

    ready = [next_one(number) for number in numbers if number not in fixed and not children[number]]
    heapq.heapify(ready)
    found = []
    while ready:
        number = -heapq.heappop(ready)[2]
        count = had[number]
        found.append((number, count))
        parts = parents.get(number, ())
        for part in parts:
            had[part] = had.get(part, 0) + count
        for part in {*parts} - {number}:
            children[part] -= 1
            if not children[part] and part in children and part not in fixed and part in had and part in numbers:
                heapq.heappush(ready, next_one(part))
    return found


def _how_many(
    order: list[tuple[int, int]],
    counts: npt.NDArray[np.int64] | None,
    asked: Asked,
    whole: int,
    foreign: Collection[int],
) -> int:
    """How many of those in order leave."""
    leave = 0
    while leave < len(order) and order[leave][0] in foreign:
        leave += 1
    if counts is not None and (asked.keep is None or asked.cover is not None):
        total = int(counts.sum()) - sum(int(counts[number]) for number, _ in order[:leave])
        spare = 0 if asked.cover is None else int((1 - asked.cover) * total + 1e-9)
        while leave < len(order):
            number, had = order[leave]
            if had and int(counts[number]) > spare:
                break
            if asked.cover is None and had:
                break
            spare -= int(counts[number])
            leave += 1
    if asked.keep is not None:
        if whole - len(order) > asked.keep:
            raise ValueError(
                f"at least {whole - len(order):,} tokens have to stay, more than the {asked.keep:,} asked for: those "
                f"that were added, those that are single letters or bytes, and what they are made of."
            )
        leave = max(leave, whole - asked.keep)
    return leave
