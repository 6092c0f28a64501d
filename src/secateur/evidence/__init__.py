"""Evidence about weights from data: statistics of layers' inputs, and gradients."""

from secateur.evidence.collection import collect
from secateur.evidence.statistics import VOCABULARY, Sums, add_gram, in_range, mirrored, needs, sum_over_ranks
from secateur.evidence.unfolding import CONVOLUTIONS, RECURRENT, Patches, gates, patches_of

__all__ = [
    "CONVOLUTIONS",
    "Patches",
    "RECURRENT",
    "Sums",
    "VOCABULARY",
    "add_gram",
    "collect",
    "gates",
    "in_range",
    "mirrored",
    "needs",
    "patches_of",
    "sum_over_ranks",
]
