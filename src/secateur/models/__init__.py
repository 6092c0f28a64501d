"""The engine: a model run block by block or layer by layer, in memory or from files, with data; `oneshot`."""

from secateur.models.batches import (
    NamedTexts,
    longest_sequence,
    naming_batch,
    read_calibration,
    refuse_empty,
    with_batch_in_errors,
)
from secateur.models.blocks import block_of, choose_targets, find_blocks, full_name, parts_of
from secateur.models.files import BlockFiles, build_on_meta, loaded_model, parameters_on_meta
from secateur.models.in_directory import DirectoryWalk
from secateur.models.in_memory import InMemory, calls_of, walk_model
from secateur.models.jobs import (
    Job,
    Layer,
    Pruned,
    Solved,
)
from secateur.models.observation import find_next, in_place, prepared, store
from secateur.models.oneshot import oneshot
from secateur.models.pairs import PairedStats, ProductCall, is_turned
from secateur.models.products import AllMetError, Inputs, InputStats, Products, Rows, Tokens, WeightView
from secateur.models.replay import LostOutputError, Outputs, Replay
from secateur.models.result import OneShot
from secateur.models.slopes import RunAgain, divergence, slopes, unexplained
from secateur.models.solving import MatrixJob, RunAlong, Solve, digest, held_batches
from secateur.models.walk import Weights, run_through, with_all_outputs

__all__ = [
    "AllMetError",
    "BlockFiles",
    "DirectoryWalk",
    "InMemory",
    "InputStats",
    "Inputs",
    "Job",
    "Layer",
    "LostOutputError",
    "MatrixJob",
    "NamedTexts",
    "OneShot",
    "Outputs",
    "PairedStats",
    "ProductCall",
    "Products",
    "Pruned",
    "Replay",
    "Rows",
    "RunAgain",
    "RunAlong",
    "Solve",
    "Solved",
    "Tokens",
    "WeightView",
    "Weights",
    "block_of",
    "build_on_meta",
    "calls_of",
    "choose_targets",
    "digest",
    "divergence",
    "find_blocks",
    "find_next",
    "full_name",
    "held_batches",
    "in_place",
    "is_turned",
    "loaded_model",
    "longest_sequence",
    "naming_batch",
    "oneshot",
    "parameters_on_meta",
    "parts_of",
    "prepared",
    "read_calibration",
    "refuse_empty",
    "run_through",
    "slopes",
    "store",
    "unexplained",
    "walk_model",
    "with_all_outputs",
    "with_batch_in_errors",
]
