"""`shrink_vocabulary`: removes tokens from a tokenizer, with their rows of the model's tensors."""

from secateur.vocabulary.module import shrink_vocabulary
from secateur.vocabulary.result import Sample, ShrunkVocabulary, Unseen

__all__ = [
    "Sample",
    "ShrunkVocabulary",
    "Unseen",
    "shrink_vocabulary",
]
