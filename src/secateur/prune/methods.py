"""The ways to prune: each a class that computes a mask, and is the forward pre-hook that marks what it pruned.

Law: classes, signatures, draws and errors are those of ``torch.nn.utils.prune``, and ``isinstance`` holds both ways.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from secateur.prune.amounts import (
    Amount,
    _compute_norm,
    _validate_pruning_amount_init,
    along,
    channels_of,
    count_of,
    in_dtype_of,
    largest,
)
from secateur.prune.masked_weight import is_computed_on_read, masked
from secateur.support import local, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

TORCH_METHOD: Any = torch_prune.BasePruningMethod
TORCH_CONTAINER: Any = torch_prune.PruningContainer
_COUNTERPARTS: dict[type, Any] = {}  # each of the classes below to torch's of the same name


class BasePruningMethod(ABC):
    """A way to prune: `compute_mask` says what stays, ``PRUNING_TYPE`` what a repeated pruning chooses among.

    ``PRUNING_TYPE`` is ``"unstructured"`` (the entries still there), ``"structured"`` (the channels along ``self.dim``
    that still hold something) or ``"global"`` (everything; the method combines the masks itself).

    >>> import torch
    >>> class Largest(BasePruningMethod):
    ...     PRUNING_TYPE = "unstructured"
    ...     def compute_mask(self, t, default_mask):
    ...         return default_mask * (t.abs() >= 1)
    >>> layer = torch.nn.Linear(3, 1)
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
        from secateur.prune.changes import prune_one  # the life cycle is written in terms of the methods

        return cast(
            "BasePruningMethod", prune_one(module, name, lambda: cls(*args, **kwargs), scores=importance_scores)
        )

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
            local(product).masked_fill_(local(mask) == 0, 0)
        return product

    def remove(self, module: nn.Module) -> None:
        """``module.<name>`` is the parameter again, with zeros where it was masked; the hook stays registered.

        To delete the hook as well, call the function `remove`.
        """
        if self._tensor_name is None:
            raise AssertionError(f"Module {module} has to be pruned before pruning can be removed")
        from secateur.prune.changes import make_permanent

        make_permanent(self, module)


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
        mask = in_dtype_of(t, default_mask).clone()
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
    """Prunes nothing, but registers the mask of ones.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> method = Identity.apply(layer, "weight")
    >>> layer.weight_mask.tolist()
    [[1.0, 1.0]]
    """

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:  # noqa: ARG002
        """`default_mask` itself."""
        return default_mask

    @classmethod
    def apply(cls, module: nn.Module, name: str) -> BasePruningMethod:  # type: ignore[override]
        """Registers the original and a mask of ones for ``module.<name>``."""
        return super().apply(module, name)


class _Unstructured(BasePruningMethod):
    """What the two share that prune so many entries."""

    PRUNING_TYPE = "unstructured"

    def __init__(self, amount: Amount) -> None:
        _validate_pruning_amount_init(amount)
        self.amount = amount

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """`default_mask` less ``amount`` of its entries, those of least score; asks for none if that is none."""
        count = count_of(self.amount, t.nelement())
        if count == 0:
            return default_mask.clone()
        return default_mask.masked_fill(~largest(self._scores(t.detach()), t.nelement() - count), 0)

    def _scores(self, t: Tensor) -> Tensor:
        raise NotImplementedError


class RandomUnstructured(_Unstructured):
    """Prunes `amount` entries at random: those with the largest of one ``rand_like`` draw.

    Args:
        amount: a fraction in [0, 1], or (an integer) how many.

    >>> import torch
    >>> int((RandomUnstructured(amount=3).prune(torch.ones(10)) == 0).sum())
    3
    """

    def _scores(self, t: Tensor) -> Tensor:
        # Drawn in the order of the indices, so that channels_last weights get the mask of contiguous ones.
        return -torch.rand_like(t, memory_format=torch.contiguous_format)

    @classmethod
    def apply(cls, module: nn.Module, name: str, amount: Amount) -> BasePruningMethod:  # type: ignore[override]
        """Prunes `amount` of ``module.<name>`` at random; see `random_unstructured`."""
        return super().apply(module, name, amount=amount)


class L1Unstructured(_Unstructured):
    """Prunes the `amount` entries of least absolute value; among equal ones the last.

    Args:
        amount: a fraction in [0, 1], or (an integer) how many.

    >>> import torch
    >>> L1Unstructured(amount=2).prune(torch.tensor([3.0, -1.0, 2.0, -4.0])).tolist()
    [3.0, 0.0, 0.0, -4.0]
    """

    def _scores(self, t: Tensor) -> Tensor:
        return t.abs()

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

    >>> import torch
    >>> pruned = RandomStructured(amount=0.5, dim=1).prune(torch.ones(3, 4))
    >>> int((pruned.sum(0) == 0).sum())
    2
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
        channels, count = channels_of(t, self.dim, self.amount)
        if count == 0:
            return default_mask
        kept = largest(torch.rand(channels), channels - count)
        return in_dtype_of(t, default_mask).masked_fill(~along(kept, t, self.dim), 0)

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

    >>> import torch
    >>> LnStructured(amount=1, n=2, dim=0).prune(torch.tensor([[3.0, 4.0], [1.0, 1.0]])).tolist()
    [[3.0, 4.0], [0.0, 0.0]]
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
        channels, count = channels_of(t, self.dim, self.amount)
        norm = _compute_norm(t.detach(), self.n, self.dim)
        if count == 0:
            return default_mask
        return in_dtype_of(t, default_mask).masked_fill(~along(largest(norm, channels - count), t, self.dim), 0)

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


class MaskShapeError(ValueError, AssertionError):
    """A ValueError, as everywhere in this library; an AssertionError for code that knows torch's."""


class CustomFromMask(BasePruningMethod):
    """Prunes what a given mask says, on top of what is pruned already.

    Args:
        mask: 0 and 1 (or bool) in the shape of the tensor.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> method = CustomFromMask.apply(layer, "weight", torch.tensor([[1, 0]]))
    >>> layer.weight_mask.tolist()
    [[1.0, 0.0]]
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
            raise MaskShapeError(f"default_mask shape {default_mask.shape} must match self.mask shape {mask.shape}")
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
