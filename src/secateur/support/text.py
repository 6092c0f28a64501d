"""Text for people and words that people type: names, bytes, shares; words for values; globs over names."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

# ---- Text for people: names that came from files, bytes and shares.
#
# Law: what is printed of a file holds no control character, and a share reads 0% or 100% only where it is.


def printable(text: str, limit: int = 200) -> str:
    r"""``text`` for one line of a terminal: control characters escaped, the middle of a long one cut out.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    if len(text) > limit:
        text = f"{text[: limit // 2]}...{text[-limit // 2 :]}"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


_WITHIN = frozenset(["secateur", "contextlib", "torch"])  # the library, and decorators of it


def warn(message: str, kind: type[Warning] = UserWarning) -> None:
    """A warning at the line that called into the library, however deep in it this is.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn("few batches")
    >>> caught[0].message
    UserWarning('few batches')
    """
    depth, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _WITHIN:
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, kind, stacklevel=depth)


def some(names: Sequence[object]) -> str:
    """The first four of many.

    >>> some(["a", "b", "c", "d", "e"])
    'a, b, c, d and 1 more'
    """
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(printable(str(name)) for name in names[:4]) + more


def bytes_text(count: int) -> str:
    if count < 1000:
        return f"{count} B"
    size = float(count)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.5:
            return f"{size:.3g} {unit}"
    return f"{size / 1000:.3g} TB"


def percent(fraction: float | None) -> str:
    """A share that reads 0% or 100% only where it is.

    >>> [percent(share) for share in (0.0, 1e-6, 0.5, 0.99999, 1.0, 1.25, None)]
    ['0%', '<0.1%', '50.0%', '>99.9%', '100%', '125.0%', '-']
    """
    if fraction is None:
        return "-"
    if fraction in (0, 1):
        return f"{fraction:.0%}"
    if fraction < 0.001:
        return "<0.1%"
    return ">99.9%" if 0.999 < fraction < 1 else f"{fraction:.1%}"


def percents(fractions: list[float | None], *, opaque: bool) -> str:
    if opaque:
        return "?"
    known = [fraction for fraction in fractions if fraction is not None]
    if not known:
        return "-"
    low, high = percent(min(known)), percent(max(known))
    return low if low == high else f"{low} to {high}"


# Words for values: what people type, looked up beside the values that it means, and what a record says of them.
#
# Law: a word that means nothing is an error that lists those that do, and names the nearest; what is said of a
# function is the same in every process, and another where it was given something else.

_Function = TypeVar("_Function", bound=Callable[..., Any])


def function_of(word: str | _Function, known: Mapping[str, _Function], kind: str) -> _Function:
    """The function that a word means; a function is returned as it is.

    Args:
        word: upper case, hyphens for underscores and space around it are no matter.
        known: ``{word: function}``.
        kind: what it is a word for, such as "criterion".

    Raises:
        ValueError: no function is called so. TypeError: it is neither a word nor a function.

    >>> function_of("Max", {"max": max, "min": min}, "reduction")
    <built-in function max>
    >>> function_of("maks", {"max": max, "min": min}, "reduction")
    Traceback (most recent call last):
    ...
    ValueError: no reduction is called 'maks'; did you mean max? There are max and min.
    """
    if not isinstance(word, str):
        if not callable(word):
            raise TypeError(f"{kind} is a function, or the word for one such as {min(known)!r}, not {word!r}.")
        return word
    found = known.get(word.strip().lower().replace("-", "_"))
    if found is None:
        raise unknown(word, known, kind)
    return found


def unknown(word: str, known: Iterable[str], kind: str) -> ValueError:
    """The error for a word that means nothing."""
    *most, last = sorted(known)
    near = difflib.get_close_matches(word.strip().lower(), [*most, last], n=1, cutoff=0.5)
    guess = f"; did you mean {near[0]}?" if near else "."
    return ValueError(f"no {kind} is called {word!r}{guess} There are {', '.join(most)} and {last}.")


def name_of(what: Any) -> str:
    """The name of a function, also inside functools.partial."""
    while isinstance(what, functools.partial):
        what = what.func
    return str(getattr(what, "__name__", what))


def described(function: Any) -> str:
    """The name of a function with its settings: of a partial its arguments, of a callable object its fields.

    >>> described(functools.partial(sorted, key=abs))
    'sorted(key=abs)'
    """
    if isinstance(function, functools.partial):
        given = [*map(_said, function.args), *(f"{key}={_said(value)}" for key, value in function.keywords.items())]
        return f"{described(function.func)}({', '.join(given)})"
    if (named := getattr(function, "__qualname__", None)) is not None:
        return str(named)
    name = str(getattr(function, "__name__", type(function).__qualname__))
    if not dataclasses.is_dataclass(function):
        return name
    fields = [field.name for field in dataclasses.fields(function) if field.repr]
    return f"{name}({', '.join(f'{field}={_said(getattr(function, field))}' for field in fields)})"


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_said(inner)}' for key, inner in value.items())}}}"
    return described(value) if callable(value) else repr(value)


# ---- Globs over names, as every verb and command takes them: ``"encoder.*.weight"``.
#
# Law: a glob that matches nothing is an error, in one form everywhere, that names those that are closest.


def matches(name: str, globs: Iterable[str]) -> bool:
    """Whether one of the globs matches the name.

    >>> matches("layers.1.fc.weight", ["*.bias", "layers.*.weight"])
    True
    """
    return any(fnmatchcase(name, glob) for glob in globs)


def globs_of(given: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """Globs as they are asked for: one or several, or None.

    >>> globs_of("*.weight"), globs_of(["a", "b"]), globs_of(None)
    (('*.weight',), ('a', 'b'), None)
    """
    return None if given is None else (given,) if isinstance(given, str) else tuple(given)


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
