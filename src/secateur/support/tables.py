"""What a verb did, as lines and tables of values. Text, a terminal, a notebook, JSON and a page are views of them.

Law: a table holds values, and its column says once how one is shown. In plain text a line is a row, and a cell is never
read as markup.
"""

from __future__ import annotations

import dataclasses
import html
import io
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from secateur.support.text import bytes_text, percent, printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.measure import Measurement
    from rich.table import Table as RichTable

WIDE = 10_000  # columns of a terminal that no line of ours fills

# ---- A column, a table of them, and what is drawn of it.


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table: how its values are called and shown.

    Attributes:
        head: its name; a JSON key is made of it where ``key`` is not given.
        of: the value of a row; what stands at the column's place if left out.
        show: a value as text; None is shown as ``none``.
        side: where cells end flush: numbers ``right``. One that ``folds`` breaks in lines where a terminal is narrow.
        number: what a value counts as where a page sorts and draws; it counts as itself if left out.
        bar: whether that is a share, which a page draws beside it.
        detail: whether it is left out where the table is printed, and stands on a page and in JSON alone.

    >>> Column.count("Kept").text(1234), Column.portion("Left").text(0.5), Column.change("Units").text((8, 6))
    ('1,234', '50.0%', '8 -> 6')
    """

    head: str
    of: Callable[[Any], Any] | None = None
    show: Callable[[Any], str] = str
    side: Literal["left", "right", "folds"] = "left"
    key: str = ""
    none: str = ""
    number: Callable[[Any], float | None] | None = None
    bar: bool = False
    detail: bool = False

    def __post_init__(self) -> None:
        if not self.key:
            object.__setattr__(self, "key", re.sub(r"[^a-z0-9]+", "_", self.head.lower()).strip("_"))

    @classmethod
    def name(cls, head: str, of: Callable[[Any], Any] | None = None, **how: Any) -> Column:
        """Words, which may be long."""
        return cls(head, of, **(dict[str, Any](side="folds") | how))

    @classmethod
    def shape(cls, head: str, of: Callable[[Any], Any] | None = None, **how: Any) -> Column:
        """The dimensions of a tensor."""
        return cls(head, of, **(dict[str, Any](show=lambda shape: "x".join(map(str, shape)) or "scalar") | how))

    @classmethod
    def figure(cls, head: str, of: Callable[[Any], Any] | None = None, form: str = ".3g", **how: Any) -> Column:
        """A number in a format."""
        return cls(head, of, **(dict[str, Any](show=lambda value: format(value, form), side="right") | how))

    @classmethod
    def count(cls, head: str, of: Callable[[Any], Any] | None = None, **how: Any) -> Column:
        """A number of things."""
        return cls.figure(head, of, ",", **how)

    @classmethod
    def bytes(cls, head: str, of: Callable[[Any], Any] | None = None, **how: Any) -> Column:
        """A size, in the unit that fits it."""
        return cls(head, of, **(dict[str, Any](show=bytes_text, side="right") | how))

    @classmethod
    def portion(cls, head: str, of: Callable[[Any], Any] | None = None, **how: Any) -> Column:
        """A fraction, in percent."""
        return cls(head, of, **(dict[str, Any](show=percent, side="right", none="-", bar=True) | how))

    @classmethod
    def change(cls, head: str, of: Callable[[Any], Any] | None = None, **how: Any) -> Column:
        """How many there were and are: a pair."""
        return cls(head, of, **(dict[str, Any](show=_changed, side="right", number=_left_of, bar=True) | how))

    def text(self, value: Any) -> str:
        """A value as it is shown: one line, without control characters."""
        return self.none if value is None else printable(self.show(value), WIDE)

    def counts_as(self, value: Any) -> Any:
        """What a page sorts by, and a chart draws."""
        return value if self.number is None or value is None else self.number(value)

    def share_of(self, value: Any) -> float | None:
        """How much of a bar is drawn beside it; None where there is none."""
        share = self.counts_as(value) if self.bar else None
        return None if share is None else min(max(share, 0.0), 1.0)


def _changed(pair: Sequence[int]) -> str:
    before, after = pair
    return f"{before:,} -> {after:,}" if after != before else f"{before:,}"


def _left_of(pair: Sequence[int]) -> float | None:
    before, after = pair
    return after / before if before else None


@dataclasses.dataclass(frozen=True)
class Chart:
    """One number of each of many named things, in their order: of each layer, say. Names that differ in numbers alone
    are one series.

    ``share`` says that the numbers are fractions, shown in percent, up to 100 if one is over 50; None is left out.
    ``series`` says which things are one series, if their names do not; ``places`` where each is from left to right,
    and ``along`` what that is. Only where neighbours have to do with one another are they ``joined`` by a line.
    ``grid`` says the row and the column that each has in a map of the numbers; by their names, a row is a kind and a
    column a block. The numbers begin at 0 unless they are not ``from_zero``. The series ``chosen`` is drawn as a large
    star, and at ``most`` of what is along there is a line.

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
    from_zero: bool = True
    chosen: str | None = None
    most: float | None = None

    def __post_init__(self) -> None:
        if len(self.names) != len(self.values):
            raise ValueError(f"the chart {self.title!r} has {len(self.names)} names and {len(self.values)} values.")
        for what in (self.series, self.places, self.grid):
            if what is not None and len(what) != len(self.values):
                raise ValueError(f"the chart {self.title!r} has {len(self.values)} values and {len(what)} beside.")


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of values under columns.

    ``name`` is its key in JSON. A table with a ``title`` has a part of a page to itself, where it can be sorted and its
    ``charts`` are drawn.

    >>> table = Table.of("layers", [("head", 8), ("norm", None)], Column("Layer"), Column.count("Zeros"))
    >>> print(table)
    Layer  Zeros
    head       8
    norm
    >>> table.json()
    [{'layer': 'head', 'zeros': 8}, {'layer': 'norm', 'zeros': None}]
    """

    name: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    charts: Sequence[Chart] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a table of {len(self.columns)} columns has a row of {len(row)} cells: {list(row)}.")

    @classmethod
    def of(cls, name: str, items: Iterable[Any], *columns: Column, title: str = "") -> Table:
        """A row for each item, of what each column finds in it."""
        items = list(items)
        found = [[item[at] if each.of is None else each.of(item) for at, each in enumerate(columns)] for item in items]
        return cls(name, columns, found, title)

    def filled(self) -> Table:
        """The same without columns that say nothing in any row."""
        return self._of(
            [at for at in range(len(self.columns)) if any(row[at] not in (None, "", ()) for row in self.rows)]
        )

    def printed(self) -> Table:
        """The same without columns of details."""
        return self._of([at for at, column in enumerate(self.columns) if not column.detail])

    def _of(self, kept: Sequence[int]) -> Table:
        columns, rows = [self.columns[at] for at in kept], [[row[at] for at in kept] for row in self.rows]
        return dataclasses.replace(self, columns=columns, rows=rows)

    def drawn(self, key: str, title: str, caption: str, **how: Any) -> Table:
        """The same with a chart of a column, over the names in the first one."""
        at = [column.key for column in self.columns].index(key)
        column, names = self.columns[at], [self.columns[0].text(row[0]) for row in self.rows]
        values = [column.counts_as(row[at]) for row in self.rows]
        how = {"label": column.head.lower(), "share": column.bar, **how}
        return dataclasses.replace(self, charts=[*self.charts, Chart(title, caption, names, values, **how)])

    def texts(self) -> list[list[str]]:
        """The cells as they are shown, row by row."""
        return [[column.text(value) for column, value in zip(self.columns, row, strict=True)] for row in self.rows]

    def widest(self) -> list[int]:
        """How many characters the longest text of each column has: behind bars all take as much."""
        return [max(map(len, texts), default=0) for texts in zip(*self.texts(), strict=True)]

    def json(self) -> list[dict[str, Any]]:
        """Each row as plain values."""
        keys = [column.key for column in self.columns]
        return [dict(zip(keys, map(as_json, row), strict=True)) for row in self.rows]

    def rich(self) -> RichTable:
        """For a terminal: where that is narrow, columns that fold do, and the others do not."""
        from rich.table import Table as RichTable
        from rich.text import Text

        table = self.printed()
        made = RichTable(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for column in table.columns:
            folds = column.side == "folds"
            made.add_column(
                Text(column.head),
                justify="right" if column.side == "right" else "left",
                no_wrap=not folds,
                overflow="fold" if folds else "ellipsis",  # a number that is cut has to look like it
            )
        sides = [column.side for column in table.columns]
        for row in table.texts():
            made.add_row(
                *(_Folding(text) if side == "folds" else Text(text) for text, side in zip(row, sides, strict=True))
            )
        return made

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        # in a notebook rich would show it below the cell, and give no text
        console = Console(file=text, width=WIDE, color_system=None, legacy_windows=False, force_jupyter=False)
        console.print(self.rich())
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def _repr_html_(self) -> str:
        table = self.printed()
        sides = ["right" if column.side == "right" else "left" for column in table.columns]
        lines = [("th", [column.head for column in table.columns]), *(("td", row) for row in table.texts())]
        return f"<table>{''.join(_html_row(kind, sides, cells) for kind, cells in lines)}</table>"


def _html_row(kind: str, sides: Iterable[str], cells: Iterable[str]) -> str:
    made = (
        f'<{kind} style="text-align: {side}">{html.escape(each)}</{kind}>'
        for side, each in zip(sides, cells, strict=True)
    )
    return f"<tr>{''.join(made)}</tr>"


def totals(rows: Mapping[str, tuple[float, float]]) -> Table:
    """``{what: (before, after)}`` as a table; "bytes" are shown in the unit that fits.

    >>> print(totals({"parameters": (2000, 1500), "bytes": (8000, 6000)}))
    Total       before  after   left
    parameters   2,000  1,500  75.0%
    bytes         8 kB   6 kB  75.0%
    """
    items = [(what, *(map(_Bytes, pair) if what == "bytes" else pair)) for what, pair in rows.items()]
    return Table.of(
        "total",
        items,
        Column("Total", key="of"),
        Column("before", show=_amount, side="right"),
        Column("after", show=_amount, side="right"),
        Column.portion("left", lambda row: row[2] / row[1] if row[1] else None),
    )


class _Bytes(int):
    """A number of them."""


def _amount(number: float) -> str:
    if isinstance(number, _Bytes):
        return bytes_text(number)
    return f"{number:,}" if isinstance(number, int) else f"{number:.3f}"


def as_json(value: Any) -> Any:
    """A value as JSON has it: what is not finite is None, and what is unknown is what ``str`` makes of it.

    >>> as_json((1, float("nan"), Path("a"), {2: True}))
    [1, None, 'a', {'2': True}]
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, dict):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    return str(value)


def folded(text: str, width: int) -> str:
    """The text in lines of at most ``width`` characters where its words are no longer, broken after spaces and within
    names after dots; the later lines of a name are indented.

    >>> print(folded("encoder.layer.0.attention.self.query.weight", 30))
    encoder.layer.0.attention.
      self.query.weight
    >>> print(folded("an output of the model", 12))
    an output of
    the model
    """
    indent = "" if " " in text.strip() else "  "
    lines = [""]
    for part in re.findall(r"[^. ]*[. ]|[^. ]+$", text):
        if lines[-1].strip() and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append(indent)
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


class _Folding:
    """A cell that folds as `folded` does, in whatever width its column gets."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        longest = max(map(len, folded(self.text, 1).splitlines()), default=0)
        return Measurement(longest, len(self.text)).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield Text(folded(self.text, options.max_width), overflow="fold")


# ---- What a result says of itself, wherever it is shown.

Part = str | Table  # of what a verb says it did: a line, or a table


def text_of(parts: Iterable[Part]) -> str:
    """The parts as plain text."""
    return "\n".join(map(str, parts))


def html_of(parts: Iterable[Part]) -> str:
    """The parts for a cell of a notebook; nothing of them is read as markup.

    >>> html_of(["<b>"])
    '<div><div>&lt;b&gt;</div></div>'
    """
    shown = (f"<div>{html.escape(each)}</div>" if isinstance(each, str) else each._repr_html_() for each in parts)
    return f"<div>{''.join(shown)}</div>"


def json_of(parts: Iterable[Part]) -> dict[str, Any]:
    """The parts as plain values: what is said, and each table by its name."""
    parts = [part for part in parts if part != ""]
    said = [part for part in parts if isinstance(part, str)]
    return {"said": said} | {part.name: part.json() for part in parts if isinstance(part, Table)}


class Shown:
    """A result that is shown as the lines and tables that it says of itself: by print, at a prompt, in a notebook, as
    JSON."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # IPython asks one class after the other, and at each for `__repr__`, too, which a dataclass has
        cls._repr_pretty_ = Shown._repr_pretty_  # type: ignore[method-assign]

    @abstractmethod
    def content(self) -> Iterable[Part]:
        """All that there is to say, as lines and tables."""

    def summary(self) -> Iterable[Part]:
        """What is printed of it: all of it, unless that is long."""
        return self.content()

    def json(self) -> dict[str, Any]:
        """All of it as plain values: its own numbers and words, what it says, and its tables, row by row."""
        fields = getattr(self, "__dataclass_fields__", {})
        every = {name: each for kind in type(self).__mro__ for name, each in vars(kind).items()}
        named = [*fields, *(name for name, each in every.items() if isinstance(each, property))]
        own = {name: getattr(self, name) for name in named if not name.startswith("_")}
        return {name: as_json(value) for name, value in own.items() if _is_plain(value)} | json_of(self.content())

    def __str__(self) -> str:
        return text_of(self.summary())

    def _repr_html_(self) -> str:
        return html_of(self.summary())

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        printer.text(str(self))


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a word or a path, or a few of them."""
    return (
        value is None
        or isinstance(value, str | int | float | Path)
        or (isinstance(value, tuple | list) and all(map(_is_plain, value)))
    )
