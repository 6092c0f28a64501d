"""Transformers pruned block by block, and other networks layer by layer, with calibration data: `oneshot`."""

from secateur.blockwise.calibration import read_calibration
from secateur.blockwise.finding import find_blocks, parts_of
from secateur.blockwise.in_directory import DirectoryWalk
from secateur.blockwise.in_memory import InMemory, walk_model
from secateur.blockwise.jobs import Job, Layer, Pruned, Solved
from secateur.blockwise.journal import Unfinished, check_new, unfinished, unfinished_copy
from secateur.blockwise.observation import prepared, store
from secateur.blockwise.outcome import OneShot
from secateur.blockwise.pairs import Meeting, Pairs, is_turned
from secateur.blockwise.processes import barrier, gathered, handed_out, of_the_first, rank_and_world
from secateur.blockwise.products import AllMetError, Inputs, Met, Piece, Products, Rows, Tokens
from secateur.blockwise.pruning import oneshot
from secateur.blockwise.replay import Outputs, Replay
from secateur.blockwise.request import RunAlong, digest, held_batches
from secateur.blockwise.skeleton import build_on_meta
from secateur.blockwise.slopes import divergence, slopes
from secateur.blockwise.targets import full_name
from secateur.blockwise.walk import Weights, run_through
from secateur.checkpoints import blaming_config, family_of, parameters_counted

__all__ = [
    "AllMetError",
    "DirectoryWalk",
    "InMemory",
    "Inputs",
    "Job",
    "Layer",
    "Meeting",
    "Met",
    "OneShot",
    "Outputs",
    "Pairs",
    "Piece",
    "Products",
    "Pruned",
    "Replay",
    "Rows",
    "RunAlong",
    "Solved",
    "Tokens",
    "Unfinished",
    "Weights",
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
    "is_turned",
    "of_the_first",
    "oneshot",
    "parameters_counted",
    "parts_of",
    "prepared",
    "rank_and_world",
    "read_calibration",
    "run_through",
    "slopes",
    "store",
    "unfinished",
    "unfinished_copy",
    "walk_model",
]
