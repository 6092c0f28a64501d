"""What one call of a verb was asked and what it got, on one page: what it prints, charts, and every row, to be sorted.

Law: an account states what the verb returned and nothing else. The page loads nothing, whatever the names in it, and
appears whole or not at all. That of a call in Python and that of the command's ``--report`` are one design.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from secateur.report.charts import STYLE, chart_of, map_of
from secateur.report.measured import Timed, environment
from secateur.support import Part, Shown, Table, json_of, write_whole


@dataclasses.dataclass(frozen=True)
class Account:
    """One call of a verb.

    Args:
        title: such as "minilm, pruned".
        command: what would have to be typed to do it again.
        asked: what was asked for, by the names of the options; None, False and what is empty is left out.
        got: what the verb says that it did: lines, and tables. One with a title has a part of the page to itself.
        seconds: wall time, None if it was not measured.
        versions: the machine and the software.

    >>> from secateur.support import Column
    >>> table = Table.of("layers", [("a", 0.5)], Column.name("Layer"), Column.portion("Zeros"), title="Layer by layer")
    >>> Account("mine", "secateur prune mine", {"sparsity": 0.5}, ["Done.", table], 1.0).versions["torch"] != ""
    True
    """

    title: str
    command: str
    asked: Mapping[str, object]
    got: Sequence[Part]
    seconds: float | None
    versions: Mapping[str, str] = dataclasses.field(default_factory=environment)


def write_account(account: Account, path: str | os.PathLike[str]) -> Path:
    """Write what one call of a verb was asked and got as one self-contained HTML page, to a temporary name first, and
    return its path.

    The page holds its style, its script, its charts (SVG) and its data (JSON, under the id ``results``), and a content
    security policy that forbids it to load anything. It reads in light and dark and prints. Names are escaped.

    Needs jinja2 and matplotlib: ``ImportError`` says how to install them. The folder of ``path`` must exist.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = write_account(Account("mine", "", {}, ["Done."], 1.0), Path(folder, "page.html"))
    ...     page.name, page.read_text(encoding="utf-8").startswith("<!doctype html>")
    ('page.html', True)
    """
    _check_extra()
    import base64
    import hashlib

    import jinja2
    import markupsafe
    import matplotlib as mpl

    tables = [part for part in account.got if isinstance(part, Table)]
    with mpl.rc_context():  # the page's own style: the reader's matplotlibrc has no say in it
        mpl.rcdefaults()
        mpl.rcParams.update(cast(Any, STYLE))
        sections = [
            (table, [(each, map_of(each), chart_of(each, f"c{at}-{n}")) for n, each in enumerate(table.charts, 1)])
            for at, table in enumerate((table for table in tables if table.title), 1)
        ]
    folder = Path(__file__).parent / "templates"
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    text = pages.get_template("page.html.j2").render(
        title=account.title,
        command=account.command,
        versions=({} if account.seconds is None else {"time": f"{account.seconds:.1f} s"}) | dict(account.versions),
        asked=[(name, _in_words(value)) for name, value in account.asked.items() if _was_asked(value)],
        got=[
            part
            for part, after in zip(account.got, [*account.got[1:], ""], strict=True)
            if isinstance(part, Table) or (part and not (isinstance(after, Table) and part in after.title))
        ],  # a line over a table is the head of a part here
        sections=sections,
        data={"command": account.command, "seconds": account.seconds} | json_of(account.got),
        style=markupsafe.Markup(style),
        script=markupsafe.Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    return write_whole(path, text)


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


def _was_asked(value: object) -> bool:
    return value is not None and value is not False and value not in ([], ())


def _in_words(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {each}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "yes" if value is True else str(value)


class Reported(Shown):
    """A result that is shown as lines and tables, and written as a page with charts."""

    def report(self, path: str | os.PathLike[str], *, title: str = "", timed: Timed | None = None) -> Path:
        """Write one self-contained HTML page of what was done, as ``--report`` of the command does; returns its path.

        Args:
            path: a name that ends in ``.html``, in a folder that exists.
            title: of the page; the result's own, or the name of its class, if left out.
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
        got = [*self.content()] if timed is None else [timed.table(), *self.content(), "", timed.line()]
        title = title or getattr(self, "title", type(self).__name__)
        versions = getattr(self, "versions", None) or environment()
        seconds = getattr(self, "seconds", None)
        return write_account(Account(title, getattr(self, "command", ""), {}, got, seconds, versions), path)
