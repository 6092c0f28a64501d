"""The result of `oneshot`: each layer's error and sparsity, and what was left alone, as numbers and as a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from secateur.blockwise.jobs import Layer, Pruned
from secateur.report import Reported, Sheet
from secateur.support import Part, Rows, percent, printable

__all__ = ["OneShot", "Tally"]

WIDE = 1000  # letters of a line that is not a table's


@dataclass(frozen=True)
class OneShot(Reported):
    """The result of `oneshot`: its layers in the order of the walk, and ``{reason: names}`` of the matrices left alone.

    >>> import torch
    >>> from secateur import oneshot
    >>> blocks = (torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)) for _ in range(2))
    >>> done = oneshot(torch.nn.Sequential(*blocks), [torch.randn(3, 4)], 0.5)
    >>> done.sparsity, [layer.name for layer in done.layers][:2]
    (0.5, ['0.0.weight', '0.1.weight'])
    """

    layers: tuple[Layer, ...]
    left_alone: Mapping[str, tuple[str, ...]]
    seconds: float
    out: Path | None = None

    @property
    def sparsity(self) -> float:
        """The fraction of the pruned weights' entries that are 0."""
        sizes = [math.prod(layer.shape) for layer in self.layers]
        return sum(size * layer.sparsity for size, layer in zip(sizes, self.layers, strict=True)) / sum(sizes)

    @property
    def error(self) -> float:
        """The mean of the layers' errors."""
        errors = [layer.error for layer in self.layers if layer.error is not None]
        return sum(errors) / len(errors) if errors else 0.0

    @property
    def warnings(self) -> tuple[str, ...]:
        """All layers' warnings, with their names."""
        return tuple(f"{layer.name}: {text}" for layer in self.layers for text in layer.warnings)

    def _sheets(self) -> list[Sheet]:
        from secateur.blockwise.sheets import pruned_blocks_sheets

        return pruned_blocks_sheets(self)

    def _parts(self) -> Iterator[Part]:
        """A row a layer, and what else there is to know."""
        rows = []
        for layer in self.layers:
            shape = "×".join(map(str, layer.shape))
            rows.append((layer.name, shape, percent(layer.sparsity), _error_text(layer), f"{layer.tokens:,}"))
        yield Rows(("Layer", ">Shape", ">Removed", ">Error", ">Tokens"), rows)
        yield ""
        yield (
            f"{len(self.layers)} weights, {percent(self.sparsity)} of their entries removed; the mean squared relative "
            f"error of their outputs is {self.error:.4f}."
        )
        for why, names in self.left_alone.items():
            yield printable(f"Left alone, {why}: {len(names)}, such as {names[0]}.", WIDE)
        for warning in self.warnings:
            yield printable(f"Warning: {warning}", WIDE)
        if self.out is not None:
            yield printable(f"In {self.out}.", WIDE)


def _error_text(layer: Layer) -> str:
    if layer.error is not None:
        return f"{layer.error:.4f}"
    return "no relative error" if layer.tokens else "no tokens"


@dataclass
class Tally:
    """What a walk has done so far; the one value of it that grows."""

    layers: list[Layer] = field(default_factory=list)
    left_alone: dict[str, list[str]] = field(default_factory=dict)

    def add(self, pruned: Pruned) -> None:
        self.layers.extend(pruned.layers)
        self.leave_alone(pruned.left_alone)

    def leave_alone(self, names: Mapping[str, Iterable[str]]) -> None:
        """``{reason: names}``."""
        for reason, found in names.items():
            self.left_alone.setdefault(reason, []).extend(found)

    def outcome(self, seconds: float, out: Path | None = None) -> OneShot:
        return OneShot(tuple(self.layers), {why: tuple(names) for why, names in self.left_alone.items()}, seconds, out)
