"""The charts of an account: one number of each of many things, in their order.

Law: what is drawn is what the account says; a name is text, whatever is in it.
"""

import math
import re
from typing import Any, NamedTuple

from secateur.report.account import Chart
from secateur.report.plots import MARKERS, PAPER, SERIES, Plot, svg_of

__all__ = ["Key", "chart_of"]

_MOST = 24  # series; more are not told apart, and the table has them all
_SIGNS = dict(zip(MARKERS, "●■◆▲▼✚✖★", strict=True))


class Key(NamedTuple):
    """A line of the legend: the number of its colour, its sign, its name."""

    color: int
    sign: str
    name: str


def chart_of(chart: Chart, prefix: str) -> tuple[Plot, list[Key]] | None:
    """A marker for each thing from left to right, a line through those that differ in numbers alone; None where
    there is nothing to see: all numbers are the same, or there are too many kinds of them.

    >>> plot, keys = chart_of(Chart("Zeros", "", ["a.0.w", "a.1.w", "b"], [0.5, 0.9, 0.1], "zeros", share=True), "c")
    >>> [key.name for key in keys]
    ['a.*.w', 'b']
    """
    from matplotlib.figure import Figure

    series: dict[str, list[tuple[int, float]]] = {}
    for place, (name, value) in enumerate(zip(chart.names, chart.values, strict=True), 1):
        if value is not None and math.isfinite(value):
            series.setdefault(_kind(name), []).append((place, 100 * value if chart.share else value))
    if len({value for points in series.values() for _, value in points}) < 2 or len(series) > _MOST:
        return None
    figure = Figure(figsize=(8.4, 3.6))
    axes = figure.add_axes((0.075, 0.13, 0.905, 0.76))
    keys = []
    for number, (kind, points) in enumerate(series.items()):
        color = number % len(SERIES)
        marker = MARKERS[(number + number // len(SERIES)) % len(MARKERS)]
        xs, ys = zip(*points, strict=True)
        axes.plot(
            xs, ys, color=SERIES[color], marker=marker, linewidth=0.8, markersize=5.5, markeredgecolor=PAPER,
            markeredgewidth=0.6, clip_on=False,
        )  # fmt: skip
        keys.append(Key(color, _SIGNS[marker], kind))
    axes.set_xlim(0.5, len(chart.names) + 0.5)
    if chart.share:
        axes.set_ylim(0, 104)
    else:
        axes.set_ylim(0, None)
    label: dict[str, Any] = {"parse_math": False}
    axes.text(-0.06, 1.04, f"{chart.label} (%)" if chart.share else chart.label, transform=axes.transAxes, **label)
    axes.set_xlabel("in their order")
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    return Plot(chart.title, chart.caption, svg_of(figure, prefix, f"{chart.title}: {chart.caption}")), keys


def _kind(name: str) -> str:
    return re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", name)
