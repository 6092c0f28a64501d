"""Which entries are the k largest: of a row, of a tensor, of many tensors that are never joined, over ranks."""

from secateur.selection.overall import counts_kept_overall as counts_kept_overall
from secateur.selection.overall import keep_largest_overall as keep_largest_overall
from secateur.selection.rows import keep_largest as keep_largest
from secateur.selection.sizes import in_threads as in_threads
from secateur.selection.sources import LazyScores as LazyScores
from secateur.selection.sources import comparable as comparable
from secateur.selection.sources import part_of as part_of
from secateur.selection.sources import refuse_meta as refuse_meta
from secateur.selection.sources import removed_lowest as removed_lowest
