"""Which entries are the k largest: of a row, of a tensor, of many tensors that are never joined, over ranks."""

from secateur.selection.largest import (
    LazyScores,
    comparable,
    counts_kept_overall,
    in_threads,
    keep_largest,
    keep_largest_overall,
    removed_lowest,
)

__all__ = [
    "LazyScores",
    "comparable",
    "counts_kept_overall",
    "in_threads",
    "keep_largest",
    "keep_largest_overall",
    "removed_lowest",
]
