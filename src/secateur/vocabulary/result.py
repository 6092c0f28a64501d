"""The result of shrinking a vocabulary, as plain numbers and as tables.

Law: what is said of unseen text was measured on text that was not counted; what was not measured is None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from secateur.models import ByText
from secateur.support import Column, Part, Table, percent, printable, some, totals
from secateur.vocabulary.tokens import Ids

_SHOWN = 1000  # rows of tokens


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
class ShrunkVocabulary(ByText):
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

    def content(self) -> Iterator[Part]:
        """What is printed; the tensors that became shorter, and the most frequent tokens that leave."""
        yield from self.summary()
        before, after = self.rows
        tensors = Table.of(
            "tensors",
            self.tensors.items(),
            Column.name("Tensor"),
            Column.count("Dimension"),
            Column.change("Tokens", lambda _: (before, after)),
            title="Tensor by tensor",
        )
        if tensors.rows:
            yield tensors
        gone = [*self.gone.items()][:_SHOWN]
        if gone:
            told = "How often the text has each token that leaves, the most frequent first."
            title = "Tokens of the text that leave"
            table = Table.of("gone", gone, Column("Token", show=_token), Column.count("In the text"), title=title)
            yield table.drawn("in_the_text", title, told, label="times", series=["tokens"] * len(gone))

    def summary(self) -> Iterator[Part]:
        """Tokens, sizes, the effect on text, the proof, and where it is."""
        return _printed(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShrunkVocabulary) and np.array_equal(self.order, other.order)

    __hash__ = None  # type: ignore[assignment]


def _token(token: str) -> str:
    return printable(repr(token), 100)


def _printed(done: ShrunkVocabulary) -> Iterator[Part]:
    rows: dict[str, tuple[float, float]] = {"tokens": done.rows, "parameters": done.parameters, "bytes": done.nbytes}
    if done.words and done.tokens:
        rows["tokens a word"] = done.tokens[0] / done.words, done.tokens[1] / done.words
    yield totals(rows)
    yield ""
    yield from done.by_text()
    yield f"The tokenizer's kind is {done.kind}. Shorter: {some([*done.tensors])}."
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
    if done.left_out:
        yield f"Left out, as they say the old numbers or hold the weights in other forms: {some(done.left_out)}."
    if done.left_whole:
        yield f"Left whole, as long as the vocabulary and no part of the model: {some(done.left_whole)}."
    yield ""
    took = f"{done.seconds:.1f} s, {done.counting:.1f} of them for counting"
    if done.out is None:
        yield f"Nothing was written ({took})."
    else:
        loads = "; from_pretrained loads it" if done.fields else ""  # of a table of tokens there is no configuration
        yield f"Wrote {printable(str(done.out))}{loads} ({took})."


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
