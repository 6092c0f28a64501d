"""Transformers pruned block by block, and other networks layer by layer, with calibration data: `oneshot`."""

from secateur.blockwise.blaming import naming_batches
from secateur.blockwise.calibration import read_calibration
from secateur.blockwise.finding import find_blocks, parts_of
from secateur.blockwise.in_directory import DirectoryWalk
from secateur.blockwise.in_memory import walk_model
from secateur.blockwise.jobs import Job, Layer, Pruned, Solved
from secateur.blockwise.journal import Unfinished, check_new, unfinished_copy
from secateur.blockwise.observation import in_place, prepared
from secateur.blockwise.outcome import OneShot
from secateur.blockwise.pairs import Meeting, Pairs, is_turned
from secateur.blockwise.processes import barrier, gathered, handed_out, of_the_first, rank_and_world
from secateur.blockwise.products import AllMetError, Inputs, Met, Piece, Rows, Tokens
from secateur.blockwise.pruning import oneshot
from secateur.blockwise.replay import LostOutputError, Outputs
from secateur.blockwise.request import RunAlong, digest, held_batches
from secateur.blockwise.skeleton import build_on_meta, parameters_on_meta
from secateur.blockwise.slopes import RunAgain, divergence, slopes
from secateur.blockwise.targets import full_name
from secateur.checkpoints import blaming_config, family_of, parameters_counted

__all__ = [
    "AllMetError",
    "DirectoryWalk",
    "Inputs",
    "Job",
    "Layer",
    "LostOutputError",
    "Meeting",
    "Met",
    "OneShot",
    "Outputs",
    "Pairs",
    "Piece",
    "Pruned",
    "Rows",
    "RunAgain",
    "RunAlong",
    "Solved",
    "Tokens",
    "Unfinished",
    "barrier",
    "blaming_config",
    "build_on_meta",
    "check_new",
    "digest",
    "divergence",
    "family_of",
    "find_blocks",
    "full_name",
    "gathered",
    "handed_out",
    "held_batches",
    "in_place",
    "is_turned",
    "naming_batches",
    "of_the_first",
    "oneshot",
    "parameters_counted",
    "parameters_on_meta",
    "parts_of",
    "prepared",
    "rank_and_world",
    "read_calibration",
    "slopes",
    "unfinished_copy",
    "walk_model",
]
