"""The result of `oneshot`: each layer's error and sparsity, and what was left alone, as numbers and as a table. The
tables of `oneshot` on a page: a row and a mark for every weight. ``secateur.json`` in a directory that `oneshot`
pruned, and what its journal is begun with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from secateur import patterns
from secateur.checkpoints import RECORD, Run, inspect_checkpoint, library_versions, record_text
from secateur.models.files import BlockFiles
from secateur.models.jobs import Count, Layer, Pruned
from secateur.models.solving import Request, digest
from secateur.report import Cells, Chart, Reported, Sheet
from secateur.support import Between, Part, Rows, percent, printable

# ---- The result of `oneshot`: each layer's error and sparsity, and what was left alone, as numbers and as a table.

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

    def add(self, pruned: Pruned | PrunedBlock) -> None:
        self.layers.extend(pruned.layers)
        self.leave_alone(pruned.left_alone)

    def leave_alone(self, names: Mapping[str, Iterable[str]]) -> None:
        """``{reason: names}``."""
        for reason, found in names.items():
            self.left_alone.setdefault(reason, []).extend(found)

    def outcome(self, seconds: float, out: Path | None = None) -> OneShot:
        return OneShot(tuple(self.layers), {why: tuple(names) for why, names in self.left_alone.items()}, seconds, out)


# ---- The tables of `oneshot` on a page: a row and a mark for every weight.
#
# Law: what is drawn is what the result holds.


def pruned_blocks_sheets(done: OneShot) -> list[Sheet]:
    """The sheets of a `oneshot` result: a table with a row for each weight, in the order of the walk."""
    layers = done.layers
    names = [printable(each.name, 1000) for each in layers]
    removed = [each.sparsity for each in layers]
    errors = [each.error for each in layers]
    experts = [", ".join(map(str, each.without_tokens)) for each in layers]
    cells = [
        Cells("weight", names),
        Cells("shape", ["x".join(map(str, each.shape)) for each in layers]),
        Cells("removed", removed, [percent(each) for each in removed], removed),
        Cells("error", errors, ["-" if each is None else f"{each:.4f}" for each in errors]),
        Cells("tokens", [each.tokens for each in layers], [f"{each.tokens:,}" for each in layers]),
        Cells("seconds", [each.seconds for each in layers], [f"{each.seconds:.1f}" for each in layers]),
        *([Cells("experts without tokens", experts)] if any(experts) else []),
    ]
    order = "in the order of the walk; a line joins what differs in numbers alone."
    of_error = Chart(
        "Each weight's output error", f"The squared relative error of the outputs, {order}", names, errors, "error"
    )
    of_removed = Chart(
        "How much was removed of each",
        f"The share of entries that are zero, {order}",
        names,
        removed,
        "removed",
        share=True,
    )
    return [Sheet("Weight by weight", cells, [of_error, of_removed])]


# ---- ``secateur.json`` in a directory that `oneshot` pruned, and what its journal is begun with.
#
# Law: no time and no path of our own: the same call on the same files writes the same bytes.


def said_of(request: Request, batches: Iterable[Any]) -> dict[str, Any]:
    """As JSON: what the bytes of a pruned directory depend on, but for the source's files."""
    return {"data": digest(batches), **request.described(), "versions": library_versions()}


@dataclass(frozen=True)
class PrunedTensor:
    """What was written of a tensor in the files."""

    sparsity: Annotated[float, Between(0, 1)]
    removed: Count
    kept_as_they_were: bool


@dataclass(frozen=True)
class PrunedBlock:
    """What a run's journal says of a block that `oneshot` pruned; ``tensors`` by their names in the files."""

    name: str
    layers: tuple[Layer, ...]
    left_alone: Mapping[str, tuple[str, ...]]
    tensors: Mapping[str, PrunedTensor]


def write_record(
    run: Run,
    blocks: Iterable[PrunedBlock],
    done: OneShot,
    request: Request,
    said: Mapping[str, Any],
    files: BlockFiles,
    previous: Mapping[str, Any] | None,
) -> None:
    """Writes ``secateur.json`` into the copy.

    Names are those of the tensors in files, but under ``layers``, where they are the model's. ``removed`` leaves out
    what stands in several tensors of the file and competed as one, where the pattern counts units. ``previous`` is the
    record of the source, and ``said`` what the journal was begun with.
    """
    pruned = {name: found for block in blocks for name, found in block.tensors.items()}
    alone = {
        name
        for name in pruned
        if isinstance(request.pattern, patterns.Unstructured | patterns.Rows | patterns.NM) or files.stands_alone(name)
    }
    record = {
        "solver": said["solver"],
        "kept_weights": "unchanged" if all(found.kept_as_they_were for found in pruned.values()) else "updated",
        "pattern": said["pattern"],
        "allocate": said["allocate"],
        "stages": said["stages"],
        "aim": said["aim"],
        "data": {"sha256": said["data"]},
        "sparsity": {"targets": done.sparsity, "model": inspect_checkpoint(run.folder).total().sparsity},
        "pruned": {name: found.sparsity for name, found in pruned.items()},
        "removed": {name: found.removed for name, found in pruned.items() if name in alone},
        "layers": {
            layer.name: {
                "sparsity": layer.sparsity,
                "error": layer.error,
                "tokens": layer.tokens,
                "without_tokens": list(layer.without_tokens),
            }
            for layer in done.layers
        },
        "warnings": list(done.warnings),
        "left_alone": files.left_alone(pruned, done.left_alone),
    }
    text = record_text(
        "oneshot",
        record,
        previous=previous,
        versions={"transformers": said["versions"]["transformers"]},
    )
    run.add(RECORD, text)
