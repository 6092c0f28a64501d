"""Compressed checkpoints: a pruned model's zeros leave its files, and every bit of what is kept comes back."""

from secateur.storage.compressed_files import FREE as FREE
from secateur.storage.compressed_files import JUSTIFIED as JUSTIFIED
from secateur.storage.expanding import expand_checkpoint as expand_checkpoint
from secateur.storage.loading import CompressedCheckpoint as CompressedCheckpoint
from secateur.storage.loading import load_compressed as load_compressed
from secateur.storage.saving import Compression as Compression
from secateur.storage.saving import save_compressed as save_compressed
