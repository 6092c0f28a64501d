"""Tensors that are shards of larger ones: what is here, and what all ranks count together.

Law: but for the ties of one tensor, only counts cross ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from secateur.support import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from secateur.selection.sources import Source

__all__ = [
    "as_dtensor",
    "counts_here",
    "first_of_shards",
    "integers",
    "local_of",
    "mesh_of",
    "sum_over_ranks",
    "totals",
]


def as_dtensor(tensor: Tensor) -> DTensor | None:
    if not is_sharded(tensor):
        return None
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None


def local_of(tensor: Tensor) -> Tensor:
    sharded = as_dtensor(tensor)
    if sharded is None:
        return tensor
    if any(placement.is_partial() for placement in sharded.placements):
        raise ValueError("a DTensor with partial sums has no values to rank; redistribute it first.")
    local: Tensor = sharded.to_local()
    return local.wait() if hasattr(local, "wait") else local


def mesh_of(sources: list[Source]) -> DeviceMesh | None:
    return next((source.sharded.device_mesh for source in sources if source.sharded is not None), None)


def counts_here(source: Source, mesh: DeviceMesh | None) -> int:
    """1 on the ranks whose entries count: of replicas (a plain tensor beside shards is one) the first."""
    if mesh is None:
        return 1
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return 0
    placements = [None] * mesh.ndim if source.sharded is None else source.sharded.placements
    pairs = zip(coordinate, placements, strict=True)
    return int(all(at == 0 or (placement is not None and placement.is_shard()) for at, placement in pairs))


def sum_over_ranks(sources: list[Source], counts: Tensor) -> Tensor:
    """Sum counts over the mesh that the shards lie on."""
    mesh = mesh_of(sources)
    if mesh is None:
        return counts
    import torch.distributed as distributed

    counts = counts.to(mesh.device_type)
    for dimension in range(mesh.ndim):
        distributed.all_reduce(counts, group=mesh.get_group(dimension))
    return counts.cpu()


def totals(sources: list[Source], counts: list[int]) -> list[int]:
    """Each source's count over all its shards."""
    mesh = mesh_of(sources)
    here = [count * counts_here(source, mesh) for source, count in zip(sources, counts, strict=True)]
    return [int(count) for count in sum_over_ranks(sources, integers(here))]


def integers(values: list[int]) -> Tensor:
    """On the host, whatever torch's default device is."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def first_of_shards(source: Source, equal: Tensor, taken: int) -> Tensor:
    """Of the ties in a sharded tensor, the first in row-major order of the whole tensor; gathers one bool tensor."""
    from torch.distributed.tensor import DTensor, Replicate

    assert source.sharded is not None
    mesh = source.sharded.device_mesh
    whole = source.whole(equal)
    assert isinstance(whole, DTensor)
    flat = whole.full_tensor().reshape(-1)
    first = (flat & (flat.cumsum(0) <= taken)).reshape(whole.shape)
    everywhere = DTensor.from_local(first, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=source.sharded.placements).to_local().reshape(-1)
