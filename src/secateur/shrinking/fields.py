"""The fields of a configuration, those of the configurations within it as well.

Law: a place is a field's keys from outside in, and whoever changes a field changes a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from secateur.support import private

__all__ = [
    "Place",
    "configurations_in",
    "dotted",
    "fields_in",
    "integer_fields",
    "is_configuration",
    "same_ways",
    "unset_fields",
    "with_fields",
]

Place = tuple[str | int, ...]  # of a field: keys of nested configurations, then an index where it holds a list


def with_fields(values: Mapping[str, Any], changes: Mapping[Place, Any]) -> dict[str, Any]:
    """A copy of nested values with fields set.

    >>> with_fields({"text": {"width": 8}, "stages": [3, 5]}, {("text", "width"): 4, ("stages", 1): 2})
    {'text': {'width': 4}, 'stages': [3, 2]}
    """
    made = copy.deepcopy(dict(values))
    for place, value in changes.items():
        held: Any = made
        for key in place[:-1]:
            if isinstance(held[key], tuple):
                held[key] = list(held[key])
            held = held[key]
        held[place[-1]] = value
    return made


def is_configuration(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(type(value), "from_dict") and not isinstance(value, type | nn.Module)


def fields_in(config: Any, values: Mapping[str, Any], place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """All fields, those of configurations within as well; not what lies in other dicts, such as names of labels."""
    for key, value in values.items():
        part = getattr(config, key, None)
        if isinstance(value, Mapping):
            if is_configuration(part):
                yield from fields_in(part, value, (*place, key))
        elif not key.startswith("_"):
            yield (*place, key), value


def configurations_in(config: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """A configuration and those within."""
    yield place, config
    for key, part in vars(config).items():
        if not key.startswith("_") and is_configuration(part):
            yield from configurations_in(part, (*place, key))


def integer_fields(config: Any, values: Mapping[str, Any]) -> Iterator[tuple[Place, int]]:
    for place, value in fields_in(config, values):
        if type(value) is int and value > 0:
            yield place, value
        elif isinstance(value, list | tuple):
            yield from (((*place, at), each) for at, each in enumerate(value) if type(each) is int and each > 0)


def unset_fields(config: Any, values: Mapping[str, Any]) -> Iterator[Place]:
    yield from (place for place, value in fields_in(config, values) if value is None)


def same_ways(config: Any, made: Any) -> None:
    """Which implementations of attention and experts are used is held beside the fields; within as well."""
    for key, value in vars(config).items():
        if private.tells_implementation(key):
            vars(made)[key] = value
        elif is_configuration(value) and is_configuration(vars(made).get(key)):
            same_ways(value, vars(made)[key])


def dotted(place: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in place if part != "")
