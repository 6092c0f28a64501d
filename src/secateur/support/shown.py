"""What a result says of itself, shown wherever a result is: by print, at a prompt, in a notebook.

Law: all three say the same; IPython would show the fields of a dataclass, and not what `print` shows.
"""

from __future__ import annotations

import html
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

from secateur.support.tables import WIDE, Part, Rows, table
from secateur.support.text import printable

__all__ = ["Shown", "html_of_parts", "text_of_parts"]


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
