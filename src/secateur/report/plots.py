"""The plots of a report: SVG whose colours are the page's, so that they follow light and dark. The charts of an
account: one number of each of many things, in their order.
"""

import dataclasses
import html
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from secateur.report.account import Chart
from secateur.report.results import Network, Results, Row, interval_of

# ---- The plots of a report: SVG whose colours are the page's, so that they follow light and dark.
#
# Law: what is drawn is what the results say; a name is text, whatever is in it.

# matplotlib draws with stand-ins; `svg_of` puts the page's CSS variables in their place.
_INK, _FAINT, PAPER = "#010001", "#010002", "#010003"
_KEPT, _REMOVED = "#010011", "#010012"
SERIES = [f"#0200{number:02x}" for number in range(8)]
_STAND_INS = {_INK: "--ink", _FAINT: "--faint", PAPER: "--paper", _KEPT: "--series-0", _REMOVED: "--series-1"} | {
    color: f"--series-{number}" for number, color in enumerate(SERIES)
}
MARKERS = "osD^vPX*"
_NAME: dict[str, Any] = {"parse_math": False, "fontweight": "bold", "fontsize": 9.5}  # a $ in a name is a $
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


def _accuracy_scale(results: Results, values: Sequence[float]) -> tuple[Any, list[float] | None]:
    """The map from metric to height and its ticks. Percentages near 100 are spread by their distance from 100,
    since 99 and 98 differ as much as 90 and 80 do: twice the errors."""
    if results.unit != "%" or max(values) < 90 or max(values) > 100 or min(values) < 0:
        return (lambda value: value), None
    ticks = [float(tick) for tick in (0, 50, 80, 90, 95, 98, 99, 100) if tick >= min(values) - 50]
    return (lambda value: -math.log10(101 - value)), ticks


def _series(rows: Sequence[Row]) -> dict[str, list[Row]]:
    series: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        series[row.method].append(row)
    return {method: sorted(group, key=lambda row: row.sparsity) for method, group in series.items()}


def _styles(rows: Sequence[Row]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each method that prunes; both, so that the plot reads without colour."""
    pruned = [method for method, group in _series(rows).items() if any(row.sparsity for row in group)]
    count = len(SERIES)  # from the ninth on, colours meet other markers
    return {name: (SERIES[n % count], MARKERS[(n + n // count) % len(MARKERS)]) for n, name in enumerate(pruned)}


def _figure() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 4.1))
    axes = figure.add_axes((0.085, 0.13, 0.595, 0.79))
    return figure, axes


def _curves(results: Results, rows: Sequence[Row], stage: str, axes: Any, abscissa: Any) -> None:
    """One line a method, a band from the lowest to the highest seed, the name at the line's end."""
    scale, ticks = _accuracy_scale(results, [v for row in rows for v in (row.before, row.after) if v is not None])
    labels = []
    styles = _styles(rows)
    for method, group in _series(rows).items():
        points = [row for row in group if getattr(row, stage) is not None and abscissa(row) is not None]
        if not points:
            continue
        ys = [scale(getattr(row, stage)) for row in points]
        low = [scale(getattr(row, f"{stage}_range")[0]) for row in points]
        high = [scale(getattr(row, f"{stage}_range")[1]) for row in points]
        if method not in styles:  # a dense network: the line to beat
            axes.axhline(ys[0], color=_INK, linewidth=1, linestyle=(0, (4, 3)), zorder=1.5)
            interval = interval_of(results, getattr(points[0], stage))
            bottom, top = (low[0], high[0]) if interval is None else map(scale, interval)
            axes.axhspan(bottom, top, color=_INK, alpha=0.1, linewidth=0)
            labels.append((ys[0], None, method, _INK))
            continue
        color, marker = styles[method]
        xs = [abscissa(row) for row in points]
        if len(points) > 1:
            axes.fill_between(xs, low, high, color=color, alpha=0.18, linewidth=0)
        else:
            axes.vlines(xs, low, high, color=color, linewidth=5, alpha=0.3)
        axes.plot(
            xs,
            ys,
            color=color,
            linewidth=1.7,
            marker=marker,
            markersize=5.5,
            markeredgecolor=PAPER,
            markeredgewidth=0.8,
            zorder=2 if len(points) > 1 else 3,
        )
        labels.append((ys[-1], xs[-1], method, color))
    if ticks:
        axes.set_yticks([scale(tick) for tick in ticks], [f"{tick:g}" for tick in ticks])
        axes.set_ylim(scale(ticks[0]) - 0.03, scale(100) + 0.03)
    unit = f"{results.metric} ({results.unit})" if results.unit else results.metric
    axes.text(-0.12, 1.045, unit, transform=axes.transAxes, va="bottom", parse_math=False)
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    _place_labels(axes, labels)


def _place_labels(axes: Any, labels: Sequence[tuple[float, float | None, str, str]]) -> None:
    """Names beside the right edge, as near as they can be to the ends of their lines without touching each other."""
    bottom, top = axes.get_ylim()
    left, right = axes.get_xlim()
    gap = (top - bottom) * 0.044 / axes.get_position().height
    wanted = sorted(labels, key=lambda label: label[0])
    heights: list[float] = []
    for label in wanted:
        heights.append(max(label[0], heights[-1] + gap) if heights else max(label[0], bottom + gap / 2))
    overflow = (heights[-1] if heights else bottom) - (top - gap / 4)
    if overflow > 0:  # push down from the top, just as far as needed
        ceiling = top - gap / 4
        for index in range(len(heights) - 1, -1, -1):
            heights[index] = min(heights[index], ceiling)
            ceiling = heights[index] - gap
    edge = (right - left) * 0.035
    for (y, x, name, color), height in zip(wanted, heights, strict=True):
        start = right if x is None else x  # a line that stops early is led on to its name
        axes.plot(
            [start, right + edge * 0.9], [y, height], color=color, linewidth=0.8, alpha=0.7, clip_on=False, zorder=1
        )
        axes.text(right + edge * 1.15, height, _short(name), color=color, va="center", ha="left", **_NAME)
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)


def _short(name: str, limit: int = 16) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"


def accuracy_plots(results: Results, rows: Sequence[Row]) -> list[Plot]:
    stages = [stage for stage in ("before", "after") if any(getattr(row, stage) is not None for row in rows)]
    plots = []
    for stage in stages:
        figure, axes = _figure()
        marks = _marks(rows)
        axes.set_xticks([-math.log10(1 - mark) for mark in marks], [f"{100 * mark:.3g}" for mark in marks])
        axes.set_xlim(-math.log10(1 - marks[0]) - 0.08, -math.log10(1 - marks[-1]) + 0.08)
        axes.set_xlabel("weights removed (%)")
        _curves(results, rows, stage, axes, lambda row: -math.log10(1 - row.sparsity))
        title = results.metric.capitalize()
        if "after" in stages:
            title += f" {stage} fine-tuning"
        caption = f"{results.metric.capitalize()} against sparsity, mean and range over seeds."
        plots.append(Plot(title, caption, svg_of(figure, f"curve-{stage}", f"{title}: {caption}")))
    return plots


def _marks(rows: Sequence[Row]) -> list[float]:
    """The sparsities to mark: of several that are close together, the one that most rows have."""
    counts = Counter(round(row.sparsity, 3) for row in rows if row.sparsity)
    marks: list[float] = []
    for sparsity, _ in counts.most_common():
        if all(abs(math.log10((1 - sparsity) / (1 - mark))) > 0.08 for mark in marks):
            marks.append(sparsity)
    return sorted(marks) or [0.0]


def cost_plots(results: Results, rows: Sequence[Row]) -> list[Plot]:
    """The metric against what is left: bytes of the zipped file, multiply-adds. Those that were measured."""
    plots = []
    for key, scale, title, axis, caption in (
        (
            "zipped",
            1e3,
            "size",
            "file, zipped (kB): smaller to the right",
            "Size of the saved file after zip compression, mean over seeds.",
        ),
        (
            "multiply_adds",
            1e3,
            "work",
            "multiply-adds (thousands): fewer to the right",
            "Multiplications by weights that are not zero, in one forward pass: the speed-up in theory.",
        ),
    ):
        costly = [row for row in rows if getattr(row, key) is not None]
        if not costly:
            continue
        stage = "after" if any(row.after is not None for row in costly) else "before"
        figure, axes = _figure()
        amounts = [getattr(row, key) / scale for row in costly]
        low, high = min(amounts), max(amounts)
        nice = [m * 10.0**e for e in range(-3, 12) for m in (1, 2, 3, 5, 7)]
        marks = [mark for mark in nice if low * 0.9 <= mark <= high * 1.1]
        marks = [mark for mark in marks if len(marks) < 9 or f"{mark:e}"[0] in "125"]
        marks = [mark for mark in marks if len(marks) < 9 or f"{mark:e}"[0] == "1"]
        axes.set_xticks([math.log10(mark) for mark in marks], [f"{mark:,g}" for mark in marks])
        pad = 0.04 * max(math.log10(high / low), 0.1)
        axes.set_xlim(math.log10(high) + pad, math.log10(low) - pad)  # as in the other plots, right is pruned most
        axes.set_xlabel(axis)
        _curves(results, costly, stage, axes, lambda row, key=key, scale=scale: math.log10(getattr(row, key) / scale))
        title = f"{results.metric.capitalize()} against {title}" + (", after fine-tuning" if stage == "after" else "")
        plots.append(Plot(title, caption, svg_of(figure, key.replace("_", "-"), f"{title}: {caption}")))
    return plots


def history_plot(results: Results, rows: Sequence[Row]) -> list[Plot]:
    """Sparsity, and below it churn, over the run of each method that prunes while it trains."""
    from matplotlib.figure import Figure

    if not results.histories:
        return []
    styles = _styles(rows)
    figure = Figure(figsize=(5.6, 4.1))
    upper, lower = figure.add_axes((0.085, 0.56, 0.595, 0.36)), figure.add_axes((0.085, 0.13, 0.595, 0.32))
    ends: list[tuple[float, float | None, str, str]] = []
    for number, history in enumerate(results.histories):
        color, marker = styles.get(history.method, (SERIES[number % len(SERIES)], "o"))
        last = max(history.steps[-1], 1)
        places = [100 * step / last for step in history.steps]
        upper.plot(places, [100 * value for value in history.sparsity], color=color, linewidth=1.7)
        ends.append((100 * history.sparsity[-1], places[-1], history.method, color))
        updates = [(x, 100 * churn) for x, churn in zip(places, history.churn, strict=True) if churn]
        if updates:
            xs, ys = zip(*updates, strict=True)
            lower.vlines(xs, 0, ys, color=color, linewidth=0.8, alpha=0.5)
            lower.plot(xs, ys, color=color, linestyle="none", marker=marker, markersize=3.5, markeredgewidth=0)
    for axes, label in ((upper, "weights removed (%)"), (lower, "churn (% of the weights at an update)")):
        axes.set_xlim(-2, 102)
        axes.set_ylim(0, None)
        axes.text(-0.12, 1.04, label, transform=axes.transAxes, va="bottom")
        axes.tick_params(length=0)
        axes.spines["left"].set_visible(False)
    upper.set_ylim(0, 104)
    upper.set_xticklabels([])
    lower.set_xlabel("training done (%)")
    _place_labels(upper, ends)
    title = "Pruned while training"
    caption = "Sparsity, and the share of the weights whose mask an update changed, in one network of each method."
    return [Plot(title, caption, svg_of(figure, "history", f"{title}: {caption}"))]


def histogram(network: Network, number: int) -> Plot:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.0))
    axes = figure.add_axes((0.1, 0.175, 0.88, 0.72))
    for counts, color, alpha in ((network.removed, _REMOVED, 0.55), (network.kept, _KEPT, 0.55)):
        axes.stairs(counts, network.edges, fill=True, color=color, alpha=alpha, linewidth=0)
        axes.stairs(counts, network.edges, color=color, linewidth=1.2)
    most = max([*network.kept, *network.removed, 1])
    axes.set_yscale("symlog", linthresh=1, linscale=0.4)
    marks = [10**power for power in range(math.floor(math.log10(most)) + 1)]
    axes.set_yticks(marks, [f"{mark:,}" for mark in marks])
    axes.minorticks_off()
    axes.set_ylim(0, max(most * 1.6, 2))
    axes.set_xlim(network.edges[0], network.edges[-1])
    axes.set_xlabel("weight before pruning")
    axes.text(-0.1, 1.03, "weights", transform=axes.transAxes, va="bottom")
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="x")
    for x, align, color, word, counts in (
        (0.5, "center", _REMOVED, "removed", network.removed),
        (1.0, "right", _KEPT, "kept", network.kept),
    ):
        axes.text(
            x, 1.03, f"■ {sum(counts):,} {word}", color=color, transform=axes.transAxes, ha=align, va="bottom", **_NAME,
        )  # fmt: skip
    title = "Weights kept and removed"
    return Plot(title, "Counts on a log scale.", svg_of(figure, f"histogram-{number}", f"{network.title}: {title}"))


# ---- The charts of an account: one number of each of many things, in their order.
#
# Law: what is drawn is what the account says; a name is text, whatever is in it.

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
    """A row for each kind of thing, a column for each block; None where there are no blocks, or nothing differs.

    >>> names = ["a.0.up", "a.0.down", "a.1.up", "a.1.down", "head"]
    >>> found = map_of(Chart("Error", "", names, [0.1, 0.2, 0.3, 0.4, 9.0], "error"))
    >>> [label for label, _ in found.rows], found.columns, found.high
    (['up', 'down'], [0, 1], '0.4')
    >>> found.rows[1][1]
    [(0.5, 'a.0.down: 0.2'), (1.0, 'a.1.down: 0.4')]
    """
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
    figure = Figure(figsize=(8.4, 3.6))
    axes = figure.add_axes((0.095, 0.14, 0.885, 0.75))
    keys = []
    for number, (kind, points) in enumerate(series.items()):
        color = number % len(SERIES)
        marker = MARKERS[(number + number // len(SERIES)) % len(MARKERS)]
        xs, ys = zip(*points, strict=True)
        axes.plot(
            xs, ys, color=SERIES[color], marker=marker, linewidth=0.8 if chart.joined else 0, clip_on=False,
            markersize=5.5 if chart.joined else 4.5, markeredgecolor=PAPER, markeredgewidth=0.6,
        )  # fmt: skip
        keys.append(Key(color, _SIGNS[marker], kind))
    if chart.places is None:
        axes.set_xlim(0.5, len(chart.names) + 0.5)
        axes.set_xticks([])
    else:
        edge = (max(chart.places) - min(chart.places)) / 40 or 0.5
        axes.set_xlim(min(chart.places) - edge, max(chart.places) + edge)
        axes.locator_params(axis="x", integer=True)
    if chart.share and max(value for points in series.values() for _, value in points) > 50:
        axes.set_ylim(0, 104)
    else:
        axes.set_ylim(0, None)
    label: dict[str, Any] = {"parse_math": False}
    axes.text(-0.07, 1.04, f"{chart.label} (%)" if chart.share else chart.label, transform=axes.transAxes, **label)
    axes.set_xlabel(chart.along, labelpad=9 if chart.places is None else 4)  # markers at zero reach below the axis
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    return Plot(chart.title, chart.caption, svg_of(figure, prefix, f"{chart.title}: {chart.caption}")), keys


def _kind(name: str) -> str:
    return _NUMBER.sub("*", name)
