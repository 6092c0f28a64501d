"""Prunes a checkpoint directory without its model code, tensor by tensor, into a new directory.

Law: the output is a copy of the input in which some weights' bytes are zero and nothing else differs; it appears under
its name complete or not at all.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.allocation import Allocation, check_sparsity
from secateur.checkpoints.inspect import Inspection, Layout, TensorInspection, inspect_checkpoint, layout_of
from secateur.checkpoints.reading import Checkpoint, TensorEntry, open_checkpoint
from secateur.checkpoints.record import RECORD, check_places, previous_record, record_text
from secateur.checkpoints.results import pruned, tensor_table
from secateur.checkpoints.writing import copy_tree, new_directory, other_weights, write_tensor
from secateur.patterns import Pattern, word_of
from secateur.pipeline import apply_, iterate_masks
from secateur.report import Reported
from secateur.support import (
    LazyTensors,
    Part,
    described,
    matched,
    matches,
    printable,
    restoring_generators,
    seed_torch,
    track,
)
from secateur.targets import VECTORS, check_lengths, kinds_by_name


@dataclass(frozen=True)
class CheckpointSparsification(Reported):
    """The result of `sparsify` of a directory; prints as a table: ``inspection`` is measured on the written files.

    ``left_alone`` maps each reason to the tensors; ``stale`` are files that were copied and still hold dense weights.
    """

    out: Path
    inspection: Inspection
    targets: tuple[str, ...]
    left_alone: Mapping[str, tuple[str, ...]]
    stale: tuple[Path, ...]
    seconds: float

    @property
    def target_sparsity(self) -> float:
        """The fraction of zeros in the tensors that were pruned."""
        return sum(tensor.zeros or 0 for tensor in self.pruned) / sum(tensor.numel for tensor in self.pruned)

    @property
    def pruned(self) -> list[TensorInspection]:
        """The tensors that were pruned, as they are now."""
        chosen = set(self.targets)
        return [tensor for tensor in self.inspection.tensors if tensor.name in chosen]

    def content(self) -> Iterator[Part]:
        """What is printed, and a row for each tensor, with the reason where it was left alone."""
        why = {name: reason for reason, names in self.left_alone.items() for name in names}
        yield from self.summary()
        yield tensor_table(self.inspection.tensors, why)

    def summary(self) -> Iterator[Part]:
        """How much was pruned, what was left alone and why, and where it is."""
        return pruned(self)


def sparsify_files(
    source: Path,
    out: Path,
    sparsity: float | None,
    pattern: Pattern,
    criterion: Callable[..., Tensor],
    allocate: Allocation,
    include: str | Iterable[str] | None,
    exclude: str | Iterable[str] | None,
    seed: int,
) -> CheckpointSparsification:
    """`sparsify` of a directory into another one, one tensor and its mask in memory at a time."""
    started = time.monotonic()
    _check_sparsity(sparsity, pattern)
    check_places(source, out)
    checkpoint = open_checkpoint(source)
    previous = previous_record(source)
    targets, left_alone = choose_targets(checkpoint, pattern, include=include, exclude=exclude)
    weights = _Weights(checkpoint, targets)
    shapes = {name: entry.shape for name, entry in checkpoint.entries.items()}
    with restoring_generators(), new_directory(out) as temporary:
        seed_torch(seed)
        masks = iterate_masks(weights, sparsity, pattern=pattern, criterion=criterion, allocate=allocate)
        first = next(masks)  # counts are ready now: what can be refused is refused before the copy
        copied = list(track(copy_tree(source, temporary), "copying"))
        pruned = itertools.chain([first], masks)
        del first
        removed: dict[str, int] = {}
        for name, mask in track(pruned, "pruning", total=len(targets)):
            entry = checkpoint.entries[name]
            tensor = weights.stored(name)
            removed[name] = mask.numel() - int(mask.sum())
            stored = {name: weights.layouts[name].from_rows(mask).contiguous()}
            check_lengths(shapes, stored)
            apply_({name: tensor}, stored)
            write_tensor(temporary / entry.path.relative_to(checkpoint.root), entry, tensor)
            del tensor, mask, stored
        inspection = inspect_checkpoint(temporary)
        others = other_weights(checkpoint)
        stale = tuple(path for path in copied if path in others)
        done = CheckpointSparsification(out, inspection, tuple(targets), left_alone, stale, time.monotonic() - started)
        how = {
            "criterion": described(criterion),
            "allocate": None if pattern.density is not None else described(allocate),
            "pattern": word_of(pattern),
        }
        _write_record(temporary / RECORD, done, how, removed, previous)
    return done


def choose_targets(
    checkpoint: Checkpoint,
    pattern: Pattern,
    *,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """The names to prune, and ``{reason: names}`` of all others.

    By default: floating-point tensors of two or more dimensions, but for what `secateur.targets.kinds_by_name` leaves
    alone. ``include`` replaces these rules by names; vectors, integers and opaque tensors stay out all the same.
    ``exclude`` wins over both.

    Raises:
        ValueError: a glob matches nothing, an ``include`` matches nothing that can be pruned, or nothing is left.
    """
    include, exclude = _globs(include), _globs(exclude)
    included = matched(include, checkpoint, "tensor") or set()
    excluded = matched(exclude, checkpoint, "tensor") or set()
    kinds = kinds_by_name({name: entry.shape for name, entry in checkpoint.entries.items()})
    targets: list[str] = []
    left_alone: dict[str, list[str]] = {}
    why: dict[str, str] = {}
    for name, entry in checkpoint.entries.items():
        if name in excluded:
            reason: str | None = "excluded"
        elif include and name not in included:
            reason = "not included"
        else:
            reason = _unprunable(entry, pattern, layout_of(name, entry.shape, checkpoint.config), bool(include))
            if reason is None and not include:
                reason = kinds.get(name)
        if reason is None:
            targets.append(name)
        else:
            left_alone.setdefault(reason, []).append(name)
            why[name] = reason
    for glob in include:
        asked = [name for name in checkpoint if matches(name, [glob])]
        if all(why.get(name, "excluded") != "excluded" for name in asked):
            example = f"{printable(asked[0])}: {why[asked[0]]}"
            raise ValueError(f"include {glob!r} matches nothing that can be pruned ({example}).")
    if not targets:
        reasons = ", ".join(f"{len(names)} {reason}" for reason, names in left_alone.items()) or "no tensors"
        raise ValueError(f"{checkpoint.root}: nothing to prune ({reasons}). Name tensors with include.")
    return targets, {reason: tuple(names) for reason, names in left_alone.items()}


def _unprunable(entry: TensorEntry, pattern: Pattern, layout: Layout, asked: bool) -> str | None:
    if entry.torch_dtype is None:
        return f"of dtype {entry.dtype}, which cannot be read"
    if entry.dtype.startswith("F8"):
        if not asked:
            return "8-bit floats, which need their scales to be ranked"
    elif not entry.is_floating_point:
        return "not floating-point"
    if len(entry.shape) < 2:
        return VECTORS
    if not entry.numel:
        return "empty"
    try:
        pattern.pool(torch.empty(layout.rows_shape, device="meta"))
    except ValueError:
        return f"of a shape that does not fit {word_of(pattern)}"
    return None


class _Weights(LazyTensors):
    """The targets as (outputs, inputs, ...), read on access; ``shapes`` without reading."""

    def __init__(self, checkpoint: Checkpoint, names: list[str]) -> None:
        self.checkpoint = checkpoint
        self.layouts = {name: layout_of(name, checkpoint.entries[name].shape, checkpoint.config) for name in names}
        self.shapes = {name: torch.Size(layout.rows_shape) for name, layout in self.layouts.items()}

    def stored(self, name: str) -> Tensor:
        """The tensor as it lies in the file."""
        return self.checkpoint[name]

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.stored(name)
        if tensor.element_size() == 1:
            tensor = tensor.float()  # torch does no arithmetic on 8-bit floats
        return self.layouts[name].to_rows(tensor)

    @property
    def known(self) -> Mapping[str, Layout]:
        return self.layouts


def _check_sparsity(sparsity: float | None, pattern: Pattern) -> None:
    if sparsity is not None:
        check_sparsity(sparsity)
    removed = sparsity if pattern.density is None else 1 - pattern.density
    if removed is None:
        raise ValueError(f"the pattern {word_of(pattern)} needs a sparsity: the fraction to remove, in [0, 1).")
    if removed == 1:
        raise ValueError("sparsity 1 would remove every weight; ask for less than 1.")
    if sparsity is not None and abs(sparsity - removed) > 1e-9:
        raise ValueError(
            f"{word_of(pattern)} removes {removed:g} of the weights, not {sparsity:g}; leave the sparsity out."
        )


def _globs(globs: str | Iterable[str] | None) -> tuple[str, ...]:
    return (globs,) if isinstance(globs, str) else tuple(globs or ())


def _write_record(
    path: Path,
    done: CheckpointSparsification,
    how: Mapping[str, Any],
    removed: Mapping[str, int],
    previous: Mapping[str, Any] | None,
) -> None:
    chosen = set(done.targets)
    found = {
        **how,
        "sparsity": {"targets": done.target_sparsity, "model": done.inspection.total().sparsity},
        "pruned": {tensor.name: tensor.sparsity for tensor in done.inspection.tensors if tensor.name in chosen},
        "removed": dict(removed),
        "left_alone": {reason: list(names) for reason, names in done.left_alone.items()},
    }
    path.write_text(record_text("sparsify", found, previous=previous), "utf-8")
