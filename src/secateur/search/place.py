"""The workspace of `fit_checkpoint` until its directory is complete: ``<out>.unfinished``, with a lock and the request.

Law: nothing is removed but what a fit has put there; one process at a time is in it; what took long stays, for the
same command or one with another budget, and an error says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secateur.blockwise import LOCK, locked, publish, unfinished_folder
from secateur.checkpoints import CheckpointError
from secateur.support import Fields, printable, write_whole

__all__ = ["Place", "check_outside", "working"]

NOTE = "fit.json"
FORMAT, VERSION = "secateur fit", 1
LEVELS = "levels"
_STAGE = re.compile(r"(shrunk|result)-[0-9a-f]{12}(\.unfinished)?")
_TEMPORARY = re.compile(rf"\.{re.escape(NOTE)}\..*\.tmp")


@dataclass(frozen=True)
class Place:
    """The workspace beside ``out``: levels, the choice, and intermediate directories."""

    out: Path

    @property
    def folder(self) -> Path:
        """The path of the workspace."""
        return unfinished_folder(self.out)

    @property
    def levels(self) -> Path:
        """The path for levels where no store was named."""
        return self.folder / LEVELS

    def stage(self, what: str, digest: str) -> Path:
        """For a directory on the way, "shrunk" or the "result", by what it is made of; others are removed."""
        for path in self._stages():
            if digest[:12] not in path.name:
                shutil.rmtree(path)
        return self.folder / f"{what}-{digest[:12]}"

    def publish(self, result: Path) -> None:
        """Gives the result its final name, and removes the rest.

        Raises:
            CheckpointError: the name was taken meanwhile.
        """
        publish(result, self.out)
        self.remove()

    @property
    def has_levels(self) -> bool:
        """Whether some were made here."""
        return self.levels.is_dir() and any(self.levels.iterdir())

    @property
    def is_bare(self) -> bool:
        """Whether nothing is there that a run could go on with."""
        return not any(path.is_dir() and any(path.iterdir()) for path in self.folder.iterdir())

    def remove(self) -> None:
        """Removes what a fit has written there, the lock last, and the folder if nothing else is in it."""
        self.clear()
        if self.levels.is_dir() and not self.levels.is_symlink():
            shutil.rmtree(self.levels)
        (self.folder / NOTE).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # Windows keeps what is open, and somebody may have put something there
            (self.folder / LOCK).unlink()
            self.folder.rmdir()

    def clear(self) -> None:
        """Removes the intermediate directories."""
        for path in self._stages():
            shutil.rmtree(path)

    def _stages(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if _STAGE.fullmatch(path.name) and not path.is_symlink()]

    def check(self) -> None:
        """Whether what is there was put there by a fit, from its names alone.

        Raises:
            CheckpointError: it is a link or a file, or holds what no fit has put there.
        """
        if not os.path.lexists(self.folder):
            return
        advice = "move it, or choose another name for the result."
        if self.folder.is_symlink() or not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: no folder of an unfinished fit, and in the way of one; {advice}")
        names = set(os.listdir(self.folder))
        for name in sorted(names):
            wanted = stat.S_ISDIR if name == LEVELS or _STAGE.fullmatch(name) else stat.S_ISREG
            ours = name == LOCK or _TEMPORARY.fullmatch(name) or (NOTE in names and (name == NOTE or _is_dir(name)))
            if not ours or not wanted(os.lstat(self.folder / name).st_mode):
                raise CheckpointError(
                    f"{self.folder}: holds {printable(name)}, which no unfinished fit has put there; {advice}"
                )

    def begin(self, request: Mapping[str, Any]) -> None:
        """Notes what was asked, or holds it to the note of the run that was stopped.

        Raises:
            CheckpointError: that was asked for something else, or its note is damaged.
        """
        for path in self.folder.iterdir():
            if _TEMPORARY.fullmatch(path.name):
                path.unlink()
        path, hint = self.folder / NOTE, f" Remove {self.folder} to start over."
        asked = json.loads(json.dumps(request))
        try:
            read = Fields.read(path, error=CheckpointError, hint=hint)
        except FileNotFoundError:
            note = {"format": FORMAT, "version": VERSION, "asked": asked}
            write_whole(path, json.dumps(note, indent=1))
            return
        if read.take("format", str) != FORMAT or read.take("version", int) != VERSION:
            raise read.wrong("format", f"is not {FORMAT!r} of version {VERSION}")
        read.only("format", "version", "asked")
        before = read.take("asked", dict)
        if other := [name for name in {**before, **asked} if before.get(name) != asked.get(name)]:
            raise CheckpointError(
                f"{self.folder}: a fit of another {', another '.join(map(printable, other))} was stopped here. Give "
                "its command again to finish it, or remove the folder to start over."
            )


@contextlib.contextmanager
def working(out: Path, request: Mapping[str, Any]) -> Iterator[Place]:
    """The place, new or found. After an error it stays if it holds levels, or what a stopped run can go on with.

    Args:
        out: what becomes of it.
        request: what the levels are made of, as JSON.

    Raises:
        CheckpointError: another process is in it, it is nobody's, or of a fit of something else.
    """
    place = Place(out)
    place.check()
    new = not place.folder.exists()
    place.folder.mkdir(exist_ok=True)
    with locked(place.folder):
        place.check()  # another run may have ended since
        place.begin(request)
        try:
            yield place
        except BaseException as error:  # after a full disk, say, the same command goes on
            in_vain = isinstance(error, ValueError) and not isinstance(error, CheckpointError)
            if new and (place.is_bare or (in_vain and not place.has_levels)):
                place.remove()
            elif type(error) is ValueError and place.has_levels:
                raise ValueError(
                    f"{error} What was measured is kept in {place.folder}, for the same command with another budget; "
                    "remove it to give other options."
                ).with_traceback(error.__traceback__) from None
            raise


def check_outside(out: Path, **named: Path | None) -> None:
    """`CheckpointError` where a folder that somebody named lies in one that this run makes or removes."""
    for name, path in named.items():
        for taken in (out, unfinished_folder(out)):
            if path is not None and path.resolve().is_relative_to(taken.parent.resolve() / taken.name):
                raise CheckpointError(
                    f"{path}: {name} lies in {taken}, which this run makes and moves; choose another folder for it, or "
                    "another name for the result."
                )


def _is_dir(name: str) -> bool:
    return name == LEVELS or _STAGE.fullmatch(name) is not None
