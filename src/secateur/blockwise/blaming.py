"""Errors of a model on a batch are re-raised with the number and the shapes of the batch.

Law: what this library found itself says so already, and passes; whatever the model or torch raises becomes one line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateur.blockwise.replay import LostOutputError
from secateur.checkpoints import CheckpointError
from secateur.support import Forward, printable, run_batch

__all__ = ["naming_batch", "naming_batches", "passes", "which"]


def naming_batches(batches: Sequence[Any], forward: Forward | None) -> Forward:
    """The function that runs a batch; where that fails, the error names the batch.

    A custom ``forward`` raises its own error, with a note.

    >>> run = naming_batches([torch.ones(1, 3), torch.ones(1, 4)], None)
    >>> run(nn.Linear(3, 2), torch.ones(1, 4))
    Traceback (most recent call last):
      ...
    ValueError: the model does not run on a batch of shape (1, 4), float32 (RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x4 and 3x2)); pass batches that it takes, or forward=(model, batch) -> outputs.
    """  # noqa: E501

    def run(model: nn.Module, batch: Any) -> Any:
        with naming_batch(batches, batch, forward):
            return run_batch(model, batch, forward)

    return run


@contextlib.contextmanager
def naming_batch(
    batches: Sequence[Any], batch: Any, forward: Forward | None = None, who: str = "the model"
) -> Iterator[None]:
    """A context in which a batch is run: where that fails, the error names the batch, as in `naming_batches`.

    Args:
        batches: all batches.
        batch: the one that is run, as it is in ``batches``.
        forward: the custom function that runs it, if there is one.
        who: the model, in words.
    """
    try:
        yield
    except Exception as error:
        if passes(error):
            raise
        if forward is not None:
            error.add_note(f"This was {which(batches, batch)}.")
            raise
        said = printable(" ".join(str(error).split()), 400)
        raise ValueError(
            f"{who} does not run on {which(batches, batch)} ({type(error).__name__}: {said}); pass batches "
            "that it takes, or forward=(model, batch) -> outputs."
        ) from error


def which(batches: Sequence[Any], batch: Any) -> str:
    """A batch in words.

    >>> batches = [{"input_ids": torch.ones(1, 4).long()}, (torch.ones(2, 3), torch.ones(2))]
    >>> which(batches, batches[0]); which(batches, batches[1])
    'batch 0 of 2 (input_ids of shape (1, 4), int64)'
    'batch 1 of 2 (shape (2, 3), float32 and shape (2,), float32)'
    """
    shapes = " and ".join(_spelled(batch)) or f"a {type(batch).__name__}"
    number = next((at for at, each in enumerate(batches) if each is batch), None)
    return f"a batch of {shapes}" if number is None else f"batch {number} of {len(batches)} ({shapes})"


def _spelled(batch: Any, name: str = "") -> Iterator[str]:
    if isinstance(batch, Tensor):
        words = f"shape {tuple(batch.shape)}, {str(batch.dtype).removeprefix('torch.')}"
        yield f"{name} of {words}" if name else words
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _spelled(value, printable(str(key)))
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from _spelled(value, name)


def passes(error: Exception) -> bool:
    """Whether an error passes unchanged: it is this library's own, or memory ran out."""
    known = (CheckpointError, LostOutputError, OSError, MemoryError, torch.OutOfMemoryError)
    return isinstance(error, known) or _is_our_own(error)


def _is_our_own(error: Exception) -> bool:
    """Whether a call of this library found it, and not the model's code or torch's, of which no frame may be seen."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    frame = None if trace is None else trace.tb_frame
    own = frame is not None and str(frame.f_globals.get("__name__")).startswith("secateur.")
    watched = frame is not None and frame.f_code.co_name == "__torch_function__"  # where torch's products are called
    return isinstance(error, ValueError | TypeError) and own and not watched
