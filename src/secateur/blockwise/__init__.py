"""Transformers pruned block by block with calibration data: `oneshot`, in memory and from a directory."""

from secateur.blockwise.calibration import read_calibration
from secateur.blockwise.jobs import Job, Layer, Pruned, Solved
from secateur.blockwise.finding import find_blocks
from secateur.blockwise.in_memory import walk_model
from secateur.blockwise.outcome import OneShot
from secateur.blockwise.products import Met, Piece
from secateur.blockwise.pruning import oneshot
from secateur.blockwise.skeleton import blaming_config, build_on_meta, family_of, parameters_counted
from secateur.blockwise.slopes import slopes

__all__ = [
    "Job",
    "Layer",
    "Met",
    "OneShot",
    "Piece",
    "Pruned",
    "Solved",
    "blaming_config",
    "build_on_meta",
    "family_of",
    "find_blocks",
    "oneshot",
    "parameters_counted",
    "read_calibration",
    "slopes",
    "walk_model",
]
