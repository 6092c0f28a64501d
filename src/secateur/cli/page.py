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
    from secateur.report import Sheet, Timed
    from secateur.support import Part

__all__ = ["Page", "page_at", "timing_of"]


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
        timed: Callable[[], Timed | str] | None = None,
    ) -> None:
        """Writes it, and says so on stderr: stdout may be JSON. Only for a page is it ``timed`` what a model takes."""
        if self.path is None:
            return
        from secateur.report import Account, write_account
        from secateur.support import printable

        command = command_line(verb, *arguments, **asked, report=self.path)
        seconds = time.monotonic() - self.started
        said = {name.replace("_", "-"): value for name, value in asked.items()}
        parts, drawn = [*got], [*sheets()]
        if timed is not None:
            found = timed()
            parts += ["", found if isinstance(found, str) else found.line()]
            drawn = drawn if isinstance(found, str) else [found.sheet(), *drawn]
        write_account(Account(printable(title), command, said, parts, drawn, seconds), self.path)
        print(f"The report is in {printable(str(self.path))}.", file=sys.stderr)


def timing_of(before: Path, after: Path | None) -> Callable[[], Timed | str] | None:
    """How a page learns what a directory's model took and what the one that was written takes; None if none was."""
    if after is None:
        return None

    def timed() -> Timed | str:
        from secateur.cli.measuring import timed_directories

        return timed_directories(before, after)

    return timed


def page_at(path: Path | None) -> Page:
    if path is not None:
        from secateur.report import check_page

        check_page(path)
    return Page(path, time.monotonic())
