"""Changing the modules: masks registered and taken away, names and hooks with them.

Law: all of a call happens or none of it, whatever raises and wherever.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from secateur.prune.computing import mask_for, ones_in, refuse_nan_scores, with_another
from secateur.prune.holders import Holder, Target, hooks_of, is_plain, key_of, other_holders
from secateur.prune.masked_weight import compute_on_read, is_computed_on_read, stop_computing_on_read
from secateur.prune.methods import TORCH_CONTAINER, BasePruningMethod, CustomFromMask, PruningContainer
from secateur.support import Undo, is_sharded, private, sharded_parameter, warn, whole


def prune_one(module: nn.Module, name: str, make: Callable[[], Any], *, scores: Tensor | None) -> Any:
    """Prune one tensor by the method that `make` constructs; returns its hook, or the container that it joined."""
    target = Target.find(module, name, make)
    if scores is not None:
        if scores.shape != target.orig.shape:
            raise AssertionError(
                f"importance_scores should have the same shape as parameter "
                f"{name} of {module}, got {scores.shape} vs {target.orig.shape}"
            )
        refuse_nan_scores(scores, target)
    commit([Change(target, mask_for(target, scores))])
    return target.resulting_hook


@dataclass(eq=False)
class Change:
    """A tensor and its new mask."""

    target: Target
    mask: Tensor


def commit(changes: Sequence[Change]) -> None:
    """Every mask is ready; now the modules change, all of them or none."""
    _warn_of_emptied([change for change in changes if _is_emptied(change)])
    with Undo() as undo:
        _note(undo, [holder for change in changes for holder in change.target.holders])
        for change in changes:
            target = change.target
            if change.mask.is_inference():
                with torch.inference_mode(False):
                    change.mask = change.mask.clone()  # so that the module can be trained later
            for index, holder in enumerate(target.holders):
                if index < target.asked:
                    method = target.method
                    if index > 0:
                        method = copy.copy(method)
                        method._tensor_name = holder.name
                else:
                    method = CustomFromMask(change.mask)
                    method._follows = method._made_here = True
                    method._tensor_name = holder.name
                hook = _prune_holder(holder, target.orig, change.mask, method)
                if index == 0:
                    target.resulting_hook = hook


def _prune_holder(holder: Holder, orig: Tensor, mask: Tensor, method: Any) -> Any:
    module, name = holder.module, holder.name
    if holder.hook is None:
        hook = method
        record = sharded_parameter(module, name)
        module.register_parameter(name + "_orig", cast("nn.Parameter", orig))
        del private.parameters_of(module)[name]
        if record is not None:
            _rename(record, module, name, name + "_orig")
    elif getattr(holder.hook, "_follows", False):
        hook = method
    elif isinstance(holder.hook, PruningContainer) and type(holder.hook) is not TORCH_CONTAINER:
        hook = holder.hook
        _release_masks(hook)
        hook.add_pruning_method(method)
    else:
        hook = with_another(holder.hook, method)
        _release_masks(hook[:-1])
    module.register_buffer(name + "_mask", mask)
    if is_plain(hook, "__call__"):
        by_hook = not is_plain(hook, "apply_mask")
        if by_hook:
            hook.apply_mask(module)  # raises now rather than at the first read
        compute_on_read(module, name, by_hook=by_hook)
    else:
        # A hook that does more than to assign the product has the attribute to itself, as with torch.
        stop_computing_on_read(module, name)
        setattr(module, name, hook.apply_mask(module))
    if holder.key is None:
        module.register_forward_pre_hook(hook)
    else:
        private.pre_hooks_of(module)[holder.key] = hook
    return hook


def _release_masks(methods: Iterable[Any]) -> None:
    """Masks that global pruning made earlier are in the new one; kept, they would be a model's size each round."""
    for method in methods:
        if getattr(method, "_made_here", False):
            method.mask = None


def _is_emptied(change: Change) -> bool:
    """Whether nothing is left where something was."""
    previous = change.target.mask
    return (
        change.target.orig.numel() > 0
        and not change.mask.is_meta
        and not _holds_anything(change.mask)
        and (previous is None or _holds_anything(previous))
    )


def _holds_anything(mask: Tensor) -> bool:
    if is_sharded(mask):
        return ones_in(mask != 0) > 0
    return (mask.dim() > 0 and bool(mask[:1].any())) or bool(mask.any())  # the first row nearly always tells


def _warn_of_emptied(changes: Sequence[Change]) -> None:
    if changes:
        names = ", ".join(str(change.target) for change in changes)
        warn(f"Nothing is left of {names}: every entry is pruned.")


def take_off(pairs: Sequence[tuple[nn.Module, str]]) -> list[tuple[nn.Module, str]]:
    """Make the prunings of tensors permanent and take their hooks off.

    Returns the pairs, less those that went with the other end of a tie.
    """
    for module, name in pairs:
        if not hooks_of(module, name):
            raise ValueError(f"Parameter '{name}' of module {module} has to be pruned before pruning can be removed")
    done: list[tuple[nn.Module, str]] = []
    with Undo() as undo:
        for module, name in pairs:
            for key, hook in hooks_of(module, name)[:1]:
                if is_plain(hook, "remove"):
                    _make_permanent(hook, module, undo)
                else:
                    holder = Holder(module, name, key, hook)
                    _note(undo, [holder, *other_holders(holder)])
                    _note_values(undo, private.parameters_of(module).get(name + "_orig"))
                    hook.remove(module)
                del private.pre_hooks_of(module)[key]
                done.append((module, name))
    return done


def make_permanent(hook: Any, module: nn.Module) -> None:
    """Write the zeros into the parameter and give it its name back; those that merely followed do the same."""
    with Undo() as undo:
        _make_permanent(hook, module, undo)


def _make_permanent(hook: Any, module: nn.Module, undo: Undo) -> None:
    name = hook._tensor_name
    holder = Holder(module, name, None, hook)
    sharded_parameter(module, name + "_orig")  # puts a gathered parameter away
    following = other_holders(holder)
    orig = private.parameters_of(module)[name + "_orig"]
    assert orig is not None
    # The product of a trainable parameter under inference_mode would be a tensor that autograd refuses for good.
    with torch.inference_mode(orig.is_inference()), torch.no_grad():
        weight = (
            hook.apply_mask(module) if not is_plain(hook, "apply_mask") else BasePruningMethod.apply_mask(hook, module)
        )
        for other in following:
            if other.hook is None and not bool(whole((orig == weight).all())):
                raise ValueError(
                    f"{holder} and {other} are one tensor, and {other} is not pruned: removing the pruning of {holder} "
                    f"would write its zeros into both. Prune {other} as well, or give it a Parameter of its own."
                )
        _note(undo, [holder, *following])
        _note_values(undo, orig)
        _restore(module, name, orig)
        for other in following:
            if getattr(other.hook, "_follows", False):
                _restore(other.module, other.name, orig)
                assert other.key is not None
                del private.pre_hooks_of(other.module)[other.key]
        if is_sharded(orig):
            orig.copy_(weight)  # fully_shard keeps the memory of its shard for itself
        else:
            orig.data = weight.detach()


def _restore(module: nn.Module, name: str, orig: nn.Parameter) -> None:
    record = sharded_parameter(module, name + "_orig")
    if is_computed_on_read(module, name):
        stop_computing_on_read(module, name)
    elif hasattr(module, name):
        delattr(module, name)
    del private.parameters_of(module)[name + "_orig"]
    del private.buffers_of(module)[name + "_mask"]
    private.unsaved_buffers_of(module).discard(name + "_mask")
    if is_computed_on_read(module, name):
        private.parameters_of(module)[name] = orig  # a class on top keeps the property; the plain lookup comes after it
    else:
        setattr(module, name, orig)
    if record is not None:
        _rename(record, module, name + "_orig", name)


def _note(undo: Undo, holders: Iterable[Holder]) -> None:
    """Record what pruning a tensor, or no longer pruning it, changes in the modules that hold it."""
    for holder in holders:
        undo.modules([holder.module])
        undo.contents(*(vars(hook) for hook in _with_members(holder.hook)))
        if (record := sharded_parameter(holder.module, key_of(holder))) is not None:  # fully_shard's note of the name
            undo.attributes(private.gathered_as(record), "param_name")
            undo.contents(private.gathered_as(record).shared_param_names)


def _with_members(hook: Any) -> Iterator[Any]:
    """A hook and, if it is a container, the methods in it, whose masks are let go."""
    if hook is not None:
        yield hook
    if isinstance(hook, PruningContainer):
        yield from (method for method in hook if method is not None)


def _note_values(undo: Undo, orig: Tensor | None) -> None:
    if orig is None:
        return
    if is_sharded(orig):  # written to in place
        undo.values(orig)
    else:
        undo.call(setattr, orig, "data", orig.data)


def _rename(record: Any, module: nn.Module, name: str, new_name: str) -> None:
    """Tells ``fully_shard`` under which name it finds the parameter from here on."""
    info = private.gathered_as(record)
    if info.module is module and info.param_name == name:
        info.param_name = new_name
    for index, (owner, owner_name) in enumerate(zip(info.shared_modules, info.shared_param_names, strict=True)):
        if owner is module and owner_name == name:
            info.shared_param_names[index] = new_name
