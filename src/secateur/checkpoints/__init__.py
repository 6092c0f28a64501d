"""Safetensors on disk: read, written, inspected, pruned and verified, a tensor at a time."""

from secateur.checkpoints import slicing
from secateur.checkpoints.claims import HINT, about_config, about_parameters, claims_of, is_made_by
from secateur.checkpoints.families import blaming_config, family_of, meta_model_of, most_parameters, parameters_counted
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
from secateur.checkpoints.slicing import (
    Compared,
    Cuts,
    Hashed,
    index_text,
    nbytes_of_cut,
    pieces_of_cut,
    rows_of,
    sha256_of,
    shape_of_cut,
    write_bytes,
)
from secateur.checkpoints.tables import left_alone_rows, pruned_rows, verified_rows
from secateur.checkpoints.verification import Verification, VerifiedTensor, verify_checkpoint
from secateur.checkpoints.writing import copy_tree, files_below, new_directory, write_tensor

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointSparsification",
    "Compared",
    "Cuts",
    "HEADER_KEY",
    "HINT",
    "Hashed",
    "Inspection",
    "MAX_HEADER",
    "NO_WEIGHTS",
    "OTHER_WEIGHTS",
    "RECORD",
    "TensorEntry",
    "TensorInspection",
    "Verification",
    "VerifiedTensor",
    "about_config",
    "about_parameters",
    "blaming_config",
    "check_arguments",
    "check_places",
    "claims_of",
    "copy_tree",
    "dtype_word",
    "family_of",
    "files_below",
    "index_text",
    "inspect_checkpoint",
    "is_made_by",
    "left_alone_rows",
    "meta_model_of",
    "most_parameters",
    "nbytes_of_cut",
    "new_directory",
    "open_checkpoint",
    "parameters_counted",
    "parse_header",
    "parse_json",
    "pieces_of_cut",
    "previous_record",
    "pruned_rows",
    "read_header",
    "read_json",
    "record_text",
    "rows_of",
    "sha256_of",
    "shape_of_cut",
    "slicing",
    "sparsify_checkpoint",
    "verified_rows",
    "verify_checkpoint",
    "write_bytes",
    "write_header",
    "write_tensor",
]
