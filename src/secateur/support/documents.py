"""Documents of text in files: one of ``.txt``, or one a record of ``.jsonl`` and ``.json``.

Law: only what is read is held, no character is cut, and whatever is wrong with a file is one line that says where.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from secateur.support.progress import track
from secateur.support.text import printable

__all__ = [
    "PIECE",
    "array",
    "checked_kind",
    "decoded",
    "document_in",
    "first_byte",
    "line_of",
    "pieces",
    "read_documents",
    "records_in",
    "text_of",
]

_LINE = 256 << 20  # bytes: a longer line is no record
_JSON = 1 << 30  # bytes of a JSON array, which cannot be read in part
PIECE = 1 << 20  # bytes of text tokenized at once


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
        yield from array(path, path.stat().st_size, field)
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


def array(path: Path, size: int, field: str) -> Iterator[str]:
    if size > _JSON:
        raise ValueError(f"{path}: a JSON array of {size:,} bytes must be read whole; make it .jsonl, a record a line.")
    try:
        records = json.loads(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except (ValueError, RecursionError):
        raise ValueError(f"{path}: damaged: not valid JSON.") from None
    for number, record in enumerate(track(records, "tokenizing")):
        yield text_of(record, f"{path}, record {number}", field)


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
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data, final=False)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text near byte {at + error.start:,}.") from None
