"""A directory that is being made, by a process that may be killed at any moment and started again.

Law: what the journal says is done is on the disk; it grows by one block at a time; under the final name there is all or
nothing; a run with other arguments or data does not go on with what is there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from secateur.checkpoints import Checkpoint, CheckpointError, copy_tree, printable
from secateur.files import write_whole
from secateur.progress import track

__all__ = ["Unfinished", "unfinished", "unfinished_folder"]

PRIVATE = ".secateur"
JOURNAL = "journal.json"


class Unfinished:
    """The copy that is being pruned, and the journal of what is done.

    ``folder`` is ``<out>.unfinished``, ``blocks`` what `note` was given of each block, in its order, ``facts`` what was
    found out once, such as the sparsity of each weight.
    """

    def __init__(self, out: Path, request: Mapping[str, Any]) -> None:
        self.out = out
        self.folder = unfinished_folder(out)
        self.private = self.folder / PRIVATE
        self.request = json.loads(json.dumps(request))
        self.blocks: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.copied = False

    def note(self, block: Mapping[str, Any]) -> None:
        """A block is done: its weights are on the disk already."""
        self.blocks.append(dict(block))
        self._write()

    def learn(self, **facts: Any) -> None:
        """What a run that goes on shall not have to find out again."""
        self.facts.update(facts)
        self._write()

    def read(self) -> None:
        """What an earlier run left, if it was of the same request.

        Raises:
            CheckpointError: it was of another; the message names the differences.
        """
        path = self.private / JOURNAL
        try:
            found = json.loads(path.read_text("utf-8"))
            request, self.blocks, self.facts = found["request"], found["blocks"], found["facts"]
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(f"{path}: damaged; remove {self.folder} to begin anew.") from None
        if differences := list(_differences(request, self.request)):
            raise CheckpointError(
                f"{self.folder}: was begun with {'; '.join(differences)}. Run the same command again to finish it, or "
                "remove it to begin anew."
            )
        self.copied = True

    def copy(self, source: Path) -> None:
        """Copies the source, from the beginning if an earlier copy was broken off."""
        if self.copied:
            return
        for path in self.folder.iterdir():
            if path.name != PRIVATE:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for path in track(copy_tree(source, self.folder), "copying"):
            _synchronise(self.folder / path)
        self.copied = True
        self._write()

    def publish(self) -> None:
        """Gives the directory its final name."""
        for directory, _, files in os.walk(self.folder):
            for name in files:
                _synchronise(Path(directory) / name)
        if os.path.lexists(self.out):
            raise CheckpointError(
                f"{self.out}: was created by somebody else in the meantime; move it, and run the same command again."
            )
        shutil.rmtree(self.private)
        self.folder.rename(self.out)

    def _write(self) -> None:
        found = {"request": self.request, "blocks": self.blocks, "facts": self.facts}
        write_whole(self.private / JOURNAL, json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False))


def unfinished_folder(out: Path) -> Path:
    """Where a directory is until it is complete.

    >>> unfinished_folder(Path("models/sparse")).name
    'sparse.unfinished'
    """
    return out.with_name(f"{out.name}.unfinished")


@contextlib.contextmanager
def unfinished(
    out: Path, request: Mapping[str, Any], source: Checkpoint, *, first: bool = True
) -> Iterator[Unfinished]:
    """The unfinished directory beside ``out``, new or found; it stays where it is if the body fails after a block.

    Args:
        out: must not exist; the directory above it must.
        request: what the bytes of the result depend on, as JSON.
        source: what is copied; fails before the copy where the disk has no room for it.
        first: whether this process is the one that writes; others only read what it wrote.

    Raises:
        CheckpointError: ``out`` exists, another process is at work on it, an earlier run was of another request, or
            the disk is full.
    """
    if os.path.lexists(out):
        raise CheckpointError(f"{out}: already exists; nothing is overwritten. Choose another name, or remove it.")
    if not out.parent.is_dir():
        raise CheckpointError(f"{out.parent}: no such directory; create it first.")
    run = Unfinished(out, request)
    if not first:
        run.read()
        yield run
        return
    run.private.mkdir(parents=True, exist_ok=True)
    with _locked(run):
        try:
            run.read()
            if not run.copied and (free := shutil.disk_usage(run.folder).free) < source.nbytes:
                raise CheckpointError(
                    f"{out.parent}: {free / 1e9:.3g} GB are free, and the result takes {source.nbytes / 1e9:.3g} GB."
                )
            yield run
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise CheckpointError(
                f"{run.folder}: the disk is full; free space and run the same command again, the "
                f"{len(run.blocks)} finished blocks are kept."
            ) from None
        finally:
            if run.private.exists() and not run.blocks and not (run.private / JOURNAL).exists():
                shutil.rmtree(run.folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(run: Unfinished) -> Iterator[None]:
    """The lock goes with the process, also if that is killed."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with open(run.private / "lock", "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(f"{run.folder}: another process is at work here; wait for it.") from None
        yield


def _synchronise(path: Path) -> None:
    """Some file systems say only now that the disk is full."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys((*before, *now)):
            yield from _differences(before.get(key), now.get(key), f"{path}.{key}" if path else str(key))
    elif before != now:
        yield f"{printable(path)} {printable(json.dumps(before), 60)}, not {printable(json.dumps(now), 60)}"
