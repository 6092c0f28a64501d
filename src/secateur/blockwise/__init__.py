"""Transformers pruned block by block, and other networks layer by layer, with calibration data: `oneshot`."""

from secateur.blockwise.calibration import read_calibration
from secateur.blockwise.jobs import Job, Layer, Pruned, Solved
from secateur.blockwise.outcome import OneShot
from secateur.blockwise.products import Met, Piece
from secateur.blockwise.pruning import oneshot
from secateur.blockwise.skeleton import blaming_config, build_on_meta, family_of, parameters_counted

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
    "oneshot",
    "parameters_counted",
    "read_calibration",
]
