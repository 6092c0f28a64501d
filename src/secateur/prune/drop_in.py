"""The drop-in for ``torch.nn.utils.prune``: the same names, state, hooks, draws and errors, with its faults mended.

A pruned tensor ``name`` lives on as the parameter ``<name>_orig`` and the buffer ``<name>_mask``, and a forward
pre-hook, which is the pruning method itself, marks it. Every call computes first and changes the module last, so
that a call that fails leaves everything as it was. What differs on purpose is listed in ``docs/drop-in.md``.
"""

from __future__ import annotations

import copy
import itertools
import numbers
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils import prune as torch_prune

from secateur.criteria import magnitude
from secateur.prune.masked_weight import (
    compute_on_read,
    is_computed_on_read,
    masked,
    placed_like,
    stop_computing_on_read,
)
from secateur.selection import LazyScores, keep_largest, keep_largest_overall
from secateur.support import is_sharded, other_owners, replicating_group, sharded_parameter, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

Amount = int | float | numbers.Real

_TORCH_METHOD: Any = torch_prune.BasePruningMethod
_TORCH_CONTAINER: Any = torch_prune.PruningContainer
_COUNTERPARTS: dict[type, Any] = {}  # each of the classes below to torch's of the same name

__all__ = [
    "BasePruningMethod",
    "CustomFromMask",
    "Identity",
    "L1Unstructured",
    "LnStructured",
    "PruningContainer",
    "RandomStructured",
    "RandomUnstructured",
    "custom_from_mask",
    "global_unstructured",
    "identity",
    "is_pruned",
    "l1_unstructured",
    "ln_structured",
    "random_structured",
    "random_unstructured",
    "remove",
]


class BasePruningMethod(ABC):
    """A way to prune: `compute_mask` says what stays, ``PRUNING_TYPE`` what a repeated pruning chooses among.

    ``PRUNING_TYPE`` is ``"unstructured"`` (the entries still there), ``"structured"`` (the channels along ``self.dim``
    that still hold something) or ``"global"`` (everything; the method combines the masks itself).

    >>> class Largest(BasePruningMethod):
    ...     PRUNING_TYPE = "unstructured"
    ...     def compute_mask(self, t, default_mask):
    ...         return default_mask * (t.abs() >= 1)
    >>> layer = nn.Linear(3, 1)
    >>> _ = layer.weight.data.copy_(torch.tensor([[0.5, -2.0, 1.0]]))
    >>> method = Largest.apply(layer, "weight")
    >>> layer.weight_mask
    tensor([[0., 1., 1.]])
    """

    _tensor_name: str

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        """A method made by torch counts as one of ours, of the same name; the other direction is registered below."""
        return True if _COUNTERPARTS.get(cls) in other.__mro__ else NotImplemented

    def __call__(self, module: nn.Module, inputs: Any) -> None:  # noqa: ARG002
        """The forward pre-hook: ``module.<name>`` becomes `apply_mask` of the module, unless reading it does that."""
        if not is_computed_on_read(module, self._tensor_name):
            setattr(module, self._tensor_name, self.apply_mask(module))

    @abstractmethod
    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """The mask (1 = kept) for scores `t`, within `default_mask`; all three of one shape.

        Args:
            t: importance of each entry, by default the tensor to prune.
            default_mask: what earlier prunings left; ones at first.
        """

    def apply_mask(self, module: nn.Module) -> Tensor:
        """``mask * orig`` of `module`, of the shape and dtype of the original tensor; exactly 0 where the mask is."""
        if self._tensor_name is None:
            raise AssertionError(f"Module {module} has to be pruned")
        return masked(getattr(module, self._tensor_name + "_orig"), getattr(module, self._tensor_name + "_mask"))

    @classmethod
    def apply(
        cls, module: nn.Module, name: str, *args: Any, importance_scores: Tensor | None = None, **kwargs: Any
    ) -> BasePruningMethod:
        """Prunes ``module.<name>`` by ``cls(*args, **kwargs)`` and returns the method, or the container it joined.

        Args:
            module: holds the tensor.
            name: of the parameter within `module`.
            args: for the constructor of the method.
            importance_scores: what `compute_mask` sees instead of the tensor; same shape.
            kwargs: for the constructor of the method.

        Raises:
            AssertionError: scores of another shape; several pruning hooks for one tensor.
            ValueError: a scores or mask value that is none; an amount out of range.
            TypeError: `name` is no parameter (None, computed by a parametrization or by weight_norm).
        """
        target = Target.find(module, name, lambda: cls(*args, **kwargs))
        scores = importance_scores
        if scores is not None:
            if scores.shape != target.orig.shape:
                raise AssertionError(
                    f"importance_scores should have the same shape as parameter "
                    f"{name} of {module}, got {scores.shape} vs {target.orig.shape}"
                )
            _refuse_nan_scores(scores, target)
        mask = _mask_for(target, scores)
        _commit([_Change(target, mask)])
        return cast("BasePruningMethod", target.resulting_hook)

    def prune(self, t: Tensor, default_mask: Tensor | None = None, importance_scores: Tensor | None = None) -> Tensor:
        """``t * mask``, with the mask computed for `importance_scores` within `default_mask`.

        Args:
            t: the tensor to prune; not changed.
            default_mask: what is left of it, by default everything.
            importance_scores: what `compute_mask` sees, by default `t`; same shape.

        >>> L1Unstructured(amount=1).prune(torch.tensor([3.0, -1.0, 2.0]))
        tensor([3., 0., 2.])
        """
        if importance_scores is None:
            importance_scores = t
        elif importance_scores.shape != t.shape:
            raise AssertionError(
                f"importance_scores should have the same shape as tensor t, got {importance_scores.shape} vs {t.shape}"
            )
        if default_mask is None:
            default_mask = torch.ones_like(t)
        mask = self.compute_mask(importance_scores, default_mask=default_mask)
        product = t * mask
        with torch.no_grad():
            product.masked_fill_(mask == 0, 0)
        return product

    def remove(self, module: nn.Module) -> None:
        """``module.<name>`` is the parameter again, with zeros where it was masked; the hook stays registered.

        To delete the hook as well, call the function `remove`.
        """
        if self._tensor_name is None:
            raise AssertionError(f"Module {module} has to be pruned before pruning can be removed")
        _make_permanent(self, module)


class PruningContainer(BasePruningMethod):
    """Several methods that pruned one tensor, in order; its mask is the last one's within what the others left.

    Args:
        args: the methods, or one iterable of them. All act on the tensor of the same name.

    >>> first, second = L1Unstructured(0.2), RandomUnstructured(0.5)
    >>> container = PruningContainer(first, second)
    >>> len(container), container[1] is second
    (2, True)
    """

    def __init__(self, *args: Any) -> None:
        self._pruning_methods: tuple[BasePruningMethod, ...] = ()
        if len(args) == 1 and isinstance(args[0], Iterable) and not isinstance(args[0], BasePruningMethod):
            args = tuple(args[0])
        for method in args:
            self.add_pruning_method(method)

    def add_pruning_method(self, method: BasePruningMethod | None) -> None:
        """Appends a method; the first one gives the container its tensor name.

        Raises:
            TypeError: it is no pruning method.
            ValueError: it acts on a tensor of another name.
        """
        if method is not None:
            if not isinstance(method, BasePruningMethod):
                raise TypeError(f"{type(method)} is not a BasePruningMethod subclass")
            name = getattr(method, "_tensor_name", None)
            if not self._pruning_methods and name is not None and getattr(self, "_tensor_name", None) is None:
                self._tensor_name = name
            if getattr(self, "_tensor_name", None) != name:
                raise ValueError(
                    "Can only add pruning methods acting on "
                    f"the parameter named '{getattr(self, '_tensor_name', None)}' to PruningContainer {self}."
                    f" Found '{name}'"
                )
        self._pruning_methods += (cast("BasePruningMethod", method),)

    def __len__(self) -> int:
        return len(self._pruning_methods)

    def __iter__(self) -> Iterator[BasePruningMethod]:
        return iter(self._pruning_methods)

    def __getitem__(self, idx: Any) -> Any:
        return self._pruning_methods[idx]

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """`default_mask`, with the last method's mask where that method may choose.

        An unstructured method sees the entries where the mask is 1, as a vector; a structured one the channels along
        its ``dim`` whose mask does not sum to 0; a global one everything.

        Raises:
            AttributeError: no ``PRUNING_TYPE``, or a structured method without ``dim``.
            ValueError: an unknown ``PRUNING_TYPE``.
        """
        method = self._pruning_methods[-1]
        choice = _choice(method, t.dim(), default_mask)
        mask = _in_dtype_of(t, default_mask).clone()
        chosen = default_mask[choice]
        partial = method.compute_mask(t[choice], default_mask=chosen)
        if partial.shape != chosen.shape:
            raise ValueError(
                f"The mask of {type(method).__name__} for '{getattr(self, '_tensor_name', None)}' has shape "
                f"{tuple(partial.shape)}, the entries that it chooses among {tuple(chosen.shape)}."
            )
        mask[choice] = partial.to(dtype=mask.dtype)
        return mask


def _choice(method: BasePruningMethod, n_dims: int, mask: Tensor) -> Any:
    """The index of the entries among which `method` chooses."""
    kind = method.PRUNING_TYPE  # type: ignore[attr-defined]
    if kind == "unstructured":
        return mask == 1
    if kind == "global":
        return (slice(None),) * n_dims
    if kind != "structured":
        raise ValueError(f"Unrecognized PRUNING_TYPE {kind}")
    if not hasattr(method, "dim"):
        raise AttributeError('Pruning methods of PRUNING_TYPE "structured" need to have the attribute `dim` defined.')
    dim = method.dim + n_dims if method.dim < 0 else method.dim
    if dim < 0:
        raise IndexError(f"Index is out of bounds for tensor with dimensions {n_dims}")
    left = mask.sum(dim=[other for other in range(n_dims) if other != dim]) != 0
    choice: list[Any] = [slice(None)] * n_dims
    choice[dim] = left
    return tuple(choice)


class Identity(BasePruningMethod):
    """Prunes nothing, but registers the mask of ones."""

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:  # noqa: ARG002
        """`default_mask` itself."""
        return default_mask

    @classmethod
    def apply(cls, module: nn.Module, name: str) -> BasePruningMethod:  # type: ignore[override]
        """Registers the original and a mask of ones for ``module.<name>``."""
        return super().apply(module, name)


class RandomUnstructured(BasePruningMethod):
    """Prunes `amount` entries at random: those with the largest of one ``rand_like`` draw.

    Args:
        amount: a fraction in [0, 1], or (an integer) how many.
    """

    PRUNING_TYPE = "unstructured"

    def __init__(self, amount: Amount) -> None:
        _validate_pruning_amount_init(amount)
        self.amount = amount

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """`default_mask` less ``amount`` of its entries; draws once, and not at all if that is none."""
        count = _count(self.amount, t.nelement())
        if count == 0:
            return default_mask.clone()
        # Drawn in the order of the indices, so that channels_last weights get the mask of contiguous ones.
        draw = torch.rand_like(t.detach(), memory_format=torch.contiguous_format)
        return default_mask.masked_fill(~_largest(-draw, draw.numel() - count), 0)

    @classmethod
    def apply(cls, module: nn.Module, name: str, amount: Amount) -> BasePruningMethod:  # type: ignore[override]
        """Prunes `amount` of ``module.<name>`` at random; see `random_unstructured`."""
        return super().apply(module, name, amount=amount)


class L1Unstructured(BasePruningMethod):
    """Prunes the `amount` entries of least absolute value; among equal ones the last.

    Args:
        amount: a fraction in [0, 1], or (an integer) how many.
    """

    PRUNING_TYPE = "unstructured"

    def __init__(self, amount: Amount) -> None:
        _validate_pruning_amount_init(amount)
        self.amount = amount

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """`default_mask` less its ``amount`` entries of least ``abs(t)``."""
        count = _count(self.amount, t.nelement())
        if count == 0:
            return default_mask.clone()
        return default_mask.masked_fill(~_largest(t.detach().abs(), t.nelement() - count), 0)

    @classmethod
    def apply(  # type: ignore[override]
        cls, module: nn.Module, name: str, amount: Amount, importance_scores: Tensor | None = None
    ) -> BasePruningMethod:
        """Prunes `amount` of ``module.<name>``; see `l1_unstructured`."""
        return super().apply(module, name, amount=amount, importance_scores=importance_scores)


class RandomStructured(BasePruningMethod):
    """Prunes `amount` channels along `dim` at random: those with the smallest of one CPU draw, a number a channel.

    Args:
        amount: a fraction of the channels in [0, 1], or (an integer) how many.
        dim: the axis that counts channels.
    """

    PRUNING_TYPE = "structured"

    def __init__(self, amount: Amount, dim: int = -1) -> None:
        _validate_pruning_amount_init(amount)
        self.amount = amount
        self.dim = dim

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """`default_mask` less ``amount`` of its channels; draws once, and not at all if that is none.

        Raises:
            IndexError: ``dim`` is no axis of `t`.
            ValueError: `t` has fewer than two axes, or fewer channels than asked for.
        """
        channels, count = _channels(t, self.dim, self.amount)
        if count == 0:
            return default_mask
        kept = _largest(torch.rand(channels), channels - count)
        return _in_dtype_of(t, default_mask).masked_fill(~_along(kept, t, self.dim), 0)

    @classmethod
    def apply(  # type: ignore[override]
        cls, module: nn.Module, name: str, amount: Amount, dim: int = -1
    ) -> BasePruningMethod:
        """Prunes `amount` channels of ``module.<name>`` at random; see `random_structured`."""
        return super().apply(module, name, amount=amount, dim=dim)


class LnStructured(BasePruningMethod):
    """Prunes the `amount` channels along `dim` of least L`n` norm; among equal ones the last.

    Args:
        amount: a fraction of the channels in [0, 1], or (an integer) how many.
        n: the order of the norm, as in ``torch.norm``: a number, ``inf``, ``-inf``, ``'fro'``, ``'nuc'``; None is 2.
        dim: the axis that counts channels.
    """

    PRUNING_TYPE = "structured"

    def __init__(self, amount: Amount, n: Any, dim: int = -1) -> None:
        _validate_pruning_amount_init(amount)
        self.amount = amount
        self.n = n
        self.dim = dim

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """`default_mask` less its ``amount`` channels of least norm in `t`.

        Raises:
            IndexError: ``dim`` is no axis of `t`.
            ValueError: `t` has fewer than two axes, or fewer channels than asked for.
        """
        channels, count = _channels(t, self.dim, self.amount)
        norm = _compute_norm(t.detach(), self.n, self.dim)
        if count == 0:
            return default_mask
        return _in_dtype_of(t, default_mask).masked_fill(~_along(_largest(norm, channels - count), t, self.dim), 0)

    @classmethod
    def apply(  # type: ignore[override]
        cls,
        module: nn.Module,
        name: str,
        amount: Amount,
        n: Any,
        dim: int,
        importance_scores: Tensor | None = None,
    ) -> BasePruningMethod:
        """Prunes `amount` channels of ``module.<name>``; see `ln_structured`."""
        return super().apply(module, name, amount=amount, n=n, dim=dim, importance_scores=importance_scores)


class _MaskShapeError(ValueError, AssertionError):
    """A ValueError, as everywhere in this library; an AssertionError for code that knows torch's."""


class CustomFromMask(BasePruningMethod):
    """Prunes what a given mask says, on top of what is pruned already.

    Args:
        mask: 0 and 1 (or bool) in the shape of the tensor.
    """

    PRUNING_TYPE = "global"

    _follows = False  # True on the far side of a tied weight: it was pruned through another module
    _made_here = False  # True where the mask was computed by global_unstructured and not given by the user

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:  # noqa: ARG002
        """``default_mask * mask``."""
        mask = whole(self.mask)
        if default_mask.shape != mask.shape:
            raise _MaskShapeError(f"default_mask shape {default_mask.shape} must match self.mask shape {mask.shape}")
        return default_mask * mask.to(dtype=default_mask.dtype)

    @classmethod
    def apply(cls, module: nn.Module, name: str, mask: Tensor) -> BasePruningMethod:  # type: ignore[override]
        """Prunes ``module.<name>`` by `mask`; see `custom_from_mask`."""
        return super().apply(module, name, mask=mask)


for _ours in (
    BasePruningMethod,
    PruningContainer,
    Identity,
    RandomUnstructured,
    L1Unstructured,
    RandomStructured,
    LnStructured,
    CustomFromMask,
):
    _theirs: Any = getattr(torch_prune, _ours.__name__)
    _theirs.register(_ours)  # before the other direction holds, for an abstract class refuses a circle
    _COUNTERPARTS[_ours] = _theirs


def identity(module: nn.Module, name: str) -> nn.Module:
    """`module`, with ``<name>_orig`` and a ``<name>_mask`` of ones in the place of ``<name>``.

    >>> identity(nn.Linear(2, 3), "bias").bias_mask
    tensor([1., 1., 1.])
    """
    Identity.apply(module, name)
    return module


def random_unstructured(module: nn.Module, name: str, amount: Amount) -> nn.Module:
    """`module`, with `amount` of the entries left in ``<name>`` pruned at random.

    Args:
        module: holds the tensor.
        name: of the parameter within `module`.
        amount: a fraction in [0, 1] of what is left, or (an integer) how many.

    >>> layer = random_unstructured(nn.Linear(2, 3), "weight", amount=1)
    >>> int((layer.weight_mask == 0).sum())
    1
    """
    RandomUnstructured.apply(module, name, amount)
    return module


def l1_unstructured(module: nn.Module, name: str, amount: Amount, importance_scores: Tensor | None = None) -> nn.Module:
    """`module`, with the `amount` entries left in ``<name>`` of least absolute value pruned.

    Args:
        module: holds the tensor.
        name: of the parameter within `module`.
        amount: a fraction in [0, 1] of what is left, or (an integer) how many.
        importance_scores: ranked instead of the tensor; same shape.

    >>> layer = l1_unstructured(nn.Linear(2, 3), "weight", amount=0.2)
    >>> list(layer.state_dict())
    ['bias', 'weight_orig', 'weight_mask']
    """
    L1Unstructured.apply(module, name, amount=amount, importance_scores=importance_scores)
    return module


def random_structured(module: nn.Module, name: str, amount: Amount, dim: int) -> nn.Module:
    """`module`, with `amount` of the channels left along `dim` of ``<name>`` pruned at random.

    Args:
        module: holds the tensor.
        name: of the parameter within `module`.
        amount: a fraction in [0, 1] of the channels left, or (an integer) how many.
        dim: the axis that counts channels.

    >>> layer = random_structured(nn.Linear(5, 3), "weight", amount=3, dim=1)
    >>> int((layer.weight == 0).all(dim=0).sum())
    3
    """
    RandomStructured.apply(module, name, amount, dim)
    return module


def ln_structured(
    module: nn.Module, name: str, amount: Amount, n: Any, dim: int, importance_scores: Tensor | None = None
) -> nn.Module:
    """`module`, with the `amount` channels left along `dim` of ``<name>`` of least L`n` norm pruned.

    Args:
        module: holds the tensor.
        name: of the parameter within `module`.
        amount: a fraction in [0, 1] of the channels left, or (an integer) how many.
        n: the order of the norm: a number, ``inf``, ``-inf``, ``'fro'``, ``'nuc'``.
        dim: the axis that counts channels.
        importance_scores: whose norm is ranked instead of the tensor's; same shape.

    >>> layer = ln_structured(nn.Conv2d(5, 3, 2), "weight", amount=0.3, dim=1, n=float("-inf"))
    >>> int((layer.weight_mask.sum(dim=(0, 2, 3)) == 0).sum())
    2
    """
    LnStructured.apply(module, name, amount, n, dim, importance_scores=importance_scores)
    return module


def global_unstructured(
    parameters: Iterable[tuple[nn.Module, str]],
    pruning_method: Any,
    importance_scores: dict[tuple[nn.Module, str], Tensor] | None = None,
    **kwargs: Any,
) -> None:
    """Prunes all `parameters` in one competition, leaving a `CustomFromMask` on each.

    The exact count goes, whatever the ties; a tensor listed twice, or under two names, takes part once. Nothing
    changes unless every parameter can be pruned.

    Args:
        parameters: ``(module, name)`` pairs.
        pruning_method: a class whose ``PRUNING_TYPE`` is ``"unstructured"``.
        importance_scores: ``{(module, name): scores}``, ranked instead of the parameters where given; same shapes.
        kwargs: for `pruning_method`, such as ``amount``: a fraction of all entries left, or (an integer) how many.

    Raises:
        TypeError: the method is not unstructured; `parameters` holds something else than pairs.
        ValueError: scores of another shape, with NaN, or for a pair that is not listed.

    >>> net = nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 1))
    >>> global_unstructured([(net[0], "weight"), (net[1], "weight")], L1Unstructured, amount=10)
    >>> sum(int((mask == 0).sum()) for mask in net.buffers())
    10
    """
    if not isinstance(parameters, Iterable):
        raise TypeError("global_unstructured(): parameters is not an Iterable")
    if importance_scores is None:
        importance_scores = {}
    if not isinstance(importance_scores, dict):
        raise TypeError("global_unstructured(): importance_scores must be of type dict")
    pairs = [_pair(pair, index) for index, pair in enumerate(parameters)]
    if not pairs:
        raise ValueError("global_unstructured(): expected a non-empty list of Tensors")
    listed = {(id(module), name) for module, name in pairs}
    for module, name in importance_scores:
        if (id(module), name) not in listed:
            raise ValueError(
                f"importance_scores holds {type(module).__name__}.{name}, which is not among the parameters to prune"
            )

    targets = distinct([Target.find(module, name, where=index) for index, (module, name) in enumerate(pairs)])
    scores: dict[str, Tensor] = {}
    for key, target in targets.items():
        given = [importance_scores[pair] for pair in target.pairs if pair in importance_scores]
        if given:
            if given[0].shape != target.orig.shape:
                raise ValueError(
                    f"importance_scores of {target} has shape {tuple(given[0].shape)}, "
                    f"the parameter {tuple(target.orig.shape)}"
                )
            _refuse_nan_scores(given[0], target)
            scores[key] = given[0].detach()

    method = pruning_method(**kwargs)
    method._tensor_name = "temp"
    if method.PRUNING_TYPE != "unstructured":
        raise TypeError(
            'Only "unstructured" PRUNING_TYPE supported for '
            f"the `pruning_method`. Found method {pruning_method} of type {method.PRUNING_TYPE}"
        )
    if type(method) is L1Unstructured:
        masks = _largest_overall(method, targets, scores)
    else:
        masks = _joined(method, targets, scores)
    for key, target in targets.items():
        target.method = CustomFromMask(masks[key])
        target.method._made_here = True
        target.method._tensor_name = target.name
    _commit([_Change(target, masks[key]) for key, target in targets.items()])


def custom_from_mask(module: nn.Module, name: str, mask: Tensor) -> nn.Module:
    """`module`, with ``<name>`` pruned where `mask` is 0.

    Args:
        module: holds the tensor.
        name: of the parameter within `module`.
        mask: 0 and 1 (or bool) in the shape of the parameter.

    Raises:
        ValueError: the mask has another shape or other values.

    >>> custom_from_mask(nn.Linear(5, 3), "bias", torch.tensor([0, 1, 0])).bias_mask
    tensor([0., 1., 0.])
    """
    CustomFromMask.apply(module, name, mask)
    return module


def remove(module: nn.Module, name: str) -> nn.Module:
    """`module`, with ``<name>`` an ordinary parameter again, zero where it was masked, and its pruning hook gone.

    It is the same Parameter object as before pruning. This does not undo the pruning, and does not look into children.

    Raises:
        ValueError: ``<name>`` is not pruned; or a module that is not pruned holds the same parameter, and would
            silently change.

    >>> layer = remove(random_unstructured(nn.Linear(5, 7), "weight", amount=0.2), "weight")
    >>> list(layer.state_dict())
    ['bias', 'weight']
    """
    found = hooks_of(module, name)
    if not found:
        raise ValueError(f"Parameter '{name}' of module {module} has to be pruned before pruning can be removed")
    key, hook = found[0]
    if _is_plain(hook, "remove"):
        _make_permanent(hook, module)
    else:
        hook.remove(module)
    del module._forward_pre_hooks[key]
    return module


def is_pruned(module: nn.Module) -> bool:
    """Whether `module` or a module in it has a pruning hook, ours or torch's.

    >>> layer = nn.Linear(5, 7)
    >>> is_pruned(layer), is_pruned(nn.Sequential(random_unstructured(layer, "weight", amount=0.2)))
    (False, True)
    """
    return any(
        isinstance(hook, BasePruningMethod) for child in module.modules() for hook in child._forward_pre_hooks.values()
    )


def _validate_pruning_amount_init(amount: Any) -> None:
    """An amount is an integer that is not negative, or another real number in [0, 1].

    Raises:
        TypeError: it is no real number.
        ValueError: it is out of range.
    """
    if not isinstance(amount, numbers.Real):
        raise TypeError(f"Invalid type for amount: {amount}. Must be int or float.")
    # NaN passes here, as with torch, and is found out where it is counted.
    if amount < 0 or (not isinstance(amount, numbers.Integral) and float(amount) > 1):
        raise ValueError(f"amount={amount} should either be a float in the range [0, 1] or a non-negative integer")


def _validate_pruning_amount(amount: Any, tensor_size: int) -> None:
    """An integer amount is at most `tensor_size`; else a ValueError."""
    if isinstance(amount, numbers.Integral) and int(amount) > tensor_size:
        raise ValueError(f"amount={amount} should be smaller than the number of parameters to prune={tensor_size}")


def _validate_structured_pruning(t: Tensor) -> None:
    """A tensor with channels has at least two axes; else a ValueError."""
    shape = t.shape
    if len(shape) <= 1:
        raise ValueError(
            "Structured pruning can only be applied to multidimensional tensors. "
            f"Found tensor of shape {shape} with {len(shape)} dims"
        )


def _compute_nparams_toprune(amount: Any, tensor_size: int) -> Any:
    """An integer amount itself; another one times `tensor_size`, rounded half to even.

    >>> _compute_nparams_toprune(7, 10), _compute_nparams_toprune(0.25, 10)
    (7, 2)
    """
    return amount if isinstance(amount, numbers.Integral) else round(amount * tensor_size)


def _validate_pruning_dim(t: Tensor, dim: int) -> None:
    """`dim` is less than the number of axes; else an IndexError."""
    if dim >= t.dim():
        raise IndexError(f"Invalid index {dim} for tensor of size {t.shape}")


def _compute_norm(t: Tensor, n: Any, dim: int) -> Tensor:
    """The L`n` norm over all axes but `dim`, of shape ``(t.shape[dim],)``; of half precision in float32.

    >>> _compute_norm(torch.tensor([[3.0, 4.0], [0.0, 5.0]]), 2, dim=0)
    tensor([5., 5.])
    """
    dims = list(range(t.dim()))
    dims.remove(dims[dim] if dim < 0 else dim)
    if t.dtype in (torch.float16, torch.bfloat16):
        t = t.float()  # in half precision the squares overflow, and the strongest channel ranks as the weakest
    norm: Tensor
    if isinstance(n, str) and n != "fro":
        norm = torch.norm(t, p=n, dim=dims)
    else:
        norm = torch.linalg.vector_norm(t, 2 if n is None or n == "fro" else n, dim=dims)
    return norm


# What follows is the life cycle: find the tensor and everything around it, compute the mask, change the modules.


def _count(amount: Amount, size: int) -> int:
    count = _compute_nparams_toprune(amount, size)
    _validate_pruning_amount(count, size)
    return int(count)


def _channels(t: Tensor, dim: int, amount: Amount) -> tuple[int, int]:
    """How many channels there are, and how many of them go."""
    _validate_structured_pruning(t)
    _validate_pruning_dim(t, dim)
    channels = t.shape[dim]
    return channels, _count(amount, channels)


def _largest(scores: Tensor, kept: int) -> Tensor:
    """Bool mask of the `kept` largest entries, the first of equal ones; NaN is above all, as in ``torch.topk``."""
    if scores.is_meta:
        return torch.empty_like(scores, dtype=torch.bool)
    table = scores.reshape(1, -1)
    if table.isnan().any():
        table = _above_all(table)
    return keep_largest(table, kept).view(scores.shape)


def _above_all(scores: Tensor) -> Tensor:
    return scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)


def _in_dtype_of(t: Tensor, mask: Tensor) -> Tensor:
    """Methods on their own return masks as torch's do; whole scores would round what a user wrote into a mask."""
    return mask.to(dtype=t.dtype) if t.is_floating_point() else mask


def _along(kept: Tensor, t: Tensor, dim: int) -> Tensor:
    """A mask of channels, shaped so that it broadcasts over `t`."""
    shape = [1] * t.dim()
    shape[dim] = -1
    return kept.to(t.device).view(shape)


def _is_plain(hook: Any, attribute: str) -> bool:
    """Whether a hook, ours or torch's, has the library's own version of a method."""
    return getattr(type(hook), attribute, None) in (
        getattr(BasePruningMethod, attribute),
        getattr(_TORCH_METHOD, attribute),
    )


def hooks_of(module: nn.Module, name: str) -> list[tuple[int, Any]]:
    return [
        (key, hook)
        for key, hook in module._forward_pre_hooks.items()
        if isinstance(hook, BasePruningMethod) and getattr(hook, "_tensor_name", None) == name
    ]


@dataclass(eq=False)
class _Holder:
    """One place where the tensor is registered: a module, the name there, and the pruning hook if it has one."""

    module: nn.Module
    name: str
    key: int | None = None
    hook: Any = None

    @classmethod
    def find(cls, module: nn.Module, name: str) -> _Holder:
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
    holders: list[_Holder]
    masks: list[Tensor]
    method: Any = None
    where: int | None = None  # position in the list given to global_unstructured
    pairs: list[tuple[nn.Module, str]] = field(default_factory=list)
    asked: int = 1  # how many of the holders the caller named
    resulting_hook: Any = None

    @classmethod
    def find(
        cls, module: nn.Module, name: str, make: Callable[[], Any] | None = None, *, where: int | None = None
    ) -> Target:
        """Raises whatever makes ``module.<name>`` impossible to prune; `make` constructs the method."""
        holder = _Holder.find(module, name)
        method = None
        if make is not None:
            method = make()
            method._tensor_name = name
        sharded_parameter(module, key_of(holder))  # puts a gathered parameter away
        others = [_other_holder(*other, than=holder) for other in other_owners(module, key_of(holder))]
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


def key_of(holder: _Holder) -> str:
    return holder.name if holder.hook is None else holder.name + "_orig"


def _other_holder(module: nn.Module, key: str, than: _Holder) -> _Holder:
    """The holder for a parameter registered as `key`: pruned, if that is the ``_orig`` of a pruned tensor."""
    if key.endswith("_orig") and hooks_of(module, key.removesuffix("_orig")):
        return _Holder.find(module, key.removesuffix("_orig"))
    if _is_parametrization_list(module):
        raise ValueError(
            f"{than} is also the original of a parametrization, which cannot follow the pruning of {than}: "
            f"untie the two, or call torch.nn.utils.parametrize.remove_parametrizations first."
        )
    return _Holder.find(module, key)


def _is_parametrization_list(module: nn.Module) -> bool:
    return isinstance(module, nn.utils.parametrize.ParametrizationList)


def _refuse_unprunable(holder: _Holder) -> None:
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
        parameters = module._parameters
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
    if name not in module._parameters:
        raise ValueError(f"{holder} is a parameter of another module: prune it there.")
    for reserved in (name + "_orig", name + "_mask"):
        if hasattr(module, reserved) and (reserved not in module._buffers or reserved.endswith("_orig")):
            raise KeyError(f"attribute '{reserved}' already exists")


def _refuse_nan_scores(scores: Tensor, target: Target) -> None:
    if not scores.is_meta and bool(whole(scores.isnan().any())):
        raise ValueError(f"importance_scores of {target} holds NaN.")


def _mask_for(target: Target, scores: Tensor | None) -> Tensor:
    """The mask that the target's method computes, on top of the mask that is there, checked; nothing changes yet."""
    holder, orig, method, previous = target.holders[0], target.orig, target.method, target.mask
    if isinstance(method, CustomFromMask):
        _refuse_other_mask(method.mask, target)
    if scores is None:
        scores = orig if previous is None else _current(holder, orig, previous)
    default = torch.ones_like(orig) if previous is None else previous.clone()
    if is_sharded(orig):
        scores, default = whole(scores), whole(default)
    if previous is None:
        mask: Any = method.compute_mask(scores, default_mask=default)
    else:
        mask = _trial(holder.hook, method).compute_mask(scores, default_mask=default)
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


def _current(holder: _Holder, orig: Tensor, mask: Tensor) -> Tensor:
    with torch.no_grad():
        if holder.hook is None or _is_plain(holder.hook, "apply_mask"):
            return masked(orig, mask)
        return cast("Tensor", holder.hook.apply_mask(holder.module))


def _is_ours(method: Any) -> bool:
    return type(method) in (
        Identity, RandomUnstructured, L1Unstructured, RandomStructured, LnStructured, CustomFromMask,
    )  # fmt: skip


def _refuse_other_mask(mask: Any, target: Target) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"The mask for {target} is a {type(mask).__name__}, not a tensor.")
    if mask.shape != target.orig.shape:
        raise _MaskShapeError(f"default_mask shape {target.orig.shape} must match self.mask shape {mask.shape}")
    if not mask.is_meta and not bool(whole(((mask == 0) | (mask == 1)).all())):
        raise ValueError(f"The mask for {target} holds values other than 0 and 1.")


def _trial(hook: Any, method: Any) -> Any:
    """The container as it will be; the one on the module is not touched."""
    if isinstance(hook, PruningContainer) and type(hook) is not _TORCH_CONTAINER:
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


# Global pruning.


def _pair(pair: Any, index: int) -> tuple[nn.Module, str]:
    if (
        isinstance(pair, tuple | list)
        and len(pair) == 2
        and isinstance(pair[0], nn.Module)
        and isinstance(pair[1], str)
    ):
        return pair[0], pair[1]
    hint = ", as model.parameters() gives them" if isinstance(pair, Tensor) else ""
    raise TypeError(
        "global_unstructured() needs (module, name) pairs such as (model.fc, 'weight'); "
        f"parameters[{index}] is a {type(pair).__name__}{hint}."
    )


def distinct(found: Sequence[Target]) -> dict[str, Target]:
    """Each tensor once, under a key that says where; a tensor listed twice has all its pairs."""
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
    return {str(target): target for target in targets.values()}


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


def _largest_overall(
    method: L1Unstructured, targets: Mapping[str, Target], given: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """L1 over all tensors at once, without joining them: each weight is read, and only the masks are written."""
    previous = {key: mask for key, target in targets.items() if (mask := target.mask) is not None}
    among = {key: mask == 1 for key, mask in previous.items()}
    sizes = {key: _ones(among[key]) if key in among else target.orig.numel() for key, target in targets.items()}
    count = _count(method.amount, sum(sizes.values()))
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
            LazyScores(weights, lambda weight: _above_all(weight.abs()), elementwise=True), kept, among=among or None
        )
    for key, target in targets.items():
        masks[key] = torch.empty_like(target.orig).copy_(keep.pop(key))
        if key in previous and _ones(previous[key] != 0) != sizes[key]:
            masks[key] = torch.where(among[key], masks[key], previous[key])
    return masks


def _ones(mask: Tensor) -> int:
    """How many entries of a bool mask are true, over all ranks if it is sharded."""
    return int(whole(mask.sum())) if is_sharded(mask) else int(mask.count_nonzero())


def _joined(method: BasePruningMethod, targets: Mapping[str, Target], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
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


# Changing the modules.


@dataclass(eq=False)
class _Change:
    target: Target
    mask: Tensor


def _commit(changes: Sequence[_Change]) -> None:
    """Every mask is ready; now the modules change, all of them or none."""
    _warn_of_emptied([change for change in changes if _is_emptied(change)])
    with _all_or_none([holder.module for change in changes for holder in change.target.holders]):
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


def _prune_holder(holder: _Holder, orig: Tensor, mask: Tensor, method: Any) -> Any:
    module, name = holder.module, holder.name
    if holder.hook is None:
        hook = method
        record = sharded_parameter(module, name)
        module.register_parameter(name + "_orig", cast("nn.Parameter", orig))
        del module._parameters[name]
        if record is not None:
            _rename(record, module, name, name + "_orig")
    elif getattr(holder.hook, "_follows", False):
        hook = method
    elif isinstance(holder.hook, PruningContainer) and type(holder.hook) is not _TORCH_CONTAINER:
        hook = holder.hook
        _release_masks(hook)
        hook.add_pruning_method(method)
    else:
        hook = _trial(holder.hook, method)
        _release_masks(hook[:-1])
    module.register_buffer(name + "_mask", mask)
    if _is_plain(hook, "__call__"):
        by_hook = not _is_plain(hook, "apply_mask")
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
        module._forward_pre_hooks[holder.key] = hook
    return hook


def _release_masks(methods: Iterable[Any]) -> None:
    """Masks that global pruning made earlier are in the new one; kept, they would be a model's size each round."""
    for method in methods:
        if getattr(method, "_made_here", False):
            method.mask = None


def _rename(record: Any, module: nn.Module, name: str, new_name: str) -> None:
    """Tells ``fully_shard`` under which name it finds the parameter from here on."""
    info = record._module_info
    if info.module is module and info.param_name == name:
        info.param_name = new_name
    for index, (owner, owner_name) in enumerate(zip(info.shared_modules, info.shared_param_names, strict=True)):
        if owner is module and owner_name == name:
            info.shared_param_names[index] = new_name


@contextmanager
def _all_or_none(modules: Sequence[nn.Module]) -> Iterator[None]:
    """If the body raises, the modules and their pruning containers are as they were."""
    classes = [(module, type(module), type(module).__bases__) for module in modules]
    held = [
        (module, dict(module.__dict__), {key: copy.copy(module.__dict__[key]) for key in _TABLES}) for module in modules
    ]
    hooks = [
        (hook, dict(hook.__dict__))
        for module in modules
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, PruningContainer)
    ]
    try:
        yield
    except BaseException:
        for module, attributes, tables in held:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for key, table in tables.items():
                live = module.__dict__[key]
                live.clear()
                live.update(table)
        for module, cls, bases in classes:
            module.__class__ = cls
            if cls.__bases__ != bases:
                cls.__bases__ = bases
        for hook, attributes in hooks:
            hook.__dict__.clear()
            hook.__dict__.update(attributes)
        raise


_TABLES = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_forward_pre_hooks")


def _is_emptied(change: _Change) -> bool:
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
        return _ones(mask != 0) > 0
    return (mask.dim() > 0 and bool(mask[:1].any())) or bool(mask.any())  # the first row nearly always tells


def _warn_of_emptied(changes: Sequence[_Change]) -> None:
    if changes:
        names = ", ".join(str(change.target) for change in changes)
        warnings.warn(f"Nothing is left of {names}: every entry is pruned.", UserWarning, stacklevel=_depth_of_caller())


def _depth_of_caller() -> int:
    """How far up the stack the code is that called into this file."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame, depth = frame.f_back, depth + 1
    return depth


def _make_permanent(hook: Any, module: nn.Module) -> None:
    """Writes the zeros into the parameter and gives it its name back; those that merely followed do the same."""
    name = hook._tensor_name
    holder = _Holder(module, name, None, hook)
    sharded_parameter(module, name + "_orig")  # puts a gathered parameter away
    others = other_owners(module, name + "_orig")
    orig = module._parameters[name + "_orig"]
    assert orig is not None
    # The product of a trainable parameter under inference_mode would be a tensor that autograd refuses for good.
    with torch.inference_mode(orig.is_inference()), torch.no_grad():
        weight = (
            hook.apply_mask(module) if not _is_plain(hook, "apply_mask") else BasePruningMethod.apply_mask(hook, module)
        )
        following = [_other_holder(*other, than=holder) for other in others]
        for other in following:
            if other.hook is None and not bool(whole((orig == weight).all())):
                raise ValueError(
                    f"{holder} and {other} are one tensor, and {other} is not pruned: removing the pruning of {holder} "
                    f"would write its zeros into both. Prune {other} as well, or give it a Parameter of its own."
                )
        with _all_or_none([module, *(other.module for other in following)]):
            _restore(module, name, orig)
            for other in following:
                if getattr(other.hook, "_follows", False):
                    _restore(other.module, other.name, orig)
                    assert other.key is not None
                    del other.module._forward_pre_hooks[other.key]
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
    del module._parameters[name + "_orig"]
    del module._buffers[name + "_mask"]
    module._non_persistent_buffers_set.discard(name + "_mask")
    if is_computed_on_read(module, name):
        module._parameters[name] = orig  # a class on top keeps the property; the plain lookup comes after it
    else:
        setattr(module, name, orig)
    if record is not None:
        _rename(record, module, name + "_orig", name)
