"""The ways to prune that the demo compares, each in the library's own words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from secateur.allocation import erk
from secateur.criteria import lamp, random
from secateur.patterns import NM

__all__ = ["METHODS", "Method", "choose_methods"]


@dataclass(frozen=True)
class Method:
    """A way to prune: its ``name`` on the command line, its ``label`` in tables, a ``line`` of description.

    ``choices`` is what it says to `sparsify` beside the sparsity; None if a `Pruner` prunes while training goes on.
    """

    name: str
    label: str
    line: str
    choices: Mapping[str, Any] | None = field(default_factory=dict)


_ALL = (
    Method("magnitude", "global magnitude", "the smallest |w| of the whole network go; a baseline"),
    Method("erk", "ERK", "each layer has a share by its shape, the smallest |w| within it go", {"allocate": erk}),
    Method("lamp", "LAMP", "|w| relative to the larger ones of its layer, over the whole network", {"criterion": lamp}),
    Method("random", "random", "any weights of the whole network go; a baseline", {"criterion": random}),
    # 2:4 takes four consecutive inputs, and the stem has one input channel only.
    Method(
        "2:4",
        "2:4",
        "2 of every 4 consecutive inputs stay; 50 % and nothing else",
        {"pattern": NM(2, 4), "exclude": "stem.weight"},
    ),
    Method("gradual", "gradual", "LAMP more and more while fine-tuning: the Pruner's default", None),
)

METHODS: Mapping[str, Method] = {method.name: method for method in _ALL}


def choose_methods(names: Sequence[str] | None = None) -> tuple[Method, ...]:
    """The methods of these names, commas allowed within one, or all: each once, in the order of `METHODS`.

    ``ValueError`` for an unknown name lists the known ones.

    >>> [method.label for method in choose_methods(["random,lamp"])]
    ['LAMP', 'random']
    """
    asked = [part.strip().casefold() for name in names or () for part in name.split(",") if part.strip()]
    if unknown := [name for name in asked if name not in METHODS]:
        raise ValueError(f"there is no method {unknown[0]!r}; there are {', '.join(METHODS)}.")
    return tuple(method for name, method in METHODS.items() if name in (asked or METHODS))
