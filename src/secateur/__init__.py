"""Prune PyTorch models: decide which weights go, remove them, and leave a model that is smaller and faster.

``from secateur import prune`` replaces ``from torch.nn.utils import prune``; `sparsify` is the one-call verb; every
kind of pruning is the same five steps: score, pool, count, keep, spread.
"""

from secateur import criteria, patterns, prune, regrowth, schedules
from secateur.allocation import erk, everywhere, uniform
from secateur.batchnorm import reestimate_batchnorm
from secateur.checkpoint_sparsification import sparsify_checkpoint
from secateur.masks import apply_, attach, detach, make_masks, masks_from_zeros, sparsity_of
from secateur.patterns import NM, Block, Channels, Rows, Unstructured
from secateur.plans import load_shrunken, save_shrunken
from secateur.proof import verify_shrunken
from secateur.pruner import Pruner
from secateur.shrinking import shrink
from secateur.sparsification import sparsify
from secateur.targets import find_targets
from secateur.version import __version__

__all__ = [
    "Block",
    "Channels",
    "NM",
    "Pruner",
    "Rows",
    "Unstructured",
    "__version__",
    "apply_",
    "attach",
    "criteria",
    "detach",
    "erk",
    "everywhere",
    "find_targets",
    "load_shrunken",
    "make_masks",
    "masks_from_zeros",
    "patterns",
    "prune",
    "reestimate_batchnorm",
    "regrowth",
    "save_shrunken",
    "schedules",
    "shrink",
    "sparsify",
    "sparsify_checkpoint",
    "sparsity_of",
    "uniform",
    "verify_shrunken",
]
