"""Communication between processes of `torch.distributed`: ranks, values that all hold, and each one's part of a batch.

Law: after each step here all processes hold the same values; an error of one is raised on all. With one process each
function returns what it was given, and `torch.distributed` sends nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from secateur.support.progress import track
from secateur.support.running import mapped, tensors_in

_T = TypeVar("_T")
_A = TypeVar("_A")


_by_itself = 0  # how many of `alone` this process is in


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A context in which this process does all of what it does, as if there were no others.

    >>> with alone():
    ...     rank_and_world()
    (0, 1)
    """
    global _by_itself
    _by_itself += 1
    try:
        yield
    finally:
        _by_itself -= 1


def rank_and_world() -> tuple[int, int]:
    """``(rank, world size)`` of this process; ``(0, 1)`` where there is only one, and within `alone`.

    >>> rank_and_world()  # without torchrun
    (0, 1)
    """
    from torch import distributed

    if _by_itself or not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def broadcast(said: Any, tensors: Sequence[Tensor], owner: int) -> Any:
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


def on_rank_zero(compute: Callable[[], _T]) -> _T:
    """The value that the first process computes, on all of them; its error is raised on all.

    >>> on_rank_zero(lambda: 7)  # of one process
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
    found: _T = broadcast(said, (), 0)
    return found


def all_gather(said: Any) -> list[Any]:
    """The values of all processes, in the order of their ranks.

    >>> all_gather("mine")  # of one process
    ['mine']
    """
    world = rank_and_world()[1]
    if world == 1:
        return [said]
    from torch import distributed

    everyone: list[Any] = [None] * world
    distributed.all_gather_object(everyone, said)
    return everyone


def everywhere(compute: Callable[[], _T]) -> _T:
    """What each process computes for itself; an error of one is raised on all, the first one's where there are several.

    >>> everywhere(lambda: 7)  # of one process
    7
    """
    if rank_and_world()[1] == 1:
        return compute()
    found: Any = None
    wrong: Exception | None = None
    try:
        found = compute()
    except Exception as error:  # the others are to hear of it
        wrong = error
    for said in all_gather(wrong):
        if said is not None:
            raise said
    value: _T = found
    return value


def side_by_side(compute: Callable[[_A], _T], of: Sequence[_A], what: str = "") -> Iterator[_T]:
    """What is computed of each of these, in their order, as it comes: the processes take one each, `alone`, then the
    next ones, and all get all of it. An error of one is raised on all.

    Args:
        compute: called by one process for each; what it gives can be pickled.
        of: the same on all processes.
        what: said on a progress bar.

    >>> list(side_by_side(str, [3, 5]))
    ['3', '5']
    """
    rank, world = rank_and_world()

    def computed(at: int) -> list[_T]:
        with alone():
            return [compute(each) for each in of[at + rank : at + rank + 1]]  # none, where a last round has too few

    rounds = range(0, len(of), world)
    for at in track(rounds, what) if what else rounds:
        for found in all_gather(everywhere(functools.partial(computed, at))):
            yield from found


def summed(tensor: Tensor) -> Tensor:
    """The sum over all processes of a tensor that each has of the same shape, in a tensor of its own.

    >>> summed(torch.ones(2))  # of one process
    tensor([1., 1.])
    """
    if rank_and_world()[1] == 1:
        return tensor
    from torch import distributed

    total = tensor.detach().clone()
    distributed.all_reduce(total)
    return total


def part_of(batch: Any) -> tuple[Any, bool]:
    """This process's rows of a batch, and whether they are its own: where a batch has fewer rows than there are
    processes, those without one get the first, to stay in step with the others, and it does not count.

    Rows are entries along the first dimension of the first tensor; tensors of another length are every process's.

    >>> part_of({"input_ids": torch.ones(4, 2)})[0]["input_ids"].shape  # of one process
    torch.Size([4, 2])

    Raises:
        ValueError: there is no tensor with rows.
    """
    rank, world = rank_and_world()
    if world == 1:
        return batch, True
    rows = next((len(each) for each in tensors_in(batch) if each.dim()), 0)
    if not rows:
        raise ValueError(
            f"a batch ({type(batch).__name__}) has no tensor with rows to share out among {world} processes; run one."
        )
    places = [*torch.arange(rows, device="cpu").tensor_split(world)][rank]
    own = len(places) > 0
    first, end = (int(places[0]), int(places[-1]) + 1) if own else (0, 1)
    return mapped(batch, lambda each: each[first:end] if each.dim() and len(each) == rows else each), own
