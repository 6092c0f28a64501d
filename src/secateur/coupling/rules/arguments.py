"""Arguments of calls, as rules read them.

Law: a rule's own arithmetic is not the model's, so that it asks for no equation.
"""

from __future__ import annotations

from typing import Any

__all__ = ["each_of", "places", "plain"]


def each_of(given: Any, at: int) -> Any:
    """The value for one dimension of an argument given once or for each."""
    return plain(given if isinstance(given, int | str) else given[at] if len(given) > 1 else given[0])


def places(given: Any, rank: int) -> set[int]:
    """Dimensions named by an integer, several, or none (all)."""
    if given is None:
        return set(range(rank))
    return {int(at) % max(rank, 1) for at in ([given] if isinstance(given, int) else given)}


def plain(number: Any) -> Any:
    """Without its origin: the rule's own arithmetic is not the model's."""
    return int.__index__(number) if isinstance(number, int) else number
