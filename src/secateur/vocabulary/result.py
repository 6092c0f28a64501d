"""The result of shrinking a vocabulary, as plain numbers and as tables. The tables of a smaller vocabulary on a page:
tensors that became shorter, and tokens of the text that leave.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from secateur.report import Cells, Chart, Reported, Sheet
from secateur.support import Part, Rows, bytes_text, percent, printable
from secateur.vocabulary.tokens import Ids

# ---- The result of shrinking a vocabulary, as plain numbers and as tables.
#
# Law: what is said of unseen text was measured on text that was not counted; what was not measured is None.


@dataclass(frozen=True)
class Unseen:
    """A test on unseen text: how tokens chosen from nine tenths of the text serve the last tenth.

    Attributes:
        passages: how many there are, and of how many all tokens stay.
        tokens: how many there are, and how many of them stay.
        pieces: how many tokens there are in place of those that do not stay, where they are known.
        unknown: how many became unknown.
    """

    passages: tuple[int, int]
    tokens: tuple[int, int]
    pieces: int
    unknown: int


@dataclass(frozen=True)
class Sample:
    """How many of the tokenizer's own order stay beside the tokens of a text, which is a sample of what will be read.

    Attributes:
        first: so many of them, the most frequent ones.
        of: how many the order has.
        tokens: of the last tenth of the text, which says how many are needed.
        share: of these, what stays where nine tenths choose; None where there are too few to say.
        once: Good and Turing's estimate of the share of other text's tokens that the text does not have, with none of
            the order and with the first; those that it has once, of all.
    """

    first: int
    of: int
    tokens: int
    share: float | None
    once: tuple[float, float]


@dataclass(frozen=True, eq=False)
class ShrunkVocabulary(Reported):
    """The result of `shrink_vocabulary`; prints as tables.

    Attributes:
        order: the old number of each new one.
        kind: of the tokenizer: "BPE", "Unigram", "WordPiece" or "WordLevel".
        rows: how many tokens the model knows, ``(before, after)``.
        parameters, nbytes: ``(before, after)``, of the whole model.
        fields: what changed in the configuration, ``{dotted name: (before, after)}``.
        tensors: ``{name: dimension}`` of those that became shorter.
        words: of the text, None without one.
        tokens: of the text, ``(before, after)``.
        seen: how many of the text's tokens stay.
        unseen: what is to be expected of other text of its kind; None without text, or with too little of it.
        proof: on what the law was seen, in words.
        gone: tokens that the text has and that leave, the most frequent first, with how often.
        out: the directory that was written, if one was.
        left_out: files that say old numbers in other forms, and were not copied.
        left_whole: tensors in the files that are as long and no part of the model.
        sample: how many of the tokenizer's own order stay beside the text's; None where it was asked otherwise.
        seconds: wall time; ``counting`` of it for the text.
    """

    order: Ids
    kind: str
    rows: tuple[int, int]
    parameters: tuple[int, int]
    nbytes: tuple[int, int]
    fields: Mapping[str, tuple[Any, Any]]
    tensors: Mapping[str, int]
    words: int | None
    tokens: tuple[int, int] | None
    seen: int | None
    unseen: Unseen | None
    proof: str
    seconds: float
    counting: float
    gone: Mapping[str, int] = field(default_factory=dict)
    out: Path | None = None
    left_out: tuple[Path, ...] = ()
    left_whole: tuple[str, ...] = ()
    sample: Sample | None = None

    def _parts(self) -> Iterator[Part]:
        return vocabulary_parts(self)

    def _sheets(self) -> list[Sheet]:

        return shrunken_sheets(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShrunkVocabulary) and np.array_equal(self.order, other.order)

    __hash__ = None  # type: ignore[assignment]


def vocabulary_parts(done: ShrunkVocabulary) -> Iterator[Part]:
    """The printed lines and tables of a `ShrunkVocabulary`: tokens, sizes, the effect on text, and the proof."""
    numbers = "{:,}".format
    rows: list[tuple[str | None, ...]] = [
        ("tokens", *map(numbers, done.rows), percent(done.rows[1] / done.rows[0])),
        ("parameters", *map(numbers, done.parameters), percent(done.parameters[1] / done.parameters[0])),
        ("bytes", *map(bytes_text, done.nbytes), percent(done.nbytes[1] / done.nbytes[0])),
    ]
    if done.words and done.tokens:
        before, after = (count / done.words for count in done.tokens)
        rows.append(("tokens a word", f"{before:.3f}", f"{after:.3f}", None))
    yield Rows(("Total", ">before", ">after", ">left"), rows)
    yield ""
    yield f"The tokenizer's kind is {done.kind}. Shorter: {_some(list(done.tensors))}."
    if done.tokens is not None and done.seen is not None:
        yield f"Of the text's {done.tokens[0]:,} tokens, {percent(done.seen / done.tokens[0])} stay."
    if done.sample is not None:
        yield from _sampled(done.sample)
    if done.unseen is not None:
        yield from _unseen(done.unseen)
    if done.gone:
        most = ", ".join(f"{printable(token, 30)!r} {count:,}" for token, count in list(done.gone.items())[:6])
        yield f"Most frequent of those that leave: {most}."
    yield f"{done.proof[0].upper()}{done.proof[1:]}."


def _sampled(found: Sample) -> Iterator[str]:
    if found.share is None:
        yield (
            f"The text is too short to say what other text needs (its last tenth has {found.tokens:,} tokens): beside "
            f"its own tokens the first {found.first:,} of {found.of:,} in the tokenizer's order stay. Give more text, "
            "--keep, or --exact for its own tokens alone."
        )
    else:
        yield (
            f"The text is a sample: beside its tokens the first {found.first:,} of {found.of:,} in the tokenizer's "
            f"order stay, so that {percent(found.share)} of {found.tokens:,} unseen tokens do."
        )
    without, left = found.once
    yield (
        f"Good-Turing: {percent(left)} of other text's tokens are missing, {percent(without)} with the text's alone."
    )


def _unseen(found: Unseen) -> Iterator[str]:
    (passages, whole), (tokens, same) = found.passages, found.tokens
    yield (
        f"Unseen text (a trial without the last tenth): {percent(whole / passages)} of {passages:,} passages are read "
        f"as before, {percent(same / tokens)} of {tokens:,} tokens stay."
    )
    if tokens > same:
        lost = tokens - same
        yield f"The other {lost:,} become {found.pieces:,} smaller pieces; {found.unknown:,} become unknown."


def _some(names: list[str], count: int = 3) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(printable(name) for name in names[:count]) + more


# ---- The tables of a smaller vocabulary on a page: tensors that became shorter, and tokens of the text that leave.
#
# Law: tokens are shown as text that holds no control character.

_SHOWN = 1000  # rows of tokens


def shrunken_sheets(done: ShrunkVocabulary) -> list[Sheet]:
    """The sheets of a `ShrunkVocabulary`: the tensors that became shorter, and the most frequent tokens that leave."""
    tensors = [
        Cells("tensor", [printable(name, 1000) for name in done.tensors]),
        Cells("dimension", list(done.tensors.values())),
        Cells("before", [done.rows[0]] * len(done.tensors), [f"{done.rows[0]:,}"] * len(done.tensors)),
        Cells("after", [done.rows[1]] * len(done.tensors), [f"{done.rows[1]:,}"] * len(done.tensors)),
    ]
    sheets = [Sheet("Tensor by tensor", tensors)] if done.tensors else []
    gone = list(done.gone.items())[:_SHOWN]
    if gone:
        names, counts = [printable(repr(token), 100) for token, _ in gone], [count for _, count in gone]
        cells = [Cells("token", names), Cells("in the text", counts, [f"{count:,}" for count in counts])]
        told = "How often the text has each token that leaves, the most frequent first."
        chart = Chart("Tokens of the text that leave", told, [f"t.{at}" for at in range(len(gone))], counts, "times")
        sheets.append(Sheet("Tokens of the text that leave", cells, [chart]))
    return sheets
