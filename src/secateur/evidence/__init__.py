"""What data says about weights: collection, gradients, and the sums of what flows through a layer."""

from secateur.evidence.collection import collect
from secateur.evidence.statistics import Sums, add_gram, mirrored, sum_over_ranks
from secateur.evidence.vocabulary import VOCABULARY, needs

__all__ = ["Sums", "VOCABULARY", "add_gram", "collect", "mirrored", "needs", "sum_over_ranks"]
