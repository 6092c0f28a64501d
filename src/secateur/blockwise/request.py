"""The checked arguments of `oneshot`, and the batches of each process.

Law: what the bytes of a result depend on can be said as JSON, so that a run that goes on can be told from another.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.allocation import Allocation
from secateur.blockwise.jobs import Layer
from secateur.blockwise.processes import rank_and_world
from secateur.blockwise.replay import Outputs
from secateur.blockwise.solving import MatrixJob, Solve
from secateur.patterns import Pattern, word_of
from secateur.support import Forward, check_batches, described

__all__ = ["Request", "RunAlong", "digest", "held_batches"]


@dataclass(frozen=True)
class Request:
    """The checked arguments of `oneshot`, after words became values."""

    sparsity: float | None
    solver: Solve
    pattern: Pattern
    allocate: Allocation
    words: tuple[str, ...]  # the evidence that the solver names
    include: list[str] | None = None
    exclude: list[str] | None = None
    forward: Forward | None = None
    activations: Path | None = None
    arguments: Mapping[str, Any] | None = None
    on_layer: Callable[[Layer], None] | None = None
    stages: bool = False
    aim: float = 0.0

    def job(self, sparsities: Mapping[str, float | None]) -> MatrixJob:
        """What is asked of every block, given the sparsity of each weight."""
        return MatrixJob(
            self.solver, self.pattern, sparsities, self.words, self.on_layer, in_stages=self.stages, aim=self.aim
        )

    def dense_outputs(self) -> Outputs | None:
        """Where what the dense model's blocks return is kept, if it is run beside the pruned one."""
        return Outputs(self.activations, "dense") if self.aim else None

    def described(self) -> dict[str, Any]:
        """As JSON: what a run that goes on must have in common with the one that was killed, beside the data."""
        return {
            "sparsity": self.sparsity,
            "pattern": word_of(self.pattern),
            "solver": described(self.solver),
            "allocate": described(self.allocate),
            "include": self.include,
            "exclude": self.exclude,
            "stages": self.stages,
            "aim": self.aim,
            "processes": rank_and_world()[1],
        }


class RunAlong(tuple[Any, ...]):
    """The batches of a process without a share of its own: it runs them to stay in step with the others, but sums
    nothing.

    >>> len(RunAlong(["a batch"]))
    1
    """


def held_batches(batches: Iterable[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """All batches, as a list if they are an iterator, and this process's share of them.

    Where there are fewer than processes, those without one run along on the first, with a warning of one line.
    """
    check_batches(batches)
    every = batches if isinstance(batches, Sequence) else list(batches)
    if not len(every):
        raise ValueError("there are no batches: pass at least one, since pruning needs the inputs of each layer.")
    rank, world = rank_and_world()
    if len(every) < world:
        warnings.warn(
            f"there are fewer batches than processes: {len(every)} of {world} processes sum what they see, and the "
            "others help to solve.",
            stacklevel=4,  # where oneshot was called
        )
    return every, every[rank::world] if rank < len(every) else RunAlong(every[:1])


def digest(batches: Iterable[Any]) -> str:
    """The SHA-256 of all tensors in the batches: names, dtypes, shapes and values.

    >>> digest([torch.tensor([1, 2])]) == digest([torch.tensor([1, 3])])
    False
    """
    total = hashlib.sha256()

    def add(batch: Any) -> None:
        if isinstance(batch, Tensor):
            whole = batch.detach().cpu().contiguous()
            total.update(f"{whole.dtype}{tuple(whole.shape)}".encode())
            total.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b"")
        elif isinstance(batch, Mapping):
            for key in sorted(batch):
                total.update(str(key).encode())
                add(batch[key])
        elif isinstance(batch, tuple | list):
            total.update(b"(")
            for part in batch:
                add(part)
        else:
            total.update(repr(batch).encode())

    for batch in batches:
        add(batch)
        total.update(b";")
    return total.hexdigest()
