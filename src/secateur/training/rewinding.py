"""Going back to saved weights, as lottery tickets do (arXiv:1803.03635, arXiv:1912.05671).

Law: the states given are not changed, so that they serve again; one that does not fit is a ``ValueError``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateur.support import Undo
from secateur.training.optimizers import check_state_goes_on, remembered_of

__all__ = ["put_back"]


def put_back(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    weights: Mapping[str, Tensor],
    model_state: Mapping[str, Any],
    optimizer_state: Mapping[str, Any] | None,
    undo: Undo,
) -> None:
    """Load the states of a model and of the first of its optimizers; without one, all optimizers are emptied.

    Args:
        weights: those that are pruned, of which optimizers remember what is zeroed afterwards.
        undo: records all that changes, here and by zeroing.
    """
    tensors = {id(each): each for each in model.state_dict(keep_vars=True).values() if isinstance(each, Tensor)}
    first, *others = optimizers
    before = {weight: dict(remembered) for weight, remembered in first.state.items()}
    undo.values(*tensors.values(), *(value for each in others for value in remembered_of(each, *weights.values())))
    undo.optimizers(optimizers)
    try:
        model.load_state_dict(model_state)
    except Exception as error:
        raise ValueError(f"the weights to go back to don't fit the model: {error}") from error
    if optimizer_state is None:
        for each in optimizers:
            each.state.clear()
        return
    try:
        first.load_state_dict(copy.deepcopy(dict(optimizer_state)))
    except Exception as error:
        raise ValueError(f"the state to go back to doesn't fit the optimizer: {error!r}") from error
    check_state_goes_on(before, first.state, {each: name for name, each in model.named_parameters()})
