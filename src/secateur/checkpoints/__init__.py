"""Safetensors on disk: read, written, inspected, pruned and verified, a tensor at a time."""

from secateur.checkpoints.headers import (
    HEADER_KEY,
    MAX_HEADER,
    CheckpointError,
    TensorEntry,
    dtype_word,
    parse_header,
    parse_json,
    read_header,
    read_json,
    write_header,
)
from secateur.checkpoints.inspection import Inspection, TensorInspection, inspect_checkpoint
from secateur.checkpoints.pruning import NO_WEIGHTS, OTHER_WEIGHTS, CheckpointSparsification, sparsify_checkpoint
from secateur.checkpoints.reading import Checkpoint, open_checkpoint
from secateur.checkpoints.record import RECORD, check_arguments, check_places, previous_record, record_text
from secateur.checkpoints.tables import left_alone_rows, pruned_rows, verified_rows
from secateur.checkpoints.verification import Verification, VerifiedTensor, verify_checkpoint
from secateur.checkpoints.writing import copy_tree, files_below, new_directory, write_tensor

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointSparsification",
    "HEADER_KEY",
    "Inspection",
    "MAX_HEADER",
    "NO_WEIGHTS",
    "OTHER_WEIGHTS",
    "RECORD",
    "TensorEntry",
    "TensorInspection",
    "Verification",
    "VerifiedTensor",
    "check_arguments",
    "check_places",
    "copy_tree",
    "dtype_word",
    "files_below",
    "inspect_checkpoint",
    "left_alone_rows",
    "new_directory",
    "open_checkpoint",
    "parse_header",
    "parse_json",
    "previous_record",
    "pruned_rows",
    "read_header",
    "read_json",
    "record_text",
    "sparsify_checkpoint",
    "verified_rows",
    "verify_checkpoint",
    "write_header",
    "write_tensor",
]
