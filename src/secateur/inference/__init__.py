"""Layers that skip what was removed, put in a model where they are measured to be faster."""

from secateur.inference.files import PackedFile, load_packed, save_packed
from secateur.inference.layers import BlockLinear, GroupedLinear, Pointwise, SparseLinear, WindowLinear
from secateur.inference.packing import PackedLayer, Packing, pack
from secateur.inference.semi_structured import SemiStructuredLinear

__all__ = [
    "BlockLinear",
    "GroupedLinear",
    "PackedFile",
    "PackedLayer",
    "Packing",
    "Pointwise",
    "SemiStructuredLinear",
    "SparseLinear",
    "WindowLinear",
    "load_packed",
    "pack",
    "save_packed",
]
