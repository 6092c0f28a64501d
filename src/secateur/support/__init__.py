"""What every room uses, each once: files, sharding, ownership, running a model, progress."""

from secateur.support.files import naming, whole_file, write_whole
from secateur.support.ownership import other_owners, replicating_group, sharded_parameter
from secateur.support.progress import PATIENCE, track
from secateur.support.running import (
    Forward,
    Loss,
    device_of,
    loss_of,
    mapped,
    moved,
    repeatable,
    run,
    unchanged,
    unwrapped,
)
from secateur.support.sharding import count_nonzero, is_sharded, laid_out, local, whole

__all__ = [
    "Forward",
    "Loss",
    "PATIENCE",
    "count_nonzero",
    "device_of",
    "is_sharded",
    "laid_out",
    "local",
    "loss_of",
    "mapped",
    "moved",
    "naming",
    "other_owners",
    "repeatable",
    "replicating_group",
    "run",
    "sharded_parameter",
    "track",
    "unchanged",
    "unwrapped",
    "whole",
    "whole_file",
    "write_whole",
]
