"""Channels that leave: `shrink` takes coupled slices out of a model, which stays an ordinary module, but smaller.

Law: the smaller model computes what the original computes with the removed entries zeroed, and a call that fails leaves
the model as it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.allocation import Allocation, check_sparsity, uniform
from secateur.axes import Axis
from secateur.coupling import Coupling, Group, Kept, find_coupling, tensors_of
from secateur.criteria import magnitude
from secateur.files import write_whole
from secateur.masks import make_masks
from secateur.proof import difference, outputs, probe_of
from secateur.selection import keep_largest

__all__ = ["Plan", "load_shrunken", "save_shrunken", "shrink", "verify_shrunken"]

_FORMAT = "secateur shrink plan"
_VERSION = 1
_ATTRIBUTE = "shrink_plans"  # of a shrunken model: what was removed, in order
# Numbers that torch's own modules hold for their printed form and do not use in a forward pass: as their tensors say.
_SIZES: dict[type[nn.Module], dict[str, Callable[[Any], int]]] = {
    nn.Linear: {"in_features": lambda m: m.weight.shape[1], "out_features": lambda m: m.weight.shape[0]},
    nn.Bilinear: {
        "in1_features": lambda m: m.weight.shape[1],
        "in2_features": lambda m: m.weight.shape[2],
        "out_features": lambda m: m.weight.shape[0],
    },
    nn.modules.conv._ConvNd: {
        "in_channels": lambda m: m.weight.shape[0] if m.transposed else m.weight.shape[1] * m.groups,
        "out_channels": lambda m: m.weight.shape[1] * m.groups if m.transposed else m.weight.shape[0],
    },
    nn.modules.batchnorm._NormBase: {
        "num_features": lambda m: next(t.shape[0] for t in (m.weight, m.running_mean) if t is not None)
    },
    nn.GroupNorm: {"num_channels": lambda m: m.weight.shape[0]},
    nn.Embedding: {"embedding_dim": lambda m: m.weight.shape[1], "num_embeddings": lambda m: m.weight.shape[0]},
    nn.EmbeddingBag: {"embedding_dim": lambda m: m.weight.shape[1], "num_embeddings": lambda m: m.weight.shape[0]},
    nn.PReLU: {"num_parameters": lambda m: m.weight.shape[0]},
    nn.RNNBase: {"input_size": lambda m: m.weight_ih_l0.shape[1], "hidden_size": lambda m: m.weight_hh_l0.shape[1]},
    nn.RNNCellBase: {"input_size": lambda m: m.weight_ih.shape[1], "hidden_size": lambda m: m.weight_hh.shape[1]},
}


@dataclass(frozen=True)
class Plan:
    """What leaves a model: kept indices of tensors' dimensions, and numbers that modules hold.

    Attributes:
        tensors: ``{name: (shape before, {dimension: kept indices})}``.
        numbers: ``[(place, before, after)]``; a place is the path of a module, then names, keys and indices.
    """

    tensors: dict[str, tuple[tuple[int, ...], dict[int, npt.NDArray[np.int64]]]]
    numbers: list[tuple[tuple[str | int, ...], int, int]]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "tensors": {
                name: {"shape": list(shape), "kept": {str(at): each.tolist() for at, each in kept.items()}}
                for name, (shape, kept) in self.tensors.items()
            },
            "numbers": [{"place": list(place), "from": old, "to": new} for place, old, new in self.numbers],
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Plan:
        """What `to_json` made."""
        tensors = {
            str(name): (
                tuple(int(size) for size in entry["shape"]),
                {int(at): np.asarray(kept, dtype=np.int64) for at, kept in entry["kept"].items()},
            )
            for name, entry in values["tensors"].items()
        }
        numbers = [(tuple(each["place"]), int(each["from"]), int(each["to"])) for each in values["numbers"]]
        return Plan(tensors, numbers)


def shrink(
    model: nn.Module,
    example_inputs: Any,
    sparsity: float | None = None,
    *,
    criterion: Callable[..., Tensor] = magnitude,
    allocate: Allocation = uniform,
    include: str | Iterable[str] | None = None,
    keep: str | Iterable[str] | None = None,
    round_to: int | None = None,
    target: str = "params",
    evidence: Mapping[str, Mapping[str, Tensor]] | None = None,
    modes: Iterable[bool] | None = None,
    more_inputs: Iterable[Any] = (),
    optimizer: torch.optim.Optimizer | None = None,
    verify: bool = True,
) -> nn.Module:
    """Take whole channels, heads and hidden units out of a model, in place; returns the same module, smaller.

    Which slices live and die together is found by watching a forward pass (`find_coupling`); the outputs of the model
    keep their shapes. Each unit's score is the sum of the criterion's scores over all entries that would leave with it,
    divided by its group's mean; biases and normalizations count only where a group has no matrices.

    Args:
        model: any module; its parameters stay the same objects, with smaller data.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        sparsity: the fraction of ``target`` that leaves, in [0, 1). None: the units that are zero in all members leave.
        criterion: ``(weight, *, <evidence>) -> scores``, higher = keep; see `secateur.criteria`.
        allocate: how many units each group keeps; `uniform` (the same fraction of each) by default. Names are groups'.
        include, keep: globs over the names of groups' tensors: shrink only these; leave these whole.
        round_to: counts become multiples of this, rounded up.
        target: what ``sparsity`` is a fraction of: ``"params"`` (entries of parameters), ``"macs"`` (multiply-adds of
            the example) or ``"units"``.
        evidence: ``{name: {keyword: Tensor}}`` for a criterion that names some; see `secateur.evidence.collect`.
        modes, more_inputs: which passes to watch; see `find_coupling`.
        optimizer: its state (moments, momentum) loses the same slices, so that training goes on.
        verify: compare, on a copy with random weights in float64, with the original whose removed entries are zero.
            What does not agree is frozen, and the rest tried again.

    Raises:
        ValueError: nothing can leave, or not as much as asked; the message says what is frozen and why.

    >>> model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> shrink(model, torch.zeros(1, 4), 0.5)
    Sequential(
      (0): Linear(in_features=4, out_features=7, bias=True)
      (1): ReLU()
      (2): Linear(in_features=7, out_features=3, bias=True)
    )
    """
    if target not in _TARGETS:
        raise ValueError(f"target must be one of {', '.join(map(repr, _TARGETS))}, not {target!r}.")
    if sparsity is not None:
        check_sparsity(sparsity)
    coupling = find_coupling(model, example_inputs, modes=modes, more_inputs=more_inputs)
    inputs = [example_inputs, *more_inputs]
    while True:
        groups = _chosen(coupling, include, keep)
        if sparsity is None:
            kept = _dead(model, coupling, groups)
        else:
            kept = _ranked(
                model, coupling, groups, sparsity, criterion, allocate, evidence, round_to=round_to, target=target
            )
        wrong = _wrong(model, coupling, groups, kept, inputs) if verify else []
        if not wrong:
            break
        coupling.freeze(wrong, "the smaller model computed something else")
    plan = _plan(model, coupling, kept)
    _carry_out(model, plan, optimizer)
    return model


def verify_shrunken(original: nn.Module, shrunken: nn.Module, example_inputs: Any) -> None:
    """Check that a shrunken model equals its original with the removed entries zeroed; both are left as they are.

    On random weights, in float64, in both modes. Raises ValueError with what differs.

    >>> import copy
    >>> model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> shrunken = shrink(copy.deepcopy(model), torch.zeros(1, 4), 0.5)
    >>> verify_shrunken(model, shrunken, torch.zeros(1, 4))
    """
    plans = list(getattr(shrunken, _ATTRIBUTE, ()))[len(getattr(original, _ATTRIBUTE, ())) :]
    if not plans:
        raise ValueError("the second model was not made from the first by shrink or load_shrunken.")
    probe = probe_of(original)
    tensors = tensors_of(probe)
    kept_so_far = {name: [torch.arange(size) for size in tensor.shape] for name, tensor in tensors.items()}
    for plan in plans:
        for name, (_, kept) in plan.tensors.items():
            for at, indices in kept.items():
                kept_so_far[name][at] = kept_so_far[name][at][torch.from_numpy(indices)]
    for name, parameter in probe.named_parameters():
        for at, indices in enumerate(kept_so_far[name]):
            gone = torch.ones(parameter.shape[at], dtype=torch.bool)
            gone[indices] = False
            _zero(parameter, at, gone)
    coupling = find_coupling(original, example_inputs)
    statistics = coupling.statistics(coupling.groups)

    def all_outputs(model: nn.Module, form: str) -> list[Tensor]:
        return [
            each
            for in_pass in coupling.passes
            for each in outputs(
                model, example_inputs, training=in_pass[1], statistics=statistics[in_pass], form=form, backward=False
            )
        ]

    expected = {form: all_outputs(probe, form) for form in ("sums", "affine")}
    for plan in plans:
        _carry_out(probe, plan, None)
    smaller = tensors_of(probe)
    copied = probe_of(shrunken)
    mine = tensors_of(copied)
    if {name: each.shape for name, each in smaller.items()} != {name: each.shape for name, each in mine.items()}:
        raise ValueError("the shapes of the shrunken model are not those that its plans make.")
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.copy_(smaller[name])
    found = {form: difference(expected[form], all_outputs(copied, form)) for form in expected}
    if all(words is not None for words in found.values()):
        raise ValueError(f"the shrunken model does not compute what the original does: {found['sums']}.")


def save_shrunken(model: nn.Module, directory: str | Path) -> None:
    """Write ``plan.json`` and ``model.safetensors`` of a shrunken model; `load_shrunken` reads them. No pickle.

    >>> import tempfile
    >>> model = shrink(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), torch.zeros(1, 4), 0.5)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_shrunken(model, folder)
    ...     fresh = load_shrunken(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), folder)
    >>> torch.equal(fresh(torch.ones(1, 4)), model(torch.ones(1, 4)))
    True
    """
    from safetensors.torch import save

    plans: list[Plan] = list(getattr(model, _ATTRIBUTE, ()))
    if not plans:
        raise ValueError("this model was not shrunken; save its state_dict instead.")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": _FORMAT, "version": _VERSION, "plans": [plan.to_json() for plan in plans]})
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors_of(model).items()}
    write_whole(directory / "model.safetensors", save(tensors, {"format": "pt"}))
    write_whole(directory / "plan.json", text)


def load_shrunken(model: nn.Module, directory: str | Path) -> nn.Module:
    """Shrink a freshly built model as `save_shrunken` wrote it, and load its weights; on meta, it becomes real.

    Raises:
        ValueError: the plan is not one that this version reads, or does not fit the model; nothing is changed.

    >>> import tempfile
    >>> model = shrink(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), torch.zeros(1, 4), 0.5)
    >>> with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
    ...     save_shrunken(model, folder)
    ...     load_shrunken(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), folder)[0].weight.shape
    torch.Size([7, 4])
    """
    from safetensors.torch import load_file

    directory = Path(directory)
    try:
        read = json.loads((directory / "plan.json").read_text(encoding="utf-8"))
        if read.get("format") != _FORMAT or read.get("version") != _VERSION:
            raise ValueError(f"it is {read.get('format')!r} version {read.get('version')!r}")
        plans = [Plan.from_json(each) for each in read["plans"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{directory / 'plan.json'} is no plan that this version of secateur reads: {error}."
        ) from error
    tensors = load_file(directory / "model.safetensors")
    undo: list[Callable[[], None]] = []
    try:
        for plan in plans:
            undo += [_carry_out(model, plan, None)]
        mine = tensors_of(model)
        if mine.keys() != tensors.keys():
            other = sorted(mine.keys() ^ tensors.keys())
            raise ValueError(f"the model and {directory} differ in {', '.join(other[:5])}.")
        for name, tensor in mine.items():
            if tensor.shape != tensors[name].shape:
                shapes = f"{tuple(tensors[name].shape)}, in the model {tuple(tensor.shape)}"
                raise ValueError(f"{name} has in {directory} shape {shapes} once the plan is carried out.")
    except BaseException:
        for each in reversed(undo):
            each()
        raise
    for name, tensor in mine.items():
        if tensor.is_meta:
            _replace(model, name, tensors[name])
        else:
            tensor.data.copy_(tensors[name])
    return model


# ---- choosing -------------------------------------------------------------------------------------------------------

_TARGETS = ("params", "macs", "units")


def _chosen(coupling: Coupling, include: str | Iterable[str] | None, keep: str | Iterable[str] | None) -> list[Group]:
    included = None if include is None else [include] if isinstance(include, str) else list(include)
    whole = [] if keep is None else [keep] if isinstance(keep, str) else list(keep)
    names = {name for group in coupling.groups for name, _ in group.members} | {name for name, _ in coupling.frozen}
    for glob in (*(included or ()), *whole):
        if not any(fnmatchcase(name, glob) for name in names):
            raise ValueError(f"{glob!r} matches no tensor of the model.")

    def about(group: Group, globs: Sequence[str]) -> bool:
        return any(fnmatchcase(name, glob) for name, _ in group.members for glob in globs)

    wanted = [group for group in coupling.groups if included is None or about(group, included)]
    left = [group for group in wanted if not about(group, whole)]
    # of groups that keep equally many, all leave together or none
    excluded = {group.tied for group in coupling.groups} - {group.tied for group in left}
    partly = {group.tied for group in coupling.groups if group not in left}
    left = [group for group in left if group.tied not in excluded | partly]
    if not left:
        reasons = dict.fromkeys(coupling.frozen.values())
        why = "".join(
            f"\n  {name} dimension {at}: {reason}" for (name, at), reason in list(coupling.frozen.items())[:10]
        )
        raise ValueError(f"nothing of the model can leave ({len(reasons)} reasons).{why}")
    return left


def _ranked(
    model: nn.Module,
    coupling: Coupling,
    groups: Sequence[Group],
    sparsity: float,
    criterion: Callable[..., Tensor],
    allocate: Allocation,
    evidence: Mapping[str, Mapping[str, Tensor]] | None,
    *,
    round_to: int | None,
    target: str,
) -> dict[Axis, npt.NDArray[np.bool_]]:
    """The best units of each group, as few as leave ``sparsity`` of the target."""
    every = _scores(model, coupling, groups, criterion, evidence)
    scores = {group.name: each for group, each in zip(groups, every, strict=True)}

    def counts_at(share: float) -> dict[Axis, int]:
        masks = make_masks(scores, share, criterion=lambda weight: weight, allocate=allocate)
        counts = [int(masks[group.name].sum()) for group in groups]
        tied: dict[int, list[int]] = {}
        for group, count in zip(groups, counts, strict=True):
            tied.setdefault(group.tied, []).append(count)
        found: dict[Axis, int] = {}
        for group in groups:
            equal = tied[group.tied]
            count = max(1, round(sum(equal) / len(equal)))
            if round_to:
                count = -(-count // round_to) * round_to
            found[group.axis] = min(count, group.size)
        return found

    def cost(counts: Mapping[Axis, int]) -> float:
        if target == "params":
            return sum(coupling.size(name, counts) for name, _ in model.named_parameters())
        if target == "macs":
            return coupling.multiply_adds(counts)
        return sum(counts.get(group.axis, group.size) for group in groups)

    if target == "units" and not round_to:
        counts = counts_at(sparsity)
    else:
        goal = (1 - sparsity) * cost({})
        low, high = 0.0, 1.0
        if cost(counts_at(high)) > goal:
            most = 1 - cost(counts_at(high)) / cost({})
            raise ValueError(
                f"at most {most:.1%} of the {target} can leave, not {sparsity:.1%}: the rest is frozen or kept."
            )
        for _ in range(24):
            middle = (low + high) / 2
            if cost(counts_at(middle)) > goal:
                low = middle
            else:
                high = middle
        counts = counts_at(high)
    kept = {}
    for group in groups:
        mask = keep_largest(scores[group.name].reshape(1, -1), counts[group.axis])
        kept[group.axis] = mask.reshape(-1).numpy()
    return kept


def _scores(
    model: nn.Module,
    coupling: Coupling,
    groups: Sequence[Group],
    criterion: Callable[..., Tensor],
    evidence: Mapping[str, Mapping[str, Tensor]] | None,
) -> list[Tensor]:
    """For each group the score of each of its units."""
    parameters = dict(model.named_parameters())
    found = []
    for group in groups:
        members = [(name, at) for name, at in group.members if name in parameters]
        matrices = [(name, at) for name, at in members if parameters[name].dim() > 1]
        units = np.zeros(group.size)
        for name, at in matrices or members:
            scores = criterion(parameters[name].detach(), **(evidence or {}).get(name, {}))
            others = [dim for dim in range(scores.dim()) if dim != at]
            along = scores.double().sum(others) if others else scores.double()
            index = coupling.indices(group, name, at)
            np.add.at(units, index[index >= 0], along.cpu().numpy()[index >= 0])
        if np.isnan(units).any():
            raise ValueError(f"a score of {group.name} is NaN; mend the weights first.")
        found.append(torch.from_numpy(units / (abs(units).mean() or 1.0)))
    return found


def _dead(model: nn.Module, coupling: Coupling, groups: Sequence[Group]) -> dict[Axis, npt.NDArray[np.bool_]]:
    """Units that are zero in every member leave; of groups that keep equally many, as many as of the fullest."""
    parameters = dict(model.named_parameters())
    alive: dict[Axis, npt.NDArray[np.bool_]] = {}
    for group in groups:
        lives = np.zeros(group.size, dtype=bool)
        for name, at in group.members:
            if name in parameters:
                entries = parameters[name].detach().ne(0)
                others = [dim for dim in range(entries.dim()) if dim != at]
                along = (entries.sum(others) if others else entries).cpu().numpy() > 0
                index = coupling.indices(group, name, at)
                np.logical_or.at(lives, index[index >= 0], along[index >= 0])
        lives[0] |= not lives.any()
        alive[group.axis] = lives
    most: dict[int, int] = {}
    for group in groups:
        most[group.tied] = max(most.get(group.tied, 0), int(alive[group.axis].sum()))
    for group in groups:
        dead = np.flatnonzero(~alive[group.axis])
        alive[group.axis][dead[: most[group.tied] - int(alive[group.axis].sum())]] = True
    return alive


# ---- proof ----------------------------------------------------------------------------------------------------------


def _wrong(
    model: nn.Module, coupling: Coupling, groups: Sequence[Group], kept: Kept, inputs: Sequence[Any]
) -> list[Group]:
    """The groups whose removal makes the model compute something else; found by halving."""
    by_tie: dict[int, list[Group]] = {}
    for group in groups:
        if not kept[group.axis].all():
            by_tie.setdefault(group.tied, []).append(group)
    probe = probe_of(model)
    return _wrong_among(probe, coupling, list(by_tie.values()), kept, inputs)


def _wrong_among(
    probe: nn.Module, coupling: Coupling, sets: Sequence[Sequence[Group]], kept: Kept, inputs: Sequence[Any]
) -> list[Group]:
    chosen = [group for each in sets for group in each]
    if not chosen or _differs(probe, coupling, chosen, kept, inputs) is None:
        return []
    if len(sets) == 1:
        return chosen
    half = len(sets) // 2
    found = _wrong_among(probe, coupling, sets[:half], kept, inputs)
    found += _wrong_among(probe, coupling, sets[half:], kept, inputs)
    return found or chosen  # right one by one, wrong together


def _differs(
    probe: nn.Module, coupling: Coupling, groups: Sequence[Group], kept: Kept, inputs: Sequence[Any]
) -> str | None:
    """What differs between the original with zeros and the smaller model; the probe is as before afterwards."""
    statistics = coupling.statistics(groups)
    words = None
    for form in ("sums", "affine") if any(statistics.values()) else ("sums",):
        words = _differs_in_form(probe, coupling, {group.axis: kept[group.axis] for group in groups}, inputs, form)
        if words is None:
            break
    return words


def _differs_in_form(probe: nn.Module, coupling: Coupling, kept: Kept, inputs: Sequence[Any], form: str) -> str | None:
    statistics = coupling.statistics(group for group in coupling.groups if group.axis in kept)
    plan = _plan(probe, coupling, kept)
    tensors = tensors_of(probe)
    saved = {name: tensors[name].data for name in plan.tensors}
    undo: Callable[[], None] | None = None

    def all_outputs(*, backward: bool) -> list[Tensor]:
        return [
            each
            for number, training in coupling.passes
            for each in outputs(
                probe,
                inputs[number],
                training=training,
                statistics=statistics[number, training],
                form=form,
                backward=backward,
            )
        ]

    try:
        for name, (_, indices) in plan.tensors.items():
            if not isinstance(tensors[name], nn.Parameter):
                continue  # where a weight is zero, statistics and constants have no effect
            tensors[name].data = saved[name].clone()
            for at, places in indices.items():
                gone = torch.ones(tensors[name].shape[at], dtype=torch.bool)
                gone[torch.from_numpy(places)] = False
                _zero(tensors[name], at, gone)
        expected = all_outputs(backward=False)
        undo = _carry_out(probe, plan, None)
        try:
            found = all_outputs(backward=True)
            probe.load_state_dict(probe.state_dict())
        except Exception as error:  # whatever the model raises, this removal breaks it
            return f"it raises {type(error).__name__}: {error}"
        return difference(expected, found)
    finally:
        if undo is not None:
            undo()
        for name, value in saved.items():
            tensors[name].data = value
        probe.zero_grad(set_to_none=True)


def _zero(tensor: Tensor, at: int, gone: Tensor) -> None:
    if gone.any():
        shape = [1] * tensor.dim()
        shape[at] = -1
        tensor.data.masked_fill_(gone.reshape(shape).to(tensor.device), 0)


# ---- removing -------------------------------------------------------------------------------------------------------


def _plan(model: nn.Module, coupling: Coupling, kept: Kept) -> Plan:
    tensors: dict[str, tuple[tuple[int, ...], dict[int, npt.NDArray[np.int64]]]] = {}
    for name, tensor in tensors_of(model).items():
        masks = coupling.kept(name, kept)
        cuts = {at: np.flatnonzero(mask) for at, mask in enumerate(masks) if not mask.all()}
        if cuts:
            tensors[name] = (tuple(tensor.shape), cuts)
    counts = {axis: int(mask.sum()) for axis, mask in kept.items()}
    numbers = [(each.place, each.value, value) for each, value in coupling.attributes(counts).items()]
    return Plan(tensors, numbers)


def _carry_out(model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer | None) -> Callable[[], None]:
    """Slice tensors and set numbers; all or nothing. Returns what takes it back."""
    tensors = tensors_of(model)
    smaller: dict[str, Tensor] = {}
    states: list[tuple[dict[str, Any], str, Tensor]] = []
    for name, (shape, kept) in plan.tensors.items():
        if name not in tensors:
            raise ValueError(f"the model has no tensor {name}, which the plan makes smaller.")
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; the plan was made for {shape}.")
        if not all(0 <= at < len(shape) and _fits(each, shape[at]) for at, each in kept.items()):
            raise ValueError(f"the plan keeps entries of {name} that its shape {shape} does not have.")
        smaller[name] = _sliced(tensor.data, kept)
        state = {} if optimizer is None else optimizer.state.get(tensor, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and tuple(value.shape) == shape:
                states.append((state, key, _sliced(value, kept)))
    for place, old, _ in plan.numbers:
        if _get(model, place) != old:
            raise ValueError(f"{_spelled(place)} is {_get(model, place)}; the plan was made for {old}.")
    before = {name: (tensors[name].data, tensors[name].grad) for name in smaller}
    changed = {id(tensors[name]) for name in smaller}
    printed = [
        (module, key, vars(module)[key], size)
        for module in model.modules()
        if any(id(tensor) in changed for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
        for kind, facts in _SIZES.items()
        if isinstance(module, kind)
        for key, size in facts.items()
    ]
    states_before = [(state, key, state[key]) for state, key, _ in states]
    history = list(getattr(model, _ATTRIBUTE, ()))

    def undo() -> None:
        for name, (value, grad) in before.items():
            tensors[name].grad = None
            tensors[name].data = value
            tensors[name].grad = grad
        for place, old, _ in plan.numbers:
            _set(model, place, old)
        for module, key, old, _ in printed:
            vars(module)[key] = old
        for state, key, value in states_before:
            state[key] = value
        vars(model)[_ATTRIBUTE] = history
        if not history:
            del vars(model)[_ATTRIBUTE]

    try:
        for name, value in smaller.items():
            grad = before[name][1]
            tensors[name].grad = None
            tensors[name].data = value
            if grad is not None:
                tensors[name].grad = _sliced(grad, plan.tensors[name][1])
        for place, _, new in plan.numbers:
            _set(model, place, new)
        for module, key, _, size in printed:
            vars(module)[key] = int(size(module))
        for state, key, value in states:
            state[key] = value
        vars(model)[_ATTRIBUTE] = [*history, plan]
    except BaseException:
        undo()
        raise
    return undo


def _fits(indices: npt.NDArray[np.int64], size: int) -> bool:
    return bool(
        indices.ndim == 1 and len(indices) and indices[0] >= 0 and indices[-1] < size and (np.diff(indices) > 0).all()
    )


def _sliced(tensor: Tensor, kept: Mapping[int, npt.NDArray[np.int64]]) -> Tensor:
    for at, indices in kept.items():
        tensor = tensor.index_select(at, torch.from_numpy(indices).to(tensor.device))
    return tensor.contiguous()


def _get(model: nn.Module, place: Sequence[str | int]) -> int:
    try:
        held: Any = model.get_submodule(str(place[0]))
        for key in place[1:]:
            held = _inside(held)[key]
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"the model has no number at {_spelled(place)}.") from error
    if not isinstance(held, int):
        raise ValueError(f"{_spelled(place)} is no integer.")
    return held


def _set(model: nn.Module, place: Sequence[str | int], value: int) -> None:
    _with(model.get_submodule(str(place[0])), place[1:], value)


def _with(held: Any, keys: Sequence[str | int], value: int) -> Any:
    """The same with a number at the place of these keys replaced: in place, but for tuples."""
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    if isinstance(held, tuple):
        return type(held)([_with(each, rest, value) if at == key else each for at, each in enumerate(held)])
    inside = _inside(held)
    inside[key] = _with(inside[key], rest, value)
    return held


def _inside(held: Any) -> Any:
    return held if isinstance(held, dict | list | tuple) else vars(held)


def _spelled(place: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in place if part != "")


def _replace(model: nn.Module, name: str, value: Tensor) -> None:
    """A tensor on meta becomes a real one, wherever the model has it."""
    old = tensors_of(model)[name]
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is old:
                module._parameters[key] = nn.Parameter(value, requires_grad=old.requires_grad)
        for key, buffer in list(module._buffers.items()):
            if buffer is old:
                module._buffers[key] = value
