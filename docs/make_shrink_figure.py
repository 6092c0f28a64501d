"""Draw what leaves together in grouped-query attention: ``python docs/make_shrink_figure.py``.

Law: what is drawn as leaving is what `secateur.coupling.find_coupling` finds, in docs/guides/coupling.md, for this
attention.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("grouped-queries.svg")
HEADS, QUERIES, WIDTH = 2, 2, 3  # key/value heads, queries of each, entries of each
CELL, BAR, PANEL, TOP = 21, 58, 352, 104
STYLE = """
  svg { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", Arial, sans-serif; }
  text { fill: #1d2126; } .soft { fill: #575e66; } .title { font-weight: 650; font-size: 15px; }
  .cell { stroke: #ffffff; stroke-width: 1.5; } .a { fill: #b9d7ee; } .b { fill: #f6d0b1; }
  .gone { fill: none; stroke: #c02a3c; stroke-width: 1.3; stroke-dasharray: 3 2.5; }
  .code, .gone-code { font: 11px ui-monospace, "DejaVu Sans Mono", monospace; } .gone-code { fill: #c02a3c; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e8eaed; } .soft { fill: #a9b0b8; } .cell { stroke: #0d1117; }
    .a { fill: #1f567f; } .b { fill: #84481b; }
    .gone { stroke: #ff7b8a; } .gone-code { fill: #ff7b8a; }
  }
"""


class Cell(NamedTuple):
    """One row of a projection, or one column of the last: of which head, which of its queries, which entry."""

    head: int
    query: int | None
    entry: int

    def __str__(self) -> str:
        return "".join("AB"[self.head] + ("" if self.query is None else f" {self.query + 1}") + f" {'xyz'[self.entry]}")


ROWS = [Cell(head, query, entry) for head in range(HEADS) for query in range(QUERIES) for entry in range(WIDTH)]
SHARED = [Cell(head, None, entry) for head in range(HEADS) for entry in range(WIDTH)]
# a title, a line, and of the projections that lose cells which they lose
PANELS: tuple[tuple[str, str, dict[str, Callable[[Cell], bool]]], ...] = (
    (
        "A key/value head leaves",
        "head B: rows of all three, columns of o",
        {name: lambda cell: cell.head == 1 for name in "qkvo"},
    ),
    (
        "A query of each head leaves",
        "query 2 of A and of B; k and v stay",
        {name: lambda cell: cell.query == 1 for name in "qo"},
    ),
    (
        "An entry of each value leaves",
        "entry y of all heads; q and k stay",
        {name: lambda cell: cell.entry == 1 for name in "vo"},
    ),
)


def drawing() -> str:
    """The whole file."""
    width, height = len(PANELS) * PANEL, TOP + len(ROWS) * CELL + 130
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-label="Three ways in which slices of grouped-query attention leave together">',
        f"<style>{STYLE}</style>",
    ]
    for number, (title, line, leaves) in enumerate(PANELS):
        left = number * PANEL + 16
        parts += [_text(left, 24, title, "title"), _text(left, 45, line, "soft")]
        for place, (name, cells) in enumerate({"q": ROWS, "k": SHARED, "v": SHARED}.items()):
            x = left + place * (BAR + 42)
            parts += [_text(x, TOP - 27, f"{name}_proj"), _text(x, TOP - 10, f"{len(cells)} rows", "soft")]
            for row, cell in enumerate(cells):
                gone = name in leaves and leaves[name](cell)
                parts.append(_cell(x, TOP + row * CELL, BAR, CELL, cell, gone=gone))
        below = TOP + len(ROWS) * CELL + 30
        parts += [_text(left, below, "o_proj"), _text(left + 52, below, f"{len(ROWS)} columns", "soft")]
        for column, cell in enumerate(ROWS):
            x = left + column * 26
            parts.append(_cell(x, below + 12, 26, 66, cell, gone=leaves["o"](cell)))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _cell(x: float, y: float, wide: float, high: float, cell: Cell, *, gone: bool) -> str:
    inset = 1.5 if gone else 0.0
    kind = "gone" if gone else f"cell {'ab'[cell.head]}"
    box = (
        f'<rect class="{kind}" x="{x + inset}" y="{y + inset}" width="{wide - 2 * inset}" height="{high - 2 * inset}"/>'
    )
    words = "gone-code" if gone else "code"
    if high < wide:
        return (
            box + f'<text class="{words}" x="{x + wide / 2}" y="{y + high / 2 + 4}" text-anchor="middle">{cell}</text>'
        )
    lines = "".join(
        f'<text class="{words}" x="{x + wide / 2}" y="{y + 20 + 17 * at}" text-anchor="middle">{part}</text>'
        for at, part in enumerate(str(cell).split())
    )
    return box + lines


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{words}</text>'


if __name__ == "__main__":
    FILE.write_text(drawing(), encoding="utf-8")
