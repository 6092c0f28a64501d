"""Prune PyTorch models: decide which weights go, remove them, and leave a model that is smaller and faster.

``from secateur import prune`` replaces ``from torch.nn.utils import prune``; `sparsify` is the one-call verb; every
kind of pruning is the same five steps: score, pool, count, keep, spread.
"""

from secateur import allocation, criteria, patterns, prune, regrowth, schedules, solvers
from secateur.blockwise import oneshot
from secateur.calibration import read_calibration
from secateur.checkpoint_shrinking import shrink_checkpoint
from secateur.checkpoint_sparsification import sparsify_checkpoint
from secateur.inference import pack
from secateur.masks import apply_, attach, detach, make_masks, sparsity_of
from secateur.patterns import NM, Block, Channels, GroupedColumns, Rows, Unstructured
from secateur.plans import load_shrunken, save_shrunken
from secateur.proof import verify_shrunken
from secateur.pruner import Pruner
from secateur.shrinking import shrink
from secateur.sparsification import sparsify
from secateur.storage import load_compressed, save_compressed
from secateur.verification import verify_checkpoint
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
