"""Layers that skip what was removed, put in a model where they are measured to be faster."""

from secateur.inference.blocks import Absorbed as Absorbed
from secateur.inference.blocks import FusedBlock as FusedBlock
from secateur.inference.blocks import FusedSequential as FusedSequential
from secateur.inference.convolution import BlockConv1d as BlockConv1d
from secateur.inference.convolution import BlockConv2d as BlockConv2d
from secateur.inference.convolution import ChannelsLastMaxPool2d as ChannelsLastMaxPool2d
from secateur.inference.convolution import FoldedConv2d as FoldedConv2d
from secateur.inference.convolution import SparseConv1d as SparseConv1d
from secateur.inference.convolution import SparseConv2d as SparseConv2d
from secateur.inference.files import PackedFile as PackedFile
from secateur.inference.files import load_packed as load_packed
from secateur.inference.files import save_packed as save_packed
from secateur.inference.linear import BlockLinear as BlockLinear
from secateur.inference.linear import GroupedLinear as GroupedLinear
from secateur.inference.linear import Pointwise as Pointwise
from secateur.inference.linear import SemiStructuredLinear as SemiStructuredLinear
from secateur.inference.linear import SparseLinear as SparseLinear
from secateur.inference.linear import WindowLinear as WindowLinear
from secateur.inference.packing import PackedLayer as PackedLayer
from secateur.inference.packing import Packing as Packing
from secateur.inference.packing import pack as pack
from secateur.support import to_int8 as to_int8
