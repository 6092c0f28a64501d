"""What a result says, taken apart: its lines, and its tables by their names."""

from collections.abc import Iterable

from secateur.support import Part, Table


def lines_of(parts: Iterable[Part]) -> list[str]:
    return [part for part in parts if isinstance(part, str)]


def tables_of(parts: Iterable[Part]) -> dict[str, Table]:
    return {part.name: part for part in parts if isinstance(part, Table)}
