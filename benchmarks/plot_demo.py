"""The README's plot, from the results of the demo.

make demo && python benchmarks/plot_demo.py demo-report/results.json docs/accuracy.svg
"""

import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

from secateur.results import load_results, summarize

COLORS = {"global magnitude": "#0072b2", "ERK": "#e69f00", "LAMP": "#009e73", "random": "#7f7f7f", "2:4": "#cc79a7"}


def main(source: Path, target: Path) -> None:
    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "secateur", "font.size": 11}
    results = load_results(source)
    rows = summarize(results.runs)
    figure, axes = plt.subplots(figsize=(7.2, 3.8), layout="constrained", facecolor="white")
    dense = next(row for row in rows if row.sparsity == 0)
    axes.axhline(dense.after, color="#333333", linewidth=1, linestyle=":")
    axes.annotate("dense", (0.5, dense.after), textcoords="offset points", xytext=(0, 4), fontsize=9, color="#333333")
    for method in dict.fromkeys(row.method for row in rows if row.sparsity > 0):
        color = next((c for word, c in COLORS.items() if word in method), "#7f7f7f")
        mine = sorted((row for row in rows if row.method == method), key=lambda row: row.sparsity)
        places = range(len(mine)) if len(mine) > 1 else [0]
        means = [row.after for row in mine]
        spread = [row.after_sd or 0 for row in mine]
        axes.errorbar(places, means, spread, color=color, marker="o", capsize=3, label=method, markersize=5,
                      linestyle="-" if len(mine) > 1 else "none")  # fmt: skip
    ticks = sorted({round(row.sparsity, 2) for row in rows if row.method == "LAMP"})
    axes.set_xticks(range(len(ticks)), [f"{100 * tick:g} %" for tick in ticks])
    axes.set_xlabel("weights removed")
    axes.set_ylabel("accuracy after fine-tuning (%)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, loc="lower left", fontsize=9)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
