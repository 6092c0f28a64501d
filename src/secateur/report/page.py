"""What happened, on one page: methods compared, accuracy against sparsity and size; or one call of a verb. What a verb
returns can be written as a page: the same that it prints, and below it charts and every row.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from secateur.report.account import Account, Sheet, Timed
from secateur.report.plots import STYLE, accuracy_plots, chart_of, cost_plots, histogram, history_plot, map_of
from secateur.report.results import Results, best_rows, columns_of, missing_baselines, shrunken_table, summarize
from secateur.support import Part, Shown, write_whole

# ---- What happened, on one page: methods compared, accuracy against sparsity and size; or one call of a verb.
#
# Law: the page loads nothing, whatever the names in it, and appears whole or not at all.

_Drawn = TypeVar("_Drawn")


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
    _check_extra()
    rows = summarize(results.runs)
    shrunken, shrunken_columns = shrunken_table(results)
    return _write(
        path,
        "report.html.j2",
        title=results.title,
        command=results.command,
        versions=results.versions,
        results=results,
        columns=columns_of(results, rows),
        rows=rows,
        best=best_rows(rows),
        missing=missing_baselines(rows),
        checks=[(check, row, columns_of(results, [row])) for check in results.checks for row in summarize(check.runs)],
        shrunken=shrunken,
        shrunken_columns=shrunken_columns,
        plots=_drawn(
            lambda: [plot for draw in (accuracy_plots, cost_plots, history_plot) for plot in draw(results, rows)]
        ),
        histograms=_drawn(lambda: [histogram(network, number) for number, network in enumerate(results.networks, 1)]),
        data=dataclasses.asdict(results),
        seeds=max(row.seeds for row in rows),
    )


def write_account(account: Account, path: str | os.PathLike[str]) -> Path:
    """Write what one call of a verb was asked and got as such a page: what it printed, and below it charts and a
    table of every tensor, layer or group.

    >>> from secateur.report import Cells, Sheet
    >>> sheet = Sheet("Layer by layer", [Cells("layer", ["a", "b"]), Cells("zeros", [0.5, 0.9])])
    >>> account = Account("mine", "secateur prune mine", {"sparsity": 0.7}, ["Done."], [sheet], 1.0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_account(account, Path(folder, "page.html")).name
    'page.html'
    """
    _check_extra()
    asked = {
        name: value
        for name, value in account.asked.items()
        if value is not None and value is not False and value not in ([], ())
    }

    def drawn() -> list[Any]:
        return [
            (
                sheet,
                [
                    (chart, map_of(chart), chart_of(chart, f"c{at}-{each}"))
                    for each, chart in enumerate(sheet.charts, 1)
                ],
            )
            for at, sheet in enumerate(account.sheets, 1)
        ]

    return _write(
        path,
        "account.html.j2",
        title=account.title,
        command=account.command,
        versions=({} if account.seconds is None else {"time": f"{account.seconds:.1f} s"}) | dict(account.versions),
        asked=[(name, _in_words(value)) for name, value in asked.items()],
        got=[part for part in account.got if part],
        sheets=_drawn(drawn),
        data={
            "command": account.command,
            "seconds": account.seconds,
            "sheets": {
                sheet.title: {cells.head: list(cells.values) for cells in sheet.cells} for sheet in account.sheets
            },
        },
    )


def check_page(path: str | os.PathLike[str]) -> None:
    """Raises an error if a page could not be written to ``path``; to be called before long work.

    Raises:
        ValueError: it is not named as a page is, so that no other file is replaced by mistake.
        OSError: it is a folder, or its folder does not exist or takes no file.
        ImportError: jinja2 or matplotlib is missing.

    >>> check_page("model.safetensors")
    Traceback (most recent call last):
    ...
    ValueError: model.safetensors: a report is one HTML page; name it so, as in report.html.
    """
    path = Path(path)
    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"{path}: a report is one HTML page; name it so, as in report.html.")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; the report is a file: name one in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}; create it first")
    with tempfile.TemporaryFile(dir=path.parent):
        pass
    _check_extra()


def _check_extra() -> None:
    try:
        import jinja2
        import markupsafe
        import matplotlib
    except ImportError as error:
        raise ImportError(f"a report needs jinja2 and matplotlib ({error}): pip install 'secateur[report]'") from error
    del jinja2, markupsafe, matplotlib


def _drawn(draw: Callable[[], _Drawn]) -> _Drawn:
    """What is drawn in the page's own style: the reader's matplotlibrc has no say in it."""
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(cast(Any, STYLE))
        return draw()


def _in_words(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {each}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "yes" if value is True else str(value)


def _write(path: str | os.PathLike[str], template: str, **values: Any) -> Path:
    """The template with these values and what every page has: its style and its script, which the policy knows."""
    import base64
    import hashlib

    import jinja2
    import markupsafe

    folder = Path(__file__).parent / "templates"
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    text = pages.get_template(template).render(
        **values,
        style=markupsafe.Markup(style),
        script=markupsafe.Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    return write_whole(path, text)


# ---- What a verb returns can be written as a page: the same that it prints, and below it charts and every row.
#
# Law: the page of a call in Python and that of the command's ``--report`` are one design, drawn by the same
# functions.


class Reported(Shown):
    """A result that is shown as lines and tables, and written as a page with more."""

    @abstractmethod
    def _parts(self) -> Iterable[Part]:
        """Lines and tables."""

    @abstractmethod
    def _sheets(self) -> Sequence[Sheet]:
        """All of it, tensor by tensor or layer by layer, with charts."""

    def report(self, path: str | os.PathLike[str], *, title: str = "", timed: Timed | None = None) -> Path:
        """Write one self-contained HTML page of what was done, as ``--report`` of the command does; returns its path.

        Args:
            path: a name that ends in ``.html``, in a folder that exists.
            title: of the page; the name of the result's class if left out.
            timed: what `before_and_after` measured, to stand on the page; without it no time does.

        Raises:
            ValueError, OSError: no page can be written there.
            ImportError: jinja2 or matplotlib is missing: ``pip install 'secateur[report]'``.

        >>> import tempfile, torch
        >>> from secateur import sparsify
        >>> masks = sparsify(torch.nn.Linear(8, 8), 0.5)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     masks.report(Path(folder, "masks.html")).name
        'masks.html'
        """
        check_page(path)
        seconds = getattr(self, "seconds", None)
        got, sheets = [*self._parts()], [*self._sheets()]
        if timed is not None:
            got, sheets = [*got, "", timed.line()], [timed.sheet(), *sheets]
        return write_account(Account(title or type(self).__name__, "", {}, got, sheets, seconds), path)
