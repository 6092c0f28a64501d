"""Records: JSON that some program wrote, perhaps another one, perhaps only in part; and values as JSON and back.

Law: nothing that a record says is believed before it is held to its type; whatever is wrong is one line that names the
file, the field and what to do. `plain` writes a value, and `Fields.value` reads it back, as its annotation says.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import stat
import sys
import types
import typing
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple, TypeVar

import numpy as np

from secateur.support.text import printable

MAX_JSON = 100_000_000  # bytes of a file
MAX_DEPTH = 200  # objects and lists in each other: Python's own reader and writer call themselves for each

T = TypeVar("T")

_WORDS = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


_NOT_FINITE = {str(value): value for value in (math.inf, -math.inf, math.nan)}  # JSON has no number for them


class Between(NamedTuple):
    """The bounds of a number, in the annotation of a field: ``Annotated[float, Between(0, 1)]``."""

    least: float | None = None
    most: float | None = None


def plain(value: Any) -> Any:
    """A value as JSON, which `Fields.value` reads back: of dataclasses and named tuples, mappings, sequences and sets,
    arrays and tensors, paths, text and numbers.

    >>> plain({"share": math.inf, "kept": np.arange(3), "names": frozenset("ba")})
    {'share': 'inf', 'kept': [0, 1, 2], 'names': ['a', 'b']}
    """
    if isinstance(value, str | int | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if names := _names_of(type(value)):
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, AbstractSet):
        return sorted(map(plain, value))
    return plain(value.tolist()) if hasattr(value, "tolist") else [plain(each) for each in value]


def _names_of(kind: Any) -> tuple[str, ...]:
    """The fields of a dataclass or a named tuple; none of other types."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    return tuple(getattr(kind, "_fields", ()))


@functools.cache
def _annotations(kind: Any) -> dict[str, Any]:
    found = typing.get_type_hints(kind, include_extras=True)
    return {name: found[name] for name in _names_of(kind)}


class _WrongError(Exception):
    """What the reader of JSON is stopped with."""


def read_json(
    path: Path,
    *,
    error: type[ValueError] = ValueError,
    hint: str = "",
    finite: bool = True,
    largest: int = MAX_JSON,
) -> dict[str, Any]:
    """The JSON object in a file of at most 100 MB, or of ``largest`` bytes, as `parse_json` reads it.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not one, of the class ``error``; ``hint`` says what to do.
    """
    with open_regular(path, error=error) as file:
        text = file.read(min(largest, os.fstat(file.fileno()).st_size) + 1)  # memory is taken for as much as is asked
    if len(text) > largest:
        raise error(f"{path}: more than {largest} bytes of JSON.{hint}")
    return parse_json(text, path, error=error, hint=hint, finite=finite)


def parse_json(
    text: bytes, path: Path, *, error: type[ValueError] = ValueError, hint: str = "", finite: bool = True
) -> dict[str, Any]:
    """The JSON object in ``text``: no key twice, no half characters, not nested endlessly, and, where ``finite``, no
    NaN or infinity, which Python writes though JSON has none.

    >>> parse_json(b'{"a": 1, "a": 2}', Path("record.json"))
    Traceback (most recent call last):
    ValueError: record.json: damaged: a is there twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise _WrongError(f"{printable(twice)} is there twice")
        return found

    def number(word: str) -> float:
        value = float(word)
        if finite and not math.isfinite(value):
            raise _WrongError(f"{printable(word, 40)} is not a finite number")
        return value

    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_float=number, parse_constant=number)
        if not isinstance(parsed, dict):
            raise _WrongError("not a JSON object")
        if _is_deep(parsed):
            raise RecursionError
        if b"\\u" in text:
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")  # half a surrogate pair is no name
    except _WrongError as fault:
        raise error(f"{path}: damaged: {fault}.{hint}") from None
    except RecursionError:
        raise error(f"{path}: damaged: not valid JSON (nested too deeply).{hint}") from None
    except ValueError as fault:  # UnicodeError and JSONDecodeError are ValueErrors
        raise error(f"{path}: damaged: not valid JSON ({_one_line(fault)}).{hint}") from None
    return parsed


def _is_deep(parsed: Any) -> bool:
    """Level by level, so that the check itself does not nest."""
    level = [parsed]
    for _ in range(MAX_DEPTH):
        level = [
            below
            for each in level
            for below in (each.values() if isinstance(each, dict) else each)
            if isinstance(below, dict | list)
        ]
        if not level:
            return False
    return True


class Fields:
    """The fields of a record, or of an object in it, each held to its type where it is taken.

    Args:
        values: the object.
        path: the file, for messages.
        error: the class of what is raised.
        hint: what to do about it, the end of each message.
        place: where in the file this object is, such as ``blocks[2]``.

    >>> record = Fields({"name": "fc", "sizes": [3, -1]}, Path("record.json"), hint=" Delete it.")
    >>> record.take("name", str)
    'fc'
    >>> record.each("sizes", int, least=0)
    Traceback (most recent call last):
    ValueError: record.json: damaged: sizes[1] must be a whole number of at least 0, not -1. Delete it.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        path: Path,
        *,
        error: type[ValueError] = ValueError,
        hint: str = "",
        place: str = "",
    ) -> None:
        self.values, self.path, self.error, self.hint, self.place = values, path, error, hint, place

    @classmethod
    def read(
        cls,
        path: Path,
        *,
        error: type[ValueError] = ValueError,
        hint: str = "",
        finite: bool = True,
        largest: int = MAX_JSON,
    ) -> Fields:
        """Of a file; raises what `read_json` does."""
        return cls(
            read_json(path, error=error, hint=hint, finite=finite, largest=largest), path, error=error, hint=hint
        )

    def take(self, key: str, kind: type[T], *, least: float | None = None, most: float | None = None) -> T:
        """The value of a field."""
        if key not in self.values:
            raise self.wrong(key, "is missing")
        return self._held(self.values[key], key, kind, least, most)

    def maybe(self, key: str, kind: type[T], *, least: float | None = None, most: float | None = None) -> T | None:
        """The value of a field that must be there, and may be null."""
        if self.values.get(key, 0) is None:
            return None
        return self.take(key, kind, least=least, most=most)

    def optional(self, key: str, kind: type[T], *, least: float | None = None, most: float | None = None) -> T | None:
        """The value of a field that may be missing or null."""
        return None if self.values.get(key) is None else self.take(key, kind, least=least, most=most)

    def each(self, key: str, kind: type[T], *, least: float | None = None, most: float | None = None) -> list[T]:
        """The values of a list."""
        found = self.take(key, list)
        for at, one in enumerate(found):
            if not _fits(one, kind, least, most):  # there may be millions: only what is wrong is named
                self._held(one, f"{key}[{at}]", kind, least, most)
        return found

    def inner(self, key: str) -> Fields:
        """The fields of an object in this one."""
        return self._of(self.take(key, dict), key)

    def inners(self, key: str) -> Iterator[Fields]:
        """The fields of each object in a list."""
        for at, one in enumerate(self.each(key, dict)):
            yield self._of(one, f"{key}[{at}]")

    def inners_named(self, key: str) -> Iterator[tuple[str, Fields]]:
        """The names in an object of objects, and the fields of each."""
        found = self.inner(key)
        for name in found.values:
            yield name, found.inner(name)

    def each_named(
        self, key: str, kind: type[T], *, least: float | None = None, most: float | None = None
    ) -> dict[str, T]:
        """The values of an object whose names are free, such as those of tensors."""
        found = self.inner(key)
        return {name: found.take(name, kind, least=least, most=most) for name in found.values}

    def value(self, key: str, kind: Any) -> Any:
        """The value of a field, of whatever type that `plain` writes; bounds of numbers are in its annotation.

        >>> record = Fields({"shares": {"fc": 1.5}}, Path("record.json"))
        >>> record.value("shares", dict[str, Annotated[float, Between(0, 1)]])
        Traceback (most recent call last):
        ValueError: record.json: damaged: shares.fc must be a number of at least 0 and at most 1, not 1.5.
        """
        if key not in self.values:
            raise self.wrong(key, "is missing")
        return self._read(self.values[key], key, kind)

    def whole(self, kind: type[T]) -> T:
        """All fields there are, as a dataclass of this kind, which `plain` wrote."""
        found: T = self._read(self.values, "", kind)
        return found

    def of_format(self, word: str, version: int) -> Fields:
        """The fields of a file beside its format and version, which must be these."""
        if self.take("format", str) != word or self.take("version", int) != version:
            raise self.wrong("format", f"is not {word!r}, version {version}")
        rest = {key: value for key, value in self.values.items() if key not in ("format", "version")}
        return Fields(rest, self.path, error=self.error, hint=self.hint, place=self.place)

    def _read(self, value: Any, key: str, kind: Any) -> Any:
        bounds = Between()
        if typing.get_origin(kind) is Annotated:
            kind, bounds = typing.get_args(kind)
        while hasattr(kind, "__value__"):  # a name for a type, as NDArray is from numpy 2.5 on
            kind = kind.__value__
        origin, inner = typing.get_origin(kind), typing.get_args(kind)
        if origin in (typing.Union, types.UnionType):  # with None
            return (
                None if value is None else self._read(value, key, *(each for each in inner if each is not type(None)))
            )
        if names := _names_of(kind):
            its = self._of(self._held(value, key, dict, None, None), key)
            its.only(*names)
            return kind(**{name: its.value(name, each) for name, each in _annotations(kind).items()})
        if kind is Any:
            return value
        if np.ndarray in (kind, origin):  # of numbers, with their bounds
            return np.array(self._read(value, key, tuple[Annotated[float, bounds], ...]))
        if origin is not None and issubclass(origin, Mapping):
            its = self._of(self._held(value, key, dict, None, None), key)
            return {its._key(name, inner[0]): its.value(name, inner[1]) for name in its.values}
        if origin is not None:
            found = self._held(value, key, list, None, None)
            if origin is tuple and inner[-1] is not ...:
                if len(found) != len(inner):
                    raise self.wrong(key, f"must be a list of {len(inner)}, not of {len(found)}")
                return tuple(self._read(one, f"{key}[{at}]", inner[at]) for at, one in enumerate(found))
            each, limits = (
                typing.get_args(inner[0]) if typing.get_origin(inner[0]) is Annotated else (inner[0], Between())
            )
            every = (  # there may be millions of numbers
                one if type(one) is each and _fits(one, each, *limits) else self._read(one, f"{key}[{at}]", inner[0])
                for at, one in enumerate(found)
            )
            return (tuple if origin is Sequence else origin)(every)
        if kind is Path:
            return Path(self._held(value, key, str, None, None))
        if kind is float and isinstance(value, str) and value in _NOT_FINITE:
            value = _NOT_FINITE[value]
        return self._held(value, key, kind, *bounds)

    def _key(self, name: str, kind: Any) -> Any:
        """The name of a field that is free: text, or a number."""
        base = typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind
        try:
            if base is int and not name.isdecimal():  # Python reads more than that as a whole number
                raise ValueError
            return name if base is str else self._read(base(name), name, kind)
        except ValueError:
            raise self.wrong(name, "is not a number that may be here") from None

    def only(self, *keys: str) -> None:
        """Refuses fields of other names: who wrote them meant something by them."""
        for key in self.values:
            if key not in keys:
                raise self.wrong(key, "is not known")

    def wrong(self, key: str, what: str) -> ValueError:
        """The error to raise about a field, in the one form that all have."""
        where = ".".join(printable(part, 120) for part in (self.place, key) if part)
        return self.error(f"{self.path}: damaged: {f'{where} ' if where else ''}{what}.{self.hint}")

    def _name(self, key: str) -> str:
        return ".".join(part for part in (self.place, key) if part)

    def _of(self, values: Mapping[str, Any], key: str) -> Fields:
        return Fields(values, self.path, error=self.error, hint=self.hint, place=self._name(key))

    def _held(self, value: Any, key: str, kind: type[T], least: float | None, most: float | None) -> T:
        if _fits(value, kind, least, most):
            held: T = value
            return held
        bounds = [f"at {word} {bound:g}" for word, bound in (("least", least), ("most", most)) if bound is not None]
        wanted = _WORDS[kind] + (f" of {' and '.join(bounds)}" if bounds else "")
        raise self.wrong(key, f"must be {wanted}, not {_short(value)}")


def open_regular(path: Path, *, error: type[ValueError] = ValueError) -> BinaryIO:
    """A file to read, if it is one."""
    # A named pipe would wait for ever, a device has no size: look before opening.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise error(f"{path}: not a regular file.")
    return open(path, "rb")


def _fits(value: Any, kind: type, least: float | None, most: float | None) -> bool:
    fits = type(value) is kind  # true is an int to Python
    if kind is float and type(value) is int:
        fits = abs(value) <= sys.float_info.max  # JSON's whole numbers have no end
    return fits and (least is None or value >= least) and (most is None or value <= most)


def _short(value: Any) -> str:
    if isinstance(value, dict | list):
        return f"{_WORDS[type(value)]} of {len(value)}"
    return printable(json.dumps(value, ensure_ascii=False), 60)


def _one_line(error: BaseException) -> str:
    return printable(str(error).splitlines()[0] if str(error) else type(error).__name__, 120)
