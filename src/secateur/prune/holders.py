"""Finding what is to be pruned: the tensor, every module that holds it, the hooks and masks that are there.

Law: what cannot be pruned is refused here, by name, before anything is computed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from secateur.prune.masked_weight import placed_like
from secateur.prune.methods import TORCH_METHOD, BasePruningMethod
from secateur.support import is_sharded, other_owners, private, sharded_parameter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def is_plain(hook: Any, attribute: str) -> bool:
    """Whether a hook, ours or torch's, has the library's own version of a method."""
    return getattr(type(hook), attribute, None) in (
        getattr(BasePruningMethod, attribute),
        getattr(TORCH_METHOD, attribute),
    )


def hooks_of(module: nn.Module, name: str) -> list[tuple[int, Any]]:
    """``(key, hook)`` of each pruning hook for that tensor: none, or one, if nobody has tampered."""
    return [
        (key, hook)
        for key, hook in private.pre_hooks_of(module).items()
        if isinstance(hook, BasePruningMethod) and getattr(hook, "_tensor_name", None) == name
    ]


@dataclass(eq=False)
class Holder:
    """One place where the tensor is registered: a module, the name there, and the pruning hook if it has one."""

    module: nn.Module
    name: str
    key: int | None = None
    hook: Any = None

    @classmethod
    def find(cls, module: nn.Module, name: str) -> Holder:
        found = hooks_of(module, name)
        if len(found) > 1:
            raise AssertionError(
                f"Avoid adding multiple pruning hooks to the "
                f"same tensor {name} of module {module}. Use a PruningContainer."
            )
        return cls(module, name, *(found[0] if found else ()))

    def __str__(self) -> str:
        return f"{type(self.module).__name__}.{self.name}"


@dataclass(eq=False)
class Target:
    """One tensor to prune, with every module that holds it; the first holder is the one that was asked for."""

    orig: Tensor
    holders: list[Holder]
    masks: list[Tensor]
    method: Any = None
    where: int | None = None  # position among several
    pairs: list[tuple[nn.Module, str]] = field(default_factory=list)
    asked: int = 1  # how many of the holders the caller named
    resulting_hook: Any = None

    @classmethod
    def find(
        cls, module: nn.Module, name: str, make: Callable[[], Any] | None = None, *, where: int | None = None
    ) -> Target:
        """Raises whatever makes ``module.<name>`` impossible to prune; `make` constructs the method."""
        holder = Holder.find(module, name)
        method = None
        if make is not None:
            method = make()
            method._tensor_name = name
        sharded_parameter(module, key_of(holder))  # puts a gathered parameter away
        others = other_holders(holder)
        _refuse_unprunable(holder)
        for other in others:
            try:
                _refuse_unprunable(other)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{holder} and {other} are one tensor, and {other} cannot follow: {error}") from error
        return cls(
            orig=getattr(module, key_of(holder)),
            holders=[holder, *others],
            masks=[getattr(each.module, each.name + "_mask") for each in (holder, *others) if each.hook is not None],
            method=method,
            where=where,
            pairs=[(module, name)],
        )

    @property
    def name(self) -> str:
        return self.holders[0].name

    @property
    def mask(self) -> Tensor | None:
        """What is left of the tensor, in its dtype, or None if it was never pruned; not to be changed."""
        if not self.masks:
            return None
        mask = placed_like(self.masks[0].detach(), self.orig)
        for other in self.masks[1:]:
            if other is not self.masks[0]:
                mask = mask * placed_like(other, self.orig).to(mask)
        return mask.to(self.orig.dtype)

    def __str__(self) -> str:
        return str(self.holders[0]) + (f" (parameters[{self.where}])" if self.where is not None else "")


def key_of(holder: Holder) -> str:
    """The name under which the parameter is registered there."""
    return holder.name if holder.hook is None else holder.name + "_orig"


def other_holders(holder: Holder) -> list[Holder]:
    """The other ends of a tied tensor."""
    return [_other_holder(*other, than=holder) for other in other_owners(holder.module, key_of(holder))]


def _other_holder(module: nn.Module, key: str, than: Holder) -> Holder:
    """The holder for a parameter registered as `key`: pruned, if that is the ``_orig`` of a pruned tensor."""
    if key.endswith("_orig") and hooks_of(module, key.removesuffix("_orig")):
        return Holder.find(module, key.removesuffix("_orig"))
    if _is_parametrization_list(module):
        raise ValueError(
            f"{than} is also the original of a parametrization, which cannot follow the pruning of {than}: "
            f"untie the two, or call torch.nn.utils.parametrize.remove_parametrizations first."
        )
    return Holder.find(module, key)


def _is_parametrization_list(module: nn.Module) -> bool:
    return isinstance(module, nn.utils.parametrize.ParametrizationList)


def _refuse_unprunable(holder: Holder) -> None:
    """What cannot be pruned is said before anything is computed."""
    module, name = holder.module, holder.name
    if holder.hook is not None:
        return
    tensor = getattr(module, name)
    if nn.utils.parametrize.is_parametrized(module, name):
        raise TypeError(
            f"{holder} is computed by a parametrization: call torch.nn.utils.parametrize.remove_parametrizations "
            f"first, or prune 'original' of module.parametrizations.{name}."
        )
    if tensor is None:
        raise TypeError(f"{holder} is None: there is nothing to prune.")
    if isinstance(tensor, (UninitializedParameter | UninitializedBuffer)):
        raise ValueError(
            f"{holder} is an uninitialized parameter: run one forward pass, which gives it a shape, before pruning."
        )
    if not isinstance(tensor, nn.Parameter):
        parameters = private.parameters_of(module)
        if name + "_g" in parameters and name + "_v" in parameters:
            raise TypeError(
                f"{holder} is computed by weight_norm: call torch.nn.utils.remove_weight_norm first, "
                f"or prune '{name}_v'."
            )
        if name + "_orig" in parameters:
            raise TypeError(
                f"{holder} is computed from '{name}_orig' by another hook, such as spectral_norm: remove that first."
            )
        raise TypeError(
            f"cannot assign '{torch.typename(tensor)}' object to parameter '{name}_orig' "
            "(torch.nn.Parameter or None required)"
        )
    if name not in private.parameters_of(module):
        raise ValueError(f"{holder} is a parameter of another module: prune it there.")
    for reserved in (name + "_orig", name + "_mask"):
        if hasattr(module, reserved) and (reserved not in private.buffers_of(module) or reserved.endswith("_orig")):
            raise KeyError(f"attribute '{reserved}' already exists")


def distinct(found: Sequence[Target]) -> list[Target]:
    """Each tensor once; a tensor listed twice has all its pairs. Two over the same memory are refused."""
    targets: dict[int, Target] = {}
    for target in found:
        first = targets.setdefault(id(target.orig), target)
        pair = target.pairs[0]
        if first is target or any(pair[0] is module and pair[1] == name for module, name in first.pairs):
            continue
        first.pairs.append(pair)
        # The pair that was asked for comes before those that merely follow.
        holder = next((each for each in first.holders if each.module is pair[0] and each.name == pair[1]), None)
        if holder is None:
            continue  # a shallow copy of a module that is listed
        first.holders.remove(holder)
        first.holders.insert(first.asked, holder)
        first.asked += 1
    _refuse_overlap(list(targets.values()))
    return list(targets.values())


def _refuse_overlap(targets: Sequence[Target]) -> None:
    """Two parameters over the same memory cannot have two masks."""
    spans: dict[tuple[torch.device, int], list[tuple[int, int, Target]]] = {}
    for target in targets:
        local: Tensor = cast("Any", target.orig).to_local() if is_sharded(target.orig) else target.orig
        if local.device.type == "meta" or local.numel() == 0:
            continue
        extent = 1 + sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
        start = local.data_ptr()
        spans.setdefault((local.device, local.untyped_storage().data_ptr()), []).append(
            (start, start + extent * local.element_size(), target)
        )
    for group in spans.values():
        group.sort(key=lambda span: span[:2])
        for (_, stop, first), (start, _, second) in itertools.pairwise(group):
            if start < stop:
                raise ValueError(
                    f"{first} and {second} are different parameters over the same memory, so that one cannot follow "
                    f"the mask of the other: make them one Parameter (second.{second.name} = first.{first.name}), "
                    f"or give each its own."
                )
