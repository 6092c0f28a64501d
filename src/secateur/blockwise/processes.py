"""Communication between processes: ranks, sums over all batches, and solved weights.

Law: after each step here all processes hold the same values; an error of one is raised on all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from secateur.blockwise.products import SAMPLE, Met, Piece, Products
from secateur.evidence import Sums, sum_over_ranks

__all__ = ["barrier", "gathered", "handed_out", "of_the_first", "rank_and_world", "reduced"]

_T = TypeVar("_T")


def rank_and_world() -> tuple[int, int]:
    """``(rank, world size)`` of this process; ``(0, 1)`` where there is only one.

    >>> rank_and_world()  # without torchrun
    (0, 1)
    """
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def barrier() -> None:
    """Waits until all processes are here; with one process it does nothing."""
    if rank_and_world()[1] > 1:
        from torch import distributed

        distributed.barrier()


def handed_out(said: Any, tensors: Sequence[Tensor], owner: int) -> Any:
    """Broadcasts one process' result and tensors to all, which overwrite their own; its error is raised on all."""
    if rank_and_world()[1] > 1:
        from torch import distributed

        listed = [said]
        distributed.broadcast_object_list(listed, src=owner)
        said = listed[0]
        if not isinstance(said, Exception):
            for tensor in tensors:
                distributed.broadcast(tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor, src=owner)
    if isinstance(said, Exception):
        raise said
    return said


def of_the_first(compute: Callable[[], _T]) -> _T:
    """The value that the first process computes, on all of them; its error is raised on all.

    >>> of_the_first(lambda: 7)  # of one process
    7
    """
    rank, world = rank_and_world()
    if world == 1:
        return compute()
    said: Any = None
    if not rank:
        try:
            said = compute()
        except Exception as error:  # the others wait for a word
            said = error
    found: _T = handed_out(said, (), 0)
    return found


def gathered(said: Any) -> list[Any]:
    """The values of all processes, in the order of their ranks.

    >>> gathered("mine")  # of one process
    ['mine']
    """
    world = rank_and_world()[1]
    if world == 1:
        return [said]
    from torch import distributed

    everyone: list[Any] = [None] * world
    distributed.all_gather_object(everyone, said)
    return everyone


def reduced(products: Products) -> dict[Piece, Met]:
    """The statistics summed over all processes, the same on each; with one process, its own."""
    if rank_and_world()[1] == 1:
        return products.found()
    here = products.found()
    everyone = gathered({piece: products.shared.get(piece, piece) for piece in here})
    leaders: dict[Piece, Piece] = {}
    for piece, leader in ((piece, leader) for other in everyone for piece, leader in other.items()):
        # where processes do not agree on whose inputs are whose, the piece has sums of its own
        leaders[piece] = leader if leaders.get(piece, leader) == leader else piece
    total = {leader: copy.copy(here.get(leader, Met(Sums(products.words)))) for leader in sorted({*leaders.values()})}
    device = next(iter(products.parameters.values()))[1].device
    for met in total.values():
        met.sums = copy.copy(met.sums)  # several leaders may have had one object here
        met.sample = _first(met.sample, device)
    sum_over_ranks({leader: met.sums for leader, met in total.items()}, None, device)
    lacks = {
        piece: torch.cat([met.lacking, met.lacked[:, None].to(met.lacking)], 1)
        for piece, met in here.items()
        if met.lacking is not None and met.lacked is not None
    }
    lacking = _added(lacks, device)
    around = {piece: copy.copy(met.around) for piece, met in here.items() if met.around is not None}
    words = {piece: sums.words for piece, sums in around.items()}
    for piece, its in sorted(((piece, its) for other in gathered(words) for piece, its in other.items())):
        around.setdefault(piece, Sums(its))
    if around:
        sum_over_ranks({piece: around[piece] for piece in sorted(around)}, None, device)
    return {
        piece: replace(total[leader], around=around.get(piece)).and_lacking(lacking.get(piece))
        for piece, leader in sorted(leaders.items())
    }


def _added(here: Mapping[Piece, Tensor], device: torch.device) -> dict[Piece, Tensor]:
    """The sums over all processes, (outputs, inputs + 1); what one of them did not see counts as 0 there."""
    from torch import distributed

    everyone = gathered({piece: tensor.dtype for piece, tensor in here.items()})
    widest: dict[Piece, torch.dtype] = {}
    for piece, dtype in ((piece, dtype) for other in everyone for piece, dtype in other.items()):
        widest[piece] = torch.promote_types(dtype, widest.get(piece, dtype))
    found = {}
    for piece, dtype in sorted(widest.items(), key=lambda item: item[0]):
        own = here.get(piece)
        outputs, inputs = piece.shape
        zeros = torch.zeros(outputs, inputs + 1, dtype=dtype, device=device)
        found[piece] = zeros if own is None else zeros.add_(own)
        distributed.all_reduce(found[piece])
    return found


def _first(sample: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The first tokens of all processes' samples, in their order."""
    samples = gathered([part.cpu() for part in sample])
    parts = [part.to(device) for rank in samples for part in rank]
    return [torch.cat(parts)[:SAMPLE]] if parts else []
