"""What is in a checkpoint and what was done to it, as lines and tables: what was seen, pruned, verified.

Law: what is said of a tensor in one table is said of it in the others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from secateur.checkpoints.record import RECORD
from secateur.support import Column, Part, Table, bytes_text, percent, percents, printable, some

if TYPE_CHECKING:
    from secateur.checkpoints.inspect import Inspection, TensorInspection
    from secateur.checkpoints.sparsify_directory import CheckpointSparsification
    from secateur.checkpoints.verify import Verification


def inspected(inspection: Inspection, *, group: bool = False) -> Iterator[Part]:
    """A row for each tensor, or kind of tensors, the totals, and where they were found."""
    yield tensor_table(inspection.tensors, group=group)
    yield ""
    dtypes = list(inspection.by_dtype.items())
    totals = [*dtypes, ("all", inspection.total())] if len(dtypes) != 1 else dtypes
    yield Table.of(
        "total",
        totals,
        Column("Total", lambda each: each[0], key="dtype"),
        Column.count("Tensors", lambda each: each[1].tensors),
        Column.count("Parameters", lambda each: each[1].parameters),
        Column.bytes("Size", lambda each: each[1].nbytes, key="bytes"),
        Column.portion("Zeros", lambda each: each[1].sparsity, key="sparsity", none="?"),
    )
    files = len(inspection.files)
    where = inspection.files[0] if files == 1 else f"{files} files"
    yield ""
    yield f"{printable(str(inspection.path))}: {printable(where)}"


def tensor_table(
    tensors: Sequence[TensorInspection], left_alone: Mapping[str, str] | None = None, *, group: bool = False
) -> Table:
    """A row for each tensor, or kind of tensors, and the reason why one was left alone."""
    alone = left_alone or {}
    told = "The share of zeros in each tensor, in their natural order; a line joins what differs in numbers alone."
    return Table.of(
        "tensors",
        _grouped(tensors, group),
        Column.name("Tensor", lambda each: each[0], key="name"),
        Column.shape("Shape", lambda each: each[1][0].shape),
        Column("Dtype", lambda each: each[1][0].dtype),
        Column.count("Parameters", lambda each: sum(tensor.numel for tensor in each[1]), detail=True),
        Column.bytes("Size", lambda each: sum(tensor.nbytes for tensor in each[1]), key="bytes"),
        Column("Zeros", _zeros, _zeros_text, "right", "sparsity", "?", number=_share, bar=True),
        Column.name("Patterns", lambda each: patterns_text(each[1][0]), key="pattern"),
        Column("File", lambda each: each[1][0].file, detail=True),
        *([Column("Left alone", lambda each: alone.get(each[0]), detail=True)] if alone else []),
        title="Tensor by tensor",
    ).drawn("sparsity", "Where the zeros are", told, label="zeros")


def _zeros(each: tuple[str, Sequence[TensorInspection]]) -> Any:
    """The share of zeros, or of each tensor where they differ; None of a dtype of which they are not counted."""
    found = {tensor.sparsity for tensor in each[1]}
    if each[1][0].zeros is None:
        return None
    return found.pop() if len(found) == 1 and None not in found else [tensor.sparsity for tensor in each[1]]


def _zeros_text(found: Any) -> str:
    return percents(found if isinstance(found, list) else [found], opaque=False)


def _share(found: Any) -> float | None:
    return None if isinstance(found, list) else float(found)


def patterns_text(tensor: TensorInspection) -> str:
    return tensor.pattern + (" (stored inputs first)" if tensor.inputs_first and tensor.pattern else "")


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


def pruned(done: CheckpointSparsification) -> Iterator[Part]:
    """How much was pruned, from where to where, what was left alone and why, and where it is."""
    total, chosen = done.inspection.total(), done.pruned
    count = sum(tensor.numel for tensor in chosen)
    yield Table.of(
        "total",
        [
            ("pruned", len(done.targets), count, done.target_sparsity),
            ("whole model", total.tensors, total.parameters, total.sparsity),
        ],
        Column("", key="of"),
        Column.count("Tensors"),
        Column.count("Parameters"),
        Column.portion("Zeros", key="sparsity"),
    )
    least, *_, most = sorted([*chosen, *chosen], key=lambda tensor: tensor.sparsity or 0.0)
    if percent(least.sparsity) != percent(most.sparsity):
        yield ""
        yield (
            f"From {percent(least.sparsity)} ({printable(least.name)}) to {percent(most.sparsity)} "
            f"({printable(most.name)})."
        )
    if done.left_alone:
        sizes = {tensor.name: tensor.numel for tensor in done.inspection.tensors}
        yield ""
        yield Table.of(
            "left_alone",
            done.left_alone.items(),
            Column("Left alone", lambda each: each[0], key="kept_because"),
            Column.count("Tensors", lambda each: len(each[1])),
            Column.count("Parameters", lambda each: sum(sizes[name] for name in each[1])),
            Column.name("such as", lambda each: max(each[1], key=sizes.__getitem__)),
        )
    yield ""
    if done.stale:
        yield f"Copied as they were, not pruned: {some(done.stale)}."
        yield ""
    yield (
        f"Wrote {printable(str(done.out))} ({bytes_text(total.nbytes)} of weights, {done.seconds:.1f} s); "
        f"{RECORD} in it says what was done. The zeros are stored like other numbers: by themselves they make the "
        "files no smaller and the model no faster."
    )


def verified(found: Verification) -> Iterator[Part]:
    """What is wrong, what could not be checked, and the verdict."""
    yield from (f"wrong: {printable(problem, 1000)}" for problem in found.problems)
    yield from (f"unchecked: {printable(what, 1000)}" for what in found.unchecked)
    if found.problems or found.unchecked:
        yield ""
    if any(tensor.zeros is not None for tensor in found.tensors):  # of a shrunken model no zeros are counted
        yield _verified_sums(found)
    yield ""
    pattern = f", pattern {found.pattern}" if found.pattern else ""
    compared = f", {found.files} other files compared" if found.source else ""
    verdict = "holds" if found.ok else f"does not hold: {len(found.problems)} problems"
    yield f"{printable(str(found.path))}: what {RECORD} claims {verdict}{pattern}{compared}."


def verified_tensors(found: Verification) -> Table:
    """A row for each tensor, with the counted and the claimed zeros."""
    return Table.of(
        "tensors",
        found.tensors,
        Column.name("Tensor", lambda each: each.name, key="name"),
        Column.shape("Shape", lambda each: each.shape),
        Column("Dtype", lambda each: each.dtype),
        Column.count("Zeros counted", lambda each: each.zeros, key="zeros"),
        Column.count("Zeros claimed", lambda each: each.claimed, key="claimed"),
        Column("In the pattern", lambda each: each.pattern, _yes, key="pattern"),
        Column("All else as in the source", lambda each: each.unchanged, _yes, key="unchanged"),
        title="Tensor by tensor",
    ).filled()


def _yes(said: bool) -> str:
    return "yes" if said else "no"


def _verified_sums(found: Verification) -> Table:
    """How many tensors the record calls pruned, and how sparse they are; and those left alone, where it says how many
    zeros they have."""
    alone = [tensor for tensor in found.tensors if tensor.alone or tensor.claimed is None]
    counted = [tensor for tensor in alone if tensor.claimed is not None]
    rows = [
        ("pruned", len(found.tensors) - len(alone), found.target_sparsity),
        ("left alone", len(alone) - len(counted), None),
    ]
    if counted:
        size = sum(math.prod(tensor.shape) for tensor in counted)
        zeros = sum(tensor.zeros or 0 for tensor in counted)
        rows.insert(1, ("left alone, zeros counted", len(counted), zeros / size if size else None))
    return Table.of(
        "total", rows, Column("", key="of"), Column.count("Tensors"), Column.portion("Zeros", key="sparsity", none="")
    )
