"""Tables of plain text and for a terminal: the same columns, aligned in the same way.

Law: in plain text a line is a row, and a cell is shown as it is, never read as markup.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from secateur.support.text import printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

__all__ = ["Part", "Rows", "table", "table_of"]

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
    Console(file=text, width=WIDE, color_system=None, legacy_windows=False).print(table_of(columns, rows))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def table_of(columns: Sequence[str], rows: Iterable[Sequence[object]] = (), **form: Any) -> Table:
    """The same for a terminal, as a `rich.table.Table`; ``form`` is of its own arguments.

    Where the terminal is narrow, a column of words, named ``"~Group"``, folds, and the others do not. A cell that is a
    `rich.text.Text` is taken as it is.
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
        made.add_row(*map(cell_of, row))
    return made


def cell_of(value: object) -> Text:
    from rich.text import Text

    if isinstance(value, Text):
        return value
    return Text("" if value is None else printable(str(value), WIDE))
