"""Tables in Markdown, as they are pasted into RESULTS.md, and the figures in their cells."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def head(columns: Sequence[str]) -> str:
    """The two lines above the rows."""
    return f"{row(columns)}\n{row(['---'] * len(columns))}"


def spread(
    values: Sequence[float], digits: int = 4, deviation: Callable[[Sequence[float]], float] = statistics.stdev
) -> str:
    """``mean ± standard deviation``; of a single value the value."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {deviation(values):.{digits}f}" if len(values) > 1 else mean
