"""Which weights stay: masks ``{name: bool tensor, True = kept}``, made, applied, attached, saved.

Law: all masks are ready before a model is touched, and a mask keeps exactly as many units as was asked for.
"""

from __future__ import annotations

import copy
import functools
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from secateur import prune
from secateur.allocation import Allocation, Tables, check_nesting, check_sparsity, everywhere, kept_by_pattern, settled
from secateur.criteria import magnitude
from secateur.evidence import needs
from secateur.patterns import Pattern, Unstructured
from secateur.report import Reported
from secateur.selection import LazyScores, in_threads, keep_largest, keep_largest_overall, part_of
from secateur.support import (
    Column,
    Part,
    Shown,
    Table,
    count_nonzero,
    is_sharded,
    laid_out,
    local,
    matched,
    track,
    whole,
    write_whole,
)
from secateur.targets import check_lengths, find_targets

PIECE = 1 << 17  # entries zeroed at a time: in cache
SEGMENT = 1 << 20  # entries that one thread works through at a time
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_Count = tuple[str, tuple[int, ...] | None, int, int]  # name, shape, entries kept, entries


def _sum(counts: Sequence[_Count]) -> _Count:
    return f"{len(counts)} in all", None, sum(kept for *_, kept, _ in counts), sum(size for *_, size in counts)


class Masks(Reported, dict[str, Tensor]):
    """``{name: bool mask}``: a dict that prints as a table, which is what verbs return.

    It is pickled as an OrderedDict, as state dicts are, so that ``torch.load(weights_only=True)`` reads it.
    ``reach`` is what each text of the data reached, where they have names.

    >>> print(Masks(weight=torch.tensor([[True, False, True, True]]), bias=torch.tensor([False, False])))
    Weight    Shape  Kept  Removed  Sparsity
    weight    1 × 4     3        1      0.25
    bias          2     0        2         1
    2 in all            3        3       0.5
    """

    reach: Shown | None = None

    def content(self) -> Iterable[Part]:
        """A row for each weight, and their sum; what texts reached."""
        yield from self._by_text()
        told = "The share of each weight that is removed; a line joins what differs in numbers alone."
        counts = self._counts()
        table = self._table("weights", counts, "Weight by weight")
        yield table.drawn("sparsity", "How much was removed of each", told, label="removed")
        yield self._table("total", [_sum(counts)])

    def summary(self) -> Iterable[Part]:
        """The same as one table."""
        counts = self._counts()
        yield from self._by_text()
        yield self._table("weights", counts if len(counts) == 1 else [*counts, _sum(counts)])

    def _by_text(self) -> Iterator[Part]:
        if self.reach is not None:
            yield from [*self.reach.content(), ""]

    def _counts(self) -> list[_Count]:
        return [(name, tuple(mask.shape), _count(mask), mask.numel()) for name, mask in self.items()]

    @staticmethod
    def _table(name: str, counts: Sequence[_Count], title: str = "") -> Table:
        return Table.of(
            name,
            counts,
            Column("Weight"),
            Column.shape("Shape", show=lambda shape: " × ".join(map(str, shape)), side="right"),
            Column.count("Kept"),
            Column.count("Removed", lambda each: each[3] - each[2]),
            Column.portion(
                "Sparsity", lambda each: 1 - each[2] / each[3] if each[3] else 0.0, show=lambda share: f"{share:.4g}"
            ),
            title=title,
        )

    def __copy__(self) -> Masks:
        return Masks(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Masks:
        return Masks({name: copy.deepcopy(mask, memo) for name, mask in self.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())


def make_masks(
    weights: Mapping[str, Tensor],
    sparsity: float | None = None,
    *,
    pattern: str | Pattern | None = None,
    criterion: str | Callable[..., Tensor] = magnitude,
    allocate: str | Allocation | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    within: Mapping[str, Tensor] | None = None,
    evidence: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> Masks:
    """``{name: bool mask}``: the best units by a criterion, in a pattern, at a sparsity. Changes no weight.

    Args:
        weights: ``{name: Tensor}``, as from `find_targets` or ``dict(model.named_parameters())``. DTensors are ranked
            as the whole tensors that they are shards of.
        sparsity: fraction of units removed, in [0, 1]. A pattern that fixes it, such as n:m, needs none.
        pattern: who competes with whom, or a word for it (``"2:4"``); as wide as the criterion's scores compare by
            default: `Rows` or `Unstructured`.
        criterion: ``(weight, *, <evidence>) -> scores``, higher = keep, or its name.
        allocate: how many units each tensor keeps, or its name; `everywhere` by default for scores that compare over
            the whole model (see `secateur.criteria.compares`), `uniform` for others.
        include, exclude: globs over the names of the weights; all of them by default.
        within: ``{name: mask}`` of an earlier pruning, bool or 0 and 1, for all of the weights or some; what they
            removed stays removed and counts towards the sparsity.
        evidence: ``{name: {keyword: Tensor}}`` for a criterion that names some.

    Raises:
        ValueError: a score is NaN, a shape does not fit the pattern, a sparsity that contradicts it or earlier masks.
        TypeError: the criterion names evidence that is unknown or was not given, or a
            custom function or pattern returned a wrong type.

    >>> make_masks({"weight": torch.tensor([[1.0, -4.0, 3.0, 2.0]])}, 0.5)
    {'weight': tensor([[False,  True,  True, False]])}
    """
    criterion, pattern, allocate = settled(criterion, pattern, allocate)
    weights = _narrowed(weights, include, exclude)
    return choose_masks(
        weights, sparsity, pattern=pattern, criterion=criterion, allocate=allocate, within=within, evidence=evidence
    )


def choose_masks(
    weights: Mapping[str, Tensor],
    sparsity: float | None,
    *,
    pattern: Pattern,
    criterion: Callable[..., Tensor],
    allocate: Allocation = everywhere,
    within: Mapping[str, Tensor] | None = None,
    evidence: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> Masks:
    """`make_masks` of what is `settled`: no words, and no warning.

    >>> choose_masks({"weight": torch.tensor([[1.0, -4.0]])}, 0.5, pattern=Unstructured(), criterion=magnitude)
    {'weight': tensor([[False,  True]])}
    """
    if isinstance(pattern, Unstructured) and allocate is everywhere and sparsity is not None:
        scores = _scores(weights, criterion, within, evidence)
        check_sparsity(sparsity)
        total = sum(scores.shape(name).numel() for name in scores)
        kept = total - round(sparsity * total)
        if kept >= len(scores):
            # the common case in one pass; a tensor left empty means that `everywhere` must hold some back
            masks = keep_largest_overall(scores, kept, watch=functools.partial(track, description="ranking"))
            if all(_any(mask) or not mask.numel() for mask in masks.values()):
                check_nesting(sum(_count(mask) for mask in masks.values()) if within else kept, kept, "the model")
                return Masks(masks)
    return Masks(
        iterate_masks(
            weights, sparsity, pattern=pattern, criterion=criterion, allocate=allocate, within=within, evidence=evidence
        )
    )


def iterate_masks(
    weights: Mapping[str, Tensor],
    sparsity: float | None = None,
    *,
    pattern: Pattern | None = None,
    criterion: Callable[..., Tensor] = magnitude,
    allocate: Allocation = everywhere,
    within: Mapping[str, Tensor] | None = None,
    evidence: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """`choose_masks`, one tensor at a time: holds one weight and one mask. For weights that are read from disk on
    access.

    >>> next(iterate_masks({"weight": torch.tensor([[1.0, -4.0, 3.0, 2.0]])}, 0.5))
    ('weight', tensor([[False,  True,  True, False]]))
    """
    pattern = Unstructured() if pattern is None else pattern
    scores = _scores(weights, criterion, within, evidence)
    counts: Mapping[str, int | Tensor]
    if pattern.density is not None:
        if sparsity is not None and abs(sparsity - (1 - pattern.density)) > 1e-9:
            raise ValueError(
                f"{pattern} removes {1 - pattern.density:g} of the weights, not {sparsity}; leave sparsity out."
            )
        counts = kept_by_pattern(scores, pattern)
    elif sparsity is None:
        raise ValueError(f"{pattern} needs a sparsity: the fraction to remove, in [0, 1].")
    else:
        check_sparsity(sparsity)
        counts = allocate(scores, sparsity, pattern)
        if missing := [name for name in scores if name not in counts]:
            raise ValueError(f"the allocation gave no count for {', '.join(missing)}; return {{name: units kept}}.")
    tables = Tables(scores, pattern)
    for name in track(scores, "choosing"):
        yield name, _mask(tables, name, counts[name], within)


def apply_(model_or_weights: nn.Module | Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> Masks:
    """Zero, in place, every weight whose mask is False, and return the masks; a removed NaN or inf becomes 0 too.

    Args:
        model_or_weights: a module, or ``{name: Tensor}``.
        masks: ``{name: bool tensor}`` for some of its parameters, of their shapes.

    Raises:
        KeyError: a mask's name is no parameter. ValueError: a shape differs, a mask or a weight has no values (meta).
        TypeError: a mask is no dense bool tensor. Nothing is changed then.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> print(apply_(layer, {"weight": torch.tensor([[True, False]])}))
    Weight  Shape  Kept  Removed  Sparsity
    weight  1 × 2     1        1       0.5
    >>> layer.weight[0, 1].item()
    0.0
    """
    weights = _by_name(model_or_weights)
    _check(weights, masks)
    if isinstance(model_or_weights, nn.Module):
        check_lengths(model_or_weights, masks)
    done = Masks()
    with torch.no_grad():
        for name, mask in track(masks.items(), "zeroing", total=len(masks)):
            _zero_(weights[name].detach(), mask)
            done[name] = mask
    torch.clear_autocast_cache()
    return done


def attach(model: nn.Module, masks: Mapping[str, Tensor]) -> Masks:
    """Make masks reversible: each parameter becomes ``<name>_orig`` and ``<name>_mask``, as `secateur.prune` does it.

    `prune.is_pruned` and `prune.remove` then work on the model, the masked weight is what the forward pass sees, and
    gradients reach the kept weights. All are attached or none: the errors are those of `apply_`, and the result is.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> masks = attach(layer, {"weight": torch.tensor([[True, False]])})
    >>> [name for name, _ in layer.named_parameters()]
    ['weight_orig']
    """
    _check(dict(model.named_parameters(remove_duplicate=False)), masks)
    check_lengths(model, masks)
    places = {}
    done = Masks()
    for name, mask in masks.items():
        module_name, _, parameter_name = name.rpartition(".")
        module = model.get_submodule(module_name)
        if parameter_name.removesuffix("_orig") in prune.pruned_names(module):
            raise ValueError(f"{name} belongs to a mask that is attached already: detach(model) first.")
        places[module, parameter_name] = done[name] = mask
    prune.custom_from_masks(places)
    return done


def detach(
    model: nn.Module, *, include: str | Iterable[str] | None = None, exclude: str | Iterable[str] | None = None
) -> Masks:
    """Make attached masks permanent and return them: plain parameters with zeros, under their own names again.

    All or none: what makes it impossible for one of them, such as a module that shares the weight but not the mask,
    or a mask of another shape, leaves all attached.

    Args:
        include, exclude: globs over the names that the weights have then; all that are attached by default.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> masks = attach(layer, {"weight": torch.tensor([[True, False]])})
    >>> detach(layer)
    {'weight': tensor([[ True, False]])}
    """
    masks: dict[tuple[nn.Module, str], tuple[str, Tensor]] = {}
    for module_name, module in model.named_modules():
        pruned = prune.pruned_names(module)
        for original, weight in module.named_parameters(recurse=False):
            name = original.removesuffix("_orig")
            if name != original and name in pruned:
                place, mask = f"{module_name}.{name}" if module_name else name, getattr(module, f"{name}_mask", None)
                if not isinstance(mask, Tensor) or (mask.shape, mask.device) != (weight.shape, weight.device):
                    what = "is gone" if mask is None else "is none of its shape and on its device"
                    raise ValueError(f"{place}: its mask, {name}_mask, {what}; put it back as it was.")
                masks[module, name] = place, mask.ne(0)
    names = {name: place for place, (name, _) in masks.items()}
    return Masks(masks[place] for place in prune.remove_all(names[name] for name in _chosen(names, include, exclude)))


def save(
    masks: Mapping[str, Tensor], path: str | os.PathLike[str], *, metadata: Mapping[str, Any] | None = None
) -> None:
    """Write masks as a safetensors file of bool tensors; to a temporary name first, then renamed.

    Args:
        metadata: anything that JSON holds, kept in the file's header under ``secateur``.
    """
    from safetensors.torch import save as to_bytes

    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            raise TypeError(f"{name}: a mask is a bool tensor, not {mask.dtype}.")
    # cloned, because safetensors refuses tensors that share memory
    copies = {name: mask.detach().cpu().clone(memory_format=torch.contiguous_format) for name, mask in masks.items()}
    header = {"secateur": json.dumps({"kind": "masks", "version": 1, **(metadata or {})})}
    write_whole(path, to_bytes(copies, metadata=header))


def load(path: str | os.PathLike[str]) -> Masks:
    """Read masks that `save` wrote.

    Raises:
        ValueError: it is no safetensors file, or one with tensors that are not bool.
        OSError: it is not there, or a folder.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path} is a folder; name the file of masks in it.")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        masks = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            raise ValueError(f"{path}: {name} is {mask.dtype}, but masks are bool; is this a file of weights?")
    return Masks(masks)


def masks_from_zeros(
    model_or_weights: nn.Module | Mapping[str, Tensor],
    *,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
) -> Masks:
    """The masks that a model's zeros tell of, for a checkpoint without masks: ``{name: weight != 0}``.

    Only of weights that have zeros. A weight that is zero by chance counts as removed, -0.0 too.

    Args:
        model_or_weights: a module, of which `find_targets` chooses weights, or ``{name: Tensor}``.
        include, exclude: as in `find_targets`; of a mapping, globs over its names.

    >>> masks_from_zeros({"weight": torch.tensor([0.0, 2.0]), "dense": torch.ones(2)})
    {'weight': tensor([False,  True])}
    """
    if isinstance(model_or_weights, nn.Module):
        weights: Mapping[str, Tensor] = dict(find_targets(model_or_weights, include=include, exclude=exclude))
    else:
        weights = _narrowed(model_or_weights, include, exclude)
    masks = {name: weight.detach().ne(0) for name, weight in weights.items()}
    return Masks({name: mask for name, mask in masks.items() if _count(mask) < mask.numel()})


def sparsity_of(
    what: nn.Module | Mapping[str, Tensor],
    *,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
) -> float:
    """Fraction removed: of masks the False entries, of weights the zeros, of a module the zeros in its `find_targets`.

    Attached masks count as zeros.

    Args:
        include, exclude: as in `find_targets`; of a mapping, globs over its names.

    >>> sparsity_of({"weight": torch.tensor([True, False, False, False])})
    0.75
    """
    tensors: Mapping[str, Tensor] = (
        dict(find_targets(what, include=include, exclude=exclude))
        if isinstance(what, nn.Module)
        else _narrowed(what, include, exclude)
    )
    attached = attached_masks(what, tensors) if isinstance(what, nn.Module) else {}
    entries = sum(tensor.numel() for tensor in tensors.values())
    kept = 0
    for name, tensor in tensors.items():
        alive = tensor.detach().ne(0)
        kept += _count(alive & attached[name].ne(0) if name in attached else alive)
    return 1 - kept / entries if entries else 0.0


def attached_masks(model: nn.Module, names: Iterable[str]) -> Masks:
    """``{<name>_orig: mask}`` of those parameters that pruning hooks mask, as the 0/1 buffers that they are.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> masks = attach(layer, {"weight": torch.tensor([[True, False]])})
    >>> attached_masks(layer, ["weight_orig"])
    {'weight_orig': tensor([[1., 0.]])}
    """
    buffers = dict(model.named_buffers(remove_duplicate=False))
    masks = {name: buffers.get(f"{name.removesuffix('_orig')}_mask") for name in names if name.endswith("_orig")}
    return Masks({name: mask for name, mask in masks.items() if mask is not None})


def _chosen(
    names: Iterable[str], include: str | Iterable[str] | None, exclude: str | Iterable[str] | None
) -> list[str]:
    """Those of the names that globs choose; a glob that matches none is an error."""
    names = list(names)
    included, excluded = matched(include, names), matched(exclude, names) or set()
    return [name for name in names if (included is None or name in included) and name not in excluded]


def _narrowed(
    weights: Mapping[str, Tensor], include: str | Iterable[str] | None, exclude: str | Iterable[str] | None
) -> Mapping[str, Tensor]:
    return weights if include is None and exclude is None else part_of(weights, _chosen(weights, include, exclude))


def _scores(
    weights: Mapping[str, Tensor],
    criterion: Callable[..., Tensor],
    within: Mapping[str, Tensor] | None,
    evidence: Mapping[str, Mapping[str, Tensor]] | None,
) -> LazyScores:
    if not isinstance(weights, Mapping):
        raise TypeError(
            f"weights are a mapping {{name: tensor}}, such as find_targets(model), not a {type(weights).__name__}."
        )
    if not weights:
        raise ValueError("there are no weights to prune.")
    if within and not any(name in weights for name in within):
        raise ValueError(f"the earlier masks are of other tensors: {next(iter(within))!r} is not among the weights.")
    asked = needs(criterion)
    if not asked:
        return _checked(LazyScores(weights, criterion, among=within))
    for name in weights:
        missing = [word for word in asked if evidence is None or word not in evidence.get(name, {})]
        if missing:
            raise TypeError(
                f"{name}: the criterion asks for {', '.join(missing)}; pass evidence={{name: {{word: tensor}}}}."
            )
    assert evidence is not None
    named = {name: {word: evidence[name][word] for word in asked} for name in weights}
    return _checked(LazyScores(weights, criterion, evidence=named, among=within))


def _checked(scores: LazyScores) -> LazyScores:
    for name, mask in (scores.among or {}).items():
        if name in scores:
            check_mask(name, mask, scores.shape(name), what="an earlier mask")
    return scores


def _mask(tables: Tables, name: str, kept: int | Tensor, within: Mapping[str, Tensor] | None) -> Tensor:
    table = tables[name]
    alive = within.get(name) if within is not None else None
    if alive is not None and tables.pattern.density is None:
        survivors = (table > -torch.inf).sum(1)
        if survivors.numel():
            check_nesting(int((survivors - torch.as_tensor(kept, device=table.device)).min()), 0, name)
    try:
        keep = keep_largest(table, kept)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
    scores = tables.scores
    assert isinstance(scores, LazyScores)
    shape = scores.shape(name)
    mask: Any = tables.pattern.spread(keep, shape)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != shape:
        what = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name}: {tables.pattern}.spread returned {what}, not a bool mask of shape {tuple(shape)}.")
    if is_sharded(scores.weights[name]):
        mask = laid_out(mask, scores.weights[name])
    return cast("Tensor", mask if alive is None else mask & alive.ne(0).to(mask.device))


def _count(mask: Tensor) -> int:
    return count_nonzero(mask) if is_sharded(mask) else int(torch.count_nonzero(mask))


def _any(mask: Tensor) -> bool:
    if is_sharded(mask):
        return _count(mask) > 0
    return bool(np.any(mask.numpy()) if mask.device.type == "cpu" else mask.any())


def _by_name(model_or_weights: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if isinstance(model_or_weights, nn.Module):
        return dict(model_or_weights.named_parameters(remove_duplicate=False))
    return model_or_weights


def _check(weights: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
    for name, mask in masks.items():
        if name not in weights:
            hint = "; a mask is attached to it: detach(model) first" if f"{name}_orig" in weights else ""
            raise KeyError(f"there is a mask for {name!r}, but no such weight{hint}.")
        weight = weights[name]
        check_mask(name, mask, weight.shape, also_numbers=False)
        if weight.layout != torch.strided:
            raise TypeError(f"{name} is a tensor of layout {weight.layout}, which masks don't fit: use to_dense().")
        if weight.is_meta and weight.numel():
            raise ValueError(f"{name} is on the meta device, where there are no values; load the weights first.")
        if any(stride == 0 < size - 1 for size, stride in zip(mask.shape, weight.stride(), strict=True)):
            raise ValueError(f"{name} is an expanded tensor: several weights are one number in memory; clone it first.")


def check_mask(
    name: str, mask: Tensor, shape: Sequence[int], *, what: str = "a mask", also_numbers: bool = True
) -> None:
    """``TypeError`` or ``ValueError`` unless it is a dense bool tensor of that shape, or of 0 and 1, with its values.

    >>> check_mask("weight", torch.tensor([True, False]), torch.Size([3]))
    Traceback (most recent call last):
    ...
    ValueError: weight: a mask of shape (2,) for a weight of shape (3,).
    """
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name}: {what} is a bool tensor, not a {type(mask).__name__}.")
    if mask.dtype != torch.bool and not also_numbers:
        raise TypeError(f"{name}: {what} is a bool tensor, not {mask.dtype}.")
    if tuple(mask.shape) != tuple(shape):
        raise ValueError(f"{name}: {what} of shape {tuple(mask.shape)} for a weight of shape {tuple(shape)}.")
    if mask.layout != torch.strided:
        raise TypeError(f"{name}: {what} is a dense tensor, not one of layout {mask.layout}: use to_dense().")
    if mask.is_meta and mask.numel():
        raise ValueError(f"{name}: {what} is on the meta device, where there are no values.")
    if mask.dtype != torch.bool and not bool(whole(((mask == 0) | (mask == 1)).all())):
        raise ValueError(f"{name}: {what} is bool, or 0 and 1; this one of {mask.dtype} has other values.")


def _zero_(weight: Tensor, mask: Tensor) -> None:
    if is_sharded(weight):
        mask = local(laid_out(mask, weight))
        weight = local(weight)
    size = weight.element_size()
    on_host = weight.device.type == mask.device.type == "cpu"
    if not on_host or not weight.is_contiguous() or not mask.is_contiguous() or size not in _INTEGERS:
        weight.masked_fill_(~mask.to(weight.device), 0)
        return
    # and with 0 or all ones: NaN becomes 0, and numpy's pieces stay in cache
    bits = weight.view(-1).view(_INTEGERS[size]).numpy()
    kept = mask.view(-1).view(torch.int8).numpy()

    def work(start: int) -> None:
        for at in range(start, min(start + SEGMENT, bits.size), PIECE):
            piece = bits[at : at + PIECE]
            np.bitwise_and(piece, np.negative(kept[at : at + PIECE]).astype(piece.dtype), out=piece)

    threads = torch.get_num_threads() if bits.size > SEGMENT else 1
    for _ in in_threads(work, range(0, bits.size, SEGMENT), threads):
        pass
    torch.autograd.graph.increment_version(weight)
