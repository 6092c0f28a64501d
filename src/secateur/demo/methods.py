"""The ways to prune that the demo compares, each in the library's own words."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from secateur.allocation import erk
from secateur.criteria import grasp, lamp, magnitude, random, ria, snip, synflow, taylor, wanda
from secateur.patterns import NM
from secateur.regrowth import rigl
from secateur.schedules import constant
from secateur.training import Pruner

__all__ = ["DEFAULT_METHODS", "METHODS", "Method", "choose_methods"]


@dataclass(frozen=True)
class Method:
    """A way to prune: its ``name`` on the command line, its ``label`` in tables, a ``line`` of description.

    ``choices`` is what it says to `sparsify` beside the sparsity; None if nothing is pruned before training goes on.
    ``pruner`` makes the `Pruner` of ``(model, optimizer, sparsity, steps, masks)`` that follows that training.
    """

    name: str
    label: str
    line: str
    choices: Mapping[str, Any] | None = field(default_factory=dict)
    from_scratch: bool = False
    pruner: Callable[[nn.Module, torch.optim.Optimizer, float, int, Mapping[str, Tensor]], Pruner] | None = None


def _gradual(
    model: nn.Module, optimizer: torch.optim.Optimizer, sparsity: float, steps: int, _: Mapping[str, Tensor]
) -> Pruner:
    """The library's default recipe."""
    return Pruner(model, optimizer, sparsity, total_steps=steps, verbose=False)


def _rigl(
    model: nn.Module, optimizer: torch.optim.Optimizer, sparsity: float, steps: int, masks: Mapping[str, Tensor]
) -> Pruner:
    return Pruner(
        model,
        optimizer,
        constant(sparsity),
        criterion=magnitude,
        allocate=erk,
        regrow=rigl(),
        every=16,  # two epochs: what has just grown needs some steps before it is compared with the rest
        within=masks,
        total_steps=steps,
        verbose=False,
    )


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
    Method(
        "wanda",
        "Wanda",
        "|w| times the norm of its input; ERK's share of each layer",
        {"criterion": wanda, "allocate": erk},
    ),
    Method(
        "ria",
        "RIA",
        "|w| relative to its row and column, times the input's norm; ERK's shares",
        {"criterion": ria, "allocate": erk},
    ),
    Method("taylor", "Taylor", "w² times the mean squared gradient, over the whole network", {"criterion": taylor}),
    Method("snip", "SNIP", "|w · gradient| before any training, which is then longer", {"criterion": snip}, True),
    Method(
        "grasp", "GraSP", "w · Hessian · gradient before any training, which is then longer", {"criterion": grasp}, True
    ),
    Method(
        "synflow",
        "SynFlow",
        "the flow through each weight before any training, in 100 rounds; no data",
        {"criterion": synflow, "rounds": 100},
        True,
    ),
    Method("gradual", "gradual", "LAMP more and more while fine-tuning: the Pruner's default", None, pruner=_gradual),
    Method(
        "rigl",
        "RigL",
        "sparse from the first step; the smallest go, the largest gradients return",
        {"criterion": random, "allocate": erk},
        True,
        _rigl,
    ),
)


METHODS: Mapping[str, Method] = {method.name: method for method in _ALL}
DEFAULT_METHODS = ("magnitude", "erk", "lamp", "random", "2:4", "gradual")
TRAINED_METHODS = ("gradual", "rigl")  # what --train adds


def choose_methods(names: Sequence[str] | None = None, *, training: bool = False) -> tuple[Method, ...]:
    """The methods of these names, commas allowed within one, or the default ones; ``training`` adds the trained ones.

    Each once, in the order of `METHODS`. ``ValueError`` for an unknown name lists the known ones.

    >>> [method.label for method in choose_methods(["random,lamp"], training=True)]
    ['LAMP', 'random', 'gradual', 'RigL']
    """
    asked = [part.strip().casefold() for name in names or () for part in name.split(",") if part.strip()]
    if unknown := [name for name in asked if name not in METHODS]:
        raise ValueError(f"there is no method {unknown[0]!r}; there are {', '.join(METHODS)}.")
    chosen = {*(asked or DEFAULT_METHODS), *(TRAINED_METHODS if training else ())}
    return tuple(method for name, method in METHODS.items() if name in chosen)
