"""Models that are a table of tokens and no more, of whose rows a text's mean is its vector.

Law: such a directory has one tensor, with a row for each token, and no configuration that counts them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from secateur.checkpoints import Checkpoint, CheckpointError
from secateur.support import printable
from secateur.vocabulary.axes import Axes
from secateur.vocabulary.tokens import Tokens

__all__ = ["TABLES", "Table", "table_of"]

TABLES = ("embedding.weight", "embeddings")  # as sentence-transformers writes it, and model2vec


class Table(nn.Module):
    """The table, without values; it says of itself what a model of transformers does."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width, device="meta"), requires_grad=False)
        self.config: Any = SimpleNamespace()

    def get_input_embeddings(self) -> nn.Module:
        return self


def table_of(checkpoint: Checkpoint, tokens: Tokens) -> tuple[Table, Axes, dict[str, str]]:
    """The table in the files of a directory, what counts tokens in it, and the table's name for the tensor.

    Raises:
        CheckpointError: there are other tensors, or not a row for each token.
    """
    found = list(checkpoint.entries.items())
    if len(found) != 1 or found[0][0] not in TABLES or len(found[0][1].shape) != 2:
        names = ", ".join(printable(name) for name, _ in found[:3]) or "no tensor"
        raise CheckpointError(f"{checkpoint.root}: holds {names}, and not one table of tokens, {' or '.join(TABLES)}.")
    ((name, entry),) = found
    rows, width = entry.shape
    if tokens.size > rows:
        raise CheckpointError(
            f"{entry.path}: {name} has {rows:,} rows; the tokenizer has numbers up to {tokens.size - 1:,}."
        )
    return Table(rows, width), Axes(rows, (), {"weight": 0}, (), {"weight": (rows, width)}), {name: "weight"}
