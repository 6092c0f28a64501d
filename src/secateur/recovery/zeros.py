"""Which entries of a model's weights are removed, and how new values are written beside them.

Law: an entry that was removed keeps its bits, and one that was not zero does not become zero, whatever it was trained
or rounded to: the zeros afterwards are those before, to the last one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from secateur.pipeline import Masks, attached_masks, check_mask
from secateur.targets import find_targets, identity_of

__all__ = ["Zeros", "count_zeros", "groups_of", "removed_of", "settled"]

Zeros = dict[str, tuple[int, int]]  # {name: (before, after)}


def removed_of(model: nn.Module, masks: Any = None, also: Collection[str] = ()) -> Masks:
    """``{parameter: bool, True = kept}`` of the weights of which something is removed, by their first names.

    An entry is removed if a mask says so, one that is given or one that is attached; and if it is zero, in the weights
    that pruning may touch (`secateur.targets.find_targets`).

    Args:
        model: any module.
        masks: ``{name: mask}``, or what has them as ``masks``, such as a `Pruner`.
        also: other parameters whose zeros count as removed.

    Raises:
        ValueError: a mask is of no parameter of the model, of another shape, or of entries that are not zero.

    >>> layer = nn.Linear(2, 1)
    >>> _ = layer.weight.data.copy_(torch.tensor([[0.0, 1.0]]))
    >>> removed_of(layer)
    {'weight': tensor([[False,  True]])}
    """
    given = getattr(masks, "masks", masks) or {}
    if not isinstance(given, Mapping):
        raise TypeError(f"masks= is {{name: mask}} or a Pruner, not a {type(masks).__name__}.")
    every = dict(model.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, Tensor] = {}

    def remove(name: str, mask: Tensor) -> None:
        own = first[id(every[name])]
        found[own] = mask if own not in found else found[own] & mask

    for name, mask in given.items():
        full = name if name in every else f"{name}_orig"
        if full not in every:
            raise ValueError(f"there is a mask for {name!r}, but the model has no such parameter.")
        check_mask(name, mask, every[full].shape)
        kept = mask.to(every[full].device).ne(0)
        if not full.endswith("_orig") and bool((every[full].detach().ne(0) & ~kept).any()):
            raise ValueError(f"{name}: the mask removes entries that are not zero; write the zeros first, with apply_.")
        remove(full, kept)
    for name, mask in attached_masks(model, every).items():
        remove(name, mask.ne(0))
    for name in (*_touchable(model), *(name for name in also if name in every)):
        if not name.endswith("_orig"):
            remove(name, every[name].detach().ne(0))
    return Masks((name, mask) for name, mask in found.items() if not bool(mask.all()))


def _touchable(model: nn.Module) -> dict[str, nn.Parameter]:
    try:
        return find_targets(model)
    except ValueError:  # there is none, as in a model of embeddings
        return {}


def settled(old: Tensor, new: Tensor, mask: Tensor | None) -> Tensor:
    """The new values in the old ones' dtype; where the mask is False, and where rounding would make a zero of what was
    none, the old ones.

    Raises:
        ValueError: a value is not finite in that dtype.

    >>> settled(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([5.0, 6.0, 0.0]), torch.tensor([False, True, True]))
    tensor([0., 6., 2.])
    """
    rounded = new.detach().to(old.dtype)
    if not bool(rounded.isfinite().all()):
        raise ValueError(f"a weight of shape {tuple(old.shape)} grew beyond what {old.dtype} holds; lower rate=.")
    stays = rounded.eq(0) & old.ne(0)
    if mask is not None:
        stays |= ~mask
    return torch.where(stays, old, rounded)


def count_zeros(weights: Mapping[str, Tensor], masks: Mapping[str, Tensor] | None = None) -> dict[str, int]:
    """How many entries of each weight are zero, or are hidden by an attached mask.

    >>> count_zeros({"weight": torch.tensor([0.0, 2.0, 0.0])})
    {'weight': 2}
    """
    found = {}
    for name, weight in weights.items():
        there = weight.detach().ne(0)
        if masks is not None and name.endswith("_orig") and name in masks:
            there = there & masks[name]
        found[name] = there.numel() - int(there.count_nonzero())
    return found


def groups_of(parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Names of parameters that are one memory, seen in the same way, together."""
    groups: dict[Any, list[str]] = {}
    for name, parameter in parameters.items():
        groups.setdefault(identity_of(parameter), []).append(name)
    return list(groups.values())
