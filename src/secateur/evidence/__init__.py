"""What data says about weights: collection, gradients, and the sums of what flows through a layer."""

from secateur.evidence.collection import VOCABULARY, collect, needs

__all__ = ["VOCABULARY", "collect", "needs"]
