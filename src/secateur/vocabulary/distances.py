"""How far a token is from what its text is read as without it: from the mean of the rows of these pieces.

Law: 1 minus the cosine of its own row of the embedding and that mean; 1 where there are no pieces, or no rows of them.
Rows are read one by one as they are asked for, and few are held.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from secateur.checkpoints import Checkpoint
from secateur.vocabulary.tokens import Tokens

__all__ = ["Distance", "Rows", "distances", "rows_in_files", "rows_of_tensor"]

_HELD = 2048  # rows: the same pieces are part of many tokens
_LEAST = 1e-6  # more than nothing, so that what the text has leaves behind what it does not have
Distance = Callable[[int], float]
Rows = Callable[[int], Tensor]


def distances(tokens: Tokens, rows: Rows, size: int) -> Distance:
    """Of a token, by its number; ``rows`` gives one of the ``size`` rows of the embedding, in float32."""
    rows = functools.lru_cache(_HELD)(rows)

    @functools.cache  # asked for again in the trial without the last tenth of a text
    def distance(number: int) -> float:
        pieces = tokens.instead(number)
        if not pieces or number >= size or any(piece >= size or piece == tokens.unknown for piece in pieces):
            return 1.0
        mean = torch.stack([rows(piece) for piece in pieces]).mean(0)
        found = float(1 - torch.nn.functional.cosine_similarity(rows(number), mean, dim=0))
        return max(found, _LEAST) if found == found else 1.0  # of a row of NaN

    return distance


def rows_of_tensor(embedding: Tensor) -> Rows:
    """The rows of an embedding in memory."""
    return lambda number: embedding[number].detach().cpu().float()


def rows_in_files(checkpoint: Checkpoint, names: Sequence[str]) -> Rows:
    """The rows of the first of these tensors that the files hold."""
    entry = next(checkpoint.entries[name] for name in names if name in checkpoint.entries)
    width, dtype = entry.nbytes // entry.shape[0], entry.torch_dtype
    assert dtype is not None  # what counts tokens is of a dtype that torch reads
    return lambda number: checkpoint.raw(entry.name, number * width, (number + 1) * width).view(dtype).float()
