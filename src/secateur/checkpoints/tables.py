"""What was done to a checkpoint, as columns and rows: for a table of plain text, and for one in a terminal.

Law: what ``print(result)`` shows and what the command shows are the same numbers in the same words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from secateur.support import Rows, percent

if TYPE_CHECKING:
    from secateur.checkpoints.pruning import CheckpointSparsification
    from secateur.checkpoints.verification import Verification

__all__ = ["left_alone_rows", "pruned_rows", "verified_rows"]


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
    """What was left alone, by reasons, each with its largest tensor."""
    sizes = {tensor.name: tensor.numel for tensor in done.inspection.tensors}
    return Rows(
        ("Left alone", ">Tensors", ">Parameters", "~such as"),
        [
            (why, f"{len(names):,}", f"{sum(sizes[name] for name in names):,}", max(names, key=sizes.__getitem__))
            for why, names in done.left_alone.items()
        ],
    )


def verified_rows(found: Verification) -> Rows:
    """How many tensors the record calls pruned, and how sparse they are."""
    pruned = sum(tensor.claimed is not None for tensor in found.tensors)
    return Rows(
        ("", ">Tensors", ">Zeros"),
        [
            ("pruned", f"{pruned:,}", percent(found.target_sparsity)),
            ("left alone", f"{len(found.tensors) - pruned:,}", None),
        ],
    )
