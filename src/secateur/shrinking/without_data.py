"""The warning before a model of blocks is shrunken by the magnitude of its weights alone.

Law: only where data would help: where residual blocks multiply with matrices, and nobody gave evidence.
"""

from __future__ import annotations

import warnings

from torch import nn

from secateur.blockwise import find_blocks
from secateur.coupling import Coupling
from secateur.evidence import needs
from secateur.shrinking.request import Request

__all__ = ["WithoutDataWarning", "warn_without_data"]


class WithoutDataWarning(UserWarning):
    """Warning: units of a model of blocks are ranked by magnitude, which ruins a trained model.

    Where the model is trained afterwards anyway, filter it:

    >>> import warnings
    >>> warnings.simplefilter("ignore", WithoutDataWarning)
    """


def warn_without_data(model: nn.Module, coupling: Coupling, asked: Request) -> None:
    """Warns the caller's caller, if data would help."""
    if not asked.sparsity or asked.evidence or needs(asked.criterion) or not _has_residual_blocks(model, coupling):
        return
    warnings.warn(
        "shrink without data ranks units by magnitude and repairs nothing. Of SmolLM2-135M that leaves little: without "
        "10 % of its parameters its perplexity is 325 000, and was 15. Pass batches=, some dozens of real "
        "inputs (of a language model, what secateur.read_calibration gives). If the model is trained afterwards, or "
        "has not been so far, filter secateur.shrinking.WithoutDataWarning.",
        WithoutDataWarning,
        stacklevel=3,
    )


def _has_residual_blocks(model: nn.Module, coupling: Coupling) -> bool:
    """Whether blocks are repeated around which a stream runs, and units of theirs are multiplied with matrices."""
    try:
        blocks = find_blocks(model)
    except ValueError:
        return False
    inside = {f"{block}.{name}" for block, module in blocks.items() for name, _ in module.named_parameters()}
    residual = {name for branch in coupling.branches for name in branch.parameters} & inside
    consumers = {name for group in coupling.groups for name, at in group.members if at == 1} & residual
    return any(len(coupling.dims(name)) == 2 for name in consumers)
