"""Files that are there whole or not at all.

Law: content goes to a temporary name in the same folder and is renamed; a failure leaves what was there before.
"""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["FULL", "naming", "whole_file", "write_whole"]

FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))  # the disk, one's share of it, what a file may hold


def write_whole(path: str | os.PathLike[str], content: bytes | str) -> Path:
    """Writes ``content`` to ``path``, whole or not at all; returns the path. Text is written as UTF-8.

    Raises:
        FileNotFoundError: the folder does not exist.
        OSError: the disk is full, the folder is read-only, …; the old file, if any, is untouched.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(Path(folder, "note.txt"), "kept").read_text()
    'kept'
    """
    with whole_file(path) as file:
        file.write(content if isinstance(content, bytes) else content.encode())
    return Path(path)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write that appears under ``path`` if the body succeeds, and vanishes if it does not.

    Raises what `write_whole` does.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with whole_file(Path(folder, "note.txt")) as file:
    ...         _ = file.write(b"kept")
    ...     Path(folder, "note.txt").read_text()
    'kept'
    """
    path = Path(path)
    target = Path(os.path.realpath(path))  # a link stays a link
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{path.name} cannot be written: there is no folder {path.parent}; create it first.")
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:50]}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with naming(path), os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)  # mkstemp makes it private
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """The error of a full disk, which names no file, names this one.

    >>> with naming("out"):
    ...     raise OSError(28, "No space left on device")
    Traceback (most recent call last):
    OSError: [Errno 28] No space left on device: 'out'
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL and error.filename is None:  # others may be of a file that is read
            error.filename = os.fspath(path)
        raise
