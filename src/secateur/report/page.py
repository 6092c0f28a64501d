"""What happened, on one page: accuracy against sparsity and size, layer by layer, weight by weight.

Law: the page loads nothing, whatever the names in it.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any, cast

from secateur.report.plots import STYLE, accuracy_plots, cost_plots, histogram, history_plot, layer_plot
from secateur.report.results import Results
from secateur.report.summary import best_rows, missing_baselines, summarize
from secateur.report.tables import columns_of, shrunken_table
from secateur.support import write_whole

__all__ = ["write_report"]


def write_report(results: Results, path: str | os.PathLike[str]) -> Path:
    """Write ``results`` as one self-contained HTML page, to a temporary name first, and return its path.

    The page holds its style, its script, its plots (SVG) and its data (JSON, under the id ``results``), and a content
    security policy that forbids it to load anything. It reads in light and dark and prints. Names are escaped.

    Needs jinja2 and matplotlib: ``ImportError`` says how to install them. The folder of ``path`` must exist.

    >>> import tempfile
    >>> from secateur.report import Run
    >>> runs = [Run("magnitude", sparsity, before=99 - 50 * sparsity) for sparsity in (0.5, 0.9)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = write_report(Results("Mine", runs), Path(folder, "report.html"))
    ...     page.name, page.read_text(encoding="utf-8").startswith("<!doctype html>")
    ('report.html', True)
    """
    try:
        import jinja2
        import markupsafe
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError(f"a report needs jinja2 and matplotlib ({error}): pip install 'secateur[report]'") from error
    import base64
    import hashlib

    folder = Path(__file__).parent / "templates"
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    page = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    ).get_template("report.html.j2")

    rows = summarize(results.runs)
    shrunken, shrunken_columns = shrunken_table(results)
    with mpl.rc_context():
        mpl.rcdefaults()  # the reader's matplotlibrc has no say in the page
        mpl.rcParams.update(cast(Any, STYLE))
        plots = [
            plot for draw in (accuracy_plots, cost_plots, layer_plot, history_plot) for plot in draw(results, rows)
        ]
        histograms = [histogram(network, number) for number, network in enumerate(results.networks, 1)]
    text = page.render(
        results=results,
        columns=columns_of(results, rows),
        rows=rows,
        best=best_rows(rows),
        missing=missing_baselines(rows),
        checks=[(check, row, columns_of(results, [row])) for check in results.checks for row in summarize(check.runs)],
        shrunken=shrunken,
        shrunken_columns=shrunken_columns,
        plots=plots,
        histograms=histograms,
        data=dataclasses.asdict(results),
        style=markupsafe.Markup(style),
        script=markupsafe.Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        seeds=max(row.seeds for row in rows),
    )
    return write_whole(path, text)
