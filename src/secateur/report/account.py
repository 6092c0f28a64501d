"""What one call of a verb was asked and what it got: plain values, which a page shows.

Law: an account states what the verb returned and nothing else; what was not measured is None.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from secateur.report.results import environment
from secateur.report.tables import Column
from secateur.support import Part

__all__ = ["Account", "Cells", "Chart", "Sheet"]


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
