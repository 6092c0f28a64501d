"""Compressed checkpoints: a pruned model's zeros leave its files, and every bit of what is kept comes back."""

from secateur.storage.compressed_files import FREE, JUSTIFIED
from secateur.storage.expanding import expand_checkpoint
from secateur.storage.loading import CompressedCheckpoint, load_compressed
from secateur.storage.saving import Compression, save_compressed

__all__ = [
    "CompressedCheckpoint",
    "Compression",
    "FREE",
    "JUSTIFIED",
    "expand_checkpoint",
    "load_compressed",
    "save_compressed",
]
