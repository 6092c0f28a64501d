"""What a verb returns can be written as a page: the same that it prints, and below it charts and every row.

Law: the page of a call in Python and that of the command's ``--report`` are one design, drawn by the same functions.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

from secateur.report.account import Account, Sheet
from secateur.report.page import check_page, write_account
from secateur.report.timed import Timed
from secateur.support import Part, Shown

__all__ = ["Reported"]


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
