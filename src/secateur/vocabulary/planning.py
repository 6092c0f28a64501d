"""The plan of a smaller tokenizer: counts of tokens, which stay, and the proof on texts."""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from secateur.models import Reach, TextReach
from secateur.support import printable, track
from secateur.vocabulary.axes import Axes
from secateur.vocabulary.choosing import Asked, Distance, Rows, choose, distances
from secateur.vocabulary.result import Sample, Unseen
from secateur.vocabulary.tokens import Ids, Tokens, reading

# ---- How often a text has each token, and the text in passages, for what is proved and measured on it.
#
# Law: every token of the text is counted once; passages are held up to a limit, and joined they are the beginning of
# it.

PASSAGE = 200  # characters that a passage has at least, where lines allow it
LONGEST = 20_000  # characters: what has no line ends is cut here
HELD = 64_000_000  # characters of passages that are held
_AT_ONCE = 512  # passages
Texts = Iterable[str] | Mapping[str, Iterable[str]]  # documents; of texts that have names, by these
_ENDS = re.compile(r"\n(?=\S)")  # of a line, where the next one is not empty and not indented


@dataclass
class Counted:
    """The token counts and passages of a text.

    Attributes:
        counts: how often it has each token, by number.
        words: how many words: what is between white space.
        passages: parts of it, up to a limit.
        ids: the tokens of each of these.
        by_text: ``{name: passages, different tokens}`` of texts that have names.
    """

    counts: npt.NDArray[np.int64]
    words: int = 0
    passages: list[str] = field(default_factory=list)
    ids: list[Ids] = field(default_factory=list)
    by_text: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())


def count(backend: Any, texts: Texts, size: int) -> Counted:
    """Counts the tokens of documents; ``size`` is one more than their highest number. Of texts with names the last
    tenth of each stands last.

    Raises:
        TypeError: something among them is no text.
        ValueError: there is no text at all, half of a surrogate pair in one, or the tokenizer fails on one.
    """
    if not isinstance(texts, Mapping):
        return _counted(backend, texts, size)
    found = {name: _counted(backend, its, size, f"{printable(repr(name))} ") for name, its in texts.items()}
    if not found:
        raise ValueError("no text has a name: pass {name: documents}.")
    ends = [len(each.ids) - len(each.ids) // _TENTH for each in found.values()]
    parts = [*zip(found.values(), map(slice, ends), strict=True)]
    parts += [(each, slice(end, None)) for each, end in zip(found.values(), ends, strict=True)]
    return Counted(
        np.sum([each.counts for each in found.values()], axis=0),
        sum(each.words for each in found.values()),
        [passage for each, part in parts for passage in each.passages[part]],
        [ids for each, part in parts for ids in each.ids[part]],
        {name: (len(each.passages), int((each.counts > 0).sum())) for name, each in found.items()},
    )


def _counted(backend: Any, texts: Iterable[str], size: int, name: str = "") -> Counted:
    if isinstance(texts, str):
        raise TypeError(f"texts {name}are documents: pass a list of them, [text] for a single one.")
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
        raise ValueError(f"the text {name}has no tokens: there is nothing to count.")
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


# The proof on texts: the smaller tokenizer turns a text whose tokens all stay into the same tokens, renumbered.
#
# Law: what is proved is said with how many texts it was proved on; one that is read otherwise is an error, not a
# number.

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


# The plan of a smaller tokenizer: which tokens stay, the effect on the text, and the proof that nothing else changes.
#
# Law: nothing is changed here; what is returned was proved on the text and on random Unicode.

_TENTH = 10
_FEW = 20  # passages of which no tenth is left out
_SHARE = 0.995  # of unseen tokens that shall stay
_MISSING = 0.0015  # of other text, as Good and Turing estimate it; of two texts two and four times as much was
_TOO_FEW = 600  # unseen tokens: were one of 200 missing, fewer than these could by chance have none (1 of 20 times)
_SAFE = 0.9  # of the tokenizer's own order, where the text is too short to say
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
        sample: how many of the tokenizer's own order stay beside the text's; None where it was asked otherwise.
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
    sample: Sample | None
    random: list[str]
    proof: str
    counting: float

    def reach(self, rows: int) -> Reach | None:
        """Which tokens each text with a name never has, of those that the model knows."""
        its = {} if self.counted is None else self.counted.by_text
        found = {name: TextReach(passages, tokens, {}, {}) for name, (passages, tokens) in its.items()}
        return Reach(found, rows, 0, 0) if found else None


def planned(
    tokens: Tokens,
    texts: Texts | None,
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
    sample = None if counted is None or not asked.sample else _sample(tokens, counted, asked, needed, rows)
    if sample is not None:
        asked = replace(asked, first=sample.first)
    order = tokens.order(choose(tokens, _counts(counted), asked, needed, rows, distance))
    if int((order < rows).sum()) == rows:
        raise ValueError(f"{where}: all {rows:,} tokens would stay; give more text, keep fewer, cover less, or exact.")
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
        sample,
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


def _sample(tokens: Tokens, counted: Counted, asked: Asked, needed: Collection[int], rows: int) -> Sample:
    """How many of the tokenizer's own order stay: the fewest with which nearly all tokens of the last tenth do, and
    with which Good and Turing's estimate says so of other text. Of 50 kB a tenth alone says too little."""
    ranked = tokens.ranked()
    rank = np.full(len(counted.counts), -1)
    rank[ranked] = np.arange(len(ranked))
    many = len(counted.ids) // _TENTH
    last = together(counted.ids[len(counted.ids) - many :]).numbers
    enough = len(counted.ids) >= _FEW and len(last) >= _TOO_FEW
    once = counted.counts == 1
    share = None
    first = math.ceil(_SAFE * len(ranked))
    if enough:
        counts = counted.counts - np.bincount(last, minlength=len(counted.counts))
        kept = choose(tokens, counts, asked, needed, rows)
        whole = choose(tokens, counts, replace(asked, first=len(ranked)), needed, rows)  # without other scripts
        may = last[np.isin(last, whole)]
        missing = np.sort(rank[may[~np.isin(may, kept)]])
        spare = int((1 - _SHARE) * len(may) + 1e-9)
        first = 0 if len(missing) <= spare else int(missing[len(missing) - 1 - spare]) + 1
        rare = np.sort(rank[np.isin(np.arange(len(rank)), whole) & once])
        spare = int(_MISSING * counted.tokens)
        if len(rare) > spare:
            first = max(first, min(int(rare[len(rare) - 1 - spare]) + 1, math.ceil(_SAFE * len(ranked))))
        share = 1 - int((missing >= first).sum()) / max(1, len(may))
    return Sample(
        first,
        len(ranked),
        len(last),
        share,
        (int(once.sum()) / counted.tokens, int((once & (rank >= first)).sum()) / counted.tokens),
    )


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
