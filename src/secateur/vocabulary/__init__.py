"""`shrink_vocabulary`: removes tokens from a tokenizer, with their rows of the model's tensors."""

from secateur.vocabulary.module import shrink_vocabulary as shrink_vocabulary
from secateur.vocabulary.result import Sample as Sample
from secateur.vocabulary.result import ShrunkVocabulary as ShrunkVocabulary
from secateur.vocabulary.result import Unseen as Unseen
