"""The masks of one call, on top of those that are there: of one tensor, or of several that compete.

Law: every mask is computed and checked before a module changes; on all ranks it is the same.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from secateur.criteria import magnitude
from secateur.prune.amounts import count_of, nan_above_all
from secateur.prune.holders import Holder, Target, is_plain, key_of
from secateur.prune.masked_weight import masked, placed_like
from secateur.prune.methods import (
    TORCH_CONTAINER,
    BasePruningMethod,
    CustomFromMask,
    Identity,
    L1Unstructured,
    LnStructured,
    MaskShapeError,
    PruningContainer,
    RandomStructured,
    RandomUnstructured,
)
from secateur.selection import LazyScores, keep_largest_overall
from secateur.support import is_sharded, replicating_group, whole

if TYPE_CHECKING:
    from collections.abc import Mapping


def refuse_nan_scores(scores: Tensor, target: Target) -> None:
    """``ValueError`` if a score is NaN."""
    if not scores.is_meta and bool(whole(scores.isnan().any())):
        raise ValueError(f"importance_scores of {target} holds NaN.")


def mask_for(target: Target, scores: Tensor | None) -> Tensor:
    """The mask that the target's method computes, on top of the mask that is there, checked; nothing changes yet."""
    holder, orig, method, previous = target.holders[0], target.orig, target.method, target.mask
    if isinstance(method, CustomFromMask):
        refuse_other_mask(method.mask, target)
    if scores is None:
        scores = orig if previous is None else _current(holder, orig, previous)
    default = torch.ones_like(orig) if previous is None else previous.clone()
    if is_sharded(orig):
        scores, default = whole(scores), whole(default)
    if previous is None:
        mask: Any = method.compute_mask(scores, default_mask=default)
    else:
        mask = with_another(holder.hook, method).compute_mask(scores, default_mask=default)
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"{type(method).__name__}.compute_mask returned {type(mask).__name__} for {target}, not a tensor."
        )
    mask = mask.detach().to(dtype=orig.dtype)
    if mask.shape != orig.shape:
        raise ValueError(f"The mask for {target} has shape {tuple(mask.shape)}, the parameter {tuple(orig.shape)}.")
    if not _is_ours(method) and not mask.is_meta:
        # What a user has written into the buffer stays as it is; anything else is 0 or 1.
        unchanged = mask == default if previous is not None else torch.zeros_like(mask, dtype=torch.bool)
        if not bool(((mask == 0) | (mask == 1) | unchanged).all()):
            raise ValueError(f"The mask for {target} holds values other than 0 and 1.")
    if isinstance(method, RandomUnstructured | RandomStructured):
        mask = _same_on_all_ranks(mask, target)
    if mask.stride() != orig.stride() and not is_sharded(orig):
        mask = torch.empty_like(orig).copy_(mask)  # channels_last stays channels_last
    return placed_like(mask, orig)


def _current(holder: Holder, orig: Tensor, mask: Tensor) -> Tensor:
    with torch.no_grad():
        if holder.hook is None or is_plain(holder.hook, "apply_mask"):
            return masked(orig, mask)
        return cast("Tensor", holder.hook.apply_mask(holder.module))


def _is_ours(method: Any) -> bool:
    return type(method) in (
        Identity, RandomUnstructured, L1Unstructured, RandomStructured, LnStructured, CustomFromMask,
    )  # fmt: skip


def refuse_other_mask(mask: Any, target: Target) -> None:
    """``TypeError`` or ``ValueError`` unless it is a tensor of 0 and 1, in the shape of the parameter."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"The mask for {target} is a {type(mask).__name__}, not a tensor.")
    if mask.shape != target.orig.shape:
        raise MaskShapeError(f"default_mask shape {target.orig.shape} must match self.mask shape {mask.shape}")
    if not mask.is_meta and not bool(whole(((mask == 0) | (mask == 1)).all())):
        raise ValueError(f"The mask for {target} holds values other than 0 and 1.")


def with_another(hook: Any, method: Any) -> Any:
    """The container as it will be; the one on the module is not touched."""
    if isinstance(hook, PruningContainer) and type(hook) is not TORCH_CONTAINER:
        container = copy.copy(hook)
        container.add_pruning_method(method)
        return container
    container = PruningContainer()
    container._tensor_name = method._tensor_name
    for each in _methods_of(hook):
        container.add_pruning_method(each)
    container.add_pruning_method(method)
    return container


def _methods_of(hook: Any) -> tuple[Any, ...]:
    """What a hook brings into a new container: itself, or the content of a container that torch made."""
    if hook is None:
        return ()
    return tuple(hook) if isinstance(hook, PruningContainer) else (hook,)


def _same_on_all_ranks(mask: Tensor, target: Target) -> Tensor:
    """The mask of the first rank, where the parameter is copied or sharded over ranks: each has drawn its own."""
    orig, holder = target.orig, target.holders[0]
    if is_sharded(orig):
        mesh = orig.device_mesh  # type: ignore[attr-defined]
        groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    else:
        group = replicating_group(holder.module, key_of(holder))
        groups = [] if group is None else [group]
    if groups:
        mask = mask.contiguous().clone()
        for group in groups:
            torch.distributed.broadcast(mask, group=group, group_src=0)
    return mask


def masks_of_largest(
    method: L1Unstructured, targets: Mapping[str, Target], given: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """L1 over all tensors at once, without joining them: each weight is read, and only the masks are written."""
    previous = {key: mask for key, target in targets.items() if (mask := target.mask) is not None}
    among = {key: mask == 1 for key, mask in previous.items()}
    sizes = {key: ones_in(among[key]) if key in among else target.orig.numel() for key, target in targets.items()}
    count = count_of(method.amount, sum(sizes.values()))
    if count == 0:
        return {
            key: previous[key].clone() if key in previous else torch.ones_like(target.orig)
            for key, target in targets.items()
        }
    # What the user wrote into a mask that is neither 0 nor 1 is not in the competition, so that orig is the product.
    weights = {key: placed_like(given.get(key, target.orig).detach(), target.orig) for key, target in targets.items()}
    weights = {key: weight.abs() if weight.is_complex() else weight for key, weight in weights.items()}
    kept = sum(sizes.values()) - count
    masks: dict[str, Tensor] = {}
    for key in targets:
        if among and key not in among:
            among[key] = torch.ones_like(targets[key].orig, dtype=torch.bool)
    try:
        keep = keep_largest_overall(LazyScores(weights, magnitude), kept, among=among or None)
    except ValueError:
        if not any(whole(weight.isnan().any()) for weight in weights.values()):
            raise
        keep = keep_largest_overall(
            LazyScores(weights, lambda weight: nan_above_all(weight.abs()), elementwise=True), kept, among=among or None
        )
    for key, target in targets.items():
        masks[key] = torch.empty_like(target.orig).copy_(keep.pop(key))
        if key in previous and ones_in(previous[key] != 0) != sizes[key]:
            masks[key] = torch.where(among[key], masks[key], previous[key])
    return masks


def ones_in(mask: Tensor) -> int:
    """How many entries of a bool mask are true, over all ranks if it is sharded."""
    return int(whole(mask.sum())) if is_sharded(mask) else int(mask.count_nonzero())


def masks_of_joined(
    method: BasePruningMethod, targets: Mapping[str, Target], given: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Any unstructured method over the vector of all entries that are left."""
    scores: list[Tensor] = []
    masks: dict[str, Tensor] = {}
    for key, target in targets.items():
        previous = target.mask
        score = given.get(key)
        if score is None:
            score = target.orig if previous is None else _current(target.holders[0], target.orig, previous)
        masks[key] = whole(torch.ones_like(target.orig) if previous is None else previous.clone())
        scores.append(whole(score.detach())[masks[key] == 1])
    vector = torch.cat(scores)
    del scores
    left = method.compute_mask(vector, default_mask=torch.ones_like(vector)).detach()
    if left.shape != vector.shape or not bool(((left == 0) | (left == 1)).all()):
        raise ValueError(
            f"{type(method).__name__}.compute_mask has to return 0 or 1 for each of {vector.numel()} entries; "
            f"it returned shape {tuple(left.shape)}."
        )
    first = next(iter(targets.values()))
    if isinstance(method, RandomUnstructured):
        left = _same_on_all_ranks(left, first)
    start = 0
    for key, target in targets.items():
        survivors = masks[key] == 1
        stop = start + int(survivors.sum())
        masks[key][survivors] = left[start:stop].to(dtype=masks[key].dtype, device=masks[key].device)
        masks[key] = placed_like(masks[key], target.orig)
        start = stop
    return masks
