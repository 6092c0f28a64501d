"""Tokens that leave: which, with the rows of tensors that are theirs; `shrink_vocabulary`."""

from secateur.vocabulary.directory import shrink_vocabulary_checkpoint
from secateur.vocabulary.module import shrink_vocabulary
from secateur.vocabulary.outcome import ShrunkVocabulary, Unseen, vocabulary_parts
from secateur.vocabulary.sheets import shrunken_sheets

__all__ = [
    "ShrunkVocabulary",
    "Unseen",
    "shrink_vocabulary",
    "shrink_vocabulary_checkpoint",
    "shrunken_sheets",
    "vocabulary_parts",
]
