"""Layers that skip what was removed, put in a model where they are measured to be faster."""

from secateur.inference.packing import (
    BlockLinear,
    GroupedLinear,
    PackedLayer,
    Packing,
    Pointwise,
    SparseLinear,
    WindowLinear,
    load_packed,
    pack,
    save_packed,
)

__all__ = [
    "BlockLinear",
    "GroupedLinear",
    "PackedLayer",
    "Packing",
    "Pointwise",
    "SparseLinear",
    "WindowLinear",
    "load_packed",
    "pack",
    "save_packed",
]
