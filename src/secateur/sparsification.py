"""The one-call verb: choose weights, make masks, zero what is not kept.

Law: every mask is ready before the first weight changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn

from secateur.allocation import Allocation, everywhere
from secateur.criteria import magnitude
from secateur.masks import apply_, attached_masks, make_masks
from secateur.patterns import Pattern
from secateur.targets import find_targets

__all__ = ["sparsify"]


def sparsify(
    model: nn.Module,
    sparsity: float | None = None,
    *,
    pattern: Pattern | None = None,
    criterion: Callable[..., Tensor] = magnitude,
    allocate: Allocation = everywhere,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    within: Mapping[str, Tensor] | None = None,
    evidence: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> dict[str, Tensor]:
    """Zero a fraction of a model's weights, in place, and return the masks ``{name: bool tensor, True = kept}``.

    By default global magnitude pruning: of all weights that `find_targets` finds, exactly
    ``round(sparsity · weights)`` go, those with the smallest ``|w|``, and each tensor keeps at least one. To train on,
    call `apply_` after each optimizer step; to make the zeros reversible, `attach` the masks instead.

    Args:
        model: any module.
        sparsity: fraction of units removed, in [0, 1]; none for a pattern that fixes it, such as ``NM(2, 4)``.
        pattern: `Unstructured` by default; see `secateur.patterns`.
        criterion: ``(weight, *, <evidence>) -> scores``, higher = keep; see `secateur.criteria`.
        allocate: how many units each tensor keeps; see `secateur.allocation`.
        include, exclude: globs over parameter names; see `find_targets`.
        within, evidence: see `make_masks`. Where masks are attached, they are earlier masks: what they removed stays
            removed and counts.

    Raises:
        ValueError, TypeError: what `find_targets` and `make_masks` refuse; the model is unchanged then.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    >>> masks = sparsify(model, 0.75)
    >>> sum(int(mask.sum()) for mask in masks.values())
    32
    """
    weights: dict[str, Tensor] = dict(find_targets(model, include=include, exclude=exclude))
    within = {**attached_masks(model, weights), **(within or {})} or None
    masks = make_masks(
        weights, sparsity, pattern=pattern, criterion=criterion, allocate=allocate, within=within, evidence=evidence
    )
    apply_(weights, masks)
    return masks
