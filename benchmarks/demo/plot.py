"""The plot of docs/start/tutorial-cnn.md, from the results of the demo: `run.py plot` draws it.

Law: what is drawn are means and ranges over seeds.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from secateur.report import Results, Row, summarize

COLORS = {
    "global magnitude": "#0072b2", "ERK": "#e69f00", "LAMP": "#009e73", "random": "#7f7f7f", "2:4": "#cc79a7",
    "gradual": "#d55e00",
}  # fmt: skip


def height(accuracy: float) -> float:
    """By what is missing: from 98 to 99 % halves the errors as from 90 to 95 % does."""
    return -math.log10(101 - accuracy)


def draw(results: Results, target: Path) -> None:
    with mpl.rc_context({"svg.hashsalt": "secateur", "font.size": 11}):
        _draw(summarize(results.runs), target)


def _draw(rows: Sequence[Row], target: Path) -> None:
    figure = Figure(figsize=(7.2, 3.8), layout="constrained", facecolor="white")
    axes = figure.subplots()
    dense = next(row for row in rows if row.sparsity == 0)
    axes.axhline(height(dense.after), color="#333333", linewidth=1, linestyle=":")
    axes.annotate(
        "dense", (4, height(dense.after)), textcoords="offset points", xytext=(0, 4), fontsize=9, color="#333333"
    )
    for method in dict.fromkeys(row.method for row in rows if row.sparsity > 0):
        color = next((c for word, c in COLORS.items() if word in method), "#7f7f7f")
        mine = sorted((row for row in rows if row.method == method), key=lambda row: row.sparsity)
        places = range(len(mine)) if len(mine) > 1 else [0]
        means = [height(row.after) for row in mine]
        ends = [row.after_range for row in mine]
        below = [mean - height(low) for mean, (low, _) in zip(means, ends, strict=True)]
        above = [height(high) - mean for mean, (_, high) in zip(means, ends, strict=True)]
        axes.errorbar(places, means, (below, above), color=color, marker="o", capsize=3, label=method, markersize=5,
                      linestyle="-" if len(mine) > 1 else "none")  # fmt: skip
    ticks = sorted({round(row.sparsity, 2) for row in rows if row.method == "LAMP"})
    axes.set_xticks(range(len(ticks)), [f"{100 * tick:g} %" for tick in ticks])
    lowest = min(row.after_range[0] for row in rows)
    marks = [mark for mark in (0, 50, 80, 90, 95, 98, 99, 100) if mark >= lowest - 30]
    axes.set_yticks([height(mark) for mark in marks], [str(mark) for mark in marks])
    axes.set_xlabel("weights removed")
    axes.set_ylabel("accuracy after fine-tuning (%)\nmean and range of three seeds")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, loc="lower left", fontsize=9)
    figure.savefig(target, format="svg", metadata={"Date": None})
