"""Words for values: what people type, looked up beside the values that it means.

Law: a word that means nothing is an error that lists those that do, and names the nearest.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

__all__ = ["function_of", "unknown"]

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
