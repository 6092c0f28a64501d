"""Transformers pruned block by block with calibration data: `oneshot`, in memory and from a directory."""

from secateur.blockwise.calibration import read_calibration
from secateur.blockwise.directory import build_on_meta
from secateur.blockwise.products import add_gram
from secateur.blockwise.pruning import Layer, OneShot, oneshot

__all__ = ["Layer", "OneShot", "add_gram", "build_on_meta", "oneshot", "read_calibration"]
