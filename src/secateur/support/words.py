"""Words for values: what people type, looked up beside the values that it means, and what a record says of them.

Law: a word that means nothing is an error that lists those that do, and names the nearest; what is said of a function
is the same in every process, and another where it was given something else.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

__all__ = ["described", "function_of", "name_of", "unknown"]

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
