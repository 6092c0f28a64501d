"""Layers that skip what was removed, put in a model where they are measured to be faster."""

from secateur.inference.block_convolution import BlockConv1d, BlockConv2d
from secateur.inference.block_linear import BlockLinear
from secateur.inference.blocks import FusedBlock, FusedSequential
from secateur.inference.dense import ChannelsLastMaxPool2d, FoldedConv2d
from secateur.inference.files import PackedFile, load_packed, save_packed
from secateur.inference.followers import Absorbed
from secateur.inference.grouped_linear import GroupedLinear
from secateur.inference.packing import PackedLayer, Packing, pack
from secateur.inference.pointwise import Pointwise
from secateur.inference.semi_structured import SemiStructuredLinear
from secateur.inference.sheets import layers_sheet
from secateur.inference.sparse_convolution import SparseConv1d, SparseConv2d
from secateur.inference.sparse_linear import SparseLinear
from secateur.inference.window_linear import WindowLinear
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
    "layers_sheet",
    "load_packed",
    "pack",
    "save_packed",
    "to_int8",
]
