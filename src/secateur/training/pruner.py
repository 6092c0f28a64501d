"""Pruning while training: a Pruner moves through a schedule as the optimizer steps, and keeps zeros zero.

Law: weights stay plain parameters; after every optimizer step what a mask removed is zero, and at the end of the
schedule exactly the target is removed. The same seed and state give the same run, bit for bit.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from secateur.allocation import Allocation, Tables, check_sparsity, settled
from secateur.criteria import lamp
from secateur.evidence import collect, needs
from secateur.patterns import NM, Pattern, Unstructured
from secateur.pipeline import apply_, check_mask, choose_masks
from secateur.regrowth import DropAndGrow, Held, Regrowth
from secateur.schedules import Moment, Schedule, constant, cubic, resolve, step_of
from secateur.support import Forward, Loss, Undo, count_nonzero, is_sharded, local, repeatable, unwrapped
from secateur.targets import find_layers, left_alone, stored_inputs_first, turned, turned_evidence
from secateur.training.regularization import Penalty, Regularization
from secateur.training.state import Memory, factor, read, removed_by, written

__all__ = ["Pruner"]

_RAMP_END = 0.6  # of the run: the rest is recovery
_UPDATES = 100  # about as many over a ramp, where ``every`` is not given


class Pruner:
    """Prunes a model while an unchanged training loop trains it.

    It counts optimizer steps by a hook on the optimizer, so that gradient accumulation and steps skipped for infinite
    gradients are counted right. When an update is due, it chooses new masks; after every step it multiplies the pruned
    weights by their masks. There is nothing else: no forward hook, no other parameter, no other key in a state dict.

    Args:
        model: the module whose weights are pruned; `DistributedDataParallel`, `torch.compile`'s and sharded modules
            are fine. A weight that several modules share is pruned once.
        optimizer: the optimizer that trains it, or several (Muon and AdamW); the steps of the first are counted.
        schedule: a sparsity (cubic from 0 to it over the first 60 % of the run), or ``step -> sparsity`` such as
            those of `secateur.schedules`. A target lower than what is removed already changes nothing, but for
            ``regrow``. None for a pattern that fixes the sparsity: n:m then goes from m:m to n:m by the same cubic;
            and beside ``regularize``: then no weight is removed but those of its units.
        criterion: ``(weight, *, <evidence>) -> scores``. ``grad`` is the gradient of the step, ``grad_sq`` its mean
            square since the last update, ``movement`` (which makes ``regrow=regrowth.held()`` the default)
            ``-Σ w·∂L/∂w`` over all steps so far; whatever else is collected from ``batches``.
        pattern, allocate: as in `make_masks`. Words are taken here, too.
        include, exclude: globs over parameter names. Default: weights of linear layers and convolutions.
        regrow: how removed weights return: `regrowth.rigl`, `sparse_evolutionary_training`, `sr_ste`, `held`. None:
            never, so that masks nest.
        regularize: `regularization.growing` or `group_lasso`: training draws whole units to zero, biases and
            normalizations included, for `shrink` to take out. `masks` and the sparsities of `metrics` don't count them.
        every: the interval between updates, a moment as in `secateur.schedules`; about a hundredth of the schedule by
            default. Where the schedule ends, there is an update in any case.
        total_steps, epochs, steps_per_epoch: the length of the run in optimizer steps, where a moment needs it;
            ``epochs · steps_per_epoch`` serve as ``total_steps``.
        within: masks to begin with, such as `masks_from_zeros` finds in a checkpoint.
        batches, loss, forward: as in `evidence.collect`, which then gathers the evidence anew for each update.
        seed: of the Pruner's own random numbers; the global generators are never touched.
        verbose: print the timetable (``str(pruner)``), on the first rank.

    Raises:
        ValueError: there is nothing to prune, a moment can't be resolved, the target lies beyond the end of the run,
            masks are attached to the model, or no unit can leave. Then, and if the schedule or a criterion of one's own
            raises, model and optimizer are unchanged. A timetable that can't be printed is no error.

    >>> from secateur import schedules
    >>> model = nn.Linear(8, 8)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> pruner = Pruner(model, optimizer, schedules.cubic(0.75, end=3), verbose=False)
    >>> for _ in range(4):
    ...     model(torch.ones(1, 8)).sum().backward()
    ...     optimizer.step()
    >>> int((model.weight == 0).sum()), pruner.step
    (48, 4)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        schedule: Schedule | float | None = None,
        *,
        criterion: str | Callable[..., Tensor] = lamp,
        pattern: str | Pattern | None = None,
        allocate: str | Allocation | None = None,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        regrow: Regrowth | None = None,
        regularize: Regularization | None = None,
        every: Moment | None = None,
        total_steps: int | None = None,
        epochs: float | None = None,
        steps_per_epoch: float | None = None,
        within: Mapping[str, Tensor] | None = None,
        batches: Iterable[Any] | None = None,
        loss: Loss | None = None,
        forward: Forward | None = None,
        seed: int = 0,
        verbose: bool = True,
    ) -> None:
        criterion, self._pattern, self._allocate = settled(criterion, pattern, allocate)
        self._given = model  # DistributedDataParallel tells collect to average over the ranks
        self._model = unwrapped(model)
        self._weights = find_layers(self._model, include=include, exclude=exclude)
        if attached := [name for name in self._weights if name.endswith("_orig")]:
            raise ValueError(f"{attached[0]} belongs to a mask that is attached: detach(model) first.")
        if meta := [name for name, weight in self._weights.items() if weight.device.type == "meta"]:
            raise ValueError(f"{meta[0]} is on the meta device, where there are no values; load the weights first.")
        self._optimizers = [_inner_optimizer(each) for each in _listed(optimizer)]
        self._warn_of_other_weights()
        # an unstructured mask is the same either way, but for the order of ties
        unstructured = self._pattern == Unstructured()
        self._inputs_first = [] if unstructured else stored_inputs_first(self._model, self._weights)
        self._criterion = criterion
        self._collected: dict[str, Any] = {
            "batches": None if batches is None else repeatable(batches),
            "loss": loss,
            "forward": forward,
        }
        self._memory = Memory(operator.index(seed))
        if total_steps is None and epochs is not None and steps_per_epoch is not None:
            total_steps = round(epochs * steps_per_epoch)
        resolved = resolve(
            _schedule(schedule, self._pattern, regularize), total_steps=total_steps, steps_per_epoch=steps_per_epoch
        )
        self._regrow = regrow
        if regrow is None and "movement" in needs(criterion):
            self._regrow = Held()
        # what training steps show by themselves; with batches, all but movement is collected from them
        self._gathered = {"movement"} if batches is not None else {"grad", "grad_sq", "movement"}
        self._check_evidence()
        if self._trains_removed and len(self._optimizers) > 1:
            raise ValueError("training removed weights straight through works with one optimizer, not several.")
        until = 0
        if isinstance(self._regrow, DropAndGrow):
            if self._pattern.density is not None:
                raise ValueError(f"{self._pattern} says how much each group keeps: use sr_ste() to let weights return.")
            until = step_of(self._regrow.until, total_steps, steps_per_epoch)
        interval = None if every is None else max(1, step_of(every, total_steps, steps_per_epoch))
        if interval is None and self._trains_removed:
            interval = 1
        self._timetable = _Timetable(resolved, until, total_steps, interval)
        self._penalty: Penalty | None = None
        if regularize is not None:
            moment = functools.partial(step_of, total_steps=total_steps, steps_per_epoch=steps_per_epoch)
            self._penalty = Penalty(regularize, self._model, self._optimizers, moment, total_steps)

        self._places = [_Place(self._weights)]
        self._start: dict[str, tuple[Tensor, int]] = {}  # weights before the start removed some, and their versions
        self._opened = False
        told = str(self) if verbose and _is_first_rank() else None  # asks the schedule, before anything is changed
        with Undo() as undo:
            undo.optimizers(self._optimizers)
            self._begin(within, undo)
            self._hooks = [each.register_step_post_hook(self._after_step) for each in self._optimizers]
            if self._holds or "grad_sq" in set(needs(criterion)) & self._gathered:
                self._hooks += [each.register_step_pre_hook(self._before_step) for each in self._optimizers]
            if told is not None:
                with suppress(OSError, ValueError):  # a closed pipe, file or character set is no reason not to prune
                    print(told)

    # What is asked of it from outside

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return self._memory.step

    @property
    def schedule(self) -> Schedule:
        """``step -> sparsity``, every moment of it in steps."""
        return self._timetable.schedule

    @property
    def masks(self) -> dict[str, Tensor]:
        """``{name: bool tensor, True = kept}`` of all pruned weights, as they are now."""
        masks = self._memory.masks
        return {
            name: masks[name].ne(0) if name in masks else torch.ones_like(weight, dtype=torch.bool)
            for name, weight in self._weights.items()
        }

    def metrics(self) -> dict[str, float]:
        """A plain dict for any logger.

        ``step``; ``target``, the schedule's sparsity at this step; ``sparsity`` of all pruned weights together and
        ``sparsity/<name>`` of each; ``churn``, the fraction of the weights whose mask the last update changed. With
        ``regularize``, ``penalty``, its strength, and ``leaving``, the fraction of the model's parameters that leave
        with the units that it has chosen (`growing`) or brought to zero (`group_lasso`).

        >>> layer = nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> Pruner(layer, optimizer, lambda step: 0.5, verbose=False).metrics()
        {'step': 0, 'target': 0.5, 'sparsity': 0.5, 'churn': 0.5, 'sparsity/weight': 0.5}
        """
        sizes = {name: weight.numel() for name, weight in self._weights.items()}
        penalty, removed = self._penalty, self._memory.removed
        return {
            "step": self.step,
            "target": float(self.schedule(self.step)),
            "sparsity": sum(removed.values()) / max(sum(sizes.values()), 1),
            "churn": self._memory.churn,
            **({} if penalty is None else {"penalty": penalty.strength(self.step), "leaving": penalty.leaving}),
            **{f"sparsity/{name}": removed.get(name, 0) / max(size, 1) for name, size in sizes.items()},
        }

    def prune(self, sparsity: float | None = None) -> None:
        """Choose new masks now: at the given sparsity, or the schedule's at this step.

        For rounds of one's own, as lottery tickets are found. From the next step on the schedule holds again, but
        never below what is removed.
        """
        if sparsity is not None:
            check_sparsity(sparsity)
        with torch.no_grad():
            self._update(float(self.schedule(self.step)) if sparsity is None else float(sparsity))

    def rewind(self, model_state: Mapping[str, Any], optimizer_state: Mapping[str, Any] | None = None) -> None:
        """Put back saved weights, and the optimizer's state, but keep the masks: lottery tickets (arXiv:1803.03635).

        Args:
            model_state: ``copy.deepcopy(model.state_dict())`` of an earlier step (arXiv:1912.05671), or of step 0.
            optimizer_state: likewise; where it is None, the optimizer's state is emptied. With several optimizers,
                that of the first.

        The schedule goes on from where it is; what was held of removed weights is forgotten. The states given are not
        changed, so that they serve again and again.

        Raises:
            ValueError: a state does not fit the model or the optimizer. Nothing is changed then.
        """
        tensors = {
            id(each): each for each in self._model.state_dict(keep_vars=True).values() if isinstance(each, Tensor)
        }
        first, *others = self._optimizers
        before = {weight: dict(remembered) for weight, remembered in first.state.items()}
        with Undo() as undo, torch.no_grad():
            undo.attributes(self, "_memory")
            undo.call(self._keep_start, self._untouched_start())
            undo.values(
                *tensors.values(),
                *(value for each in others for value in _remembered_of(each, *self._weights.values())),
            )
            undo.optimizers(self._optimizers)
            try:
                self._model.load_state_dict(model_state)
            except Exception as error:
                raise ValueError(f"the weights to go back to don't fit the model: {error}") from error
            if optimizer_state is None:
                for each in self._optimizers:
                    each.state.clear()
            else:
                try:
                    first.load_state_dict(copy.deepcopy(dict(optimizer_state)))
                except Exception as error:
                    raise ValueError(f"the state to go back to doesn't fit the optimizer: {error!r}") from error
                _check_state_goes_on(before, first.state, {each: name for name, each in self._model.named_parameters()})
            zeros = {name: torch.zeros_like(value) for name, value in self._memory.held.items()}
            self._memory = replace(self._memory, held=zeros)
            self._zero()
            if self._penalty is not None:
                self._penalty.after_step(self.step, counted=False)
            self._zero_state(self._memory.masks)

    def follow(self, model: nn.Module) -> None:
        """Keep the same zeros in another model: the average of `torch.optim.swa_utils.AveragedModel`, or a copy.

        >>> layer = nn.Linear(4, 2)
        >>> average = torch.optim.swa_utils.AveragedModel(layer)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> pruner = Pruner(layer, optimizer, lambda step: 0.5, verbose=False)
        >>> pruner.follow(average)
        >>> int((average.module.weight == 0).sum())
        4

        Raises:
            KeyError, ValueError: it lacks a weight, or has one of another shape or without values. Nothing is changed
                then.
        """
        inside = unwrapped(model)
        parameters = dict(inside.named_parameters())
        if isinstance(averaged := getattr(inside, "module", None), nn.Module):
            parameters = dict(averaged.named_parameters()) | parameters
        if missing := [name for name in self._weights if name not in parameters]:
            raise KeyError(f"{type(model).__name__} has no weight {missing[0]!r}; follow takes a copy of the model.")
        followers = {name: parameters[name] for name in self._weights}
        for name, weight in followers.items():
            _check_follower(name, weight, self._weights[name])
        changing = {id(each): each for each in followers.values()}
        if self._penalty is not None:
            self._penalty.check_follower(parameters)
            changing |= {id(each): each for each in parameters.values()}
        with Undo() as undo, torch.no_grad():
            undo.attributes(self, "_places")
            undo.values(*changing.values())
            if self._penalty is not None:
                undo.attributes(self._penalty, "_places")
                self._penalty.follow(parameters, self.step)
            self._places = [*self._places, _Place(followers)]
            self._zero(self._places[-1:])  # to write to the model's own weights would lose what the start removed

    def finish(self) -> dict[str, Tensor]:
        """End pruning and return the masks: the schedule's last sparsity is reached now if the run was shorter.

        The zeros stay; but the optimizer is let go, and a step after this may change them.
        """
        with torch.no_grad():
            last = self._timetable.target_at
            if last is not None and self.step < last:
                self._update(float(self.schedule(last)), regrow=False)
            if self._penalty is not None:
                self._penalty.hold()
            for hook in self._hooks:
                hook.remove()
            apply_(
                {**self._weights}, {name: mask.ne(0) for name, mask in self._memory.masks.items()}
            )  # no negative zeros
        return self.masks

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on: masks as bits, the position in the schedule, what rules remember.

        Plain values and tensors, which ``torch.load(weights_only=True)`` reads. A sharded model's masks are gathered
        (never its weights), so that the state fits any number of ranks.
        """
        return written(self._memory, None if self._penalty is None else self._penalty.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; load the model's and the optimizer's own states too, in any order.

        Raises:
            ValueError: the state is of another model or Pruner, of a newer version, or damaged. Nothing is changed
                then.
        """
        memory = read(state, self._weights, self._remembered)
        if ("regularize" in state) != (self._penalty is not None):
            with_it, without = ("state", "Pruner") if self._penalty is None else ("Pruner", "state")
            raise ValueError(f"the {with_it} has regularize, the {without} has not: make the Pruner as it was saved.")
        leaving = None if self._penalty is None else self._penalty.read(state["regularize"])
        try:
            self.schedule(memory.step)
        except Exception as error:
            raise ValueError(f"the schedule has no sparsity for the state's step, {memory.step}: {error!r}") from error
        untouched = self._untouched_start()
        with Undo() as undo, torch.no_grad():
            undo.attributes(self, "_memory", "_opened")
            undo.call(self._keep_start, untouched)
            undo.values(*(weight for place in self._places for weight in place.weights.values()))
            for name, value in untouched.items():  # what the start removed comes back
                self._weights[name].copy_(value)
            self._start = {}
            if self._penalty is not None and leaving is not None:
                undo.attributes(self._penalty, "_leaving")
                self._penalty.take(leaving)
            self._opened = False
            self._memory = memory
            self._zero()

    def __str__(self) -> str:
        weights = sum(weight.numel() for weight in self._weights.values())
        total = sum(parameter.numel() for parameter in self._model.parameters())
        lines = [
            f"Pruner: {weights:,} weights in {len(self._weights)} tensors of {total:,} parameters; "
            f"{_name(self._criterion)}, {self._pattern}, {_name(self._allocate)}"
            + (f", {self._regrow}" if self._regrow else "")
        ]
        lines += self._timetable.lines()
        if self._penalty is not None:
            lines.append(f"  {self._penalty}")
        reasons = Counter(left_alone(self._model, self._weights).values())
        if reasons:
            alone = ", ".join(f"{count} × {reason}" for reason, count in reasons.most_common())
            lines.append(f"  left alone: {alone}")
        return "\n".join(lines)

    # The hooks

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if optimizer is not self._optimizers[0] or self._opened or self._is_skipped(optimizer):
            return
        gradients = self._gradients()
        asked = set(needs(self._criterion)) & self._gathered
        if "movement" in asked:
            moved = {name: self._moved(name, grad) for name, grad in gradients.items()}
            self._memory = replace(self._memory, movement=moved)
        if "grad_sq" in asked:
            before, squares = self._memory.grad_sq, {}
            for name, grad in gradients.items():
                square = grad.float().square() if grad.dtype != torch.float64 else grad.square()
                squares[name] = before[name].add_(square) if name in before else square
            self._memory = replace(self._memory, grad_sq=squares, grad_sq_steps=self._memory.grad_sq_steps + 1)
        held = self._memory.held
        if self._trains_removed and held:
            self._opened = True
            torch._foreach_add_(_locals(self._weights[name] for name in held), _locals(held.values()))
            trained = [name for name in held if self._weights[name].grad is not None]
            if isinstance(self._regrow, Held) and self._regrow.decay and trained:
                grads = _locals(gradients[name] for name in trained)
                torch._foreach_add_(grads, _locals(held[name] for name in trained), alpha=self._regrow.decay)

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._start = {}
        if self.step == 0 and not self._trains_removed:
            self._zero_state(self._memory.masks)
        counted = optimizer is self._optimizers[0] and not self._is_skipped(optimizer)
        if counted:
            self._memory = replace(self._memory, step=self.step + 1)
        if self._penalty is not None:
            self._penalty.after_step(self.step, counted=counted)
        if counted and self._is_due(self.step):
            with torch.no_grad():
                self._update(float(self.schedule(self.step)))
            return
        if self._opened:
            masks = self._memory.masks
            held = {name: self._weights[name].detach() * (1 - mask) for name, mask in masks.items()}
            self._memory = replace(self._memory, held=held)
            self._opened = False
        self._zero()

    def _is_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a fused optimizer left the step out, as GradScaler asks it to by this attribute."""
        found = getattr(optimizer, "found_inf", None)
        return bool(found is not None and found > 0)

    # Choosing

    def _begin(self, within: Mapping[str, Tensor] | None, undo: Undo) -> None:
        """Start from earlier masks, and prune at once where the schedule begins above zero."""
        before = {name: weight.detach() for name, weight in self._weights.items()}
        start: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, mask in (within or {}).items():
                if name not in self._weights:
                    raise ValueError(f"there is a mask for {name!r}, but it is not among the pruned weights.")
                check_mask(name, mask, self._weights[name].shape)
                start[name] = mask.ne(0)
            self._memory = replace(self._memory, target=self._share_removed(start))
            target = float(self.schedule(0))
            waits = bool(set(needs(self._criterion)) & self._gathered)
            if target > self._memory.target and not waits:
                start = self._chosen(before, target, start, regrow=False)
                self._memory = replace(self._memory, target=target)
            if start:
                # kept until the first step, so that a state loaded meanwhile finds the weights as they were
                values = dict(zip(start, undo.values(*(self._weights[name] for name in start)), strict=True))
                self._install(start, before, zero_state=False)
                self._keep_start(values)

    def _keep_start(self, values: Mapping[str, Tensor]) -> None:
        """Remember what weights were before the start removed some of their entries."""
        self._start = {name: (value, self._weights[name]._version) for name, value in values.items()}

    def _untouched_start(self) -> dict[str, Tensor]:
        """Of these, the ones that nobody has written to since."""
        return {
            name: value for name, (value, version) in self._start.items() if self._weights[name]._version == version
        }

    def _share_removed(self, masks: Mapping[str, Tensor]) -> float:
        """The fraction of all units that masks remove."""
        if not masks or self._pattern.density is not None:
            return 0.0
        masks = turned(masks, self._inputs_first)
        whole = {name: torch.empty(weight.shape, device="meta") for name, weight in self._weights.items()}
        shapes = turned(whole, self._inputs_first)
        units = sum(self._pattern.pool(shape).numel() for shape in shapes.values())
        kept = sum(self._pattern.pool(shape).numel() for name, shape in shapes.items() if name not in masks)
        kept += sum(int(_units_kept(mask.ne(0), self._pattern).sum()) for mask in masks.values())
        return 1 - kept / max(units, 1)

    def _update(self, target: float, *, regrow: bool = True) -> None:
        memory = self._memory
        self._memory = replace(
            memory,
            masks=self._beside_weights(memory.masks),
            held=self._beside_weights(memory.held),
            movement=self._beside_weights(memory.movement),
            grad_sq=self._beside_weights(memory.grad_sq),
        )
        if not self._opened:
            self._zero()  # criteria such as LAMP's sums see what the step left in removed weights
        weights = {name: self._dense(name, weight.detach()) for name, weight in self._weights.items()}
        masks = self._chosen(weights, target, self.masks if self._memory.masks else {}, regrow=regrow)
        self._install(masks, weights)
        reached = target if self._holds else max(self._memory.target, target)
        self._memory = replace(self._memory, target=reached, grad_sq={}, grad_sq_steps=0)

    def _beside_weights(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """On the weights' devices, where model.to has taken these meanwhile."""
        return {name: value.to(self._weights[name].device) for name, value in values.items()}

    def _chosen(
        self, weights: Mapping[str, Tensor], target: float, old: Mapping[str, Tensor], *, regrow: bool
    ) -> dict[str, Tensor]:
        """The masks for a target, given those that there are."""
        masks = turned(old, self._inputs_first)
        weights, old = turned(weights, self._inputs_first), masks
        with self._own_randomness():
            if self._holds or target > self._memory.target:
                masks = self._removing(weights, target, None if self._holds else old or None)
            if regrow and masks and isinstance(self._regrow, DropAndGrow):
                masks = self._dropped_and_grown(self._regrow, weights, masks)
        return turned(masks, self._inputs_first)

    def _removing(
        self,
        weights: Mapping[str, Tensor],
        target: float,
        within: Mapping[str, Tensor] | None,
    ) -> dict[str, Tensor]:
        check_sparsity(target)
        pattern, sparsity = self._pattern, target
        if isinstance(pattern, NM):  # n:m goes from m:m down to n:m
            kept = max(pattern.n, math.ceil((1 - target) * pattern.m - 1e-9))
            pattern, sparsity = replace(pattern, n=kept), 1 - kept / pattern.m
        elif pattern.density is not None:
            sparsity = 1 - pattern.density
        return choose_masks(
            weights,
            sparsity,
            pattern=pattern,
            criterion=self._criterion,
            allocate=self._allocate,
            within=within,
            evidence=self._evidence(weights, needs(self._criterion)),
        )

    def _dropped_and_grown(
        self, rule: DropAndGrow, weights: Mapping[str, Tensor], masks: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        share = rule.share(self.step, self._timetable.until)
        counts = {name: _units_kept(mask, self._pattern) for name, mask in masks.items()}
        left = {name: count - (count * share).round().to(torch.int64) for name, count in counts.items()}
        if share == 0 or all(torch.equal(left[name], counts[name]) for name in masks):
            return masks
        choose = functools.partial(choose_masks, sparsity=0.5, pattern=self._pattern)  # the counts say how much
        remaining = choose(
            weights,
            criterion=rule.drop,
            allocate=lambda *_: {name: _count(count) for name, count in left.items()},
            within=masks,
            evidence=self._evidence(weights, needs(rule.drop)),
        )
        scores = {}
        evidence = self._evidence(weights, needs(rule.grow))
        for name, weight in weights.items():
            score = rule.grow(weight, **evidence[name])
            score = score if score.dtype in (torch.float32, torch.float64) else score.float()
            scores[name] = score.masked_fill(remaining[name], torch.inf)
        return choose(
            scores, criterion=_itself, allocate=lambda *_: {name: _count(count) for name, count in counts.items()}
        )

    def _install(self, masks: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, zero_state: bool = True) -> None:
        """Make chosen masks the current ones: the weights, what is held of them, and the optimizer's state."""
        memory, changed = self._memory, 0
        stays: dict[str, Tensor] = {}
        made, held = dict(memory.masks), dict(memory.held)
        for name, mask in masks.items():
            new = factor(mask, self._weights[name])
            old = memory.masks.get(name)
            changed += count_nonzero(new.eq(0) if old is None else new.ne(old))
            stays[name] = new if old is None else new * old
            if self._holds:
                held[name] = weights[name] * (1 - new)
            made[name] = new
        entries = sum(weight.numel() for weight in self._weights.values())
        removed = removed_by(made, self._weights)
        # all is computed: from here on things change
        for name in masks:
            if name in memory.held and not self._opened:
                self._weights[name].detach().copy_(weights[name])
        self._memory = replace(memory, masks=made, held=held, removed=removed, churn=changed / max(entries, 1))
        self._opened = False
        self._zero()
        if zero_state and not self._trains_removed:
            self._zero_state(stays)

    # Small parts

    @property
    def _remembered(self) -> set[str]:
        """Which values of the weights, beside masks, go from step to step."""
        gathered = {"movement", "grad_sq"} & set(needs(self._criterion)) & self._gathered
        return gathered | ({"held"} if self._holds else set())

    @property
    def _holds(self) -> bool:
        """Whether removed weights keep their values."""
        return isinstance(self._regrow, Held)

    @property
    def _trains_removed(self) -> bool:
        return isinstance(self._regrow, Held) and self._regrow.straight_through

    def _warn_of_other_weights(self) -> None:
        trained = {
            id(each) for optimizer in self._optimizers for group in optimizer.param_groups for each in group["params"]
        }
        if not any(id(weight) in trained for weight in self._weights.values()):
            warnings.warn(
                f"the optimizer trains none of the {len(self._weights)} weights to be pruned: is it another model's?",
                stacklevel=3,
            )

    def _check_evidence(self) -> None:
        """Whether all that is asked for can be gathered."""
        words = dict.fromkeys(needs(self._criterion))
        if isinstance(self._regrow, DropAndGrow):
            words |= dict.fromkeys(needs(self._regrow.drop)) | dict.fromkeys(needs(self._regrow.grow))
        if "movement" in words and not self._holds:
            raise ValueError("movement needs removed weights to be held: leave regrow out, or pass regrowth.held().")
        lacking = [word for word in words if word not in self._gathered]
        if lacking and self._collected["batches"] is None:
            raise TypeError(
                f"{_name(self._criterion)} asks for {', '.join(lacking)}, which no training step shows: pass batches=, "
                "a list or loader of a few batches."
            )
        frozen = [name for name, weight in self._weights.items() if not weight.requires_grad]
        if frozen and set(words) & self._gathered:
            raise ValueError(f"{frozen[0]} is frozen and has no gradient to score it by: exclude it.")

    def _is_due(self, step: int) -> bool:
        if self._timetable.regrows_at(step):
            return True
        more = self._holds or float(self.schedule(step)) > self._memory.target
        return more and self._timetable.updates_at(step)

    def _evidence(self, weights: Mapping[str, Tensor], words: Iterable[str]) -> dict[str, dict[str, Tensor]]:
        words = set(words)
        evidence: dict[str, dict[str, Tensor]] = {name: {} for name in weights}
        if from_batches := words - self._gathered:
            for name, found in collect(
                self._given, asked=sorted(from_batches), weights=self._weights, **self._collected
            ).items():
                evidence[name].update(found)
        if "grad" in words & self._gathered:
            if all(weight.grad is None for weight in self._weights.values()):
                raise ValueError("there are no gradients: prune after backward and before zero_grad, or pass batches=.")
            for name, grad in self._gradients().items():
                evidence[name]["grad"] = grad
        for word, total in (("grad_sq", self._memory.grad_sq), ("movement", self._memory.movement)):
            if word in words & self._gathered:
                for name in weights:
                    evidence[name][word] = total.get(name, torch.zeros_like(self._weights[name]))
                    if word == "grad_sq":
                        evidence[name][word] = evidence[name][word] / max(self._memory.grad_sq_steps, 1)
        return turned_evidence(evidence, self._inputs_first)

    def _gradients(self) -> dict[str, Tensor]:
        """The gradients of the step; zero for a weight that took no part in it."""
        return {
            name: torch.zeros_like(weight) if weight.grad is None else weight.grad.detach()
            for name, weight in self._weights.items()
        }

    def _moved(self, name: str, grad: Tensor) -> Tensor:
        assert isinstance(self._regrow, Held)
        weight = self._dense(name, self._weights[name].detach())
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        step = grad.to(wide) * weight.to(wide)
        before = self._memory.movement
        total = before[name].sub_(step) if name in before else step.neg_()
        if self._regrow.penalty:
            risen = torch.sigmoid(total)
            total.sub_(self._regrow.penalty * risen * (1 - risen))
        return total

    def _dense(self, name: str, weight: Tensor) -> Tensor:
        """The weight with the values that are held of it."""
        held = self._memory.held
        return weight if name not in held or self._opened else weight + held[name]

    def _zero(self, places: Sequence[_Place] | None = None) -> None:
        """Multiply the weights by their masks, in one call for all that lie in one place.

        What is handed to that call is kept from step to step: on a small network the rest would cost more than it.
        """
        for place in self._places if places is None else places:
            if place.masks is not self._memory.masks or place.is_stale:
                place.gather(self._memory.masks)
            if place.values:
                torch._foreach_mul_(place.values, place.factors)

    def _zero_state(self, stays: Mapping[str, Tensor]) -> None:
        """Zero what optimizers remember of weights that are removed or have just returned."""
        for optimizer in self._optimizers:
            for name, mask in stays.items():
                for value in _remembered_of(optimizer, self._weights[name]):
                    local(value).mul_(local(mask))

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Random numbers that depend on the seed and the step alone: the same on all ranks and after a resume."""
        with torch.random.fork_rng(devices=[]):
            # the CPU's generator alone: torch.manual_seed would also reach those of devices. The first number keeps it
            # off the stream of manual_seed(0), which drew the weights of many a model
            torch.default_generator.manual_seed((0x5EC8 << 32) + (self._memory.seed * 1_000_003 + self.step) % 2**32)
            yield


@dataclass(frozen=True)
class _Timetable:
    """When masks are chosen anew, all in steps."""

    schedule: Schedule
    until: int  # removed weights may return before it; 0 where they don't
    total_steps: int | None
    interval: int | None  # None: about a hundred updates

    @property
    def moments(self) -> tuple[int, ...]:
        """Where the schedule turns; a function of one's own does not say."""
        return tuple(getattr(self.schedule, "moments", ()))

    @property
    def target_at(self) -> int | None:
        """The step from which the sparsity stays, as far as is known."""
        return max(self.moments) if self.moments else self.total_steps

    @functools.cached_property
    def every(self) -> int:
        if self.interval is not None:
            return self.interval
        if self.until:
            return max(1, min(100, self.until // _UPDATES))
        if not self.moments:  # a function of one's own: when its value changes
            return max(1, self.total_steps // _UPDATES) if self.total_steps else 1
        begin = self.moments[0] if len(self.moments) > 1 else 0
        return max(1, (self.moments[-1] - begin) // _UPDATES)

    def regrows_at(self, step: int) -> bool:
        return step < self.until and step % self.every == 0

    def updates_at(self, step: int) -> bool:
        return step % self.every == 0 or step == self.total_steps or step in self.moments

    def lines(self) -> list[str]:
        last = max([*self.moments, self.until]) or self.total_steps or 0
        steps = sorted({*self.moments, *(round(last * part / 4) for part in range(5))})
        end = f"then recovery until step {self.total_steps:,}" if self.total_steps else "then it stays there"
        return [
            f"  schedule: {self.schedule if hasattr(self.schedule, 'moments') else _name(self.schedule)}",
            *(f"  step {step:>8,}  sparsity {float(self.schedule(step)):.4f}" for step in steps[:12]),
            f"  an update every {self.every:,} step{'s' * (self.every > 1)}; {end}",
        ]


class _Place:
    """Weights that are multiplied by the masks after each step: the model's, or those of a model that follows it."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights
        self.masks: Mapping[str, Tensor] | None = None
        self.values: list[Tensor] = []
        self.factors: list[Tensor] = []
        self._pointers: list[tuple[Tensor, int]] = []
        self._sharded = any(is_sharded(weight) for weight in weights.values())

    @property
    def is_stale(self) -> bool:
        """Whether a weight has other memory than when it was gathered, as after ``model.to``."""
        return self._sharded or any(weight.data_ptr() != at for weight, at in self._pointers)

    def gather(self, masks: Mapping[str, Tensor]) -> None:
        """Take hold of the weights' own memory, and of the masks on its devices."""
        weights = [self.weights[name] for name in masks]
        for (name, mask), weight in zip(masks.items(), weights, strict=True):
            if mask.shape != weight.shape:
                raise ValueError(
                    f"{name} has another shape than when the Pruner was made: finish() it before shrink, and make a "
                    "new one to train on."
                )
        self.masks = masks
        self.values = _locals(weights)
        self.factors = [local(mask).to(value.device) for mask, value in zip(masks.values(), self.values, strict=True)]
        self._pointers = [] if self._sharded else [(weight, weight.data_ptr()) for weight in weights]


def _schedule(schedule: Schedule | float | None, pattern: Pattern, regularize: Regularization | None) -> Schedule:
    fixed = None if pattern.density is None else 1 - pattern.density
    if schedule is None:
        if fixed is None and regularize is not None:
            return constant(0.0)
        if fixed is None:
            raise ValueError(f"{pattern} needs a sparsity or a schedule.")
        return cubic(fixed, end=_RAMP_END)
    if callable(schedule):
        return schedule
    if fixed is not None and abs(schedule - fixed) > 1e-9:
        raise ValueError(f"{pattern} removes {fixed:g} of the weights, not {schedule}; leave the sparsity out.")
    return cubic(schedule, end=_RAMP_END)


def _listed(optimizer: Any) -> list[Any]:
    return [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer]


def _inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that steps, inside Accelerate's or Lightning's wrapper."""
    while not (isinstance(optimizer, torch.optim.Optimizer) and "_optimizer_step_post_hooks" in vars(optimizer)):
        inside = getattr(optimizer, "optimizer", getattr(optimizer, "_optimizer", None))
        if inside is None:
            raise TypeError(f"a Pruner takes torch.optim optimizers, not a {type(optimizer).__name__}.")
        optimizer = inside
    return optimizer


def _units_kept(mask: Tensor, pattern: Pattern) -> Tensor:
    """How many units of each group a mask keeps, (groups,)."""
    table = Tables({"": mask.to(torch.float32)}, pattern)[""]
    return (table > 0).sum(1).cpu()


def _count(kept: Tensor) -> int | Tensor:
    return int(kept) if kept.numel() == 1 else kept


def _itself(scores: Tensor) -> Tensor:
    return scores


def _remembered_of(optimizer: torch.optim.Optimizer, *weights: Tensor) -> list[Tensor]:
    """What an optimizer remembers of each entry of weights, such as momentum."""
    return [
        value
        for weight in weights
        for value in optimizer.state.get(weight, {}).values()
        if isinstance(value, Tensor) and value.shape == weight.shape and value.is_floating_point()
    ]


def _check_follower(name: str, weight: Tensor, own: Tensor) -> None:
    if weight.shape != own.shape:
        raise ValueError(f"{name} has shape {tuple(weight.shape)} in the model that follows, {tuple(own.shape)} here.")
    if weight.is_meta or not weight.is_floating_point():
        raise ValueError(
            f"{name} is of {weight.dtype} on {weight.device} in the model that follows: it can't be zeroed."
        )
    if is_sharded(weight) != is_sharded(own) or getattr(weight, "placements", None) != getattr(own, "placements", None):
        raise ValueError(f"{name} is not sharded in the model that follows as it is here.")


def _check_state_goes_on(
    before: Mapping[Tensor, Any], after: Mapping[Tensor, Any], names: Mapping[Tensor, str]
) -> None:
    """``ValueError`` if an optimizer that had a state of a parameter could not go on with the one it has got."""
    for parameter, old in before.items():
        new = after.get(parameter)
        if not old or not new:  # from before the first step
            continue
        where = names.get(parameter, "a parameter")
        if missing := [key for key in old if key not in new]:
            raise ValueError(f"{where}: the state to go back to has no {missing[0]} for the optimizer.")
        for key, value in old.items():
            if isinstance(value, Tensor) and isinstance(new[key], Tensor) and value.shape != new[key].shape:
                raise ValueError(
                    f"{where}: {key} has shape {tuple(new[key].shape)} in the state to go back to, the optimizer's has "
                    f"{tuple(value.shape)}."
                )


def _locals(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [local(tensor.detach()) for tensor in tensors]


def _is_first_rank() -> bool:
    from torch import distributed

    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def _name(what: Any) -> str:
    while isinstance(what, functools.partial):
        what = what.func
    return str(getattr(what, "__name__", what))
