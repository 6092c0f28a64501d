"""Files that are there whole or not at all. Documents of text in files: one of ``.txt``, or one a record of ``.jsonl``
and ``.json``.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import itertools
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from secateur.support.progress import track
from secateur.support.text import printable

# ---- Files that are there whole or not at all.
#
# Law: content goes to a temporary name in the same folder and is renamed; a failure leaves what was there before.

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


# ---- Documents of text in files: one of ``.txt``, or one a record of ``.jsonl`` and ``.json``.
#
# Law: only what is read is held, no character is cut, and whatever is wrong with a file is one line that says where.

_LINE = 256 << 20  # bytes: a longer line is no record
PIECE = 1 << 20  # bytes of text tokenized at once
_FIRST, _NEXT = re.compile(r"\s*\[\s*(\])?"), re.compile(r"\s*(?:,|(\]))\s*")  # what is before a record, and the end


def read_documents(path: Path, field: str = "text") -> Iterator[str]:
    """The documents of a file, one after the other; a ``.txt`` is one, and comes in pieces that end with lines.

    Raises:
        ValueError: there is no such file, or it holds something else.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "some.jsonl")
    ...     _ = path.write_text('{"text": "a rose"}\\n"a hedge"\\n')
    ...     list(read_documents(path))
    ['a rose', 'a hedge']
    """
    kind = checked_kind(path)
    if kind == ".json" and first_byte(path) == b"[":
        yield from array(path, field)
        return
    with open(path, "rb") as file:
        yield from pieces(file, path) if kind == ".txt" else records_in(file, path, field)


def checked_kind(path: Path) -> str:
    """The suffix of a file of text; `ValueError` for what is none."""
    if not path.exists():
        raise ValueError(f"{path}: no such file; give a .txt, .jsonl or .json file, or 'random'.")
    if not path.is_file():
        raise ValueError(f"{path}: not a regular file.")
    kind = path.suffix.lower()
    if kind not in (".txt", ".jsonl", ".ndjson", ".json"):
        raise ValueError(f"{path}: calibration data is read from .txt, .jsonl and .json, not from {kind or 'this'}.")
    return kind


def records_in(file: BinaryIO, path: Path, field: str) -> Iterator[str]:
    at = 0
    while record := line_of(file, path):
        yield document_in(record, path, at, field)
        at += len(record)


def line_of(file: BinaryIO, path: Path) -> bytes:
    line = file.readline(_LINE)
    if len(line) == _LINE:
        raise ValueError(f"{path}: a line of more than {_LINE:,} bytes at byte {file.tell() - _LINE:,}: no JSON lines.")
    return line


def document_in(line: bytes, path: Path, at: int, field: str) -> str:
    where = f"{path}, the line at byte {at:,}"
    line = line.removeprefix(codecs.BOM_UTF8) if at == 0 else line
    if not line.strip():
        return ""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"{where}: not a JSON record; each line of .jsonl is one.") from None
    return text_of(record, where, field)


def text_of(record: Any, where: str, field: str) -> str:
    if not isinstance(record, str | Mapping):
        raise ValueError(f"{where}: not a record or a string.")
    found = record if isinstance(record, str) else record.get(field)
    if not isinstance(found, str):
        fields = ", ".join(printable(str(name), 40) for name in list(record)[:10]) or "none"
        raise ValueError(f"{where}: no text in the field {field!r}; name the field that has it. There are: {fields}.")
    return found.encode("utf-8", "replace").decode()  # half a surrogate pair, which JSON can spell, is no text


def array(path: Path, field: str) -> Iterator[str]:
    """The documents of a JSON array, of which little more than a record is held."""
    held, at = "", 0
    with open(path, encoding="utf-8-sig") as file:
        for number in track(itertools.count(), "tokenizing"):
            try:
                held, at, record = _record_in(file, held, at, _NEXT if number else _FIRST)
            except (ValueError, RecursionError):
                raise ValueError(f"{path}: damaged: not valid JSON in or behind record {number}.") from None
            if at < 0:
                return
            yield text_of(record, f"{path}, record {number}", field)


def _record_in(file: TextIO, held: str, at: int, before: re.Pattern[str]) -> tuple[str, int, Any]:
    """The text that is held, where a record of it ends, and the record; -1 and None behind the last."""
    while True:
        try:
            if (found := before.match(held, at)) is None:
                raise ValueError
            if found[1]:
                return held, -1, None
            record, end = json.JSONDecoder().raw_decode(held, found.end())
            return held, end, record
        except ValueError:  # as of a record that is not all there yet
            more = file.read(max(PIECE, len(held) - at)) if len(held) - at < _LINE else ""
            if not more:
                raise
            held, at = held[at:] + more, 0


def first_byte(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip()[:1]


def pieces(file: BinaryIO, path: Path) -> Iterator[str]:
    """The whole text in pieces that end with lines, or with words where lines are too long."""
    at = 0
    piece, following = file.read(PIECE), file.read(PIECE)
    while piece:
        cut = len(piece)
        if following:
            cut = piece.rfind(b"\n") + 1 or piece.rfind(b" ") + 1 or _character(piece)
        yield decoded(piece[:cut], path, at, begins=True)
        at += cut
        piece, following = piece[cut:] + following, file.read(PIECE)


def _character(piece: bytes) -> int:
    """Where the last character of UTF-8 begins that may not be complete; all of it if that would be nothing."""
    at = len(piece) - 1
    while at > 0 and len(piece) - at < 4 and piece[at] & 0xC0 == 0x80:
        at -= 1
    return at or len(piece)


def decoded(data: bytes, path: Path, at: int, *, begins: bool = False) -> str:
    """Text of bytes from the middle of a file; unless it begins there, from its first whole line or word."""
    if at == 0:
        if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ValueError(f"{path}: UTF-16 text; save it as UTF-8.")
        data = data.removeprefix(codecs.BOM_UTF8)
    elif not begins:
        quarter = data[: len(data) // 4]
        cut = quarter.find(b"\n") + 1 or quarter.find(b" ") + 1
        while cut < min(len(data), 4) and data[cut] & 0xC0 == 0x80:
            cut += 1
        data = data[cut:]
    if data.count(0) > len(data) // 8:  # which is valid UTF-8 of letters that nobody wrote
        raise ValueError(f"{path}: full of NUL near byte {at:,}, as UTF-16 and UTF-32 are; save it as UTF-8.")
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data, final=False)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text near byte {at + error.start:,}.") from None
