"""Is a smaller model right? Compared with the original that has zeros at the removed places, in float64.

Law: nothing here trusts the library's own proof, and the comparison is the same for every library.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from benchmarks.support.models import zoo

TOLERANCE = 1e-6  # of the largest number of an output

Kept = dict[str, list[Tensor]]  # of each parameter, per dimension, the indices that stay


class Forms(TorchFunctionMode):
    """Everything in float64; statistics as they are ("exact"), or in a form to which zeros add nothing.

    "sums": a mean becomes a sum and a normalization divides by a root of a sum of squares, in every place, so that a
    channel that is zero and one that is gone are the same. "centred" is for normalizations that the code writes out,
    and for those to which a removed channel comes with a bias: no statistic at all, only the scale and the bias; a mean
    over one dimension that stays in place is left out. A channel in the wrong place changes any of the three.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.dtype, _wide, (args, dict(kwargs or {})))
        name = getattr(func, "__name__", "").strip("_")
        if name in ("float", "half", "bfloat16") and isinstance(args[0], Tensor):
            return args[0].double()
        if name == "grouped_mm":  # kernels have it for other precisions and for some widths only
            pieces = itertools.pairwise([0, *kwargs["offs"].tolist()])
            return torch.cat([args[0][begin:end] @ args[1][at] for at, (begin, end) in enumerate(pieces)])
        if name == "weight_norm":  # a direction of length zero, normalized, is zero
            return func(*args, **kwargs).nan_to_num(0.0)
        if self.form == "exact" or name not in _STATISTICS:
            return func(*args, **kwargs)
        if name == "batch_norm":
            training = kwargs.get("training", args[5] if len(args) > 5 else False)
            return _batch_normalized(self.form, *args, **kwargs) if training else func(*args, **kwargs)
        if name in ("layer_norm", "rms_norm"):
            return _normalized(self.form, *args, **kwargs)
        if name == "group_norm":
            return _group_normalized(self.form, *args, **kwargs)
        if not isinstance(args[0], Tensor):
            return func(*args, **kwargs)
        return self.statistic(name, *args, **kwargs)

    def statistic(self, name: str, x: Tensor, dim: Any = None, *rest: Any, **kwargs: Any) -> Tensor:
        keep = bool(kwargs.get("keepdim", rest[-1] if rest and isinstance(rest[-1], bool) else False))
        over = [dim] if isinstance(dim, int) else list(dim if dim is not None else range(x.dim()))
        total = (x if name == "mean" else x.square()).sum(over, keepdim=keep) / 64
        if self.form == "centred" and keep and len(over) == 1 and over[0] in (1, -1, x.dim() - 1):
            return torch.zeros_like(total) if name == "mean" else torch.ones_like(total)
        return total


_STATISTICS = ("layer_norm", "rms_norm", "group_norm", "batch_norm", "mean", "var", "std")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def _by_root_of_squares(x: Tensor, dims: Sequence[int]) -> Tensor:
    return x / (x.square().sum(tuple(dims), keepdim=True) + 1e-3).sqrt()


def _normalized(form: str, x: Tensor, shape: Any, weight: Any = None, bias: Any = None, *_: Any, **__: Any) -> Tensor:
    count = 1 if isinstance(shape, int) else len(shape)
    x = _by_root_of_squares(x, range(-count, 0)) if form == "sums" else x
    x = x * weight if weight is not None else x
    return x + bias if isinstance(bias, Tensor) else x


def _group_normalized(
    form: str, x: Tensor, groups: int, weight: Any = None, bias: Any = None, *_: Any, **__: Any
) -> Tensor:
    out = _by_root_of_squares(x.reshape(x.shape[0], groups, -1), [-1]).reshape(x.shape) if form == "sums" else x
    one = [1, -1, *(1 for _ in x.shape[2:])]
    out = out * weight.reshape(one) if weight is not None else out
    return out + bias.reshape(one) if bias is not None else out


def _batch_normalized(
    form: str, x: Tensor, _mean: Any, _var: Any, weight: Any = None, bias: Any = None, *_: Any, **__: Any
) -> Tensor:
    """In training; of weights that the code standardizes."""
    out = _by_root_of_squares(x, [0, *range(2, x.dim())]) if form == "sums" else x
    one = [1, -1, *(1 for _ in x.shape[2:])]
    out = out * weight.reshape(one) if weight is not None else out
    return out + bias.reshape(one) if bias is not None else out


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)  # noqa: NPY002  what a model may use
        yield


@contextlib.contextmanager
def wide() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def tensors_of(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    parts = out.values() if isinstance(out, Mapping) else out if isinstance(out, tuple | list) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def outputs(model: nn.Module, inputs: zoo.Inputs, form: str = "exact") -> list[Tensor]:
    inputs = tree_map_only(Tensor, lambda each: each.double() if each.is_floating_point() else each, inputs)
    with torch.no_grad(), wide(), seeded(), Forms(form):
        return tensors_of(zoo.run(model, inputs))


def gap(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """The largest difference, of the largest number of each output; infinite where shapes or kinds differ."""
    if [each.shape for each in expected] != [each.shape for each in found]:
        return math.inf
    worst = 0.0
    for one, other in zip(expected, found, strict=True):
        if not one.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(one, other) else math.inf)
        elif one.numel():
            real = torch.isfinite(one)
            if not torch.equal(real, torch.isfinite(other)):
                return math.inf
            if real.any():
                scale = float(one[real].abs().max()) or 1.0
                worst = max(worst, float((one[real] - other[real]).abs().max()) / scale)
    return worst


def agreement(masked: nn.Module, smaller: nn.Module, inputs: zoo.Inputs) -> tuple[str | None, float]:
    """In which form two models agree, None in none, and how far apart they are in the exact one."""
    exact = gap(outputs(masked, inputs), outputs(smaller, inputs))
    if exact <= TOLERANCE:
        return "exact", exact
    for form in ("sums", "centred"):
        if gap(outputs(masked, inputs, form), outputs(smaller, inputs, form)) <= TOLERANCE:
            return form, exact
    return None, exact


def with_zeros(model: nn.Module, kept: Kept) -> nn.Module:
    """A copy in which what was removed is zero; parameters that the model uses twice may differ there."""
    masked = copy.deepcopy(model)
    for name, parameter in list(masked.named_parameters(remove_duplicate=False)):
        if name in kept:
            value = parameter.detach().clone()
            for at, indices in enumerate(kept[name]):
                gone = torch.ones(value.shape[at], dtype=torch.bool)
                gone[indices] = False
                value.index_fill_(at, gone.nonzero().flatten(), 0)
            path, _, key = name.rpartition(".")
            setattr(masked.get_submodule(path), key, nn.Parameter(value))
    return masked


def randomized(model: nn.Module) -> nn.Module:
    """A copy in float64 whose weights are random and near in scale to the model's."""
    probe = copy.deepcopy(model).double()
    with seeded(), torch.no_grad():
        for parameter in probe.parameters():
            if parameter.is_floating_point() and parameter.numel() > 1:
                parameter.add_(torch.randn_like(parameter) * max(0.3 * float(parameter.std()), 0.02))
    return probe


def distinct(model: nn.Module) -> None:
    """Make the entries of every parameter differ from each other, so that each says where it came from."""
    with seeded(), torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            for _ in range(50):
                values, inverse, counts = torch.unique(flat, return_inverse=True, return_counts=True)
                if len(values) == flat.numel():
                    break
                double = counts[inverse] > 1
                scale = float(flat.abs().mean()) or 1.0
                flat[double] += 1e-3 * scale * torch.randn(int(double.sum()))


def kept_by_value(before: Tensor, after: Tensor) -> list[Tensor] | None:
    """Which indices of each dimension stayed, from the values; None where they are not slices."""
    if before.shape == after.shape and torch.equal(before, after):
        return [torch.arange(size) for size in before.shape]
    if before.dim() != after.dim() or not after.numel():
        return None
    values, order = before.flatten().sort()
    places = torch.searchsorted(values, after.flatten()).clamp(max=len(values) - 1)
    if not torch.equal(values[places], after.flatten()):
        return None
    found = []
    for at, coordinate in enumerate(torch.unravel_index(order[places].reshape(after.shape), before.shape)):
        lines = coordinate.movedim(at, 0).reshape(after.shape[at], -1)
        if not (lines == lines[:, :1]).all():
            return None
        found.append(lines[:, 0])
    return found


def sliced(tensor: Tensor, kept: Sequence[Tensor]) -> Tensor:
    for at, indices in enumerate(kept):
        tensor = tensor.index_select(at, indices)
    return tensor
