"""Prune PyTorch models: decide which weights go, remove them, and leave a model that is smaller and faster.

``from secateur import prune`` replaces ``from torch.nn.utils import prune``; `sparsify` is the one-call verb; every
kind of pruning is the same five steps: score, pool, count, keep, spread.
"""

from secateur import criteria, patterns, prune, schedules
from secateur.allocation import erk, everywhere, uniform
from secateur.criteria import elementwise, lamp, magnitude
from secateur.masks import apply_, attach, detach, iterate_masks, make_masks, sparsity_of
from secateur.patterns import NM, Block, Channels, Rows, Unstructured, parse
from secateur.sparsification import sparsify
from secateur.targets import find_targets
from secateur.version import __version__

__all__ = [
    "Block",
    "Channels",
    "NM",
    "Rows",
    "Unstructured",
    "__version__",
    "apply_",
    "attach",
    "criteria",
    "detach",
    "elementwise",
    "erk",
    "everywhere",
    "find_targets",
    "iterate_masks",
    "lamp",
    "magnitude",
    "make_masks",
    "parse",
    "patterns",
    "prune",
    "schedules",
    "sparsify",
    "sparsity_of",
    "uniform",
]
