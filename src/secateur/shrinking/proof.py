"""Whether two models compute the same function, up to rounding. Whether a smaller model computes what the original
computes with the removed entries zeroed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from secateur.coupling import (
    Branch,
    CallSites,
    Coupling,
    Group,
    Kept,
    SameDraws,
    find_coupling,
    name_of,
    operation,
    tensors_of_tree,
    written_in_others,
)
from secateur.models import check_finite
from secateur.shrinking.apply import carry_out, sliced
from secateur.shrinking.costs import by_tie
from secateur.shrinking.oracle import RouterMask, kept_by, lending_of, oracles, without_chosen, zero_all, zeroed_of
from secateur.shrinking.plan import Plan, plan_of, plan_without, plans_of
from secateur.support import (
    in_dtype,
    in_mode,
    naming_example,
    private,
    refuse_unloaded,
    restored,
    run_example,
    seeded,
    tensors_in,
    tensors_of,
    track,
)

# ---- Whether two models compute the same function, up to rounding.
#
# Law: a difference that rounding could explain is neither accepted nor rejected.
#
# Where a model is chaotic on its random weights, as recurrent ones over many steps may be, rounding grows until it
# looks like a difference. So of what differs it is asked how far the original moves by itself when its weights move
# by one unit in the last place. Only what is far beyond that is a difference; anything else is looked at again with
# smaller weights, on which the model is calmer. These count if a single wrong slice would still show.

TOLERANCE = 1e-6  # of the largest number in an output
# Times what one unit in the last place of the weights does. On 62 models of the zoo and on LSTMs rounding did at
# most twice as much; what is above is surely none, and what is below is looked at on calmer weights.
_ROUNDINGS = 1000.0
_PROBES, _CALMER = 7, 0.5  # how many are tried, and by which power of a half the weights of the next are smaller
_CLEARLY = 100.0  # times the tolerance: what a slope says of a wrong slice is only its first order
_ENTRIES = 8  # of each output, whose mean has the slope

T = TypeVar("T")


class IncomparableError(ValueError):
    """The comparison is inconclusive: rounding alone may explain the difference, or a wrong slice would not show."""


class Unsure(str):
    """What differs, in words, if it is not rounding."""


BLIND = Unsure("a wrong slice would not show on smaller weights")
Runs = Sequence[Callable[[], list[Tensor]]]  # of each pass


def probe_of(model: nn.Module, calm: float = 1.0) -> nn.Module:
    """A copy in float64 with random weights, near in scale to the model's own; then all times ``calm``."""
    probe = copy.deepcopy(model).double()
    with seeded(), torch.no_grad():
        for parameter in probe.parameters():
            if parameter.is_floating_point() and parameter.numel():
                spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
                parameter.add_(torch.randn_like(parameter) * max(0.5 * spread, 0.02)).mul_(calm)
    return probe


def difference(
    expected: Sequence[Tensor], found: Sequence[Tensor], limits: Sequence[float] | None = None
) -> str | None:
    """What differs, in words; None where nothing does. ``limits`` are of each output's largest number."""
    if len(expected) != len(found):
        return f"{len(found)} tensors came out where {len(expected)} did before"
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one.shape != other.shape:
            return f"output {number} has shape {tuple(other.shape)}, it was {tuple(one.shape)}"
        gap = _gap(one, other)
        if gap <= (TOLERANCE if limits is None else limits[number]):
            if one.is_floating_point() and one.numel() and not torch.isfinite(one).any():
                return f"output {number} has no finite number, so nothing can be compared"
            continue
        if gap < math.inf:
            return f"output {number} differs by {gap:.2g} of its largest number"
        return f"output {number} {'is not finite at other places' if one.is_floating_point() else 'differs'}"
    return None


def _gap(one: Tensor, other: Tensor) -> float:
    """How far two outputs of one shape are apart, of the largest number; where that has no measure, infinity."""
    if one.is_complex() and other.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else math.inf
    real = torch.isfinite(one)
    if not torch.equal(real, torch.isfinite(other)):
        return math.inf
    if not real.any():
        return 0.0
    return float((one[real] - other[real]).abs().max()) / max(float(one[real].abs().max()), 1e-12)


# ---- rounding -------------------------------------------------------------------------------------------------------


def compared(probe: nn.Module, expected: Sequence[Tensor], found: Sequence[Tensor], again: Runs) -> str | None:
    """What differs, in words; `Unsure` where rounding may be all that does. ``again`` makes what is expected."""
    words = difference(expected, found)
    if words is None:
        return None
    moves = _moves(probe, expected, again)
    if difference(expected, found, [max(TOLERANCE, _ROUNDINGS * each) for each in moves]) is not None:
        return words
    return Unsure(
        f"{words}, and the original's own move by {max(moves):.2g} when its weights do by one unit in the last place"
    )


def _moves(probe: nn.Module, expected: Sequence[Tensor], again: Runs) -> list[float]:
    """How far each output moves when all weights move by one unit in the last place, up or down."""
    moves = [0.0] * len(expected)
    draw = torch.Generator().manual_seed(0)
    weights = [each for each in probe.parameters() if each.is_floating_point()]
    saved = [each.data for each in weights]
    unit = torch.finfo(torch.float64).eps
    for _ in range(3):  # a single number may stay where it is by chance
        try:
            for weight, value in zip(weights, saved, strict=True):
                up = torch.randint(0, 2, value.shape, generator=draw, device="cpu").to(value)
                weight.data = value * (1 + (2 * up - 1) * unit)
            moved = all_of(again)
        finally:
            for weight, value in zip(weights, saved, strict=True):
                weight.data = value
        same = [one.shape == other.shape for one, other in zip(expected, moved, strict=True)]
        gaps = [_gap(*each) if is_same else math.inf for is_same, *each in zip(same, expected, moved, strict=True)]
        moves = [max(each) for each in zip(moves, gaps, strict=True)]
    return moves


def _settled(probe: nn.Module, example_inputs: Any) -> nn.Module:
    """The probe, its batch normalizations at the scale of what they get for an example, as training would have it. On
    random weights their own statistics let each of a hundred layers multiply the next one's numbers."""
    found: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def settle(module: Any, args: tuple[Any, ...]) -> None:
        mean, variance = module.running_mean, module.running_var
        scale = float(args[0].square().mean() / variance.mean()) if args and isinstance(args[0], Tensor) else 0.0
        if module not in found and 0 < scale < math.inf:
            found[module] = [(mean, mean * scale**0.5), (variance, variance * scale)]
            for old, new in found[module]:  # for the layers behind it
                old.copy_(new)

    hooks = [each.register_forward_pre_hook(settle) for each in _with_statistics(probe)]
    try:
        outputs(probe, example_inputs)
    finally:
        for hook in hooks:
            hook.remove()
    for old, new in (each for pairs in found.values() for each in pairs):
        old.copy_(new)
    return probe


def _with_statistics(model: nn.Module) -> list[nn.Module]:
    """The normalizations that divide by what they have seen."""
    names = ("running_mean", "running_var")
    return [each for each in model.modules() if all(isinstance(getattr(each, name, None), Tensor) for name in names)]


def on_calm_probes(model: nn.Module, compare: Callable[[nn.Module, float], T], example_inputs: Any = None) -> T:
    """What a comparison says of the least calm probe of which it says something: first ever calmer ones, then between
    one that is not calm enough and one on which a wrong slice would not show. A deep network without normalizations
    may go from numbers that are not finite to such in one step; one with batch normalizations is settled first."""
    why, wild, blind, power = "", 0.0, math.inf, 0.0
    settles = example_inputs is not None and bool(_with_statistics(model))
    for number in range(_PROBES):
        probe = probe_of(model, 0.5**power)
        try:
            return compare(_settled(probe, example_inputs) if settles and number else probe, 0.5**power)
        except IncomparableError as error:
            why = why or str(error)
            if settles and not number:
                continue
            wild, blind = (wild, power) if str(error) == BLIND else (power, blind)
        power = min(wild + _CALMER, (wild + blind) / 2)
    if why == _NOTHING:
        raise IncomparableError(why)
    raise IncomparableError(
        f"the smaller model could not be compared with the original, which is no proof that it is wrong: {why}; nor on "
        "smaller weights. Give an example of fewer steps, or leave out the proof (verify=False)."
    )


def certain(words: str | None) -> str | None:
    if isinstance(words, Unsure):
        raise IncomparableError(words)
    return words


def would_show(probe: nn.Module, plan: Plan, runs: Runs) -> bool:
    """Whether the smaller model would compute something else if a single slice of any tensor were its neighbour's.

    What the gradients that `outputs` left clearly say is not run, and first what they say the least of: a detector has
    a hundred weights to ask of.
    """
    tensors = tensors_of(probe)
    found = [run() for run in runs]
    clearly = _CLEARLY * TOLERANCE * sum(each.is_floating_point() for every in found for each in every)
    draw = torch.Generator().manual_seed(0)
    slices: list[tuple[float, str, int, int]] = []
    for name, (_, cuts) in plan.tensors.items():
        if isinstance(tensors[name], nn.Parameter):
            for at in cuts:
                place = int(torch.randint(0, tensors[name].shape[at], (), generator=draw, device="cpu"))
                slices.append((_slope(tensors[name], at, place), name, at, place))
    for slope, name, at, place in sorted(slices):
        if slope > clearly:
            break
        right = tensors[name].data
        wrong = right.clone()
        wrong.select(at, place).copy_(_instead(right, at, place))
        tensors[name].data = wrong
        try:
            if all(difference(before, run()) is None for before, run in zip(found, runs, strict=True)):
                return False
        finally:
            tensors[name].data = right
    return True


def _instead(tensor: Tensor, at: int, place: int) -> Tensor:
    """The neighbour of a slice."""
    return tensor.select(at, place - 1) if tensor.shape[at] > 1 else 1.5 * tensor.select(at, place)


def _slope(parameter: Tensor, at: int, place: int) -> float:
    """By how much the outputs move, by the gradient, where a slice becomes its neighbour; 0 where there is none."""
    if parameter.grad is None:
        return 0.0
    moved = _instead(parameter.data, at, place) - parameter.data.select(at, place)
    found = abs(float((moved * parameter.grad.select(at, place)).sum()))
    return found if math.isfinite(found) else 0.0


def all_of(runs: Runs) -> list[Tensor]:
    return [each for run in track(runs, "comparing") for each in run()]


# ---- Whether a smaller model computes what the original computes with the removed entries zeroed.
#
# Law: a removal that changes anything else is found, whatever the weights: they are random, and the numbers float64.
# What rounding could be is neither found right nor wrong; see `secateur.shrinking.proof`. A large model of blocks is
# looked at with one block's weights at a time first (`secateur.shrinking.oracle`); what is not found right so is
# looked at on a whole copy, as any other model.
#
# Where a statistic runs over an axis that loses entries (a layer normalization over the width), the original with
# zeros divides by another count. Such statistics, and only they, are compared in a form that zeros do not change:
# sums, or, where the code centers by itself, what is left without them.

_NOTHING = (
    "the model returns no finite number for the example, so there is nothing to compare. The proof runs it with random "
    "weights, of which a detector may find nothing: give an example that it has a result for, lower its threshold of "
    "scores, or verify=False."
)


def verify_shrunken(original: nn.Module, shrunken: nn.Module, example_inputs: Any) -> None:
    """Check that a shrunken model equals its original with the removed entries zeroed; both are left as they are.

    On random weights, in float64, in both modes.

    Raises:
        ValueError: what differs; the second was not made from the first, or one has no values.
        TypeError: one is no module.

    >>> import copy
    >>> from secateur import shrink
    >>> model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> shrunken = shrink(copy.deepcopy(model), torch.zeros(1, 4), 0.5).model
    >>> verify_shrunken(model, shrunken, torch.zeros(1, 4))
    """
    for each in (original, shrunken):
        if not isinstance(each, nn.Module):
            raise TypeError(f"two models are compared, and one is of type {type(each).__name__}.")
        if any(map(nn.parameter.is_lazy, each.parameters())):
            raise ValueError(
                f"{type(each).__name__} has weights without a shape yet; run it once on an example before."
            )
        refuse_unloaded(each)
    plans = plans_of(shrunken)[len(plans_of(original)) :]
    if not plans:
        raise ValueError("the second model was not made from the first by shrink or load_shrunken.")
    try:
        with naming_example(original, example_inputs):
            words = on_calm_probes(
                original,
                lambda probe, calm: _differs_after(probe, calm, original, shrunken, example_inputs),
                example_inputs,
            )
    except (AttributeError, LookupError) as error:
        raise ValueError(f"the plan of the second model does not fit the first: {error}.") from error
    if words is not None:
        raise ValueError(f"the shrunken model does not compute what the original does: {words}.")


def _differs_after(
    probe: nn.Module, calm: float, original: nn.Module, shrunken: nn.Module, example_inputs: Any
) -> str | None:
    """What differs between a shrunken model and what its plans make of a probe of the original."""
    stage = copy.deepcopy(original)
    for plan in plans_of(shrunken)[len(plans_of(original)) :]:
        for part in (Plan({}, [], modules=plan.modules), replace(plan, modules={})) if plan.modules else (plan,):
            coupling = coupling_of_outputs(stage, example_inputs, plan.outputs)
            words = _differs_by(probe, calm, coupling, part, example_inputs)
            if words is not None:
                return words
            carry_out(stage, part, None)
    smaller, copied = tensors_of(probe), probe_of(shrunken)
    mine = tensors_of(copied)
    if {name: each.shape for name, each in smaller.items()} != {name: each.shape for name, each in mine.items()}:
        return "its shapes are not those that its plans make"
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.copy_(smaller[name])
    for training in (False, True):
        try:
            expected = outputs(probe, example_inputs, training=training)
        except Exception:  # as the original does, such as in training on a batch of one
            if not training:
                raise
            continue
        found = outputs(copied, example_inputs, training=training)

        def again(training: bool = training) -> list[Tensor]:
            return outputs(probe, example_inputs, training=training)

        words = certain(compared(probe, expected, found, [again]))
        if words is not None:
            return words
    return None


def _differs_by(probe: nn.Module, calm: float, coupling: Coupling, plan: Plan, inputs: Any) -> str | None:
    """What differs between a model where all that a plan takes is zero and the same without it, as it is afterwards."""
    if gone := {path: form for path, form in plan.modules.items() if form["returns"] == "nothing"}:
        return certain(differs_without_heads(probe, coupling, Plan({}, [], modules=gone), [inputs]))
    branches = [branch for branch in coupling.branches if branch.modules.keys() <= plan.modules.keys()]
    if other := sorted(plan.modules.keys() - plan_without(branches).modules.keys()):
        return f"{', '.join(other[:5])} left, and lies in no residual branch"
    statistics = coupling.statistics([] if plan.modules else coupling.groups)
    forms = ("sums",) if plan.modules else ("sums", "affine")
    kept = kept_by(coupling, plan)
    without, after = oracles(coupling, kept)
    zero_all(tensors_of(probe), without_chosen(coupling, plan))

    def runs(form: str, zeroed: Sequence[Branch], chances: Sequence[RouterMask | None], whole: bool = False) -> Runs:
        return [
            functools.partial(
                outputs,
                probe,
                inputs,
                training=in_pass[1],
                statistics=statistics[in_pass],
                form=form,
                zeroed=_terms(zeroed, in_pass) if plan.modules else None,
                oracle=oracle,
                stay=coupling.returned(in_pass, kept) if whole and plan.outputs else None,
            )
            for in_pass in coupling.passes
            for oracle in chances
        ]

    expected = {form: all_of(runs(form, branches, without, whole=True)) for form in forms}
    all_there = runs("sums", (), without, whole=True)
    shows = not plan.modules or calm == 1 or difference(all_of(all_there), expected["sums"]) is not None
    undo = carry_out(probe, plan, None)
    found = {form: all_of(runs(form, (), after)) for form in forms}
    right = [form for form in forms if difference(expected[form], found[form]) is None]
    if right and calm < 1:
        shows = shows and would_show(probe, plan, runs(right[0], (), after))
    if right:
        return None if shows else certain(BLIND)
    undo()
    words = [compared(probe, expected[form], found[form], runs(form, branches, without, whole=True)) for form in forms]
    carry_out(probe, plan, None)
    return certain(next((each for each in words if isinstance(each, Unsure)), words[0]))


_COMPARES = re.compile(r"((log_)?softmax|a?max|argmax|topk|sort|argsort) (over|along) it|a view to \d+")


def coupling_of_outputs(
    model: nn.Module,
    example_inputs: Any,
    paths: Sequence[str],
    *,
    modes: Iterable[bool] | None = None,
    more_inputs: Sequence[Any] = (),
) -> Coupling:
    """The coupling by which outputs of these modules leave what the model returns.

    Where it returns them in one mode, and in the other only compares them, as a classifier that ends in a softmax or a
    detector without suppression of its own does, that mode alone is watched: those that stay are compared then.
    """
    watched = functools.partial(find_coupling, model, example_inputs, more_inputs=more_inputs, outputs=paths)
    found = watched(modes=modes)
    modes = {training for _, training in found.passes}
    if not paths or len(modes) == 1 or any(group.returned and not group.chosen for group in found.groups):
        return found
    for mode in sorted(modes):
        alone = watched(modes=[mode])
        places = [each for group in alone.groups if group.returned and not group.chosen for each in group.members]
        reasons = [why for each in places for why in found.frozen.get(each, "").split("; ")]
        if places and all(_COMPARES.fullmatch(why) for why in reasons if why):
            return alone
    return found


def differs_without_heads(probe: nn.Module, coupling: Coupling, plan: Plan, inputs: Sequence[Any]) -> str | None:
    """What differs, in words, between what a model returns and what it returns of that without some modules; they are
    out of the probe afterwards."""
    runs = [functools.partial(outputs, probe, inputs[number], training=mode) for number, mode in coupling.passes]
    expected = [run() for run in runs]
    carry_out(probe, plan, None)
    try:
        found = [run() for run in runs]
    except Exception as error:  # whatever the model raises, this removal breaks it
        return f"it raises {type(error).__name__}: {error}"
    for whole, left in zip(expected, found, strict=True):
        if not left or [each.shape for each in left] == [each.shape for each in whole]:
            return f"it returns {'as much as before' if left else 'nothing'}"
        if not _in_order(whole, left, _is_part_of):
            return "the other outputs are not what they were"
    return None


def _in_order(whole: Iterable[Tensor], left: Iterable[Tensor], fits: Callable[[Tensor, Tensor], bool]) -> bool:
    """Whether some of the ones are the others, in their order."""
    those = iter(whole)
    return all(any(fits(one, other) for one in those) for other in left)


def _is_part_of(one: Tensor, other: Tensor) -> bool:
    """Whether the second is the first, or what is left of it without positions of one dimension."""
    apart = [at for at, sizes in enumerate(zip(one.shape, other.shape, strict=False)) if len({*sizes}) > 1]
    if one.dim() == other.dim() and len(apart) == 1:
        return _in_order(one.unbind(apart[0]), other.unbind(apart[0]), _is_part_of)
    return difference([one], [other]) is None


def _terms(branches: Iterable[Branch], in_pass: tuple[int, bool]) -> list[tuple[int, int]]:
    """Where the branches meet their streams in a pass."""
    return [(branch.terms[in_pass].number, branch.terms[in_pass].position) for branch in branches]


def outputs(
    model: nn.Module,
    inputs: Any,
    *,
    training: bool = False,
    statistics: AbstractSet[tuple[str, int]] = frozenset(),
    form: str = "sums",
    backward: bool = False,
    zeroed: Iterable[tuple[int, int]] | None = None,
    oracle: RouterMask | None = None,
    stay: Sequence[Sequence[npt.NDArray[np.bool_]]] | None = None,
) -> list[Tensor]:
    """All tensors that a probe returns; its buffers and the random numbers are as before.

    ``statistics`` are the calls, by name and number, that may not count the entries of their axis: ``form`` says
    whether they become "sums", which entries that are zero do not change, or are left out ("affine"). ``zeroed`` are
    the terms of sums that become zero; then random numbers do not depend on how many were drawn (`SameDraws`).
    ``oracle`` says which of the units that are chosen between have no chance; ``stay`` which positions of each
    dimension of each tensor are asked for.
    """
    inputs = private.tree_map_only(Tensor, _wide, inputs)
    with (
        in_mode(model, training=training),
        restored(model),
        seeded(),
        contextlib.nullcontext() if oracle is None else CallSites(model) as where,
        _Comparable(statistics, sums=form == "sums", oracle=oracle, where=where),
        contextlib.nullcontext() if zeroed is None else SameDraws(zeroed),
        torch.set_grad_enabled(backward),
    ):
        found = list(tensors_in(run_example(model, inputs)))
        if backward and (real := [each for each in found if each.is_floating_point() and each.requires_grad]):
            torch.stack([*map(_of_some, real)]).sum().backward()  # type: ignore[no-untyped-call]
    found = [each.detach() for each in found]
    return found if stay is None else [_staying(*each) for each in zip(found, stay, strict=True)]


def _of_some(output: Tensor) -> Tensor:
    """The mean of a few entries, of the largest number: no more than the entry moves that moves most."""
    every = output.flatten()
    some = every[:: every.numel() // _ENTRIES | 1]
    largest = float(every.detach().nan_to_num(0.0, 0.0, 0.0).abs().amax()) if every.numel() else 0.0
    return some.sum() / max(some.numel() * largest, 1e-12)


def _staying(tensor: Tensor, masks: Sequence[npt.NDArray[np.bool_]]) -> Tensor:
    return sliced(tensor, {at: np.flatnonzero(mask) for at, mask in enumerate(masks) if not mask.all()})


# ---- what does not agree --------------------------------------------------------------------------------------------


def wrong_groups(
    model: nn.Module, coupling: Coupling, groups: Sequence[Group], kept: Kept, inputs: Sequence[Any]
) -> list[Group]:
    """The groups whose removal makes the model compute something else; found by halving.

    Raises:
        IncomparableError: rounding alone makes the model compute something else, on all weights that were tried.
    """
    sets = by_tie(group for group in groups if not kept[group.name].all())
    if _are_right_in_parts(model, coupling, [group for each in sets for group in each], kept, inputs):
        return []

    def look(probe: nn.Module, calm: float) -> list[Group]:
        try:
            found = _wrong_among(probe, calm, coupling, sets, kept, inputs)
        except IncomparableError:
            _check_numbers(probe, coupling, inputs)
            raise
        if found:
            _check_numbers(probe, coupling, inputs)
        return found

    return on_calm_probes(model, look, inputs[0])


Change = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]  # of a model's tensors: new values of some


def wrong_changes(
    model: nn.Module, coupling: Coupling, changes: Sequence[Sequence[Sequence[Change]]], inputs: Sequence[Any]
) -> list[int]:
    """The numbers of those changes of weights that make the model compute something else; found by halving.

    Each is several at once, with a part of each, which by itself has to show on weights that were made smaller.

    Raises:
        IncomparableError: rounding alone makes the model compute something else, on all weights that were tried.
    """

    def look(probe: nn.Module, calm: float) -> list[int]:
        runs = [
            functools.partial(outputs, probe, inputs[number], training=training) for number, training in coupling.passes
        ]
        tensors = tensors_of(probe)
        expected = all_of(runs)
        if not _has_numbers(expected):
            _check_numbers(probe, coupling, inputs)

        def after(some: Sequence[Change]) -> list[Tensor]:
            saved: dict[str, Tensor] = {}
            try:
                for change in some:
                    for name, value in change(tensors).items():
                        saved.setdefault(name, tensors[name].data)
                        tensors[name].data = value
                return all_of(runs)
            finally:
                for name, value in saved.items():
                    tensors[name].data = value

        def wrong_among(numbers: Sequence[int]) -> list[int]:
            if not numbers:
                return []
            found = after([change for number in numbers for change in changes[number][0]])
            if certain(compared(probe, expected, found, runs)) is None:
                return []
            half = len(numbers) // 2
            return (wrong_among(numbers[:half]) + wrong_among(numbers[half:]) if half else []) or [*numbers]

        wrong = wrong_among(range(len(changes)))
        if calm < 1 and any(
            difference(expected, after([part])) is None
            for number in range(len(changes))
            if number not in wrong
            for part in changes[number][1]
        ):
            raise IncomparableError(BLIND)
        return wrong

    return on_calm_probes(model, look, inputs[0])


def _check_numbers(probe: nn.Module, coupling: Coupling, inputs: Sequence[Any]) -> None:
    """IncomparableError where a probe returns nothing to compare; asked of the original where it is not found equal.
    ValueError where that is so by a weight that is not finite, or an example that holds nothing."""
    every = [each for number, training in coupling.passes for each in outputs(probe, inputs[number], training=training)]
    if not _has_numbers(every):
        check_finite(probe)
        if empty := [tuple(each.shape) for each in tensors_in(inputs) if not each.numel()]:
            raise ValueError(f"in the example a tensor of shape {empty[0]} holds nothing; give at least one sample.")
        raise IncomparableError(_NOTHING)


def _has_numbers(every: Iterable[Tensor]) -> bool:
    return any(each.is_floating_point() and bool(torch.isfinite(each).any()) for each in every)


def _are_right_in_parts(
    model: nn.Module, coupling: Coupling, groups: Sequence[Group], kept: Kept, inputs: Sequence[Any]
) -> bool:
    """Whether a large model is found right on a probe that has one block's weights at a time; False says nothing."""
    kept = {group.name: kept[group.name] for group in groups}
    without, after = oracles(coupling, kept)
    lending = None if not groups or without != [None] else lending_of(model)
    if lending is None:
        return False
    statistics = coupling.statistics(groups)
    forms = ("sums", "affine") if any(statistics.values()) else ("sums",)
    compared_on = functools.partial(_runs, lending.module, coupling, inputs, statistics)
    with lending, contextlib.suppress(Exception):  # whatever the model raises: a whole probe shows why
        lending.zero(plan_of(lending.module, coupling, zeroed_of(coupling, kept)))
        expected = {form: all_of(compared_on(form, without, stay=kept)) for form in forms}
        if not _has_numbers(expected["sums"]):
            return False
        lending.cut(plan_of(lending.module, coupling, kept))
        for form in forms:
            found = all_of(compared_on(form, after, backward=True))
            if difference(expected[form], found) is None:
                lending.module.load_state_dict(lending.module.state_dict())
                real = all_of(compared_on(form, after, real=True)) if any(statistics.values()) else found
                return not _lost_numbers(expected[form], real)
    return False


def right_branches(
    model: nn.Module, coupling: Coupling, branches: Sequence[Branch], inputs: Sequence[Any]
) -> tuple[dict[Branch, Branch], dict[Branch, str]]:
    """The branches whose removal passes the proof: the model without them computes what it computes with their terms
    zero. For the others, what differs."""

    if _leave_right_in_parts(model, coupling, branches, inputs):
        return {each: each for each in branches}, {}

    def look(probe: nn.Module, calm: float) -> tuple[dict[Branch, Branch], dict[Branch, str]]:
        right: dict[Branch, Branch] = {each: each for each in branches}
        wrong: dict[Branch, str] = {}
        while right:
            found = _wrong_branches(probe, calm, coupling, list(right.values()), inputs)
            if not found:
                break
            for branch, now in list(right.items()):
                if now in found:
                    words, read = found[now]
                    less = now.without(read) if read in now.modules else None
                    if less is None:
                        wrong[branch] = words
                        del right[branch]
                    else:  # the code around reads something off a module that only passes the stream on: it stays
                        right[branch] = less
        return right, wrong

    return on_calm_probes(model, look, inputs[0])


def _wrong_branches(
    probe: nn.Module, calm: float, coupling: Coupling, branches: Sequence[Branch], inputs: Sequence[Any]
) -> dict[Branch, tuple[str, str]]:
    """What differs, and the path of the module that the code missed something of, if that is why."""
    words = _differs_without(probe, calm, coupling, branches, inputs)
    if words is None:
        return {}
    if len(branches) == 1:
        return {branches[0]: words}
    half = len(branches) // 2
    found = _wrong_branches(probe, calm, coupling, branches[:half], inputs)
    found |= _wrong_branches(probe, calm, coupling, branches[half:], inputs)
    return found or dict.fromkeys(branches, words)  # right one by one, wrong together


def _differs_without(
    probe: nn.Module,
    calm: float,
    coupling: Coupling,
    branches: Sequence[Branch],
    inputs: Sequence[Any],
    *,
    backward: bool = True,
) -> tuple[str, str] | None:
    """What differs between the original whose terms are zero and the model without the branches; the probe is as
    before afterwards."""

    runs = functools.partial(_runs_without, probe, coupling, inputs)
    expected = all_of(runs(branches))
    if not _has_numbers(expected):
        raise IncomparableError(_NOTHING)
    if calm < 1 and difference(all_of(runs(())), expected) is None:
        raise IncomparableError(BLIND)
    undo = carry_out(probe, plan_without(branches), None)
    try:
        found = all_of(runs((), backward=backward))
        probe.load_state_dict(probe.state_dict())
    except Exception as error:  # whatever the model raises, this removal breaks it
        missed = error.obj if isinstance(error, AttributeError) else None
        path = next((path for path, module in probe.named_modules() if module is missed), "")  # as long as it is there
        undo()
        if backward and _raises(runs(branches, backward=True)):
            return _differs_without(probe, calm, coupling, branches, inputs, backward=False)
        return f"it raises {type(error).__name__}: {error}", path
    finally:
        undo()
        probe.zero_grad(set_to_none=True)
    words = certain(compared(probe, expected, found, runs(branches)))
    return None if words is None else (words, "")


def _leave_right_in_parts(
    model: nn.Module, coupling: Coupling, branches: Sequence[Branch], inputs: Sequence[Any]
) -> bool:
    """Whether a large model is found right without branches, as `_are_right_in_parts` finds it."""
    lending = lending_of(model) if branches else None
    if lending is None:
        return False
    runs = functools.partial(_runs_without, lending.module, coupling, inputs)
    with lending, contextlib.suppress(Exception):  # whatever the model raises: a whole probe shows why
        expected = all_of(runs(branches))
        lending.cut(plan_without(branches))
        found = all_of(runs((), backward=True))
        lending.module.load_state_dict(lending.module.state_dict())
        return _has_numbers(expected) and difference(expected, found) is None
    return False


def _runs_without(
    probe: nn.Module,
    coupling: Coupling,
    inputs: Sequence[Any],
    zeroed: Sequence[Branch],
    *,
    backward: bool = False,
) -> Runs:
    """The passes that were watched, with the terms of branches zero."""
    return [
        functools.partial(
            outputs,
            probe,
            inputs[number],
            training=training,
            backward=backward,
            zeroed=_terms(zeroed, (number, training)),
        )
        for number, training in coupling.passes
    ]


def _wrong_among(
    probe: nn.Module,
    calm: float,
    coupling: Coupling,
    sets: Sequence[Sequence[Group]],
    kept: Kept,
    inputs: Sequence[Any],
) -> list[Group]:
    chosen = [group for each in sets for group in each]
    if not chosen or differs(probe, coupling, chosen, kept, inputs, calm) is None:
        return []
    if len(sets) == 1:
        return chosen
    half = len(sets) // 2
    found = _wrong_among(probe, calm, coupling, sets[:half], kept, inputs)
    found += _wrong_among(probe, calm, coupling, sets[half:], kept, inputs)
    return found or chosen  # right one by one, wrong together


def differs(
    probe: nn.Module, coupling: Coupling, groups: Sequence[Group], kept: Kept, inputs: Sequence[Any], calm: float = 1.0
) -> str | None:
    """What differs between the original with zeros and the smaller model; the probe is as before afterwards.

    Raises:
        IncomparableError: it may be rounding; or, on weights that were made smaller (``calm`` below 1), a wrong slice
            would not show.
    """
    statistics = coupling.statistics(groups)
    found = []
    for form in ("sums", "affine") if any(statistics.values()) else ("sums",):
        found.append(
            _differs_in_form(probe, coupling, {group.name: kept[group.name] for group in groups}, inputs, form, calm)
        )
        if found[-1] is None:
            return None
    return certain(next((each for each in found if isinstance(each, Unsure)), found[-1]))


def _differs_in_form(
    probe: nn.Module,
    coupling: Coupling,
    kept: Kept,
    inputs: Sequence[Any],
    form: str,
    calm: float,
    *,
    backward: bool = True,
) -> str | None:
    statistics = coupling.statistics(group for group in coupling.groups if group.name in kept)
    plan = plan_of(probe, coupling, kept)
    tensors = tensors_of(probe)
    saved = {name: tensors[name].data for name in plan.tensors}
    without, after = oracles(coupling, kept)
    undo: Callable[[], None] | None = None

    runs = functools.partial(_runs, probe, coupling, inputs, statistics, form)
    try:
        zero_all(tensors, plan_of(probe, coupling, zeroed_of(coupling, kept)))
        original = runs(without, stay=kept)
        expected = all_of(original)
        undo = carry_out(probe, plan, None)
        probe.zero_grad(set_to_none=True)
        try:
            found = all_of(runs(after, backward=backward))
            probe.load_state_dict(probe.state_dict())
            # with its own statistics: there is none of a single value
            if any(statistics.values()) and _lost_numbers(expected, all_of(runs(after, real=True))):
                return "a statistic over what is left of it is not finite"
        except Exception as error:  # whatever the model raises, this removal breaks it
            undo()
            undo = None
            if backward and _raises(runs(without, backward=True)):
                return _differs_in_form(probe, coupling, kept, inputs, form, calm, backward=False)
            return f"it raises {type(error).__name__}: {error}"
        if difference(expected, found) is None:
            if not _has_numbers(expected):
                return Unsure(_NOTHING)
            return BLIND if calm < 1 and not would_show(probe, plan, runs(after)) else None
        undo()
        undo = None
        return compared(probe, expected, found, original)
    finally:
        if undo is not None:
            undo()
        for name, value in saved.items():
            tensors[name].data = value
        probe.zero_grad(set_to_none=True)


def _raises(runs: Runs) -> bool:
    """Whether the original has no backward pass either, such as where it writes over what that needs."""
    try:
        all_of(runs)
    except Exception:
        return True
    return False


def _runs(
    probe: nn.Module,
    coupling: Coupling,
    inputs: Sequence[Any],
    statistics: Mapping[tuple[int, bool], AbstractSet[tuple[str, int]]],
    form: str,
    chances: Sequence[RouterMask | None],
    *,
    backward: bool = False,
    real: bool = False,
    stay: Kept | None = None,
) -> Runs:
    """The passes that were watched; ``real``: with statistics as they are; ``stay``: what of the outputs is asked for,
    where units are outputs."""
    leave = stay is not None and any(group.returned and group.name in stay for group in coupling.groups)
    return [
        functools.partial(
            outputs,
            probe,
            inputs[number],
            training=training,
            statistics=frozenset() if real else statistics[number, training],
            form=form,
            backward=backward,
            oracle=oracle,
            stay=coupling.returned((number, training), stay) if stay is not None and leave else None,
        )
        for number, training in coupling.passes
        for oracle in chances
    ]


def _lost_numbers(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    """Whether what was finite is not any more."""
    return any(
        bool(torch.isfinite(one).all()) and not bool(torch.isfinite(other).all())
        for one, other in zip(before, after, strict=True)
    )


class _Comparable(TorchFunctionMode):
    """Everything in float64, without dropout and dead units, and some statistics in a form that does not count."""

    def __init__(
        self,
        statistics: AbstractSet[tuple[str, int]],
        *,
        sums: bool,
        oracle: RouterMask | None = None,
        where: CallSites | None = None,
    ) -> None:
        super().__init__()
        self.statistics, self.sums, self.oracle, self.where = statistics, sums, oracle, where
        self.calls = Counter[str]()

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = name_of(func)
        args, kwargs = private.tree_map_only(torch.dtype, _double, (args, dict(kwargs or {})))
        body = written_in_others(func, name)
        if body is not None:
            with self:
                return body(*args, **kwargs)
        self.calls[name] += 1
        if self.oracle is None or self.where is None:
            return self._called(func, name, *args, **kwargs)
        called = functools.partial(self._called, func, name)
        return self.oracle.through(self.where.spot(name), name, called, args, kwargs)

    def _called(self, func: Any, name: str, /, *args: Any, **kwargs: Any) -> Any:
        known = operation(name)
        if known.uncounted is not None and (name, self.calls[name]) in self.statistics:
            return known.uncounted(*args, sums=self.sums, **kwargs)
        instead = known.proved or known.steady
        return _called_in_double(func, name, args, kwargs) if instead is None else instead(func, *args, **kwargs)


def _double(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def _called_in_double(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    try:
        return in_dtype(torch.float64, func, args, kwargs)
    except RuntimeError:
        # products take one dtype only, and a tensor may be of another that no function of torch made: torch.Tensor(3)
        wide_args, wide_kwargs = private.tree_map_only(Tensor, _wide, (args, dict(kwargs)))
        pairs = zip(tensors_of_tree((args, kwargs)), tensors_of_tree((wide_args, wide_kwargs)), strict=True)
        if operation(name).writes or func.__name__.endswith("_") or all(one is other for one, other in pairs):
            raise
        return func(*wide_args, **wide_kwargs)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
