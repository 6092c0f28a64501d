"""What one call of a verb was asked and what it got: plain values, which a page shows. What a model weighs and takes,
before and after: bytes and measured milliseconds, for a page.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from secateur.report.results import Column, environment
from secateur.support import Part, alternating, bytes_text, in_mode, ratio, ratios, run_example

# ---- What one call of a verb was asked and what it got: plain values, which a page shows.
#
# Law: an account states what the verb returned and nothing else; what was not measured is None.


@dataclasses.dataclass(frozen=True)
class Cells:
    """A column of a sheet.

    ``values`` are what it is sorted by; a column of nothing but numbers and None ends flush right. ``texts`` is how
    they are shown: as they are where it is None. ``bars`` are shares in [0, 1] that are drawn beside them.

    >>> Cells("Zeros", [0.5, None], ["50%", "-"], bars=[0.5, None]).is_numeric
    True
    """

    head: str
    values: Sequence[float | str | None]
    texts: Sequence[str] | None = None
    bars: Sequence[float | None] = ()

    def __post_init__(self) -> None:
        for what in (self.texts, self.bars or None):
            if what is not None and len(what) != len(self.values):
                raise ValueError(
                    f"the column {self.head!r} has {len(self.values)} values, and {len(what)} beside them."
                )

    @property
    def is_numeric(self) -> bool:
        return not any(isinstance(value, str) for value in self.values)

    def column(self, number: int) -> Column:
        """As the tables of a page take it; the rows are numbers."""
        shown = ["" if value is None else str(value) for value in self.values] if self.texts is None else self.texts
        bars = {row: min(max(bar, 0.0), 1.0) for row, bar in enumerate(self.bars) if bar is not None}
        values, texts = dict(enumerate(self.values)), dict(enumerate(shown))
        return Column(f"column-{number}", self.head, "", "", self.is_numeric, values, texts, bars=bars)


@dataclasses.dataclass(frozen=True)
class Chart:
    """One number of each of many named things, in their order: of each layer, say. Names that differ in numbers alone
    are one series.

    ``share`` says that the numbers are fractions, shown in percent, up to 100 if one is over 50; None is left out.
    ``series`` says which things are one series, if their names do not; ``places`` where each is from left to right,
    and ``along`` what that is. Only where neighbours have to do with one another are they ``joined`` by a line.
    ``grid`` says the row and the column that each has in a map of the numbers; by their names, a row is a kind and a
    column a block.

    >>> Chart("Zeros", "Of each layer.", ["a", "b"], [0.5], "zeros")
    Traceback (most recent call last):
    ...
    ValueError: the chart 'Zeros' has 2 names and 1 values.
    """

    title: str
    caption: str
    names: Sequence[str]
    values: Sequence[float | None]
    label: str
    share: bool = False
    series: Sequence[str] | None = None
    places: Sequence[float] | None = None
    along: str = "in their order"
    joined: bool = True
    grid: Sequence[tuple[str, int]] | None = None

    def __post_init__(self) -> None:
        if len(self.names) != len(self.values):
            raise ValueError(f"the chart {self.title!r} has {len(self.names)} names and {len(self.values)} values.")
        for what in (self.series, self.places, self.grid):
            if what is not None and len(what) != len(self.values):
                raise ValueError(f"the chart {self.title!r} has {len(self.values)} values and {len(what)} beside.")


@dataclasses.dataclass(frozen=True)
class Sheet:
    """A table of a page, all of one length, and what is drawn of it.

    >>> [*Sheet("Layer by layer", [Cells("layer", ["a", "b"]), Cells("zeros", [0.5, 0.9])]).rows]
    [0, 1]
    """

    title: str
    cells: Sequence[Cells]
    charts: Sequence[Chart] = ()

    def __post_init__(self) -> None:
        if len(sizes := {len(each.values) for each in self.cells}) != 1:
            raise ValueError(f"the columns of {self.title!r} have one length, not {sorted(sizes)}.")

    @property
    def rows(self) -> range:
        return range(len(self.cells[0].values))

    @property
    def columns(self) -> list[Column]:
        return [cells.column(number) for number, cells in enumerate(self.cells)]


@dataclasses.dataclass(frozen=True)
class Account:
    """One call of a verb.

    Args:
        title: such as "minilm, pruned".
        command: what would have to be typed to do it again.
        asked: what was asked for, by the names of the options; None, False and what is empty is left out.
        got: what the verb says that it did, as it is printed: lines and tables.
        sheets: all of it, tensor by tensor or layer by layer.
        seconds: wall time, None if it was not measured.
        versions: the machine and the software.

    >>> sheet = Sheet("Layer by layer", [Cells("layer", ["a"]), Cells("zeros", [0.5])])
    >>> Account("mine", "secateur prune mine", {"sparsity": 0.5}, ["Done."], [sheet], 1.0).versions["torch"] != ""
    True
    """

    title: str
    command: str
    asked: Mapping[str, object]
    got: Sequence[Part]
    sheets: Sequence[Sheet]
    seconds: float | None
    versions: Mapping[str, str] = dataclasses.field(default_factory=environment)


# ---- What a model weighs and takes, before and after: bytes and measured milliseconds, for a page.
#
# Law: both sides run in one process, in turns, on the same inputs; nothing is worked out from counts.

ROUNDS, SECONDS = 9, 1.0  # so many at least, and more of what is fast


@dataclasses.dataclass(frozen=True)
class Timed:
    """A model before and after, measured.

    Attributes:
        call: what one call is, in words, such as "1 × 32 tokens".
        nbytes: ``(before, after)``, of parameters and buffers in memory.
        before, after: seconds of one call, in each of the rounds.
        threads: that torch ran in.

    >>> timed = Timed("the example", (400, 100), [0.002, 0.002, 0.003], [0.001, 0.001, 0.0015], 1)
    >>> timed.times_faster, timed.sheet().title
    (2.0, 'Before and after, measured')
    """

    call: str
    nbytes: tuple[int, int]
    before: Sequence[float]
    after: Sequence[float]
    threads: int

    @property
    def times_faster(self) -> float:
        """The median of the rounds' ratios."""
        return ratio([*self.after], [*self.before])

    def line(self) -> str:
        """As it is said in a sentence."""
        each = ratios([*self.after], [*self.before])
        was, now = (f"{1000 * statistics.median(times):.3g} ms" for times in (self.before, self.after))
        rounds = f"medians of {len(each)} rounds, in turns, {self.threads} thread{'s' * (self.threads > 1)}"
        won = sum(faster > 1 for faster in each)
        return (
            f"Measured: {self.call} took {was} and takes {now} ({rounds}). It was faster in {won} of them: "
            f"{self.times_faster:.2f} times in the middle one, {min(each):.2f} to {max(each):.2f} in all."
        )

    def sheet(self) -> Sheet:
        """Bytes and milliseconds, a row each, with a bar for what is left."""
        rows: list[tuple[str, float, float, Any]] = [("bytes in memory", *self.nbytes, lambda each: bytes_text(each))]
        for word, which in (("median", statistics.median), ("fastest round", min), ("slowest round", max)):
            both = [1000 * which(times) for times in (self.before, self.after)]
            rows.append((f"{self.call}: ms, {word}", both[0], both[1], "{:.3g}".format))
        left = [after / before if before else None for _, before, after, _ in rows]
        cells = [
            Cells("what", [row[0] for row in rows]),
            Cells("before", [row[1] for row in rows], [shown(before) for _, before, _, shown in rows]),
            Cells("after", [row[2] for row in rows], [shown(after) for _, _, after, shown in rows]),
            Cells("left", left, ["" if each is None else f"{each:.1%}" for each in left], left),
        ]
        return Sheet("Before and after, measured", cells)


def before_and_after(dense: nn.Module, model: nn.Module, example_inputs: Any, *, call: str = "the example") -> Timed:
    """Run both on the example, in evaluation mode and in turns: at least nine rounds, and one second.

    Args:
        dense: what it was. Keep a copy: verbs change a model in place.
        model: what became of it.
        example_inputs: what both are called with, as in `torch.export`: a tuple holds positional arguments, a mapping
            keyword arguments, and anything else is the only argument.
        call: what that is, in words.

    Raises:
        Exception: whatever a model raises on the example. Modes are put back.

    >>> import copy
    >>> from secateur import shrink
    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    >>> dense = copy.deepcopy(model)
    >>> done = shrink(model, torch.randn(2, 8), 0.5)
    >>> timed = before_and_after(dense, model, torch.randn(2, 8))
    >>> timed.nbytes[1] < timed.nbytes[0]
    True
    """
    with torch.no_grad(), in_mode(dense, training=False), in_mode(model, training=False):
        calls = {at: partial(run_example, each, example_inputs) for at, each in enumerate((dense, model))}
        times = alternating(calls, ROUNDS, seconds=SECONDS, told="timing it before and after")
    return Timed(call, (_nbytes(dense), _nbytes(model)), times[0], times[1], torch.get_num_threads())


def _nbytes(model: nn.Module) -> int:
    """Each tensor once, however many names it has."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({(each.data_ptr(), each.shape): each.nbytes for each in tensors}.values())
