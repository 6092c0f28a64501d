"""What is called: one function for each way to prune, one for several tensors in one competition, `remove`.

Law: a call that fails leaves everything as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from secateur.prune.amounts import Amount
from secateur.prune.changes import Change, commit, take_off
from secateur.prune.computing import mask_for, masks_of_joined, masks_of_largest, refuse_nan_scores, refuse_other_mask
from secateur.prune.holders import Target, distinct
from secateur.prune.methods import (
    BasePruningMethod,
    CustomFromMask,
    Identity,
    L1Unstructured,
    LnStructured,
    RandomStructured,
    RandomUnstructured,
)
from secateur.support import private


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
    pairs = [_pair(pair, index, "global_unstructured") for index, pair in enumerate(parameters)]
    if not pairs:
        raise ValueError("global_unstructured(): expected a non-empty list of Tensors")
    listed = {(id(module), name) for module, name in pairs}
    for module, name in importance_scores:
        if (id(module), name) not in listed:
            raise ValueError(
                f"importance_scores holds {type(module).__name__}.{name}, which is not among the parameters to prune"
            )

    found = distinct([Target.find(module, name, where=index) for index, (module, name) in enumerate(pairs)])
    targets = {str(target): target for target in found}
    scores: dict[str, Tensor] = {}
    for key, target in targets.items():
        given = [importance_scores[pair] for pair in target.pairs if pair in importance_scores]
        if given:
            if given[0].shape != target.orig.shape:
                raise ValueError(
                    f"importance_scores of {target} has shape {tuple(given[0].shape)}, "
                    f"the parameter {tuple(target.orig.shape)}"
                )
            refuse_nan_scores(given[0], target)
            scores[key] = given[0].detach()

    method = pruning_method(**kwargs)
    method._tensor_name = "temp"
    if method.PRUNING_TYPE != "unstructured":
        raise TypeError(
            'Only "unstructured" PRUNING_TYPE supported for '
            f"the `pruning_method`. Found method {pruning_method} of type {method.PRUNING_TYPE}"
        )
    if type(method) is L1Unstructured:
        masks = masks_of_largest(method, targets, scores)
    else:
        masks = masks_of_joined(method, targets, scores)
    for key, target in targets.items():
        target.method = CustomFromMask(masks[key])
        target.method._made_here = True
        target.method._tensor_name = target.name
    commit([Change(target, masks[key]) for key, target in targets.items()])


def custom_from_mask(module: nn.Module, name: str, mask: Tensor) -> nn.Module:
    """`module`, with ``<name>`` pruned where `mask` is 0.

    Args:
        module: holds the tensor.
        name: of the parameter within `module`.
        mask: 0 and 1 (or bool) in the shape of the parameter.

    Raises:
        ValueError: the mask has another shape or other values.

    >>> import torch
    >>> custom_from_mask(nn.Linear(5, 3), "bias", torch.tensor([0, 1, 0])).bias_mask
    tensor([0., 1., 0.])
    """
    CustomFromMask.apply(module, name, mask)
    return module


def custom_from_masks(masks: Mapping[tuple[nn.Module, str], Tensor]) -> None:
    """`custom_from_mask` of several tensors, all or none.

    Args:
        masks: ``{(module, name): mask}``, as `global_unstructured` takes scores. A tensor that is listed under two
            names keeps what both masks keep.

    Raises:
        ValueError, TypeError: one of the tensors cannot be pruned, or a mask has another shape or other values. Nothing
            is changed then.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 2))
    >>> custom_from_masks({(net[0], "weight"): torch.tensor([[1, 0]]), (net[1], "bias"): torch.tensor([0, 1])})
    >>> list(net.state_dict())
    ['0.bias', '0.weight_orig', '0.weight_mask', '1.weight', '1.bias_orig', '1.bias_mask']
    """
    targets = distinct([Target.find(*_pair(pair, index, "custom_from_masks")) for index, pair in enumerate(masks)])
    changes = []
    for target in targets:
        given = [masks[pair] for pair in target.pairs]
        for mask in given:
            refuse_other_mask(mask, target)
        both = functools.reduce(lambda first, second: first.ne(0) & second.ne(0).to(first.device), given)
        target.method = CustomFromMask(both)
        target.method._tensor_name = target.name
        changes.append(Change(target, mask_for(target, None)))
    commit(changes)


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
    take_off([(module, name)])
    return module


def remove_all(pairs: Iterable[tuple[nn.Module, str]]) -> list[tuple[nn.Module, str]]:
    """`remove` of several tensors, all or none; returns the pairs, less those that went with the other end of a tie.

    Args:
        pairs: ``(module, name)`` of pruned tensors.

    Raises:
        ValueError: one of them cannot be removed; see `remove`. Nothing is changed then.

    >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> global_unstructured([(net[0], "weight"), (net[1], "weight")], L1Unstructured, amount=10)
    >>> len(remove_all((layer, "weight") for layer in net)), is_pruned(net)
    (2, False)
    """
    return take_off([_pair(pair, index, "remove_all") for index, pair in enumerate(pairs)])


def pruned_names(module: nn.Module) -> list[str]:
    """Which tensors of `module` have a pruning hook, ours or torch's; not those of its children.

    >>> pruned_names(identity(nn.Linear(2, 3), "bias"))
    ['bias']
    """
    hooks = private.pre_hooks_of(module).values()
    return [hook._tensor_name for hook in hooks if isinstance(hook, BasePruningMethod)]


def is_pruned(module: nn.Module) -> bool:
    """Whether `module` or a module in it has a pruning hook, ours or torch's.

    >>> layer = nn.Linear(5, 7)
    >>> is_pruned(layer), is_pruned(nn.Sequential(random_unstructured(layer, "weight", amount=0.2)))
    (False, True)
    """
    return any(
        isinstance(hook, BasePruningMethod)
        for child in module.modules()
        for hook in private.pre_hooks_of(child).values()
    )


def _pair(pair: Any, index: int, function: str) -> tuple[nn.Module, str]:
    if (
        isinstance(pair, tuple | list)
        and len(pair) == 2
        and isinstance(pair[0], nn.Module)
        and isinstance(pair[1], str)
    ):
        return pair[0], pair[1]
    hint = ", as model.parameters() gives them" if isinstance(pair, Tensor) else ""
    raise TypeError(
        f"{function}() needs (module, name) pairs such as (model.fc, 'weight'); "
        f"parameters[{index}] is a {type(pair).__name__}{hint}."
    )
