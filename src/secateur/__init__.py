"""Prune PyTorch models: decide which weights go, remove them, and leave a model that is smaller and faster.

``from secateur import prune`` replaces ``from torch.nn.utils import prune``; `sparsify` is the one-call verb; every
kind of pruning is the same five steps: score, pool, count, keep, spread.
"""

from secateur import allocation, criteria, patterns, prune, regrowth, schedules, solvers
from secateur.blockwise import oneshot, read_calibration
from secateur.checkpoints import sparsify_checkpoint, verify_checkpoint
from secateur.inference import pack
from secateur.patterns import NM, Block, Channels, GroupedColumns, Rows, Unstructured
from secateur.pipeline import apply_, attach, detach, make_masks, sparsify, sparsity_of
from secateur.shrinking import load_shrunken, save_shrunken, shrink, shrink_checkpoint, verify_shrunken
from secateur.storage import load_compressed, save_compressed
from secateur.training import Pruner
from secateur.version import __version__

__all__ = [
    "Block",
    "Channels",
    "GroupedColumns",
    "NM",
    "Pruner",
    "Rows",
    "Unstructured",
    "__version__",
    "allocation",
    "apply_",
    "attach",
    "criteria",
    "detach",
    "load_compressed",
    "load_shrunken",
    "make_masks",
    "oneshot",
    "pack",
    "patterns",
    "prune",
    "read_calibration",
    "regrowth",
    "save_compressed",
    "save_shrunken",
    "schedules",
    "shrink",
    "shrink_checkpoint",
    "solvers",
    "sparsify",
    "sparsify_checkpoint",
    "sparsity_of",
    "verify_checkpoint",
    "verify_shrunken",
]
