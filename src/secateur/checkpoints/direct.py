"""Large files that are written past the system's cache of pages.

Law: the bytes are those that an ordinary file would have; where a system or a file system does not take them so, it is
an ordinary file.

What is sliced is written once, and no one reads it at once. Copied into the cache it takes longer than the disk does,
and drives out what other programs have there.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, cast

from secateur.support import naming

__all__ = ["new_file"]

_LEAST = 1 << 26  # bytes of a file of which it is worth it
_BUFFER = 1 << 23  # a multiple of what disks take at a time
_DIRECT: int = getattr(os, "O_DIRECT", 0)


@contextlib.contextmanager
def new_file(path: Path, nbytes: int) -> Iterator[BinaryIO]:
    """A file to write about so many bytes to, one after the other; `flush` before it is synced."""
    descriptor = None
    if _DIRECT and nbytes >= _LEAST:
        with contextlib.suppress(OSError):  # not of this file system; what else is wrong an ordinary file says
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | _DIRECT, 0o666)
    if descriptor is None:
        with naming(path), open(path, "wb", buffering=0) as opened:
            yield opened
        return
    try:
        with naming(path), ThreadPoolExecutor(1, "secateur-write") as thread:
            file = _Direct(descriptor, thread)
            yield cast(BinaryIO, file)
            file.flush()
    finally:
        os.close(descriptor)


class _Direct:
    """Collects what is written, and writes a buffer while the other one is filled."""

    def __init__(self, descriptor: int, thread: ThreadPoolExecutor) -> None:
        self._descriptor, self._thread = descriptor, thread
        self._filling, self._other = mmap.mmap(-1, _BUFFER), mmap.mmap(-1, _BUFFER)  # begin where a page does
        self._filled = 0
        self._writing: Future[None] | None = None

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: memoryview) -> int:
        done = 0
        while done < len(data):
            count = min(len(data) - done, _BUFFER - self._filled)
            self._filling[self._filled : self._filled + count] = data[done : done + count]
            self._filled += count
            done += count
            if self._filled == _BUFFER:
                self._wait()
                self._writing = self._thread.submit(self._write, memoryview(self._filling))
                self._filling, self._other, self._filled = self._other, self._filling, 0
        return len(data)

    def flush(self) -> None:
        """All that was written is the system's; from here on it is an ordinary file, since its end is no page's."""
        self._wait()
        self._be_ordinary()
        self._write(memoryview(self._filling)[: self._filled])
        self._filled = 0

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, view: memoryview) -> None:
        while view:
            try:
                count = os.write(self._descriptor, view)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._be_ordinary():
                    raise
                continue  # it takes other sizes, or only some of it was written
            view = view[count:]

    def _be_ordinary(self) -> bool:
        """Whether it was none before."""
        import fcntl  # there is none where files are always ordinary

        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
        return bool(flags & _DIRECT)
