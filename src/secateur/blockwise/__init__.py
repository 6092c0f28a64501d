"""Transformers pruned block by block, and other networks layer by layer, with calibration data: `oneshot`."""

from secateur.blockwise.calibration import read_calibration
from secateur.blockwise.finding import find_blocks, parts_of
from secateur.blockwise.in_directory import DirectoryWalk
from secateur.blockwise.in_memory import walk_model
from secateur.blockwise.jobs import Job, Layer, Pruned, Solved
from secateur.blockwise.journal import Unfinished, check_new, unfinished_copy
from secateur.blockwise.outcome import OneShot
from secateur.blockwise.processes import barrier, handed_out, of_the_first, rank_and_world
from secateur.blockwise.products import Met, Piece, Tokens
from secateur.blockwise.pruning import oneshot
from secateur.blockwise.request import described, digest, held_batches
from secateur.blockwise.skeleton import blaming_config, build_on_meta, family_of, parameters_counted
from secateur.blockwise.slopes import slopes
from secateur.blockwise.targets import full_name

__all__ = [
    "DirectoryWalk",
    "Job",
    "Layer",
    "Met",
    "OneShot",
    "Piece",
    "Pruned",
    "Solved",
    "Tokens",
    "Unfinished",
    "barrier",
    "blaming_config",
    "build_on_meta",
    "check_new",
    "described",
    "digest",
    "family_of",
    "find_blocks",
    "full_name",
    "handed_out",
    "held_batches",
    "of_the_first",
    "oneshot",
    "parameters_counted",
    "parts_of",
    "rank_and_world",
    "read_calibration",
    "slopes",
    "unfinished_copy",
    "walk_model",
]
