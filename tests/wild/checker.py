"""Whether a shrunken model computes what its original does with zeros where entries left; no code is the proof's.

What left is read off ``Shrunk.plans`` and held to the values: a smaller tensor has to be the slice of the original's,
or a multiple of it. The original with zeros and the smaller model then run on the same inputs, in evaluation
and in training mode. Where a normalization or a mean runs over what lost entries, the original divides by as many as
the smaller model did at the same call: zeros add nothing to sums.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["Verdict", "compare", "disturbed", "in_double", "judge"]

TOLERANCE, COARSE = 1e-7, 1e-3  # of the largest number of an output, in float64 and in float32
_ROUNDINGS = 1e4  # times what the output moves when every weight moves in its last place
_DROPPING = ("p", "dropout", "drop_prob", "attn_drop_p", "dropout_p", "dropout_rate", "drop_rate", "attention_dropout")


@dataclass(frozen=True)
class Verdict:
    """``status`` is "right", "wrong" or "unjudged"; ``words`` say why; ``gap`` is the largest relative difference."""

    status: str
    words: str = ""
    gap: float = 0.0


def disturbed(model: nn.Module) -> nn.Module:
    """In float64, with noise on every parameter and statistic, so that no weight is zero or one by initialization."""
    model = model.double()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel():
                spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
                noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
                parameter.add_(noise.to(parameter) * max(0.3 * spread, 0.02))
        for module in model.modules():
            for name, scale in (("running_mean", 0.1), ("running_var", 0.2)):
                value = getattr(module, name, None)
                if isinstance(value, Tensor) and value.is_floating_point():
                    noise = torch.rand(value.shape, generator=draw, dtype=torch.float64)
                    value.add_(noise.to(value) * scale)
    return model


def in_double(value: Any) -> Any:
    """The same, with its floating tensors in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: in_double(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        parts = [in_double(each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(getattr(value, "__dict__", None), dict) and callable(getattr(value, "double", None)):
        return value.double()  # such as a graph
    return value


def judge(original: nn.Module, done: Any, example: Any, tolerance: float | None = None) -> Verdict:
    """Compare what `shrink` returned for a copy of ``original``, a model in float64, with the original."""
    if words := _dishonest(original, done):
        return Verdict("wrong", words)
    masked = copy.deepcopy(original)
    tensors = dict(masked.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for plan in done.plans:
            for name, (_, kept) in plan.tensors.items():
                if name in tensors:
                    for at, indices in kept.items():
                        gone = np.setdiff1d(np.arange(tensors[name].shape[at]), indices)
                        tensors[name].index_fill_(at, torch.from_numpy(gone), 0.0)
    return compare(masked, copy.deepcopy(done.model), example, dense=original, tolerance=tolerance)


def _dishonest(original: nn.Module, done: Any) -> str:
    """What a smaller tensor holds that is no slice of the original's; "" where all are."""
    plans = {name: kept for plan in done.plans for name, (_, kept) in plan.tensors.items()}
    scaled = {name for plan in done.plans for name, *_ in plan.scales}
    before, after = dict(original.named_parameters()), dict(done.model.named_parameters())
    if before.keys() != after.keys():
        return f"other parameters: {sorted(before.keys() ^ after.keys())[:3]}"
    buffers = dict(original.named_buffers())  # a forward pass may put others in place
    before |= {name: buffers[name] for name in plans if name in buffers}
    after |= {name: value for name, value in done.model.named_buffers() if name in before}
    for name, value in after.items():
        expected = before[name].detach()
        for at, indices in plans.get(name, {}).items():
            expected = expected.index_select(at, torch.from_numpy(np.asarray(indices)))
        if expected.shape != value.shape:
            return f"{name} has shape {tuple(value.shape)}, the plan says {tuple(expected.shape)}"
        if name not in scaled and not torch.equal(expected, value.detach()):
            return f"{name} holds other values than its slices of the original"
    return ""


def compare(
    masked: nn.Module, smaller: nn.Module, example: Any, dense: nn.Module | None = None, tolerance: float | None = None
) -> Verdict:
    """Compare two models on an example in both modes, in the dtype of their weights. Their dropout is set to zero."""
    kind = next(each.dtype for each in masked.parameters() if each.is_floating_point())
    tolerance = tolerance or (COARSE if kind == torch.float32 else TOLERANCE)
    if kind == torch.float64:
        example = in_double(example)
    for model in (masked, smaller, *(() if dense is None else (dense := copy.deepcopy(dense),))):
        _without_dropout(model)
    wide = kind == torch.float64 and _runs_wide(masked, example)
    worst, shown, modes = 0.0, dense is None, 0
    for training in (False, True):
        counts, raised = _Counts(wide=wide), ""
        try:
            found = _outputs(smaller, example, counts, training=training)
        except Exception as error:
            raised = f"training={training}: raises {type(error).__name__}: {error}"
        replay = _Counts(None if raised else counts.calls, wide=wide)
        try:
            expected = _outputs(masked, example, replay, training=training)
        except _OtherCallsError as error:
            return Verdict("unjudged", f"training={training}: {error}")
        except Exception as error:  # such as of a detector without targets, or a batch normalization of a single value
            if not training or not raised:
                return Verdict("unjudged", f"training={training}: the original raises {type(error).__name__}: {error}")
            continue
        if raised:
            return Verdict("wrong", raised)
        modes += 1
        gap = _gap(expected, found)
        if gap > tolerance:
            moves = _moves(masked, expected, example, counts, training=training)
            words = f"training={training}: the outputs differ by {gap:.2g} of their largest number"
            if replay.by_hand:
                return Verdict("unjudged", f"{words}; the code takes {replay.by_hand} over what lost entries", gap)
            if gap < _ROUNDINGS * moves:
                return Verdict("unjudged", f"{words}, and the original's own move by {moves:.2g} by rounding", gap)
            return Verdict("wrong", words, gap)
        worst = max(worst, gap)
        if not shown:
            whole = _outputs(dense, example, _Counts(wide=wide), training=training)
            shown = _gap(whole, expected) > 10 * tolerance
    if not shown:
        return Verdict("unjudged", "the outputs are those of the dense model: a wrong slice would not show", worst)
    return Verdict("right", f"{modes} modes", worst)


def _runs_wide(model: nn.Module, example: Any) -> bool:
    """Whether it computes with float64 wherever its code says ``float()``; it may say elsewhere that it is float32."""
    try:
        _outputs(model, example, _Counts(wide=True), training=False)
    except Exception:
        return False
    return True


def _without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        for name in _DROPPING:
            if type(vars(module).get(name)) is float:
                setattr(module, name, 0.0)


def _outputs(model: nn.Module, example: Any, counts: AbstractContextManager[Any], *, training: bool) -> list[Tensor]:
    model = copy.deepcopy(model).train(training)  # a pass may change buffers, and numbers that say what they hold
    torch.manual_seed(3)
    random.seed(3)
    with torch.no_grad(), counts:
        if isinstance(example, Mapping):
            out = model(**copy.deepcopy(dict(example)))
        elif isinstance(example, tuple | list):
            out = model(*copy.deepcopy(example))
        else:
            out = model(copy.deepcopy(example))
    return [each.detach() for each in _flat(out)]


def _flat(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _flat(each, depth + 1)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _flat(each, depth + 1)
    elif depth < 4 and hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
        for each in vars(value).values():
            yield from _flat(each, depth + 1)


def _gap(expected: list[Tensor], found: list[Tensor]) -> float:
    """The largest difference, of the largest number of its output; infinity for another form or place of numbers."""
    if [each.shape for each in expected] != [each.shape for each in found]:
        return math.inf
    worst = 0.0
    for one, other in zip(expected, found, strict=True):
        if one.is_complex():
            one, other = torch.view_as_real(one), torch.view_as_real(other)
        if not one.is_floating_point():
            if not torch.equal(one, other):
                return math.inf
            continue
        real = torch.isfinite(one)
        if not torch.equal(real, torch.isfinite(other)):
            return math.inf
        if real.any():
            largest = max(float(one[real].abs().max()), 1e-12)
            worst = max(worst, float((one[real] - other[real]).abs().max()) / largest)
    return worst


def _moves(model: nn.Module, expected: list[Tensor], example: Any, counts: _Counts, *, training: bool) -> float:
    """How far the outputs move when each weight moves in its last place."""
    moved = copy.deepcopy(model)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in (each for each in moved.parameters() if each.is_floating_point()):
            sign = torch.randint(0, 2, parameter.shape, generator=draw) * 2 - 1
            parameter.mul_(1 + sign.to(parameter) * torch.finfo(parameter.dtype).eps)
    return _gap(expected, _outputs(moved, example, _Counts(counts.calls, wide=counts.wide), training=training))


# ---- statistics over what lost entries ------------------------------------------------------------------------------


class _OtherCallsError(RuntimeError):
    """The two models do not call the same functions."""


class _Counts(TorchFunctionMode):
    """Notes over how many numbers each statistic runs; with those of another model, divides by as many as it did."""

    def __init__(self, calls: list[tuple[str, int]] | None = None, *, wide: bool = False) -> None:
        super().__init__()
        self.given, self.calls, self.by_hand = calls, list[tuple[str, int]](), ""
        self.wide = wide

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout"):
            return args[0] if args else kwargs["input"]
        if name == "float" and self.wide:  # code that asks for float32 would round more than a wrong slice changes
            return args[0].double()
        if name == "_weight_norm":  # of no weights: zero times zero by zero
            return func(*args, **kwargs).nan_to_num()
        own = _STATISTICS.get(name)
        if own is None:
            return func(*args, **kwargs)
        counted = own(args, kwargs, None)
        if counted is None:
            return func(*args, **kwargs)
        self.calls.append((name, counted))
        if self.given is None:
            return func(*args, **kwargs)
        at = len(self.calls) - 1
        if at >= len(self.given) or self.given[at][0] != name:
            raise _OtherCallsError(f"the {at}th statistic is a {name}, and the smaller model's is another")
        other = self.given[at][1]
        if other == counted:
            return func(*args, **kwargs)
        if name in ("mean", "var", "std", "var_mean", "std_mean"):
            self.by_hand = self.by_hand or f"a {name}"
        return own(args, kwargs, other)


def _layer_norm(args: Any, kwargs: Any, count: int | None) -> Any:
    x, shape, weight, bias, eps = _given(args, kwargs, ("input", "normalized_shape", "weight", "bias", "eps"), 1e-5)
    if count is None:
        return math.prod(shape)
    dims = tuple(range(-len(shape), 0))
    mean = x.sum(dims, keepdim=True) / count
    variance = (x * x).sum(dims, keepdim=True) / count - mean * mean
    out = (x - mean) / (variance + eps).sqrt()
    if weight is None:  # which would be zero where entries left; what is not there is not centered
        out = torch.where(x == 0, 0.0, out)
    return _affine(out, weight, bias)


def _rms_norm(args: Any, kwargs: Any, count: int | None) -> Any:
    x, shape, weight, eps = _given(args, kwargs, ("input", "normalized_shape", "weight", "eps"), None)
    if count is None:
        return math.prod(shape)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    square = (x * x).sum(tuple(range(-len(shape), 0)), keepdim=True) / count
    return _affine(x / (square + eps).sqrt(), weight, None)


def _group_norm(args: Any, kwargs: Any, count: int | None) -> Any:
    x, groups, weight, bias, eps = _given(args, kwargs, ("input", "num_groups", "weight", "bias", "eps"), 1e-5)
    if count is None:
        return x[0].numel() // groups
    parts = x.reshape(len(x), groups, -1)
    mean = parts.sum(-1, keepdim=True) / count
    variance = (parts * parts).sum(-1, keepdim=True) / count - mean * mean
    out = ((parts - mean) / (variance + eps).sqrt()).reshape(x.shape)
    shape = (1, -1, *[1] * (x.dim() - 2))
    return _affine(out, *(None if each is None else each.reshape(shape) for each in (weight, bias)))


def _batch_norm(args: Any, kwargs: Any, count: int | None) -> Any:
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    x, _, _, weight, bias, training, _, eps = _given(args, kwargs, names, 1e-5)
    if count is None:
        return x.numel() // x.shape[1] if training else None
    dims = (0, *range(2, x.dim()))
    mean = x.sum(dims, keepdim=True) / count
    variance = (x * x).sum(dims, keepdim=True) / count - mean * mean
    shape = (1, -1, *[1] * (x.dim() - 2))
    out = (x - mean) / (variance + eps).sqrt()
    return _affine(out, *(None if each is None else each.reshape(shape) for each in (weight, bias)))


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _given(args: Any, kwargs: Any, names: tuple[str, ...], eps: float | None) -> list[Any]:
    values = dict(zip(names, args, strict=False)) | kwargs
    return [values.get(name, eps if name == "eps" else None) for name in names]


def _reduced(which: str) -> Any:
    def own(args: Any, kwargs: Any, count: int | None) -> Any:
        x = args[0] if args else kwargs["input"]
        rest = args[1:]
        dims = kwargs.get("dim", kwargs.get("axis", rest[0] if rest and not isinstance(rest[0], bool) else None))
        keep = kwargs.get("keepdim", kwargs.get("keepdims", False)) or (len(rest) > 1 and rest[-1] is True)
        each = tuple(range(x.dim())) if dims is None else (dims,) if isinstance(dims, int) else tuple(dims)
        if count is None:
            return math.prod(x.shape[at] for at in each)
        total = x.sum(each, keepdim=keep)
        mean = total / count
        if which == "mean":
            return mean
        less = kwargs.get("correction", 1 if kwargs.get("unbiased", True) else 0)
        variance = ((x * x).sum(each, keepdim=keep) - total * mean) / (count - less)
        spread = variance.sqrt() if which.startswith("std") else variance
        return (spread, mean) if which.endswith("_mean") else spread

    return own


_STATISTICS: dict[str, Any] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    **{name: _reduced(name) for name in ("mean", "var", "std", "var_mean", "std_mean")},
}
