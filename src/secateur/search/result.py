"""The result of `fit`: the chosen levels, their cost, the loss of the model, and the loss at other budgets.

Law: measured and predicted values have different names; a value that was not measured is absent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from torch import nn

from secateur.models import ByText, OneShot
from secateur.runtimes import Elsewhere, is_mixed
from secateur.search.costs import Budget, words_of_budget, words_of_shares
from secateur.search.levels import Levels, shown_name
from secateur.search.score import share_left
from secateur.shrinking import CheckpointShrinking, Shrunk, in_blocks_parts
from secateur.support import Between, Chart, Column, Part, Table, bytes_text, percent, printable

KINDS = {  # of levels, that each word of over= may choose of
    "shrink": ("width", "heads", "matrix"),
    "oneshot": ("layer",),
}
MEANS = {  # by the word of a score
    "kl": "the Kullback-Leibler divergence of the model's outputs from the dense one's, a mean over tokens",
    "cosine": "1 less the mean cosine of the model's embeddings with the dense one's",
    "change": "half of the squared change of the model's outputs over their variance",
}

_LEFT = {
    "kl": "the factor by which the model's probabilities fall: exp(-loss)",
    "cosine": "the mean cosine: 1 - loss",
    "change": "the share of the outputs' variance: 1 - 2 · loss",
}


@dataclass(frozen=True)
class Point:
    """A point of the curve: a budget as a share of the dense model's cost, and the loss of the choice of least errors
    there. The user's score is beside, where there is one."""

    share: float
    loss: float
    score: float | None = None


@dataclass(frozen=True)
class Chosen:
    """The choice of a search before it is carried out, as plain values.

    Attributes:
        limits: ``{word: the most that it may cost}``.
        dense: ``{word: what the model costs}``.
        predicted: ``{word: what the choice costs}``: of latency what the table of operations says, corrected.
        measured: the milliseconds of a model of this structure; None where no latency is asked for.
        choice: ``{group: number of its level}``; groups that are not named are whole.
        candidates: ``{name: loss}`` of what the search began with, each at this budget.
        loss: of the choice, on the batches held back.
        dense_score: the user's score of the dense model; None where there is none, and losses are divergences.
        curve: of several budgets, the largest first.
        knee: the share of the curve below which it bends most; None where it has no bend.
        held_back: how many batches were held back.
        passes: over them that were made, and ``generations`` how often levels were switched.
        compared: by which word of `secateur.search.ModelLoss` outputs were.
        finals: ``{name: loss}`` of those that were carried out on a copy, and compared when they were finished.
        taken: the one of them that was taken: that of the least, or the best fixed allocation, where the difference is
            no more than noise. None where none was finished, or where a share of the score was to be kept.
        units: ``{group of the coupling: units that stay}``, where what `secateur.shrink` does by itself lost least
            and was taken; ``choice`` is then what is nearest to it. Else None.
        over: the words of what could leave.
        stays: ``{group: why}`` of what has levels and could not leave all the same.
        bits: ``{module: bits}`` of linears and tables with fewer than 32, where these were chosen, too.
    """

    limits: Mapping[str, float]
    dense: Mapping[str, float]
    predicted: Mapping[str, float]
    measured: Annotated[float, Between(0)] | None
    choice: Mapping[str, int]
    candidates: Mapping[str, float]
    loss: float
    dense_score: float | None
    curve: Sequence[Point]
    knee: float | None
    held_back: Annotated[int, Between(1)]
    passes: Annotated[float, Between(0)]
    generations: Annotated[int, Between(0)]
    compared: str = "change"
    finals: Mapping[str, float] = field(default_factory=dict)
    taken: str | None = None
    units: Mapping[str, Annotated[int, Between(0)]] | None = None
    over: tuple[str, ...] = ("shrink", "oneshot")
    stays: Mapping[str, str] = field(default_factory=dict)
    bits: Mapping[str, Annotated[int, Between(4, 8)]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Fitted(ByText):
    """The result of `fit`; prints as a table.

    Attributes:
        asked: the budget.
        chosen: the choice: what it costs and loses, what others do, and the curve; its fields are this one's, too, such
            as ``.loss`` or ``.choice``.
        got: ``{word: cost}`` of the finished model, counted: of latency what was measured.
        levels: all that could be chosen.
        batches: how many there were.
        finished: the loss of the finished model, which was repaired in order, on all batches; None of a directory.
        finished_score: the user's score of the finished model.
        kept: ``{text: share}`` of the dense outputs that the finished model keeps, of each text that has a bound.
        seconds: that it took.
        model: the module that was fitted, the same object as before; None of a directory.
        out: the directory that was written.
        shrunk, pruned: what the verbs did that carried it out.
        apart: whether levels were made of other batches than those that the search looked at.
        step: the multiple of units that the times of another machine ask for; None where they have no steps, where
            `round_to` said one, or where it is timed here.
    """

    asked: Budget
    chosen: Chosen
    got: Mapping[str, float]
    levels: Levels = field(repr=False)
    batches: int
    finished: float | None
    finished_score: float | None
    seconds: float
    kept: Mapping[str, float] = field(default_factory=dict)
    model: nn.Module | None = field(default=None, repr=False)
    out: Path | None = None
    shrunk: Shrunk | CheckpointShrinking | None = field(default=None, repr=False)
    pruned: OneShot | None = field(default=None, repr=False)
    apart: bool = True
    step: int | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in Chosen.__dataclass_fields__:
            raise AttributeError(f"{type(self).__name__} has no {name!r}.")
        return getattr(self.chosen, name)

    @property
    def in_blocks(self) -> Mapping[str, str]:
        """``{parameter: note}`` of those whose Gram matrix was summed in blocks of inputs, for levels or in the end."""
        return {**self.levels.in_blocks, **(self.shrunk.in_blocks if self.shrunk else {})}

    def content(self) -> Iterator[Part]:
        if self.got.get("latency", 0.0) > self.dense.get("latency", math.inf):
            took, whole = (cost_text("latency", of["latency"]) for of in (self.got, self.dense))
            yield f"It is slower than the dense model: {took}, where that takes {whole}."
        yield f"Asked: {words_of_budget(self.asked)}."
        if isinstance(self.asked.runtime, Elsewhere):
            yield "No latency was measured here: each is the sum of what operations take there."
        if self.step is not None:
            yield f"Counts of units are multiples of {self.step}: the times there have such steps."
        yield ""
        yield self._costs()
        yield ""
        score = Column("Score" if self.dense_score is not None else "Loss", None, self._shown, "right", key="loss")
        rows = [("chosen", self.loss), *sorted(self.candidates.items(), key=lambda each: each[1])]
        yield Table.of("candidates", rows, Column("Choice"), score)
        yield ""
        if self.finals:
            finals = [(name, loss, "taken" if name == self.taken else None) for name, loss in self.finals.items()]
            yield Table.of("finals", finals, Column("Finished"), score, Column("", key="note"))
            yield ""
        if self.curve:
            yield self._drawn_curve(score)
            yield ""
        yield self._chosen()
        yield ""
        yield from self.by_text()
        yield from self._said()

    @property
    def whole_or_not(self) -> list[str]:
        """The groups that could be chosen of."""
        kinds = {kind for word in self.over for kind in KINDS[word]}
        return [name for name in self.levels if self.levels.kind[name] in kinds]

    @property
    def _word(self) -> str:
        return self.asked.words[0]

    def _shown(self, loss: float) -> str:
        return f"{loss:.5g}" if self.dense_score is None else f"{self.dense_score - loss:.5g}"

    def _costs(self) -> Table:
        def cost(head: str, of: Mapping[str, float]) -> Column:
            return Column(head, lambda word: Cost.of(word, of[word]) if word in of else None, str, "right")

        left = Column.portion("left", lambda word: self.got[word] / self.dense[word] if self.dense[word] else None)
        heads = {"dense": self.dense, "asked": self.limits, "predicted": self.predicted, "got": self.got}
        return Table.of("costs", self.got, Column("Cost", str), *(cost(head, of) for head, of in heads.items()), left)

    def _drawn_curve(self, score: Column) -> Table:
        """The curve's budgets, and the loss at each."""
        word, what = self._word, score.head.lower()
        values = [each.loss if self.dense_score is None else each.score for each in self.curve]
        shares = [each.share for each in self.curve]
        chart = Chart(
            f"The {what} by the {word}",
            f"What the model's {what} is at less and less of its {word}.",
            [percent(share) for share in shares],
            values,
            what,
            series=["the best choice found"] * len(shares),
            places=[100 * (1 - share) for share in shares],
            along=f"{word} gone (%)",
        )
        points = [(each.share, each.loss, "the knee" if each.share == self.knee else None) for each in self.curve]
        table = Table.of(
            "curve",
            points,
            Column(f"{word.capitalize()} left", None, percent, key="left", number=lambda share: share),
            score,
            Column("", key="note"),
            title=f"The {what} against the budget",
        )
        return replace(table, charts=[chart])

    def _chosen(self) -> Table:
        chosen = {name: self.levels[name][self.choice.get(name, 0)] for name in self.whole_or_not}
        caption = "The share that each group keeps; a line joins groups that differ in numbers alone."
        return Table.of(
            "groups",
            chosen.items(),
            Column.name("Group", lambda each: shown_name(each[0])),
            Column("Kind", lambda each: self.levels.kind[each[0]]),
            Column.count("of", lambda each: each[1].of),
            Column.count("stay", lambda each: each[1].kept),
            Column.portion("left", lambda each: each[1].kept / each[1].of),
            Column.figure("error", lambda each: each[1].error, ".4f"),
            *([Column.count("bits", lambda each: each[1].bits)] if is_mixed(self.asked.runtime) else []),
            title="What was chosen",
        ).drawn("left", "What is left of each group", caption)

    def _said(self) -> Iterator[str]:
        back, every = self.held_back, self.batches
        if self.dense_score is not None:
            yield f"The score of the dense model is {self.dense_score:.5g}."
            if self.finished_score is not None:
                yield f"The score of the finished one, repaired in order, is {self.finished_score:.5g}."
        else:
            yield f"The loss is {MEANS[self.compared]}."
            if self.finished is not None:
                yield f"The loss of the finished model, repaired in order, is {self.finished:.5g}."
                if isinstance(self.asked.keep, Mapping):
                    yield f"Of the dense model {words_of_shares(self.kept)} is kept, as {_LEFT[self.compared]}."
                elif self.asked.keep is not None:
                    left = share_left(self.finished, self.compared)
                    yield f"So {left:.2%} of the dense model is kept, as {_LEFT[self.compared]}."
        apart = "held back from the levels" if self.apart else "which the levels that were given may know"
        where = f"{back} of {every} batches, {apart}" if back < every else "the only batch"
        yield (
            f"Searched on {where}, in {self.passes:.1f} passes over them and {self.generations} generations; "
            f"{self.seconds:.0f} s in all."
        )
        known = {group for groups in self.levels.groups.values() for group in groups}
        if without := {name: count for name, count in (self.units or {}).items() if name not in known}:
            name, count = next(iter(without.items()))
            yield printable(
                f"It is what shrink makes of this budget by itself: also of what "
                f"has no levels units leave, {len(without)} in all, such as {name}, of whose units {count} stay.",
                1000,
            )
        if self.stays:
            name, why = next(iter(self.stays.items()))
            yield printable(f"{len(self.stays)} stay whole, such as {shown_name(name)}: {why}.", 1000)
        yield from in_blocks_parts(self.in_blocks)
        if self.out is not None:
            yield printable(f"In {self.out}.", 1000)
        if self.knee is not None:
            yield f"The knee of the curve is at {percent(self.knee)} of the {self._word}."


def cost_text(word: str, cost: float) -> str:
    """A cost as text: milliseconds, bytes with a unit, or a number with separators.

    >>> cost_text("params", 1234567.0), cost_text("latency", 1.23456), cost_text("bytes", 2e6)
    ('1,234,567', '1.23 ms', '2 MB')
    """
    if word.endswith("bytes"):
        return bytes_text(int(cost))
    return f"{cost:.3g} ms" if word == "latency" else f"{cost:,.0f}"


class Cost(float):
    """What something costs, shown in its unit."""

    word: str

    @classmethod
    def of(cls, word: str, cost: float) -> Cost:
        found = cls(cost)
        found.word = word
        return found

    def __str__(self) -> str:
        return cost_text(self.word, self)


def knee_of(curve: Sequence[Point]) -> float | None:
    """The share of the point that lies furthest below the line from the first to the last, both scaled to 1 (Satopää
    et al. 2011, "Finding a kneedle in a haystack"): with less, each percent costs more than it did on the way there.

    >>> knee_of([Point(1.0, 0.0), Point(0.8, 0.1), Point(0.6, 0.3), Point(0.4, 4.0)])
    0.6
    >>> knee_of([Point(1.0, 0.0), Point(0.5, 1.0)]) is None
    True
    """
    points = [each for each in curve if each.loss < float("inf")]
    if len(points) < 3:
        return None
    first, last = points[0], points[-1]
    width, height = first.share - last.share, last.loss - first.loss
    if width <= 0 or height <= 0:
        return None
    below = [(first.share - each.share) / width - (each.loss - first.loss) / height for each in points]
    furthest = max(range(len(points)), key=lambda at: below[at])
    return points[furthest].share if below[furthest] > 1e-9 else None
