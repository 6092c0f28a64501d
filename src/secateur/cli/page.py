"""``--report``: what a command was asked and what came of it, on a page beside what it prints.

Law: a page that could not be written is refused before the work starts; it says what stdout says, and more.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secateur.cli.terminal import command_line

if TYPE_CHECKING:
    from secateur.report import Sheet
    from secateur.support import Part

__all__ = ["Page", "page_at"]


@dataclass(frozen=True)
class Page:
    """The page that was asked for, if one was, and when the command began."""

    path: Path | None
    started: float

    def write(
        self,
        title: str,
        verb: str,
        arguments: Sequence[object],
        asked: Mapping[str, Any],
        got: Iterable[Part],
        sheets: Callable[[], Sequence[Sheet]],
    ) -> None:
        """Writes it, and says so on stderr: stdout may be JSON."""
        if self.path is None:
            return
        from secateur.report import Account, write_account
        from secateur.support import printable

        command = command_line(verb, *arguments, **asked, report=self.path)
        seconds = time.monotonic() - self.started
        said = {name.replace("_", "-"): value for name, value in asked.items()}
        write_account(Account(printable(title), command, said, list(got), sheets(), seconds), self.path)
        print(f"The report is in {printable(str(self.path))}.", file=sys.stderr)


def page_at(path: Path | None) -> Page:
    if path is not None:
        from secateur.report import check_page

        check_page(path)
    return Page(path, time.monotonic())
