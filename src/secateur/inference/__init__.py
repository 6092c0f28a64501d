"""Layers that skip what was removed, put in a model where they are measured to be faster."""

from secateur.inference.blocks import Absorbed, FusedBlock, FusedSequential
from secateur.inference.convolution import (
    BlockConv1d,
    BlockConv2d,
    ChannelsLastMaxPool2d,
    FoldedConv2d,
    SparseConv1d,
    SparseConv2d,
)
from secateur.inference.files import PackedFile, load_packed, save_packed
from secateur.inference.linear import (
    BlockLinear,
    GroupedLinear,
    Pointwise,
    SemiStructuredLinear,
    SparseLinear,
    WindowLinear,
)
from secateur.inference.packing import PackedLayer, Packing, pack
from secateur.support import to_int8

__all__ = [
    "Absorbed",
    "BlockConv1d",
    "BlockConv2d",
    "BlockLinear",
    "ChannelsLastMaxPool2d",
    "FoldedConv2d",
    "FusedBlock",
    "FusedSequential",
    "GroupedLinear",
    "PackedFile",
    "PackedLayer",
    "Packing",
    "Pointwise",
    "SemiStructuredLinear",
    "SparseConv1d",
    "SparseConv2d",
    "SparseLinear",
    "WindowLinear",
    "load_packed",
    "pack",
    "save_packed",
    "to_int8",
]
