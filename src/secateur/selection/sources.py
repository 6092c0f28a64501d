"""The tensors of a competition, and their scores in pieces that stay in cache.

Law: entries come in row-major order, whatever the strides, and only a piece is ever copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from secateur.selection import sizes
from secateur.selection.ranks import as_dtensor, local_of, totals
from secateur.selection.scores import LazyScores, comparable, named, refuse_scores, removed_lowest

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["Source", "competitors", "empty_mask", "pieces_of", "scored_pieces", "scores_of", "segments_of"]


@dataclass
class Source:
    """One tensor of the competition: where its scores come from, and what was found out about them."""

    name: str
    load: Callable[[], Tensor]  # the local weights or scores; cheap if in memory, computed or read if not
    function: Callable[[Tensor], Tensor] | None  # elementwise, from a piece of what was loaded to its scores
    among: Tensor | None  # flat local bool mask of the entries that take part
    shape: torch.Size  # local
    device: torch.device
    sharded: DTensor | None
    on_arrays: bool = False  # the function takes numpy arrays too
    mask: Tensor | None = None  # flat, local, written by the search
    kept: int = 0  # over all shards

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def whole(self, flat: Tensor) -> Tensor:
        """A flat local mask in the tensor's shape; for a shard, the DTensor that it is a part of."""
        local = flat.reshape(self.shape)
        if self.sharded is None:
            return local
        from torch.distributed.tensor import DTensor

        like = self.sharded
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def competitors(
    scores: Mapping[str, Tensor], kept: int, among: Mapping[str, Tensor] | None
) -> tuple[list[Source], int]:
    """The tensors of a competition, checked, and the number of entries that take part in it."""
    sources = []
    lazy = scores if isinstance(scores, LazyScores) else None
    among = lazy.among if lazy is not None and among is None else among
    container = lazy.weights if lazy is not None and lazy.elementwise else scores
    for name in scores:
        given = (scores if lazy is None else lazy.weights)[name].detach()
        local = local_of(given)
        if local.is_complex():
            raise ValueError(f"{named(name)}complex scores have no order.")
        if local.device.type == "meta":
            raise ValueError(f"{named(name)}on the meta device there are no values to rank; load the weights first.")
        load = functools.partial(_identity, local) if isinstance(container, dict) else _loader(container, name)
        part = None
        if among is not None and name in among:
            part = local_of(among[name].detach())
            if part.shape != local.shape:
                raise ValueError(f"{name}: a mask of shape {tuple(part.shape)} for shape {tuple(local.shape)}.")
            part = part.ne(0).reshape(-1).to(local.device)
        function = lazy.function if lazy is not None and lazy.elementwise else None
        on_arrays = function is not None and lazy is not None and lazy.on_arrays
        sources.append(Source(name, load, function, part, local.shape, local.device, as_dtensor(given), on_arrays))
    entries = sum(totals(sources, [source.numel for source in sources]))
    if not 0 <= kept <= entries:
        raise ValueError(f"can't keep {kept} of {entries} entries.")
    if among is None:
        return sources, entries
    alive = [source.numel if source.among is None else int(source.among.sum()) for source in sources]
    return sources, sum(totals(sources, alive))


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _loader(container: Mapping[str, Tensor], name: str) -> Callable[[], Tensor]:
    return lambda: local_of(container[name].detach())


def segments_of(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(position, entries) of consecutive stretches in row-major order, flat and contiguous."""
    size = sizes.SEGMENT if tensor.device.type == "cpu" else sizes.DEVICE_SEGMENT
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        yield from ((at, flat[at : at + size]) for at in range(0, flat.shape[0], size))
        return
    at = 0
    for part in _flat_parts(tensor, size):
        yield at, part
        at += part.shape[0]


def scored_pieces(source: Source, at: int, segment: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(position, scores) of the pieces of a segment; float32 or float64."""
    size = sizes.PIECE if segment.device.type == "cpu" else sizes.DEVICE_SEGMENT
    for start in range(0, segment.shape[0], size):
        piece = segment[start : start + size]
        alive = None if source.among is None else source.among[at + start : at + start + piece.shape[0]]
        yield at + start, scores_of(source, piece, alive)


def scores_of(source: Source, entries: Tensor, alive: Tensor | None) -> Tensor:
    scores = entries
    if source.function is not None:
        scores = source.function(entries)
        refuse_scores(source.name, scores, entries)
    scores = comparable(scores.detach())
    return scores if alive is None else removed_lowest(scores, alive)


def pieces_of(source: Source) -> Iterator[tuple[int, Tensor]]:
    """(position, scores) of all entries, piece by piece."""
    for at, segment in segments_of(source.load()):
        yield from scored_pieces(source, at, segment)


def _flat_parts(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """Row-major pieces of a tensor of any strides; only a piece is ever copied."""
    if tensor.numel() == 0:
        return
    if tensor.dim() <= 1:
        flat = tensor.reshape(1) if tensor.dim() == 0 else tensor
        for at in range(0, flat.shape[0], size):
            yield flat[at : at + size].contiguous()
        return
    inner = tensor.numel() // tensor.shape[0]
    if inner > size:
        for row in range(tensor.shape[0]):
            yield from _flat_parts(tensor[row], size)
        return
    rows = size // inner
    for row in range(0, tensor.shape[0], rows):
        yield tensor[row : row + rows].reshape(-1)


def empty_mask(entries: int, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.from_numpy(np.empty(entries, dtype=np.bool_))  # numpy asks for huge pages: 3 times fewer faults
    return torch.empty(entries, dtype=torch.bool, device=device)
