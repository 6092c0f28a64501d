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
from secateur.models.hosts import Host, InFiles, InMemory
from secateur.models.jobs import (
    Job,
    Layer,
    Pruned,
    Solved,
)
from secateur.models.observation import in_place, prepared
from secateur.models.oneshot import oneshot
from secateur.models.pairs import PairedStats, ProductCall, is_turned
from secateur.models.products import AllMetError, Inputs, InputStats, Products, Rows, Tokens, WeightView
from secateur.models.replay import LostOutputError, Outputs, Replay, Weights
from secateur.models.result import OneShot
from secateur.models.slopes import RunAgain, added_to, divergence, slopes, unexplained, watched
from secateur.models.solving import MatrixJob, RunAlong, Solve, digest, held_batches
from secateur.models.walk import pass_through, run_through, with_all_outputs

__all__ = [
    "AllMetError",
    "BlockFiles",
    "Host",
    "InFiles",
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
    "added_to",
    "block_of",
    "build_on_meta",
    "choose_targets",
    "digest",
    "divergence",
    "find_blocks",
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
    "pass_through",
    "prepared",
    "read_calibration",
    "refuse_empty",
    "run_through",
    "slopes",
    "unexplained",
    "watched",
    "with_all_outputs",
    "with_batch_in_errors",
]
