"""What is in a checkpoint and what was done to it, as columns and rows: for plain text, and for a terminal.

Law: what ``print(result)`` shows and what the command shows are the same numbers in the same words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from secateur.checkpoints.record import RECORD
from secateur.checkpoints.sheets import patterns_text, shape_text
from secateur.support import Part, Rows, bytes_text, percent, percents, printable

if TYPE_CHECKING:
    from secateur.checkpoints.inspection import Inspection, TensorInspection
    from secateur.checkpoints.pruning import CheckpointSparsification
    from secateur.checkpoints.verification import Verification

__all__ = ["inspected_parts", "inspected_totals", "left_alone_rows", "pruned_rows", "verified_parts"]


def pruned_rows(done: CheckpointSparsification) -> Rows:
    """How much was pruned, and how much of the whole that is."""
    total, chosen = done.inspection.total(), set(done.targets)
    count = sum(tensor.numel for tensor in done.inspection.tensors if tensor.name in chosen)
    return Rows(
        ("", ">Tensors", ">Parameters", ">Zeros"),
        [
            ("pruned", f"{len(done.targets):,}", f"{count:,}", percent(done.target_sparsity)),
            ("whole model", f"{total.tensors:,}", f"{total.parameters:,}", percent(total.sparsity)),
        ],
    )


def left_alone_rows(done: CheckpointSparsification) -> Rows:
    """A table of the tensors left alone: a row for each reason, with its largest tensor."""
    sizes = {tensor.name: tensor.numel for tensor in done.inspection.tensors}
    return Rows(
        ("Left alone", ">Tensors", ">Parameters", "~such as"),
        [
            (why, f"{len(names):,}", f"{sum(sizes[name] for name in names):,}", max(names, key=sizes.__getitem__))
            for why, names in done.left_alone.items()
        ],
    )


def verified_parts(found: Verification) -> Iterator[Part]:
    """What is wrong, what could not be checked, and the verdict."""
    yield from (f"wrong: {printable(problem, 1000)}" for problem in found.problems)
    yield from (f"unchecked: {printable(what, 1000)}" for what in found.unchecked)
    if found.problems or found.unchecked:
        yield ""
    if any(tensor.zeros is not None for tensor in found.tensors):  # of a shrunken model no zeros are counted
        yield _verified_rows(found)
    yield ""
    pattern = f", pattern {found.pattern}" if found.pattern else ""
    compared = f", {found.files} other files compared" if found.source else ""
    verdict = "holds" if found.ok else f"does not hold: {len(found.problems)} problems"
    yield f"{printable(str(found.path))}: what {RECORD} claims {verdict}{pattern}{compared}."


def _verified_rows(found: Verification) -> Rows:
    """How many tensors the record calls pruned, and how sparse they are; and those left alone, where it says how many
    zeros they have."""
    alone = [tensor for tensor in found.tensors if tensor.alone or tensor.claimed is None]
    counted = [tensor for tensor in alone if tensor.claimed is not None]
    rows = [
        ("pruned", f"{len(found.tensors) - len(alone):,}", percent(found.target_sparsity)),
        ("left alone", f"{len(alone) - len(counted):,}", None),
    ]
    if counted:
        size = sum(math.prod(tensor.shape) for tensor in counted)
        zeros = sum(tensor.zeros or 0 for tensor in counted)
        rows.insert(1, ("left alone, zeros counted", f"{len(counted):,}", percent(zeros / size if size else None)))
    return Rows(("", ">Tensors", ">Zeros"), rows)


def inspected_parts(inspection: Inspection, *, group: bool = False) -> Iterator[Part]:
    """The printed tables of an `Inspection`: a row for each tensor, or kind of tensors, and the totals."""
    rows = [_row(name, members) for name, members in _grouped(inspection.tensors, group)]
    yield Rows(("~Tensor", "Shape", "Dtype", ">Size", ">Zeros", "~Patterns"), rows)
    yield ""
    yield from inspected_totals(inspection)


def inspected_totals(inspection: Inspection) -> Iterator[Part]:
    """The totals, and where they were found."""
    dtypes = list(inspection.by_dtype.items())
    totals = [
        (
            dtype,
            f"{total.tensors:,}",
            f"{total.parameters:,}",
            bytes_text(total.nbytes),
            percent(total.sparsity) if total.counted or not total.parameters else "?",
        )
        for dtype, total in ([*dtypes, ("all", inspection.total())] if len(dtypes) != 1 else dtypes)
    ]
    yield Rows(("Total", ">Tensors", ">Parameters", ">Size", ">Zeros"), totals)
    files = len(inspection.files)
    where = inspection.files[0] if files == 1 else f"{files} files"
    yield ""
    yield f"{printable(str(inspection.path))}: {printable(where)}"


def _row(name: str, members: Sequence[TensorInspection]) -> tuple[str, ...]:
    first = members[0]
    return (
        printable(name, 1000),
        shape_text(first),
        first.dtype,
        bytes_text(sum(tensor.nbytes for tensor in members)),
        percents([tensor.sparsity for tensor in members], opaque=first.zeros is None),
        patterns_text(first),
    )


def _grouped(tensors: Sequence[TensorInspection], group: bool) -> Iterator[tuple[str, list[TensorInspection]]]:
    if not group:
        yield from ((tensor.name, [tensor]) for tensor in tensors)
        return
    groups: dict[tuple[Any, ...], list[TensorInspection]] = {}
    for tensor in tensors:
        key = (re.sub("[0-9]+", "*", tensor.name), tensor.shape, tensor.dtype, tensor.pattern)
        groups.setdefault(key, []).append(tensor)
    for key, members in groups.items():
        yield (f"{key[0]} (x{len(members)})" if len(members) > 1 else members[0].name), members
