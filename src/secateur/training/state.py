"""What a Pruner remembers between steps, as one value, and how that is written to checkpoints and read from them.

Law: a state is read whole before anything is changed. Whatever is wrong with it is one ``ValueError`` that names the
field; what is accepted shares no memory with the state it was read from.
"""

from __future__ import annotations

import math
import reprlib
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secateur.support import count_nonzero, is_sharded, laid_out, whole

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Memory:
    """All that changes while a Pruner follows a run, but for the weights. Each dict has the names of weights."""

    seed: int
    step: int = 0  # optimizer steps so far
    target: float = 0.0  # the sparsity last brought about
    churn: float = 0.0  # the fraction of the weights whose mask the last update changed
    masks: Mapping[str, Tensor] = field(default_factory=dict)  # of the weight's dtype; weights without one are dense
    removed: Mapping[str, int] = field(default_factory=dict)  # how many entries a mask removes
    held: Mapping[str, Tensor] = field(default_factory=dict)  # values of removed weights, 0 elsewhere
    movement: Mapping[str, Tensor] = field(default_factory=dict)  # its sum over all steps so far
    grad_sq: Mapping[str, Tensor] = field(default_factory=dict)  # its sum since the last update
    grad_sq_steps: int = 0


@dataclass(frozen=True)
class _Field:
    """A field of the state: what it has to be, in words and as a check of the value alone."""

    what: str
    fits: Callable[[Any], bool]
    needed: bool = True


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_fraction(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1


def _are_names(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and all(isinstance(each, str) for each in value)
        and len(set(value)) == len(value)
    )


def _are_shapes(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(shape, list | tuple) and all(_is_count(size) for size in shape) for shape in value
    )


def _has_values(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta


def _are_bytes(value: Any) -> bool:
    return _has_values(value) and value.dtype == torch.uint8 and value.dim() == 1


def _are_numbers(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        _has_values(each) and each.dtype in _FLOATS and bool(each.isfinite().all()) for each in value.values()
    )


def _are_squares(value: Any) -> bool:
    return _are_numbers(value) and all(bool((each >= 0).all()) for each in value.values())


_FIELDS = {
    "version": _Field("1", lambda value: type(value) is int and value == 1),
    "seed": _Field("an integer", lambda value: type(value) is int),
    "step": _Field("a number of steps", _is_count),
    "target": _Field("a sparsity in [0, 1]", _is_fraction),
    "churn": _Field("a fraction in [0, 1]", _is_fraction),
    "names": _Field("a list of distinct names", _are_names),
    "shapes": _Field("a list of shapes", _are_shapes),
    "masks": _Field("a vector of torch.uint8, eight entries a byte", _are_bytes),
    "held": _Field("{name: tensor of finite numbers}", _are_numbers, needed=False),
    "movement": _Field("{name: tensor of finite numbers}", _are_numbers, needed=False),
    "grad_sq": _Field("{name: tensor of finite numbers that are not negative}", _are_squares, needed=False),
    "grad_sq_steps": _Field("a number of steps, 1 or more", lambda value: _is_count(value) and value > 0, needed=False),
    # without it a target that the masks contradict would fail at a later update; states from before it have none
    "crc": _Field("a checksum", _is_count, needed=False),
    "regularize": _Field("a dict", lambda value: isinstance(value, Mapping), needed=False),
}
_BY_NAME = ("held", "movement", "grad_sq")


def written(memory: Memory, regularize: Mapping[str, Any] | None) -> dict[str, Any]:
    """The state: plain values and tensors, masks as bits; what is sharded is gathered."""
    state: dict[str, Any] = {
        "version": 1,
        "seed": memory.seed,
        "step": memory.step,
        "target": memory.target,
        "churn": memory.churn,
        "names": list(memory.masks),
        "shapes": [tuple(mask.shape) for mask in memory.masks.values()],
        "masks": _packed(whole(mask.ne(0)).cpu() for mask in memory.masks.values()),
    }
    for word in _BY_NAME:
        if values := getattr(memory, word):
            state[word] = {name: whole(value).cpu().clone() for name, value in values.items()}
    if memory.grad_sq:
        state["grad_sq_steps"] = memory.grad_sq_steps
    state["crc"] = _crc(state)
    if regularize is not None:
        state["regularize"] = dict(regularize)
    return state


def read(state: Any, weights: Mapping[str, Tensor], remembered: Collection[str]) -> Memory:
    """The memory that a state was written of, laid out as the weights are.

    Args:
        weights: those that are pruned.
        remembered: which of held, movement and grad_sq the Pruner remembers.

    Raises:
        ValueError: a field is missing, unknown or not what it has to be, or does not fit the weights or the Pruner.
    """
    _check_fields(state)
    names, shapes = list(state["names"]), [tuple(shape) for shape in state["shapes"]]
    if len(names) != len(shapes):
        raise ValueError(f"the state's names are {len(names)}, its shapes {len(shapes)}.")
    for name, shape in zip(names, shapes, strict=True):
        if name not in weights or tuple(weights[name].shape) != shape:
            has = tuple(weights[name].shape) if name in weights else "no such weight"
            raise ValueError(f"{name}: the state has a mask of shape {shape}, the model has {has}.")
    masks = _unpacked(state["masks"], dict(zip(names, shapes, strict=True)))
    found = {word: state.get(word, {}) for word in _BY_NAME}
    for word, values in found.items():
        if values and word not in remembered:
            raise ValueError(f"the state has {word}, the Pruner has not: make the Pruner as it was saved.")
        for name, value in values.items():
            if name not in weights or value.shape != weights[name].shape:
                raise ValueError(f"{name}: the state's {word} does not fit the model.")
    # what a rule remembers it remembers of every weight, from the first mask or the first step on
    must = {
        "held": masks.keys() if "held" in remembered else set(),
        "movement": weights.keys() if "movement" in remembered and state["step"] else set(),
        "grad_sq": weights.keys() if found["grad_sq"] else set(),
    }
    for word, all_of in must.items():
        if missing := [name for name in all_of if name not in found[word]]:
            raise ValueError(f"{missing[0]}: the state has no {word} of it, which the Pruner remembers.")
    if bool(found["grad_sq"]) != ("grad_sq_steps" in state):
        raise ValueError("the state has one of grad_sq and grad_sq_steps without the other.")
    if "crc" in state and state["crc"] != _crc(state):
        raise ValueError("the state was changed after it was written: its crc is not that of its numbers and masks.")
    factors = {name: factor(masks[name], weight) for name, weight in weights.items() if name in masks}
    dtypes = {name: weight.dtype for name, weight in weights.items()}
    wide = {name: torch.float64 if dtype == torch.float64 else torch.float32 for name, dtype in dtypes.items()}
    return Memory(
        seed=state["seed"],
        step=state["step"],
        target=float(state["target"]),
        churn=float(state["churn"]),
        masks=factors,
        removed=removed_by(factors, weights),
        held=_laid_out(found["held"], weights, dtypes),
        movement=_laid_out(found["movement"], weights, wide),
        grad_sq=_laid_out(found["grad_sq"], weights, wide),
        grad_sq_steps=state.get("grad_sq_steps", 0),
    )


def with_masks(
    memory: Memory,
    masks: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    *,
    held_from: Mapping[str, Tensor] | None,
) -> tuple[Memory, dict[str, Tensor]]:
    """The memory once chosen masks are the current ones; and what stays of each weight: 0 where it goes or returns.

    Args:
        held_from: the dense weights, where values of removed weights are held.
    """
    changed, stays = 0, {}
    made, held = dict(memory.masks), dict(memory.held)
    for name, mask in masks.items():
        new, old = factor(mask, weights[name]), memory.masks.get(name)
        changed += count_nonzero(new.eq(0) if old is None else new - old)  # torch 2.11 has no `ne` of shards
        stays[name] = new if old is None else new * old
        if held_from is not None:
            held[name] = held_from[name] * (1 - new)
        made[name] = new
    entries = sum(weight.numel() for weight in weights.values())
    removed = removed_by(made, weights)
    return replace(memory, masks=made, held=held, removed=removed, churn=changed / max(entries, 1)), stays


def factor(mask: Tensor, weight: Tensor) -> Tensor:
    """A mask as what a weight is multiplied by: of its dtype, device, memory layout and shards."""
    if is_sharded(weight):
        return laid_out(mask, weight).to(weight.dtype)
    return torch.empty_like(weight, requires_grad=False).copy_(mask)


def removed_by(masks: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, int]:
    """How many entries of each weight masks remove."""
    return {name: count_nonzero(masks[name].eq(0)) if name in masks else 0 for name in names}


def _check_fields(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise ValueError(f"a Pruner's state is a dict, as state_dict() returns it, not a {type(state).__name__}.")
    if "version" not in state or not _FIELDS["version"].fits(state["version"]):
        raise ValueError(f"this is no Pruner's state of version 1: {sorted(map(str, state))[:8]}.")
    if missing := [name for name, each in _FIELDS.items() if each.needed and name not in state]:
        raise ValueError(f"the state has no {missing[0]}: {_FIELDS[missing[0]].what}.")
    if unknown := [name for name in state if name not in _FIELDS]:
        raise ValueError(f"the state has {unknown[0]!r}, which no Pruner writes; it has {', '.join(_FIELDS)}.")
    for name, value in state.items():
        if not _FIELDS[name].fits(value):
            raise ValueError(f"the state's {name} is not {_FIELDS[name].what}; got {_spelled(value)}.")


def _crc(state: Mapping[str, Any]) -> int:
    """Of all but what the penalty wrote."""
    numbers = [state["step"], float(state["target"]), float(state["churn"]), state.get("grad_sq_steps", 0)]
    places = [list(state["names"]), [list(shape) for shape in state["shapes"]]]
    found = zlib.crc32(repr([hex(state["seed"]), numbers, places]).encode())  # the longest integers have no decimals
    for values in ({"": state["masks"]}, *(state.get(word, {}) for word in _BY_NAME)):
        for name in sorted(values):
            found = zlib.crc32(values[name].detach().cpu().reshape(-1).view(torch.uint8).numpy(), found)
    return found


def _spelled(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)} on {value.device}"
    if type(value) is int and value.bit_length() > 64:  # Python refuses to write the longest
        return f"an integer of {value.bit_length()} bits"
    return f"{type(value).__name__} {reprlib.repr(value)}"


def _laid_out(
    values: Mapping[str, Tensor], weights: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    return {
        name: laid_out(value.detach().to(dtypes[name], copy=True), weights[name])
        for name, weight in weights.items()
        if (value := values.get(name)) is not None
    }


def _packed(masks: Iterable[Tensor]) -> Tensor:
    """Eight entries a byte, each mask from a byte of its own."""
    parts = [torch.from_numpy(np.packbits(mask.reshape(-1).numpy())) for mask in masks]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8, device="cpu")


def _unpacked(packed: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    masks, at = {}, 0
    needed = sum(-(-math.prod(shape) // 8) for shape in shapes.values())
    if packed.numel() != needed:
        raise ValueError(f"the state's masks are {packed.numel()} bytes of {packed.dtype}, not {needed} of uint8.")
    given = packed.cpu()
    for name, shape in shapes.items():
        size = math.prod(shape)
        piece = given[at : at + -(-size // 8)].numpy()
        masks[name] = torch.from_numpy(np.unpackbits(piece, count=size).astype(bool)).reshape(shape)
        at += -(-size // 8)
    return masks
