"""What data says about weights: collection, gradients, and the sums of what flows through a layer."""

from secateur.evidence.collection import VOCABULARY, collect, needs
from secateur.evidence.statistics import add_gram, in_range, mirrored, narrowed

__all__ = ["VOCABULARY", "add_gram", "collect", "in_range", "mirrored", "narrowed", "needs"]
