"""What every room uses, each once: files, sharding, ownership, running a model, tables, timing, progress."""

from secateur.support import documents, private, records
from secateur.support.files import FULL, naming, whole_file, write_whole
from secateur.support.globs import matched, matches, no_match
from secateur.support.lazy import LazyTensors
from secateur.support.machine import processor
from secateur.support.memory import free_memory
from secateur.support.ownership import other_owners, replicating_group, sharded_parameter
from secateur.support.per_thread import ONE_AT_A_TIME, NewTensors, in_dtype
from secateur.support.progress import PATIENCE, track
from secateur.support.records import Fields, open_regular
from secateur.support.rounding import MOST_IN_INT8, rounding_scales, to_int8
from secateur.support.running import (
    Forward,
    Loss,
    check_batches,
    device_of,
    in_mode,
    loss_of,
    mapped,
    moved,
    repeatable,
    restored,
    run_batch,
    run_example,
    seed_torch,
    seeded,
    share_of,
    tensors_in,
    tensors_of,
    unchanged,
    unwrapped,
    usable,
)
from secateur.support.sharding import count_nonzero, is_sharded, laid_out, local, whole
from secateur.support.shown import Shown, html_of_parts, text_of_parts
from secateur.support.tables import Part, Rows, table, table_of
from secateur.support.text import bytes_text, percent, percents, printable
from secateur.support.timing import alternating, in_turns, ratio, ratios, seconds_of
from secateur.support.undo import Undo
from secateur.support.words import described, function_of, name_of, unknown

__all__ = [
    "FULL",
    "Fields",
    "Forward",
    "LazyTensors",
    "Loss",
    "MOST_IN_INT8",
    "NewTensors",
    "ONE_AT_A_TIME",
    "PATIENCE",
    "Part",
    "Rows",
    "Shown",
    "Undo",
    "alternating",
    "bytes_text",
    "check_batches",
    "count_nonzero",
    "described",
    "device_of",
    "documents",
    "free_memory",
    "function_of",
    "html_of_parts",
    "in_dtype",
    "in_mode",
    "in_turns",
    "is_sharded",
    "laid_out",
    "local",
    "loss_of",
    "mapped",
    "matched",
    "matches",
    "moved",
    "name_of",
    "naming",
    "no_match",
    "open_regular",
    "other_owners",
    "percent",
    "percents",
    "printable",
    "private",
    "processor",
    "ratio",
    "ratios",
    "records",
    "repeatable",
    "replicating_group",
    "restored",
    "rounding_scales",
    "run_batch",
    "run_example",
    "seconds_of",
    "seed_torch",
    "seeded",
    "sharded_parameter",
    "share_of",
    "table",
    "table_of",
    "tensors_in",
    "tensors_of",
    "text_of_parts",
    "to_int8",
    "track",
    "unchanged",
    "unknown",
    "unwrapped",
    "usable",
    "whole",
    "whole_file",
    "write_whole",
]
