"""Who competes with whom: scores become a table whose rows are competitions and whose columns are units.

Law: ``spread`` is the inverse of ``pool`` on masks. What a table keeps, the mask keeps, as whole units; a table of
True spreads to a mask of True. A custom pattern is a class with ``pool``, ``spread`` and ``density``; there is
nothing to register.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from secateur.support import unknown

__all__ = ["Block", "Channels", "GroupedColumns", "NM", "Pattern", "Rows", "Unstructured", "parse", "word_of"]


class Pattern(Protocol):
    """The interface of a pattern, also of a custom one.

    >>> scores = torch.tensor([[1.0, 4.0, 2.0, 3.0]])
    >>> pattern = NM(2, 4)
    >>> pattern.pool(scores).tolist(), pattern.density
    ([[1.0, 4.0, 2.0, 3.0]], 0.5)
    >>> pattern.spread(torch.tensor([[False, True, False, True]]), scores.shape).tolist()
    [[False, True, False, True]]
    """

    @property
    def density(self) -> float | None:
        """The fraction of units that the pattern itself says to keep in each group; None: the budget says."""

    def pool(self, scores: Tensor) -> Tensor:
        """Scores of a weight's shape -> table (groups, units). ``ValueError`` if the shape does not fit.

        Also called with a tensor on the meta device, for the table's shape: operations of torch only, and no values.
        """

    def spread(self, keep: Tensor, shape: torch.Size) -> Tensor:
        """Bool table (groups, units) -> bool mask of the weight's shape."""


@dataclass(frozen=True)
class Unstructured:
    """Each weight is a unit, and all weights of a tensor compete: table (1, numel).

    >>> Unstructured().pool(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[1., 2., 3., 4.]])
    """

    @property
    def density(self) -> None:
        return None

    def pool(self, scores: Tensor) -> Tensor:
        return scores.reshape(1, -1)

    def spread(self, keep: Tensor, shape: torch.Size) -> Tensor:
        return keep.reshape(shape)


@dataclass(frozen=True)
class Rows:
    """Each weight is a unit, and the weights of one output (index of dim 0) compete: table (outputs, rest).

    Wanda's comparison group (Sun et al. 2023, arXiv:2306.11695).

    >>> Rows().pool(torch.zeros(8, 3, 5, 5)).shape
    torch.Size([8, 75])
    """

    @property
    def density(self) -> None:
        return None

    def pool(self, scores: Tensor) -> Tensor:
        if scores.dim() == 0:
            raise ValueError("a scalar has no rows.")
        return scores.reshape(scores.shape[0], -1) if scores.numel() else scores.new_zeros(scores.shape[0], 0)

    def spread(self, keep: Tensor, shape: torch.Size) -> Tensor:
        return keep.reshape(shape)


@dataclass(frozen=True)
class NM:
    """**n kept** of every m consecutive weights along an axis: table (numel / m, m).

    2:4 is what sparse tensor cores take (Mishra et al. 2021, arXiv:2104.08378). The default axis 1 runs along the
    inputs of Linear and convolution weights.

    Args:
        n: how many of each m are kept, 0 … m.
        m: how many consecutive weights compete.
        axis: the dimension they are consecutive in; negative counts from the end.

    >>> NM(2, 4).pool(torch.arange(8.0).reshape(1, 8))
    tensor([[0., 1., 2., 3.],
            [4., 5., 6., 7.]])
    """

    n: int
    m: int
    axis: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.n <= self.m or self.m < 1:
            raise ValueError(f"n:m keeps n of every m, so 0 <= n <= m and m >= 1; got {self.n}:{self.m}.")

    @property
    def density(self) -> float:
        return self.n / self.m

    def _axis(self, shape: torch.Size) -> int:
        if not -len(shape) <= self.axis < len(shape):
            raise ValueError(
                f"{self.n}:{self.m} along dimension {self.axis} needs more dimensions than {tuple(shape)}."
            )
        axis = self.axis % len(shape)
        if shape[axis] % self.m:
            side = "an input dimension" if self.axis == 1 else f"a dimension {self.axis}"
            raise ValueError(
                f"{self.n}:{self.m} needs {side} divisible by {self.m}; the shape is {tuple(shape)}. "
                "Leave it out by exclude=, or take another pattern."
            )
        return axis

    def pool(self, scores: Tensor) -> Tensor:
        return scores.movedim(self._axis(scores.shape), -1).reshape(-1, self.m)

    def spread(self, keep: Tensor, shape: torch.Size) -> Tensor:
        axis = self._axis(shape)
        moved = [size for at, size in enumerate(shape) if at != axis] + [shape[axis]]
        return keep.reshape(moved).movedim(-1, axis)


@dataclass(frozen=True)
class Block:
    """Tiles of h outputs by w inputs are units, and all tiles of a tensor compete: table (1, tiles).

    Convolution weights are seen as (outputs, inputs · kernel). Tiles at a ragged edge are smaller. A tile's score is
    the mean of its weights' scores, so that a smaller tile is not ranked lower for its size. N×1 blocks are
    ``Block(N, 1)``: of a convolution N consecutive outputs at one channel and one place of the kernel.
    `secateur.inference.pack` runs ``Block(16, 1)`` in linear layers and ``Block(4, 1)`` in convolutions faster.

    Args:
        height: outputs in a tile, >= 1.
        width: inputs in a tile, >= 1.
        reduce: ``(scores of shape (tiles, entries)) -> (tiles,)`` instead of the mean; needs tiles that divide evenly.

    >>> Block(2, 2).pool(torch.tensor([[1.0, 1.0, 6.0], [1.0, 1.0, 8.0]]))
    tensor([[1., 7.]])
    """

    height: int
    width: int
    reduce: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1:
            raise ValueError(f"a block has at least 1 output and 1 input; got {self.height}x{self.width}.")

    @property
    def density(self) -> None:
        return None

    def _tiles(self, shape: torch.Size) -> tuple[int, int, int, int]:
        """(outputs, inputs, tiles down, tiles across)"""
        if len(shape) < 2:
            raise ValueError(
                f"{self.height}x{self.width} blocks need a weight of 2 or more dimensions, not {tuple(shape)}."
            )
        outputs, inputs = shape[0], math.prod(shape[1:])
        return outputs, inputs, -(-outputs // self.height), -(-inputs // self.width)

    def pool(self, scores: Tensor) -> Tensor:
        outputs, inputs, down, across = self._tiles(scores.shape)
        matrix = _wide(scores).reshape(outputs, inputs).contiguous()  # summed in one order, whatever the layout
        ragged = (down * self.height - outputs, across * self.width - inputs)
        if any(ragged):
            matrix = torch.nn.functional.pad(matrix, (0, ragged[1], 0, ragged[0]))
        tiles = matrix.view(down, self.height, across, self.width)
        if self.reduce is not None:
            if any(ragged):
                raise ValueError(
                    f"{self.height}x{self.width} blocks with a reduction of your own must divide {outputs}x{inputs}."
                )
            return self.reduce(tiles.transpose(1, 2).reshape(down * across, -1)).reshape(1, -1)
        # rows first: the long inner dimension stays contiguous, which is what the reduction is fast on
        total = tiles.sum(1).sum(-1) if self.height > 1 else tiles.squeeze(1).sum(-1)
        if not any(ragged):
            return (total / (self.height * self.width)).reshape(1, -1)
        heights = _lengths(outputs, self.height, total.device)
        widths = _lengths(inputs, self.width, total.device)
        return (total / (heights[:, None] * widths)).reshape(1, -1)

    def spread(self, keep: Tensor, shape: torch.Size) -> Tensor:
        outputs, inputs, down, across = self._tiles(shape)
        tiles = keep.reshape(down, 1, across, 1).expand(down, self.height, across, self.width)
        return tiles.reshape(down * self.height, across * self.width)[:outputs, :inputs].reshape(shape)


@dataclass(frozen=True)
class Channels:
    """Slices along a dimension are units, and all slices of a tensor compete: table (1, channels).

    Args:
        dim: 0 for outputs, 1 for inputs, negative from the end.
        reduce: ``(scores of shape (channels, rest)) -> (channels,)``; the default is the mean. A monotone function of
            it ranks the same, so the L2 norm of channels is the criterion ``|w|²`` with the mean.

    >>> Channels(dim=1).pool(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[2., 3.]])
    """

    dim: int = 0
    reduce: Callable[[Tensor], Tensor] | None = None

    @property
    def density(self) -> None:
        return None

    def _dim(self, shape: torch.Size) -> int:
        if not -len(shape) <= self.dim < len(shape):
            raise ValueError(f"channels along dimension {self.dim} need more dimensions than {tuple(shape)}.")
        return self.dim % len(shape)

    def pool(self, scores: Tensor) -> Tensor:
        dim = self._dim(scores.shape)
        scores = _wide(scores).contiguous()  # summed in one order, whatever the layout
        if not scores.numel():
            return scores.new_zeros(1, scores.shape[dim])
        channels = scores.movedim(dim, 0).reshape(scores.shape[dim], -1)
        return (channels.mean(1) if self.reduce is None else self.reduce(channels)).reshape(1, -1)

    def spread(self, keep: Tensor, shape: torch.Size) -> Tensor:
        dim = self._dim(shape)
        along = [1] * len(shape)
        along[dim] = shape[dim]
        return keep.reshape(along).expand(shape).contiguous()


@dataclass(frozen=True)
class GroupedColumns:
    """Each group of ``outputs`` consecutive outputs keeps inputs of its own: table (groups, inputs).

    What is left is a small dense matrix for each group and the list of inputs that it reads, which any runtime
    computes fast: a gather and a matrix product (`secateur.inference.GroupedLinear`). Unlike with ``Channels(1)``
    each group chooses for itself; unlike with ``Block(outputs, 1)`` the columns of one group compete among themselves,
    so that a uniform allocation leaves every group the same number. Other allocations leave groups of different
    lengths, which are padded to the longest when packed.

    Convolution weights are seen as (outputs, inputs · kernel). A last group that is not full is smaller. A column's
    score is the mean of its weights' scores.

    Args:
        outputs: how many consecutive outputs share a choice, >= 1. Larger is faster, smaller keeps more of the weights'
            energy; powers of 2 from 16 to 256 are what hardware likes.

    >>> GroupedColumns(2).pool(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    tensor([[2., 3.],
            [5., 6.]])
    """

    outputs: int

    def __post_init__(self) -> None:
        if self.outputs < 1:
            raise ValueError(f"a group of columns has at least 1 output; got {self.outputs}.")

    @property
    def density(self) -> None:
        return None

    def _groups(self, shape: torch.Size) -> tuple[int, int]:
        """(groups, inputs)"""
        if len(shape) < 2:
            raise ValueError(
                f"columns grouped by {self.outputs} outputs need a weight of 2 or more dimensions, not {tuple(shape)}."
            )
        return -(-shape[0] // self.outputs), math.prod(shape[1:])

    def pool(self, scores: Tensor) -> Tensor:
        groups = self._groups(scores.shape)
        return Block(self.outputs, 1).pool(scores).reshape(groups)

    def spread(self, keep: Tensor, shape: torch.Size) -> Tensor:
        groups, inputs = self._groups(shape)
        rows = keep.reshape(groups, 1, inputs).expand(groups, self.outputs, inputs)
        return rows.reshape(groups * self.outputs, inputs)[: shape[0]].reshape(shape)


def parse(text: str | Pattern) -> Pattern:
    """The pattern that a word means: unstructured, rows, 2:4 (any n:m), 16x1 (any block), columns:64 (columns of any
    number of outputs, see `GroupedColumns`), channels, channels:1. A pattern is returned as it is.

    Raises:
        ValueError: the word is none of these. TypeError: it is neither a word nor a pattern.

    >>> parse("2:4")
    NM(n=2, m=4, axis=1)
    >>> parse("16x1")
    Block(height=16, width=1, reduce=None)
    >>> parse("columns:64")
    GroupedColumns(outputs=64)
    """
    if not isinstance(text, str):
        if isinstance(text, type) or not hasattr(text, "pool"):
            raise TypeError(f"a pattern is a value such as Rows(), or the word for one such as '2:4', not {text!r}.")
        return text
    word = text.strip().lower()
    if word == "unstructured":
        return Unstructured()
    if word == "rows":
        return Rows()
    if found := re.fullmatch(r"(\d+):(\d+)", word):
        return NM(int(found[1]), int(found[2]))
    if found := re.fullmatch(r"(\d+)[x×](\d+)", word):
        return Block(int(found[1]), int(found[2]))
    if found := re.fullmatch(r"columns:(\d+)", word):
        return GroupedColumns(int(found[1]))
    if found := re.fullmatch(r"channels(?::(-?\d+))?", word):
        return Channels(int(found[1] or 0))
    raise unknown(
        text, ("unstructured", "rows", "2:4 (any n:m)", "16x1 (any block)", "columns:64", "channels"), "pattern"
    )


def word_of(pattern: Pattern) -> str:
    """The word that `parse` reads as this pattern; its repr where there is none.

    >>> word_of(NM(2, 4)), word_of(Rows()), word_of(NM(2, 4, axis=0))
    ('2:4', 'rows', 'NM(n=2, m=4, axis=0)')
    """
    words = {
        Unstructured: "unstructured",
        Rows: "rows",
        NM: "{0.n}:{0.m}",
        Block: "{0.height}x{0.width}",
        GroupedColumns: "columns:{0.outputs}",
        Channels: "channels:{0.dim}",
    }
    word = words.get(type(pattern), "").format(pattern)
    return word if word and parse(word) == pattern else repr(pattern)


def _wide(scores: Tensor) -> Tensor:
    """Sums of halves are taken in float32, of integers in float64."""
    if scores.dtype in (torch.float32, torch.float64):
        return scores
    return scores.float() if scores.dtype.is_floating_point else scores.double()


def _lengths(total: int, step: int, device: torch.device) -> Tensor:
    starts = torch.arange(0, total, step, device=device)
    return torch.clamp(total - starts, max=step)
