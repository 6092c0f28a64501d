"""What a Pruner asks of optimizers: which they are, what they remember of a weight, whether they skipped a step. Going
back to saved weights, as lottery tickets do (arXiv:1803.03635, arXiv:1912.05671).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateur.support import Undo, local, private, warn

# What a Pruner asks of optimizers: which they are, what they remember of a weight, whether they skipped a step.
#
# Law: of removed weights an optimizer remembers nothing.


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizer or optimizers that were given, each inside Accelerate's or Lightning's wrapper."""
    return [_inner(each) for each in (optimizer if isinstance(optimizer, list | tuple) else [optimizer])]


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    while not private.tells_of_steps(optimizer):
        inside = private.optimizer_inside(optimizer)
        if inside is None:
            raise TypeError(f"a Pruner takes torch.optim optimizers, not a {type(optimizer).__name__}.")
        optimizer = inside
    return optimizer


def is_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused optimizer left the step out, as GradScaler asks it to by this attribute."""
    found = getattr(optimizer, "found_inf", None)
    return bool(found is not None and found > 0)


def warn_of_other_weights(optimizers: Iterable[torch.optim.Optimizer], weights: Mapping[str, Tensor]) -> None:
    """Warns whoever makes a Pruner, if optimizers train none of the weights."""
    trained = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    if not any(id(weight) in trained for weight in weights.values()):
        warn(
            f"the optimizer trains none of the {len(weights)} weights to be pruned: is it another model's?",
        )


def remembered_of(optimizer: torch.optim.Optimizer, *weights: Tensor) -> list[Tensor]:
    """What an optimizer remembers of each entry of weights, such as momentum."""
    return [
        value
        for weight in weights
        for value in optimizer.state.get(weight, {}).values()
        if isinstance(value, Tensor) and value.shape == weight.shape and value.is_floating_point()
    ]


def zero_remembered(
    optimizers: Iterable[torch.optim.Optimizer], weights: Mapping[str, Tensor], stays: Mapping[str, Tensor]
) -> None:
    """Multiply what optimizers remember of weights by what stays of them: 0 where removed or just returned."""
    for optimizer in optimizers:
        for name, mask in stays.items():
            for value in remembered_of(optimizer, weights[name]):
                local(value).mul_(local(mask))


def check_state_goes_on(before: Mapping[Tensor, Any], after: Mapping[Tensor, Any], names: Mapping[Tensor, str]) -> None:
    """``ValueError`` if an optimizer that had a state of a parameter could not go on with the one it has got."""
    for parameter, old in before.items():
        new = after.get(parameter)
        if not old or not new:  # from before the first step
            continue
        where = names.get(parameter, "a parameter")
        if missing := [key for key in old if key not in new]:
            raise ValueError(f"{where}: the state to go back to has no {missing[0]} for the optimizer.")
        for key, value in old.items():
            if isinstance(value, Tensor) and isinstance(new[key], Tensor) and value.shape != new[key].shape:
                raise ValueError(
                    f"{where}: {key} has shape {tuple(new[key].shape)} in the state to go back to, the optimizer's has "
                    f"{tuple(value.shape)}."
                )


# ---- Going back to saved weights, as lottery tickets do (arXiv:1803.03635, arXiv:1912.05671).
#
# Law: the states given are not changed, so that they serve again; one that does not fit is a ``ValueError``.


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
