"""The table of a report, for a page and for a terminal.

Law: a column is shown if something of it was measured; both tables say the same.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from secateur.report.results import Results
from secateur.report.summary import Row, best_rows, interval_of, summarize
from secateur.support import table_of

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

__all__ = ["Column", "columns_of", "print_summary", "shrunken_table"]


def _with_spread(mean: float | None, sd: float | None) -> str:
    if mean is None:
        return "–"
    return f"{mean:.1f}" if sd is None else f"{mean:.1f} ± {sd:.1f}"


def print_summary(results: Results) -> None:
    """Print the table of `summarize` to the terminal: mean ± standard deviation over seeds, sizes, milliseconds."""
    from rich.console import Console
    from rich.text import Text

    rows = summarize(results.runs)
    columns = columns_of(results, rows)
    tuned = any(column.key == "after" for column in columns)
    caption = f"{results.metric} before and after fine-tuning" if tuned else ""
    if any(row.before_sd is not None for row in rows):
        caption += ("; " if caption else "") + "mean ± standard deviation over seeds"
    console = Console()
    by_sparsity = sorted(rows, key=lambda row: round(row.sparsity, 2))
    console.print(_printed(by_sparsity, columns, Text(results.title, "bold"), Text(caption)))
    if results.shrunken:
        title = Text(f"\nChannels that left, zeros that are skipped: {results.metric} after fine-tuning", "bold")
        console.print(_printed(*shrunken_table(results), title, None))
    if results.checks:
        wide = max(len(check.name) for check in results.checks)
        removed = 100 * summarize(results.checks[0].runs)[0].sparsity
        console.print(f"\nSanity checks, {removed:.1f} % removed", style="bold", highlight=False)
        for check, [row] in ((check, summarize(check.runs)) for check in results.checks):
            shown = (
                _with_spread(row.before, row.before_sd) if row.after is None else _with_spread(row.after, row.after_sd)
            )
            console.print(Text(f"{check.name:{wide}}  {shown}"))


def _printed(rows: Sequence[Row], columns: "Sequence[Column]", title: "Text", caption: "Text | None") -> "Table":
    """A table for a terminal: a rule where the sparsity changes, the best of each in bold."""
    from rich import box
    from rich.text import Text

    columns = [column for column in columns if column.brief]
    heads = [f"{column.brief}\n{column.unit}" if column.unit else column.brief for column in columns]
    table = table_of(
        [f"{'>' * column.numeric}{head}" for column, head in zip(columns, heads, strict=True)],
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1),
    )
    best = best_rows(rows)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        last = following is None or round(following.sparsity, 2) != round(row.sparsity, 2)
        cells = [Text(column.show(row)) for column in columns]
        table.add_row(*cells, end_section=last, style="bold" if row in best else "")
    return table


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a page's table, whose rows are `Row` or numbers; one without a ``brief`` head is left out on a
    terminal, as are asides."""

    key: str
    head: str
    brief: str
    unit: str
    numeric: bool
    values: Mapping[Any, float | str | None]
    texts: Mapping[Any, str]
    aside: str = ""  # what is said beside each text
    asides: Mapping[Any, str] = dataclasses.field(default_factory=dict)
    bars: Mapping[Any, float] = dataclasses.field(default_factory=dict)  # shares, drawn before each text

    def value(self, row: Any) -> float | str | None:
        return self.values[row]

    def show(self, row: Any) -> str:
        return self.texts[row]

    @property
    def widest(self) -> int:
        """How many characters its longest text has: behind bars all take as much, so that bars stand in line."""
        return max(map(len, self.texts.values()), default=0)


# What a network costs: a field of `Row`, heads on a page and on a terminal, unit, how it is shown, beside it
_COSTS = (
    ("bytes", "file", "file", "kB", ".1f", 1e-3, "times smaller"),
    ("zipped", "file, zipped", "zipped", "kB", ".1f", 1e-3, "times smaller"),
    ("compressed", "file, compressed", "", "kB", ".1f", 1e-3, "times smaller"),
    ("memory", "in memory", "", "kB", ".1f", 1e-3, "times smaller"),
    ("multiply_adds", "multiply-adds", "", "thousands", ",.0f", 1e-3, "times fewer"),
    ("latency_ms", "latency", "latency", "ms", ".2f", 1.0, "times faster"),
    ("batch_ms", "latency of a batch", "batch", "ms", ".2f", 1.0, "times faster"),
)


def columns_of(results: Results, rows: Sequence[Row]) -> list[Column]:
    """What both tables show: only columns for which something was measured."""
    tuned = any(row.after is not None for row in rows)
    first, last = f"{results.metric} before fine-tuning", f"{results.metric} after fine-tuning"
    dense = next((row for row in rows if not row.sparsity), None)
    names: dict[Row, float | str | None] = {row: row.method for row in rows}
    columns = [Column("method", "method", "method", "", False, names, {row: row.method for row in rows})]

    def add(
        key: str, head: str, brief: str, unit: str, value: Callable[[Row], float | None], show: Callable[[Row], str]
    ) -> None:
        values: dict[Row, float | str | None] = {row: value(row) for row in rows}
        if any(measured is not None for measured in values.values()):
            texts = {row: "–" if values[row] is None else show(row) for row in rows}
            columns.append(Column(key, head, brief, unit, True, values, texts))

    def plain(key: str, head: str, brief: str, unit: str, form: str, scale: float = 1.0) -> None:
        def value(row: Row) -> float | None:
            measured = getattr(row, key)
            return None if measured is None else measured * scale

        add(key, head, brief, unit, value, lambda row: format(value(row), form))

    def compare(key: str, aside: str, cost: Callable[[Row], float | None]) -> None:
        """Beside each value, how many times less it costs than the dense network."""
        most = None if dense is None else cost(dense)
        if most is not None and columns[-1].key == key:
            asides = {row: f"{most / less:.1f}" for row in rows if (less := cost(row))}
            columns[-1] = dataclasses.replace(columns[-1], aside=aside, asides=asides)

    plain("sparsity", "sparsity", "removed", "%", ".1f", 100)
    add(
        "before",
        first if tuned else results.metric,
        "before" if tuned else results.metric,
        results.unit,
        lambda row: row.before,
        lambda row: _with_spread(row.before, row.before_sd),
    )
    add("after", last, "after", results.unit, lambda row: row.after, lambda row: _with_spread(row.after, row.after_sd))
    intervals = {row: interval_of(results, row.before if row.after is None else row.after) for row in rows}
    add(
        "interval",
        "95 % interval",
        "",
        results.unit,
        lambda row: None if (interval := intervals[row]) is None else interval[0],
        lambda row: " – ".join(f"{bound:.1f}" for bound in intervals[row] or ()),
    )
    plain("overall", "of all parameters", "", "%", ".1f", 100)
    compare("overall", "times fewer", lambda row: None if row.overall is None else 1 - row.overall)
    for key, head, brief, unit, form, scale, aside in _COSTS:
        plain(key, head, brief, unit, form, scale)
        if key != "bytes" or len({row.bytes for row in rows}) > 1:
            compare(key, aside, operator.attrgetter(key))
    return columns


def shrunken_table(results: Results) -> tuple[list[Row], list[Column]]:
    """The rows and columns of the table of what is smaller and faster: what that cost and gained, and no more.

    >>> from secateur.report import Run
    >>> runs = [Run("dense", 0.0, 99.0, 99.0, bytes=900), Run("channels", 0.5, 60.0, 98.0, bytes=300)]
    >>> rows, columns = shrunken_table(Results("Mine", runs, shrunken=runs))
    >>> [(column.key, column.asides.get(rows[1])) for column in columns]
    [('method', None), ('sparsity', None), ('after', None), ('bytes', '3.0')]
    """
    rows = summarize(results.shrunken)
    columns = columns_of(results, rows)
    left_out = {"interval", "overall"} | ({"before"} if any(row.after is not None for row in rows) else set())
    kept = [column for column in columns if column.key not in left_out]
    return rows, [
        dataclasses.replace(column, brief="mult-adds") if column.key == "multiply_adds" else column for column in kept
    ]
