"""Units that physically leave: what to take, the plan, carrying it out, and the proof; `shrink`."""

from secateur.shrinking.branches import KEPT
from secateur.shrinking.configuration import Configured
from secateur.shrinking.directory import CheckpointShrinking, meta_model_of, shrink_checkpoint
from secateur.shrinking.module import Shrunk, shrink
from secateur.shrinking.plan import load_shrunken, plans_of, save_shrunken
from secateur.shrinking.proof import verify_shrunken

__all__ = [
    "CheckpointShrinking",
    "Configured",
    "KEPT",
    "Shrunk",
    "load_shrunken",
    "meta_model_of",
    "plans_of",
    "save_shrunken",
    "shrink",
    "shrink_checkpoint",
    "verify_shrunken",
]
