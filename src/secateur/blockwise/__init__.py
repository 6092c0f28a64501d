"""Transformers pruned block by block, and other networks layer by layer, with calibration data: `oneshot`."""

from secateur.blockwise.blaming import naming_batch, naming_batches
from secateur.blockwise.calibration import longest_sequence, read_calibration
from secateur.blockwise.directory import BlockFiles
from secateur.blockwise.finding import find_blocks, parts_of
from secateur.blockwise.in_directory import DirectoryWalk
from secateur.blockwise.in_memory import InMemory, refuse_repeated, walk_model
from secateur.blockwise.jobs import Job, Layer, Pruned, Solved
from secateur.blockwise.journal import LOCK, Unfinished, locked, publish, unfinished, unfinished_copy, unfinished_folder
from secateur.blockwise.observation import find_next, in_place, prepared, store
from secateur.blockwise.outcome import OneShot
from secateur.blockwise.pairs import Meeting, Pairs, is_turned
from secateur.blockwise.processes import barrier, gathered, handed_out, of_the_first, rank_and_world
from secateur.blockwise.products import AllMetError, Inputs, Met, Piece, Products, Rows, Tokens
from secateur.blockwise.pruning import oneshot
from secateur.blockwise.replay import LostOutputError, Outputs, Replay
from secateur.blockwise.request import RunAlong, digest, held_batches
from secateur.blockwise.sheets import pruned_blocks_sheets
from secateur.blockwise.skeleton import build_on_meta, parameters_on_meta
from secateur.blockwise.slopes import RunAgain, divergence, slopes, unexplained
from secateur.blockwise.solving import MatrixJob, Solve
from secateur.blockwise.targets import block_of, choose_targets, full_name
from secateur.blockwise.walk import Weights, run_through, with_all_outputs
from secateur.checkpoints import blaming_config, check_new, family_of, parameters_counted

__all__ = [
    "AllMetError",
    "BlockFiles",
    "DirectoryWalk",
    "InMemory",
    "Inputs",
    "Job",
    "LOCK",
    "Layer",
    "LostOutputError",
    "MatrixJob",
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
    "RunAgain",
    "RunAlong",
    "Solve",
    "Solved",
    "Tokens",
    "Unfinished",
    "Weights",
    "barrier",
    "blaming_config",
    "block_of",
    "build_on_meta",
    "check_new",
    "choose_targets",
    "digest",
    "divergence",
    "family_of",
    "find_blocks",
    "find_next",
    "full_name",
    "gathered",
    "handed_out",
    "held_batches",
    "in_place",
    "is_turned",
    "locked",
    "longest_sequence",
    "naming_batch",
    "naming_batches",
    "of_the_first",
    "oneshot",
    "parameters_counted",
    "parameters_on_meta",
    "parts_of",
    "prepared",
    "pruned_blocks_sheets",
    "publish",
    "rank_and_world",
    "read_calibration",
    "refuse_repeated",
    "run_through",
    "slopes",
    "store",
    "unexplained",
    "unfinished",
    "unfinished_copy",
    "unfinished_folder",
    "walk_model",
    "with_all_outputs",
]
