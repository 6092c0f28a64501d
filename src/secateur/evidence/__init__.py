"""What data says about weights: collection, gradients, and the sums of what flows through a layer."""

from secateur.evidence.collection import collect
from secateur.evidence.statistics import Sums, add_gram, in_range, mirrored, sum_over_ranks
from secateur.evidence.vocabulary import VOCABULARY, needs

__all__ = ["Sums", "VOCABULARY", "add_gram", "collect", "in_range", "mirrored", "needs", "sum_over_ranks"]
