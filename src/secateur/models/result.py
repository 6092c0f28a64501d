"""The result of `oneshot`: each layer's error and sparsity, and what was left alone, as numbers and as a table; how
gates chose. ``secateur.json`` in a directory that `oneshot` pruned, and what its journal is begun with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from secateur import patterns
from secateur.checkpoints import RECORD, Run, TensorInspection, inspect_checkpoint, record_text
from secateur.models.distance import Descended
from secateur.models.files import BlockFiles
from secateur.models.jobs import Count, Layer, Pruned
from secateur.models.reach import ByText
from secateur.models.solving import LearntMasks, OneShotRequest
from secateur.support import Between, Chart, Column, Part, Table, percent, printable

# ---- The result of `oneshot`: each layer's error and sparsity, and what was left alone, as numbers and as a table.

WIDE = 1000  # letters of a line that is not a table's


@dataclass(frozen=True)
class OneShot(ByText):
    """The result of `oneshot`: its layers in the order of the walk, ``{reason: names}`` of the matrices left alone, and
    with ``choose="gates"`` what masks came to that learnt.

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
    gates: LearntMasks | None = None

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

    def content(self) -> Iterator[Part]:
        """A row a layer, and what else there is to know."""
        yield (
            Table.of(
                "layers",
                self.layers,
                Column.name("Layer", lambda each: each.name),
                Column.shape(
                    "Shape", lambda each: each.shape, show=lambda shape: "×".join(map(str, shape)), side="right"
                ),
                Column.portion("Removed", lambda each: each.sparsity),
                Column("Error", _error, _error_text, "right", number=_number),
                Column.count("Tokens", lambda each: each.tokens),
                Column.figure("Seconds", lambda each: each.seconds, ".1f", detail=True),
                Column("Experts without tokens", lambda each: each.without_tokens, _numbers, detail=True),
                title="Weight by weight",
            )
            .filled()
            .drawn("error", "Each weight's output error", f"The squared relative error of the outputs, {_ORDER}")
            .drawn("removed", "How much was removed of each", f"The share of entries that are zero, {_ORDER}")
        )
        yield ""
        yield from self.by_text()
        if self.gates is not None:
            its = self.gates
            lost = its.solved_before if its.solved_after is None else min(its.solved_before, its.solved_after)
            yield from how_gates_chose(
                {"masks": its}, lost, "What each mask loses that was tried, with the noise in it."
            )
            yield its.in_words()
        yield (
            f"Pruned {len(self.layers)} weights, {percent(self.sparsity)} of their entries; the mean squared relative "
            f"error of their outputs is {self.error:.4f}."
        )
        for why, names in self.left_alone.items():
            yield printable(f"Left alone, {why}: {len(names)}, such as {names[0]}.", WIDE)
        for warning in self.warnings:
            yield printable(f"Warning: {warning}", WIDE)
        idle = [layer.name for layer in self.layers if layer.without_tokens or not layer.tokens]
        if idle:
            yield (
                f"{len(idle)} weights have experts that no token was sent to, and were pruned by magnitude there, such "
                f"as {printable(idle[0])}; more calibration text may reach them."
            )
        if self.out is not None:
            yield ""
            yield f"Wrote {printable(str(self.out), WIDE)} ({self.seconds:.1f} s); {RECORD} in it says what was done."


_ORDER = "in the order of the walk; a line joins what differs in numbers alone."


def _error(layer: Layer) -> float | str:
    return layer.error if layer.error is not None else "no relative error" if layer.tokens else "no tokens"


def _error_text(error: float | str) -> str:
    return error if isinstance(error, str) else f"{error:.4f}"


def _number(error: float | str) -> float | None:
    return None if isinstance(error, str) else error


def _numbers(units: Iterable[int]) -> str:
    return ", ".join(map(str, units))


def how_gates_chose(gates: Mapping[str, Descended], lost: float | None, more: str) -> Iterator[Part]:
    """How far the outputs are from the dense ones before repair, by what has gates; and in the end.

    Args:
        lost: in the end, of the last of them.
        more: on what the chart of the steps shows.

    >>> next(how_gates_chose({}, None, ""), "no gates")
    'no gates'
    """
    if gates:
        yield ""
        table = Table.of(
            "gates",
            [(name, its, lost if name == [*gates][-1] else None) for name, its in gates.items()],
            Column.name("Gates of"),
            Column.count("Steps", lambda its: its[1].steps),
            Column.figure("Lost as they began", lambda its: its[1].before, key="before"),
            Column.figure("Lost by gates, before repair", lambda its: its[1].after, key="after"),
            Column.figure("Lost in the end", lambda its: its[2], key="lost"),
            title="How gates chose",
        ).filled()
        yield replace(table, charts=[_descent(gates, more)])
        yield ""


def _descent(gates: Mapping[str, Descended], more: str) -> Chart:
    """The loss over the steps, in means of tenths of them."""
    steps = [
        (what, at, sum(some) / len(some))
        for what, its in gates.items()
        for at in range(10)
        if (some := its.losses[len(its.losses) * at // 10 : len(its.losses) * (at + 1) // 10])
    ]
    return Chart(
        "What the outputs lose as gates learn",
        f"On the batches of each tenth of the steps. {more}",
        [f"{what}, tenth {at + 1}" for what, at, _ in steps],
        [lost for *_, lost in steps],
        "lost",
        series=[what for what, *_ in steps],
        places=[10.0 * (at + 1) for _, at, _ in steps],
        along="percent of the steps",
    )


@dataclass
class Tally:
    """What a walk has done so far; the one value of it that grows."""

    layers: list[Layer] = field(default_factory=list)
    left_alone: dict[str, list[str]] = field(default_factory=dict)
    gates: LearntMasks | None = None

    def add(self, pruned: Pruned | PrunedBlock) -> None:
        self.layers.extend(pruned.layers)
        self.leave_alone(pruned.left_alone)

    def leave_alone(self, names: Mapping[str, Iterable[str]]) -> None:
        """``{reason: names}``."""
        for reason, found in names.items():
            self.left_alone.setdefault(reason, []).extend(found)

    def outcome(self, seconds: float, out: Path | None = None) -> OneShot:
        alone = {why: tuple(names) for why, names in self.left_alone.items()}
        return OneShot(tuple(self.layers), alone, seconds, out, self.gates)


# ---- ``secateur.json`` in a directory that `oneshot` pruned, and what its journal is begun with.
#
# Law: no time and no path of our own: the same call on the same files writes the same bytes.


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
    request: OneShotRequest,
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
    inspected = inspect_checkpoint(run.folder)
    its = [tensor for tensor in inspected.tensors if tensor.name in pruned]
    if run.goes_on:
        _check_zeros(run, pruned, its)
    alone = {
        name
        for name in pruned
        if isinstance(request.pattern, patterns.Unstructured | patterns.Rows | patterns.NM) or files.stands_alone(name)
    }
    record = {
        "solver": said["solver"],
        "kept_weights": "unchanged" if all(found.kept_as_they_were for found in pruned.values()) else "updated",
        "pattern": patterns.word_of(request.pattern),
        "allocate": said["allocate"],
        "stages": said["stages"],
        "aim": said["aim"],
        "choose": said["choose"],
        "data": {"sha256": said["data"]},
        "sparsity": {
            "targets": sum(each.zeros or 0 for each in its) / max(sum(each.numel for each in its), 1),
            "model": inspected.total().sparsity,
        },
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


def _check_zeros(run: Run, pruned: Mapping[str, PrunedTensor], its: Iterable[TensorInspection]) -> None:
    """`CheckpointError` where the journal says of an earlier run's tensors what is not in the copy."""
    run.check_said(pruned)
    for tensor in its:
        found, zeros = pruned[tensor.name], tensor.zeros or 0
        if round(found.sparsity * tensor.numel) != zeros or found.removed > zeros:
            raise run.wrong("blocks", f"says of {printable(tensor.name)} other zeros than it has")
