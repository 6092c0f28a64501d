"""Globs over names, as every verb and command takes them: ``"encoder.*.weight"``.

Law: a glob that matches nothing is an error, in one form everywhere, that names those that are closest.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from secateur.support.text import printable

__all__ = ["matched", "matches", "no_match"]


def matches(name: str, globs: Iterable[str]) -> bool:
    """Whether one of the globs matches the name.

    >>> matches("layers.1.fc.weight", ["*.bias", "layers.*.weight"])
    True
    """
    return any(fnmatchcase(name, glob) for glob in globs)


def matched(globs: str | Iterable[str] | None, names: Iterable[str], kind: str = "parameter") -> set[str] | None:
    """The names that one of the globs matches; None for no globs. A glob that matches nothing is a ValueError.

    >>> sorted(matched("*.weight", ["fc.weight", "fc.bias"]))
    ['fc.weight']
    """
    if globs is None:
        return None
    names = list(names)
    found: set[str] = set()
    for glob in [globs] if isinstance(globs, str) else globs:
        its = [name for name in names if fnmatchcase(name, glob)]
        if not its:
            raise no_match(glob, names, kind)
        found.update(its)
    return found


def no_match(glob: str, names: Iterable[str], kind: str = "parameter") -> ValueError:
    """The error for a glob that matches none of the names.

    >>> raise no_match("layer.*", ["layers.0.weight", "layers.1.weight", "head.bias"], "tensor")
    Traceback (most recent call last):
    ValueError: no tensor matches 'layer.*'; the closest names are layers.1.weight, head.bias.
    """
    close = ", ".join(printable(name) for name in _closest(glob, list(names))) or "none"
    return ValueError(f"no {kind} matches {glob!r}; the closest names are {close}.")


def _closest(glob: str, names: list[str], count: int = 3) -> list[str]:
    """The names with the part most like the glob, one of each kind of layer."""
    plain = re.sub(r"[*?\[\]]+", "", glob).strip(".")
    length = plain.count(".") + 1
    likeness: dict[str, float] = {}
    best: dict[str, tuple[float, str]] = {}
    for name in names:
        parts = name.split(".")
        windows = {".".join(parts[at : at + length]) for at in range(max(1, len(parts) - length + 1))}
        for window in windows - likeness.keys():
            likeness[window] = difflib.SequenceMatcher(None, plain, window, autojunk=False).ratio()
        kind = re.sub("[0-9]+", "*", name)
        best[kind] = max(best.get(kind, (0.0, name)), (max(likeness[window] for window in windows), name))
    return [name for _, name in sorted(best.values(), key=lambda found: -found[0])[:count]]
