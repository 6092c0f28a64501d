"""The demo's figures: accuracy against sparsity of a small network on handwritten digits, method by method.

    python benchmarks/demo/run.py table [--methods NAME,…] [--results FILE] [--json FILE] [--smoke]
    python benchmarks/demo/run.py plot --results FILE [--out FILE]

`table` runs `secateur demo` (three seeds, 10 epochs of fine-tuning) and prints RESULTS.md's tables: accuracy in percent
after fine-tuning, before it in brackets, mean ± standard deviation over seeds; bytes and milliseconds. `--results`
takes an earlier run's results.json instead, such as `make demo` leaves in demo-report. `plot` draws that of
docs/start/tutorial-cnn.md.

Law: a figure is a mean over all seeds of a cell; what some of them residual is left out.

`--smoke` is one seed, one sparsity and an epoch: it shows that everything runs, and no figure of it means anything.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).parents[2])  # in place of this folder, whose names would hide packages
from benchmarks.support.tables import head, row
from secateur.report import Results, Row, load_results, save_results, summarize

SMOKE: dict[str, Any] = {"seeds": (0,), "sparsities": (0.9,), "epochs": 1, "tuning_epochs": 1}


def run(methods: Sequence[str] | None, *, smoke: bool) -> Results:
    """A run of the demo; its page is thrown away."""
    from secateur.demo import run_demo

    with tempfile.TemporaryDirectory() as folder:
        run_demo(Path(folder), methods=methods, **(SMOKE if smoke else {}))
        return load_results(Path(folder, "results.json"))


def lines(results: Results) -> Iterator[str]:
    """What `table` prints."""
    rows = summarize(results.runs)
    dense = next(each for each in rows if not each.sparsity)
    pruned = [each for each in rows if each.sparsity]
    yield f"{results.title}. Dense: {accuracy(dense)}."
    yield ""
    yield from by_sparsity([each for each in pruned if not each.method.startswith("channels")])
    if channels := [each for each in pruned if each.method.startswith("channels")]:
        yield ""
        yield from costs([dense, *channels])


def by_sparsity(rows: Sequence[Row]) -> Iterator[str]:
    """A row a method, a column a sparsity; a method with a sparsity of its own says it, in the nearest column."""
    columns = sorted({percent(each) for each in rows if sum(percent(other) == percent(each) for other in rows) > 1})
    columns = columns or sorted({percent(each) for each in rows})
    yield head(["method", *(f"{column} %" for column in columns)])
    for method in dict.fromkeys(each.method for each in rows):
        own = [each for each in rows if each.method == method]
        cells = {min(columns, key=lambda column, each=each: abs(column - percent(each))): each for each in own}
        odd = [each for each in own if percent(each) not in columns]
        name = f"{method} ({100 * odd[0].sparsity:.1f} %)" if odd else method
        yield row([name, *(accuracy(cells[column]) if column in cells else "" for column in columns)])


def costs(rows: Sequence[Row]) -> Iterator[str]:
    """What is smaller and faster: bytes and milliseconds of the dense network, and of those without some channels."""
    yield head(["network", "accuracy", "removed", "file, kB", "one image, ms"])
    for each in rows:
        figures = [None if each.bytes is None else each.bytes / 1e3, each.latency_ms]
        shown = ["" if value is None else f"{value:.3g}" for value in figures]
        yield row([each.method, accuracy(each), f"{100 * each.sparsity:.0f} %", *shown])


def percent(each: Row) -> int:
    return round(100 * each.sparsity)


def accuracy(each: Row) -> str:
    """``after ± sd (before)``; what was not measured is left out."""
    after = each.before if each.after is None else each.after
    deviation = each.before_sd if each.after is None else each.after_sd
    shown = "" if after is None else f"{after:.1f}" + ("" if deviation is None else f" ± {deviation:.1f}")
    return f"{shown} ({each.before:.1f})" if each.after is not None and each.before is not None else shown


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "plot"))
    parser.add_argument("--methods", help="names with commas, as of secateur demo --method list")
    parser.add_argument("--results", type=Path, help="an earlier run's results.json, in place of a new run")
    parser.add_argument("--json", type=Path, help="keep the results here")
    parser.add_argument("--out", type=Path, default=Path("docs/accuracy.svg"), help="of plot: the file to write")
    parser.add_argument("--smoke", action="store_true", help="one seed, one epoch: to see that it runs")
    options = parser.parse_args(arguments)
    if options.what == "plot":
        if options.results is None:
            parser.error("plot draws an earlier run: give --results FILE.")
        from benchmarks.demo.plot import draw

        draw(load_results(options.results), options.out)
        return
    methods = None if options.methods is None else [options.methods]
    if options.results is None:
        print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}")
        results = run(methods, smoke=options.smoke)
    else:
        results = load_results(options.results)
    print("\n".join(lines(results)))
    if options.json:
        save_results(results, options.json)


if __name__ == "__main__":
    main()
