"""Tables of plain text and for a terminal: the same columns, aligned in the same way. What a result says of itself,
shown wherever a result is: by print, at a prompt, in a notebook.
"""

from __future__ import annotations

import html
import io
import re
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from secateur.support.text import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

# ---- Tables of plain text and for a terminal: the same columns, aligned in the same way.
#
# Law: in plain text a line is a row, and a cell is shown as it is, never read as markup.

WIDE = 10_000  # columns of a terminal that no line of ours fills


class Rows(NamedTuple):
    """A table: its columns, as `table` names them, and what is in them."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


Part = str | Rows  # of what a verb says it did: a line, or a table


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Lines of plain text: what ``print(result)`` shows of a value of the library.

    A column of numbers is named ``">Size"`` and ends flush right. A cell is what ``str`` makes of it; None is empty.

    >>> print(table(["Layer", ">Zeros"], [["head", 8], ["body.weight", 1024], ["norm", None]]))
    Layer        Zeros
    head             8
    body.weight   1024
    norm
    """
    from rich.console import Console

    text = io.StringIO()
    # in a notebook rich would show it below the cell, and give no text
    console = Console(file=text, width=WIDE, color_system=None, legacy_windows=False, force_jupyter=False)
    console.print(table_of(columns, rows))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def table_of(columns: Sequence[str], rows: Iterable[Sequence[object]] = (), **form: Any) -> Table:
    """A table for a terminal, as a `rich.table.Table`; ``form`` are arguments of that.

    Where the terminal is narrow, a column of words, named ``"~Group"``, folds after spaces and dots, and the others do
    not. A cell that is a `rich.text.Text` is taken as it is.
    """
    from rich.table import Table
    from rich.text import Text

    made = Table(**{"box": None, "pad_edge": False, "header_style": "bold", "padding": (0, 2, 0, 0)} | form)
    for column in columns:
        kind, head = (column[0], column[1:]) if column.startswith((">", "~")) else ("", column)
        made.add_column(
            Text(head),
            justify="right" if kind == ">" else "left",
            no_wrap=kind != "~",
            overflow="fold" if kind == "~" else "ellipsis",  # a number that is cut has to look like it
        )
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"a table of {len(columns)} columns has a row of {len(row)} cells: {list(row)}.")
        made.add_row(
            *(cell_of(value, folds=column.startswith("~")) for value, column in zip(row, columns, strict=True))
        )
    return made


def cell_of(value: object, *, folds: bool = False) -> Text | _Folding:
    from rich.text import Text

    if isinstance(value, Text):
        return value
    text = "" if value is None else printable(str(value), WIDE)
    return _Folding(text) if folds else Text(text)


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


# ---- What a result says of itself, shown wherever a result is: by print, at a prompt, in a notebook.
#
# Law: all three say the same; IPython would show the fields of a dataclass, and not what `print` shows.


def text_of_parts(parts: Iterable[Part]) -> str:
    """The parts as plain text."""
    return "\n".join(each if isinstance(each, str) else table(*each) for each in parts)


def html_of_parts(parts: Iterable[Part]) -> str:
    """The parts for a cell of a notebook; nothing of them is read as markup.

    >>> html_of_parts(["<b>"])
    '<div><div>&lt;b&gt;</div></div>'
    """
    shown = (f"<div>{html.escape(each)}</div>" if isinstance(each, str) else _html_table(each) for each in parts)
    return f"<div>{''.join(shown)}</div>"


def _html_table(part: Rows) -> str:
    sides = ["right" if column.startswith(">") else "left" for column in part.columns]
    heads = [column[1:] if column.startswith((">", "~")) else column for column in part.columns]
    lines = (("th", heads), *(("td", row) for row in part.rows))
    return f"<table>{''.join(_html_row(kind, sides, cells) for kind, cells in lines)}</table>"


def _html_row(kind: str, sides: Iterable[str], cells: Iterable[object]) -> str:
    shown = ("" if each is None else html.escape(printable(str(each), WIDE)) for each in cells)
    made = (f'<{kind} style="text-align: {side}">{each}</{kind}>' for side, each in zip(sides, shown, strict=True))
    return f"<tr>{''.join(made)}</tr>"


class Shown:
    """A result that is shown as the lines and tables that it says of itself."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # IPython asks one class after the other, and at each for `__repr__`, too, which a dataclass has
        cls._repr_pretty_ = Shown._repr_pretty_  # type: ignore[method-assign]

    @abstractmethod
    def _parts(self) -> Iterable[Part]:
        """Lines and tables."""

    def __str__(self) -> str:
        return text_of_parts(self._parts())

    def _repr_html_(self) -> str:
        return html_of_parts(self._parts())

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        printer.text(str(self))
