"""Which entries are the k largest: of a row, of a tensor, of many tensors that are never joined, over ranks."""

from secateur.selection.overall import counts_kept_overall, keep_largest_overall
from secateur.selection.rows import keep_largest
from secateur.selection.sizes import in_threads
from secateur.selection.sources import LazyScores, comparable, part_of, removed_lowest

__all__ = [
    "LazyScores",
    "comparable",
    "counts_kept_overall",
    "in_threads",
    "keep_largest",
    "keep_largest_overall",
    "part_of",
    "removed_lowest",
]
