"""The plan of a smaller tokenizer: which tokens stay, the effect on the text, and the proof that nothing else changes.

Law: nothing is changed here; what is returned was proved on the text and on random Unicode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from secateur.vocabulary.axes import Axes
from secateur.vocabulary.choosing import Asked, choose
from secateur.vocabulary.counting import Counted, count, encoded
from secateur.vocabulary.distances import Distance, Rows, distances
from secateur.vocabulary.outcome import Unseen
from secateur.vocabulary.proof import agree, encoding, random_texts, renaming, together
from secateur.vocabulary.tokens import Ids, Tokens, reading

__all__ = ["Planned", "planned", "positions_begin_behind"]

_TENTH = 10
_FEW = 20  # passages of which no tenth is left out
_PAIRS = 100  # of random texts
_PROVED = "proved on"


@dataclass(frozen=True)
class Planned:
    """The tokens that stay, and the measurements on the text.

    Attributes:
        order: the old number of each new one.
        new: the new number of each old one, -1 of what leaves.
        smaller: the tokens that are left, under their new numbers.
        counted: what the text has; None without one.
        after: how many tokens the text has then.
        seen: how many of the text's tokens stay.
        gone: tokens that the text has and that leave, with how often.
        unseen: what the choice does to text that it has not seen.
        passages, random: on which the law was seen.
        proof: the same in words.
        counting: seconds that counting took.
    """

    order: Ids
    new: Ids
    smaller: Tokens
    counted: Counted | None
    after: int | None
    seen: int | None
    gone: dict[str, int]
    unseen: Unseen | None
    random: list[str]
    proof: str
    counting: float


def planned(
    tokens: Tokens,
    texts: Iterable[str] | None,
    asked: Asked,
    needed: Collection[int],
    rows: int,
    where: str,
    row_of: Callable[[], Rows] | None = None,
) -> Planned:
    """What stays of a tokenizer's tokens, as it was asked for; ``row_of`` gives what reads rows of the embedding, for
    ``rank="distance"``.

    Raises:
        ValueError: nothing leaves, more has to stay than was asked for, or a text would be read otherwise.
    """
    began = time.monotonic()
    size = max(tokens.size, rows)
    counted = None if texts is None else count(tokens.backend, texts, size)
    counting = time.monotonic() - began
    distance = None if row_of is None or asked.rank != "distance" else distances(tokens, row_of(), rows)
    order = tokens.order(choose(tokens, _counts(counted), asked, needed, rows, distance))
    if int((order < rows).sum()) == rows:
        raise ValueError(f"{where}: all {rows:,} tokens would stay; keep fewer, or cover less.")
    smaller, new = Tokens.of(tokens.pruned(order), f"{where}, pruned,"), renaming(order, size)
    beyond = order >= rows
    if beyond.any() and not beyond[np.argmax(beyond) :].all():
        raise ValueError(f"{where}: the model's own tokens have numbers beyond the {rows:,} that it knows.")
    after = seen = None
    said = []
    if counted is not None:
        right, found = agree(
            counted.passages, counted.ids, encoding(smaller.backend, special=False), new, f"{where}: the tokens"
        )
        said.append(f"{right:,} of {len(found):,} passages of the text, all those whose tokens stay")
        seen = int(counted.counts[order].sum())
        part = sum(map(len, counted.ids))
        after = round(sum(map(len, found)) * counted.tokens / part)
    random = random_texts(tokens, order)
    right, _ = agree(random, encoded(tokens.backend, random, special=True), encoding(smaller.backend), new, where)
    said.append(f"{right:,} of {len(random):,} random texts")
    _check_pairs(tokens, smaller, random, new, where)
    return Planned(
        order,
        new,
        smaller,
        counted,
        after,
        seen,
        _gone(tokens, counted, new),
        None if counted is None else _unseen(tokens, counted, asked, needed, rows, distance),
        random,
        f"{_PROVED} {' and on '.join(said)}: the same tokens, renamed",
        counting,
    )


def _counts(counted: Counted | None) -> Any:
    return None if counted is None else counted.counts


def _gone(tokens: Tokens, counted: Counted | None, new: Ids) -> dict[str, int]:
    if counted is None:
        return {}
    left = [int(number) for number in np.flatnonzero((counted.counts > 0) & (new < 0))]
    by_count = sorted(left, key=lambda number: (-counted.counts[number], number))
    return {
        tokens.backend.decode([number], skip_special_tokens=False): int(counted.counts[number]) for number in by_count
    }


def _check_pairs(tokens: Tokens, smaller: Tokens, random: list[str], new: Ids, where: str) -> None:
    """What is put around two texts, and what numbers are read back as."""
    pairs = list(zip(random[:_PAIRS], random[_PAIRS : 2 * _PAIRS], strict=False))
    with reading():
        before, after = tokens.backend.encode_batch(pairs), smaller.backend.encode_batch(pairs)
    for pair, old, now in zip(pairs, before, after, strict=True):
        expected = new[np.array(old.ids, dtype=np.int64)]
        if (expected < 0).any():
            continue
        if expected.tolist() != now.ids or old.type_ids != now.type_ids:
            raise ValueError(f"{where}: the pair {pair!r} would be read otherwise: nothing was changed.")
        if tokens.backend.decode(old.ids) != smaller.backend.decode(now.ids):
            raise ValueError(f"{where}: the pair {pair!r} would be written otherwise: nothing was changed.")


def _unseen(
    tokens: Tokens, counted: Counted, asked: Asked, needed: Collection[int], rows: int, distance: Distance | None
) -> Unseen | None:
    """What the choice does that is made without the last tenth of the passages."""
    many = len(counted.passages)
    if many < _FEW or (counted.tokens != sum(map(len, counted.ids)) and many < _TENTH * _FEW):
        return None
    last = together(counted.ids[many - many // _TENTH :])
    counts = counted.counts - np.bincount(last.numbers, minlength=len(counted.counts))
    if not counts.any():
        return None
    try:
        order = tokens.order(choose(tokens, counts, asked, needed, rows, distance))
    except ValueError:  # it was possible with more
        return None
    smaller, new = Tokens.of(tokens.pruned(order)), renaming(order, len(counts))
    found = together(encoded(smaller.backend, counted.passages[many - many // _TENTH :])).numbers
    stays = new[last.numbers] >= 0
    same = int(stays.sum())
    unknown = 0
    if tokens.unknown is not None and smaller.unknown is not None:
        before, after = int((last.numbers == tokens.unknown).sum()), int((found == smaller.unknown).sum())
        unknown = max(0, after - before)
    now = len(found)
    return Unseen(
        (len(last.begins) - 1, int(last.each(stays).sum())),
        (len(stays), same),
        max(0, now - same - unknown),
        unknown,
    )


def positions_begin_behind(model: nn.Module, axes: Axes, padding: int | None) -> set[int]:
    """The numbers that have to stay for the padding token to keep its own, in models that count positions from it.

    RoBERTa and its kin begin with the position behind the padding token's number: their tables of positions name it,
    though they are no tables of tokens.
    """
    if padding is None or padding < 0:
        return set()
    for path, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if vars(module).get("padding_idx") == padding and own:
            names = {f"{path}.{name}".lstrip(".") for name, _ in own}
            if not names & axes.tensors.keys():
                return set(range(padding))
    return set()
