"""The charts of a page: SVG whose colours are the page's, so that they follow light and dark.

Law: what is drawn is what the chart says; a name is text, whatever is in it.
"""

import dataclasses
import html
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from secateur.support import Chart

# matplotlib draws with stand-ins; `svg_of` puts the page's CSS variables in their place.
_INK, _FAINT, PAPER = "#010001", "#010002", "#010003"
SERIES = [f"#0200{number:02x}" for number in range(8)]
_STAND_INS = {_INK: "--ink", _FAINT: "--faint", PAPER: "--paper"} | {
    color: f"--series-{number}" for number, color in enumerate(SERIES)
}
MARKERS = "osD^vPX*"
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: it is searched, read aloud and scaled
    "font.size": 10.5,
    "text.color": _INK,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _FAINT,
    "grid.linewidth": 0.5,
    "grid.alpha": 0.45,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
}


@dataclasses.dataclass(frozen=True)
class Plot:
    title: str
    caption: str
    svg: Any  # Markup
    small: bool  # it is whole on a telephone, too


def svg_of(figure: Any, prefix: str, label: str) -> Any:
    """The figure as inline SVG: the page's colours and fonts, ids of its own, a label for screen readers."""
    import io

    import markupsafe
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": prefix}):  # the same results give the same bytes
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)  # HTML knows SVG; no address is left in the page
    text = text.replace("xlink:href=", "href=")
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\1{prefix}-", text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    for color, variable in _STAND_INS.items():
        text = text.replace(color, f"var({variable})")
    head = f'<svg role="img" aria-label="{html.escape(label)}"'
    return markupsafe.Markup(text.replace("<svg", head, 1))


_MOST = 24  # series; more are not told apart, and the table has them all
_ROWS = 40  # of a map; one that is higher is no picture any more
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
_SIGNS = dict(zip(MARKERS, "●■◆▲▼✚✖★", strict=True))


class Key(NamedTuple):
    """A line of the legend: the number of its colour, its sign, its name."""

    color: int
    sign: str
    name: str


class Map(NamedTuple):
    """Numbers over depth, as fields that are the stronger the larger they are.

    ``rows`` are ``(label, fields)``, a field ``(how strong in [0, 1], what it says)``, None where there is no number;
    ``columns`` the numbers of the blocks; ``low`` and ``high`` what the faintest and the strongest field mean.
    """

    rows: Sequence[tuple[str, Sequence[tuple[float, str] | None]]]
    columns: Sequence[int]
    low: str
    high: str


def map_of(chart: Chart) -> Map | None:
    """A row for each kind of thing, a column for each block; None where there are no blocks, things are along
    an amount, or nothing differs.

    >>> names = ["a.0.up", "a.0.down", "a.1.up", "a.1.down", "head"]
    >>> found = map_of(Chart("Error", "", names, [0.1, 0.2, 0.3, 0.4, 9.0], "error"))
    >>> [label for label, _ in found.rows], found.columns, found.high
    (['up', 'down'], [0, 1], '0.4')
    >>> found.rows[1][1]
    [(0.5, 'a.0.down: 0.2'), (1.0, 'a.1.down: 0.4')]
    """
    if chart.grid is None and chart.places is not None:
        return None
    places = [_place(name) for name in chart.names] if chart.grid is None else chart.grid
    found: dict[str, dict[int, tuple[float, str]]] = {}
    for name, place, value in zip(chart.names, places, chart.values, strict=True):
        if place is not None and value is not None and math.isfinite(value):
            found.setdefault(place[0], {})[place[1]] = (value, name)
    found = {kind: each for kind, each in found.items() if len(each) > 1}
    values = [value for each in found.values() for value, _ in each.values()]
    if len(set(values)) < 2 or len(found) > _ROWS or min(values) < 0:
        return None
    high, columns = max(values), sorted({column for each in found.values() for column in each})
    low = min(values) if chart.share or 2 * min(values) > high else 0.0  # equal marks get different shapes
    span = high - low

    def field(pair: tuple[float, str] | None) -> tuple[float, str] | None:
        return None if pair is None else ((pair[0] - low) / span, f"{pair[1]}: {_said(pair[0], chart.share)}")

    labels = _without_common(list(found)) if chart.grid is None else list(found)
    rows = [
        (label, [field(each.get(column)) for column in columns])
        for label, each in zip(labels, found.values(), strict=True)
    ]
    return Map(rows, columns, _said(low, chart.share), _said(high, chart.share))


def _said(value: float, share: bool) -> str:
    """
    >>> _said(0.5, True), _said(1.5e-16, True), _said(0.0, True), _said(0.00123, False)
    ('50 %', '<0.01 %', '0 %', '0.00123')
    """
    if not share:
        return f"{value:.3g}"
    return "<0.01 %" if 0 < value < 1e-4 else f"{100 * value:.4g} %"


def _place(name: str) -> tuple[str, int] | None:
    """The kind of what has this name, and the number of its block: the first number in it."""
    number = _NUMBER.search(name)
    return None if number is None else (f"{name[: number.start()]}*{name[number.end() :]}", int(number.group()))


def _without_common(kinds: list[str]) -> list[str]:
    """The kinds without what all of them begin and end with, in whole words."""
    words = [kind.split(".") for kind in kinds]
    most = min(map(len, words)) - 1
    first = next((at for at in range(most) if len({each[at] for each in words}) > 1), most)
    last = next((at for at in range(most - first) if len({each[-1 - at] for each in words}) > 1), most - first)
    return [".".join(each[first : len(each) - last]) for each in words]


def chart_of(chart: Chart, prefix: str) -> tuple[Plot, list[Key]] | None:
    """A marker for each thing from left to right, a line through those of a series, which differ in numbers alone if
    nothing else is said; None where there is nothing to see: all numbers are the same, or there are too many kinds.

    >>> plot, keys = chart_of(Chart("Zeros", "", ["a.0.w", "a.1.w", "b"], [0.5, 0.9, 0.1], "zeros", share=True), "c")
    >>> [key.name for key in keys]
    ['a.*.w', 'b']
    """
    from matplotlib.figure import Figure

    series: dict[str, list[tuple[float, float]]] = {}
    places = range(1, len(chart.names) + 1) if chart.places is None else chart.places
    kinds = list(map(_kind, chart.names)) if chart.series is None else chart.series
    for place, kind, value in zip(places, kinds, chart.values, strict=True):
        if value is not None and math.isfinite(value):
            series.setdefault(kind, []).append((place, 100 * value if chart.share else value))
    if len({value for points in series.values() for _, value in points}) < 2 or len(series) > _MOST:
        return None
    small = chart.places is not None
    figure = Figure(figsize=(4.8, 3.3) if small else (8.4, 3.6))
    axes = figure.add_axes((0.14, 0.15, 0.82, 0.73) if small else (0.095, 0.14, 0.885, 0.75))
    keys = []
    for number, (kind, points) in enumerate(series.items()):
        color = number % len(SERIES)
        marker = "*" if kind == chart.chosen else MARKERS[(number + number // len(SERIES)) % len(MARKERS)]
        size = 15 if kind == chart.chosen else 5.5 if chart.joined else 7 if small else 4.5
        xs, ys = zip(*points, strict=True)
        axes.plot(
            xs, ys, color=SERIES[color], marker=marker, linewidth=0.8 if chart.joined else 0, clip_on=False,
            markersize=size, markeredgecolor=PAPER, markeredgewidth=0.6,
        )  # fmt: skip
        keys.append(Key(color, _SIGNS[marker], kind))
    if chart.places is None:
        axes.set_xlim(0.5, len(chart.names) + 0.5)
        axes.set_xticks([])
    else:
        edge = (max(chart.places) - min(chart.places)) / 40 or 0.5
        axes.set_xlim(min(chart.places) - edge, max(chart.places) + edge)
        axes.locator_params(axis="x", nbins=6, integer=True)
        if chart.most is not None:
            axes.axvline(chart.most, color=_INK, linewidth=0.8, linestyle="--")
    if chart.share and max(value for points in series.values() for _, value in points) > 50:
        axes.set_ylim(0, 104)
    elif chart.from_zero:
        axes.set_ylim(0, None)
    label: dict[str, Any] = {"parse_math": False}
    axes.text(
        -0.12 if small else -0.07,
        1.04,
        f"{chart.label} (%)" if chart.share else chart.label,
        transform=axes.transAxes,
        **label,
    )
    axes.set_xlabel(chart.along, labelpad=9 if chart.places is None else 4)  # markers at zero reach below the axis
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    return Plot(chart.title, chart.caption, svg_of(figure, prefix, f"{chart.title}: {chart.caption}"), small), keys


def _kind(name: str) -> str:
    return _NUMBER.sub("*", name)
