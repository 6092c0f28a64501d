"""Compressed checkpoints: a pruned model's zeros leave its files, and every bit of what is kept comes back."""

from secateur.storage.compressed_files import FREE, JUSTIFIED
from secateur.storage.saving import (
    CompressedCheckpoint,
    Compression,
    expand_checkpoint,
    load_compressed,
    save_compressed,
)

__all__ = [
    "CompressedCheckpoint",
    "Compression",
    "FREE",
    "JUSTIFIED",
    "expand_checkpoint",
    "load_compressed",
    "save_compressed",
]
