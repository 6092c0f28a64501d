"""Pruning while training: a Pruner moves through a schedule as the optimizer steps, and keeps zeros zero.

Law: weights stay plain parameters; after every optimizer step what a mask removed is zero, and at the end of the
schedule exactly the target is removed. The same seed and state give the same run, bit for bit.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from secateur.allocation import Allocation, check_sparsity, settled
from secateur.criteria import lamp
from secateur.evidence import collect, needs
from secateur.patterns import Pattern, Unstructured
from secateur.pipeline import Masks, apply_, check_mask
from secateur.regrowth import DropAndGrow, Held, Regrowth
from secateur.schedules import Moment, Schedule, resolve, step_of
from secateur.support import Forward, Loss, Undo, private, repeatable, unwrapped
from secateur.targets import find_layers, stored_inputs_first, turned_evidence
from secateur.training.choosing import chosen, movement_after, own_randomness, share_removed, squares_after
from secateur.training.describing import description, is_first_rank
from secateur.training.optimizers import (
    check_state_goes_on,
    inner_optimizers,
    is_skipped,
    remembered_of,
    warn_of_other_weights,
    zero_remembered,
)
from secateur.training.places import Place, check_follower, locals_of
from secateur.training.regularization import Penalty, Regularization
from secateur.training.rules import Rules
from secateur.training.state import Memory, read, with_masks, written
from secateur.training.timetable import Timetable, schedule_of

__all__ = ["Pruner"]


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
        batches, loss, forward: what a DataLoader yields, and how that is run, as in `evidence.collect`, which then
            gathers the evidence anew for each update.
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
        criterion, pattern, allocate = settled(criterion, pattern, allocate)
        self._given = model  # DistributedDataParallel tells collect to average over the ranks
        self._model = unwrapped(model)
        self._weights = find_layers(self._model, include=include, exclude=exclude)
        if attached := [name for name in self._weights if name.endswith("_orig")]:
            raise ValueError(f"{attached[0]} belongs to a mask that is attached: detach(model) first.")
        if meta := [name for name, weight in self._weights.items() if weight.device.type == "meta"]:
            raise ValueError(f"{meta[0]} is on the meta device, where there are no values; load the weights first.")
        self._optimizers = inner_optimizers(optimizer)
        warn_of_other_weights(self._optimizers, self._weights)
        if regrow is None and "movement" in needs(criterion):
            regrow = Held()
        if not isinstance(regrow, DropAndGrow | Held | None):
            raise TypeError(f"regrow is what a function of secateur.regrowth makes, such as rigl(), not {regrow!r}.")
        # an unstructured mask is the same either way, but for the order of ties
        inputs_first = [] if pattern == Unstructured() else stored_inputs_first(self._model, self._weights)
        self._rules = Rules(criterion, pattern, allocate, regrow, inputs_first, collects=batches is not None)
        self._collected: dict[str, Any] = {
            "batches": None if batches is None else repeatable(batches),
            "loss": loss,
            "forward": forward,
        }
        self._memory = Memory(operator.index(seed))
        if total_steps is None and epochs is not None and steps_per_epoch is not None:
            total_steps = round(epochs * steps_per_epoch)
        asked = schedule_of(schedule, pattern, regularized=regularize is not None)
        resolved = resolve(asked, total_steps=total_steps, steps_per_epoch=steps_per_epoch)
        self._rules.check(self._weights)
        if self._rules.trains_removed and len(self._optimizers) > 1:
            raise ValueError("training removed weights straight through works with one optimizer, not several.")
        until = step_of(regrow.until, total_steps, steps_per_epoch) if isinstance(regrow, DropAndGrow) else 0
        interval = None if every is None else max(1, step_of(every, total_steps, steps_per_epoch))
        if interval is None and self._rules.trains_removed:
            interval = 1
        self._timetable = Timetable(resolved, until, total_steps, interval)
        self._penalty: Penalty | None = None
        if regularize is not None:
            moment = functools.partial(step_of, total_steps=total_steps, steps_per_epoch=steps_per_epoch)
            self._penalty = Penalty(regularize, self._model, self._optimizers, moment, total_steps)

        self._places = [Place(self._weights)]
        self._start: dict[str, tuple[Tensor, int]] = {}  # weights before the start removed some, and their versions
        self._opened = False
        told = str(self) if verbose and is_first_rank() else None  # asks the schedule, before anything is changed
        with Undo() as undo:
            undo.optimizers(self._optimizers)
            self._begin(within, undo)
            self._hooks = [each.register_step_post_hook(self._after_step) for each in self._optimizers]
            if self._rules.holds or "grad_sq" in self._rules.watched:
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
    def masks(self) -> Masks:
        """``{name: bool tensor, True = kept}`` of all pruned weights, as they are now; printed, a table."""
        masks = self._memory.masks
        return Masks(
            (name, masks[name].ne(0) if name in masks else torch.ones_like(weight, dtype=torch.bool))
            for name, weight in self._weights.items()
        )

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
                *(value for each in others for value in remembered_of(each, *self._weights.values())),
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
                check_state_goes_on(before, first.state, {each: name for name, each in self._model.named_parameters()})
            zeros = {name: torch.zeros_like(value) for name, value in self._memory.held.items()}
            self._memory = replace(self._memory, held=zeros)
            self._zero()
            if self._penalty is not None:
                self._penalty.after_step(self.step, counted=False)
            zero_remembered(self._optimizers, self._weights, self._memory.masks)

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
            check_follower(name, weight, self._weights[name])
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
            self._places = [*self._places, Place(followers)]
            self._places[-1].zero(self._memory.masks)  # the model's own would lose what the start removed

    def finish(self) -> Masks:
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
        memory = read(state, self._weights, self._rules.remembered)
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
        return description(self._model, self._weights, self._rules, self._timetable, self._penalty)

    # The hooks

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if optimizer is not self._optimizers[0] or self._opened or is_skipped(optimizer):
            return
        gradients, memory, rules = self._gradients(), self._memory, self._rules
        if "movement" in rules.watched and isinstance(rules.regrow, Held):
            moved = {
                name: movement_after(
                    memory.movement.get(name),
                    self._dense(name, self._weights[name].detach()),
                    grad,
                    rules.regrow.penalty,
                )
                for name, grad in gradients.items()
            }
            memory = replace(memory, movement=moved)
        if "grad_sq" in rules.watched:
            squares = {name: squares_after(memory.grad_sq.get(name), grad) for name, grad in gradients.items()}
            memory = replace(memory, grad_sq=squares, grad_sq_steps=memory.grad_sq_steps + 1)
        self._memory = memory
        held = memory.held
        if rules.trains_removed and held:
            self._opened = True
            private.add_all(locals_of(self._weights[name] for name in held), locals_of(held.values()))
            trained = [name for name in held if self._weights[name].grad is not None]
            if isinstance(rules.regrow, Held) and rules.regrow.decay and trained:
                grads = locals_of(gradients[name] for name in trained)
                private.add_all(grads, locals_of(held[name] for name in trained), alpha=rules.regrow.decay)

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._start = {}
        if self.step == 0 and not self._rules.trains_removed:
            zero_remembered(self._optimizers, self._weights, self._memory.masks)
        counted = optimizer is self._optimizers[0] and not is_skipped(optimizer)
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
            self._memory = replace(self._memory, target=share_removed(self._rules, self._weights, start))
            target = float(self.schedule(0))
            if target > self._memory.target and not self._rules.watched:  # else the first step has to show it
                start = self._chosen(before, target, start, regrow=False)
                self._memory = replace(self._memory, target=target)
            if start:
                # kept until the first step, so that a state loaded meanwhile finds the weights as they were
                values = dict(zip(start, undo.values(*(self._weights[name] for name in start)), strict=True))
                self._install(start, before, zero_state=False)
                self._keep_start(values)

    def _keep_start(self, values: Mapping[str, Tensor]) -> None:
        """Remember what weights were before the start removed some of their entries."""
        self._start = {name: (value, private.version_of(self._weights[name])) for name, value in values.items()}

    def _untouched_start(self) -> dict[str, Tensor]:
        """Of these, the ones that nobody has written to since."""
        return {
            name: value
            for name, (value, version) in self._start.items()
            if private.version_of(self._weights[name]) == version
        }

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
        reached = target if self._rules.holds else max(self._memory.target, target)
        self._memory = replace(self._memory, target=reached, grad_sq={}, grad_sq_steps=0)

    def _beside_weights(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """On the weights' devices, where model.to has taken these meanwhile."""
        return {name: value.to(self._weights[name].device) for name, value in values.items()}

    def _chosen(
        self, weights: Mapping[str, Tensor], target: float, old: Mapping[str, Tensor], *, regrow: bool
    ) -> dict[str, Tensor]:
        """The masks for a target, given those that there are."""
        rule, removes = self._rules.regrow, self._rules.holds or target > self._memory.target
        share = rule.share(self.step, self._timetable.until) if regrow and isinstance(rule, DropAndGrow) else 0.0
        with own_randomness(self._memory.seed, self.step):
            return chosen(self._rules, weights, old, target if removes else None, evidence=self._evidence, share=share)

    def _install(self, masks: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, zero_state: bool = True) -> None:
        """Make chosen masks the current ones: the weights, what is held of them, and the optimizer's state."""
        before = self._memory
        after, stays = with_masks(before, masks, self._weights, held_from=weights if self._rules.holds else None)
        # all is computed: from here on things change
        for name in masks:
            if name in before.held and not self._opened:
                self._weights[name].detach().copy_(weights[name])
        self._memory = after
        self._opened = False
        self._zero()
        if zero_state and not self._rules.trains_removed:
            zero_remembered(self._optimizers, self._weights, stays)

    # Small parts

    def _is_due(self, step: int) -> bool:
        if self._timetable.regrows_at(step):
            return True
        more = self._rules.holds or float(self.schedule(step)) > self._memory.target
        return more and self._timetable.updates_at(step)

    def _evidence(self, words: Iterable[str]) -> dict[str, dict[str, Tensor]]:
        words, weights, gathered = set(words), self._weights, self._rules.gathered
        evidence: dict[str, dict[str, Tensor]] = {name: {} for name in weights}
        if from_batches := words - gathered:
            for name, found in collect(
                self._given, asked=sorted(from_batches), weights=weights, **self._collected
            ).items():
                evidence[name].update(found)
        if "grad" in words & gathered:
            if all(weight.grad is None for weight in weights.values()):
                raise ValueError("there are no gradients: prune after backward and before zero_grad, or pass batches=.")
            for name, grad in self._gradients().items():
                evidence[name]["grad"] = grad
        for word, total in (("grad_sq", self._memory.grad_sq), ("movement", self._memory.movement)):
            if word in words & gathered:
                for name in weights:
                    evidence[name][word] = total.get(name, torch.zeros_like(weights[name]))
                    if word == "grad_sq":
                        evidence[name][word] = evidence[name][word] / max(self._memory.grad_sq_steps, 1)
        return turned_evidence(evidence, self._rules.inputs_first)

    def _gradients(self) -> dict[str, Tensor]:
        """The gradients of the step; zero for a weight that took no part in it."""
        return {
            name: torch.zeros_like(weight) if weight.grad is None else weight.grad.detach()
            for name, weight in self._weights.items()
        }

    def _dense(self, name: str, weight: Tensor) -> Tensor:
        """The weight with the values that are held of it."""
        held = self._memory.held
        return weight if name not in held or self._opened else weight + held[name]

    def _zero(self) -> None:
        """Multiply the weights by their masks, here and in the models that follow."""
        for place in self._places:
            place.zero(self._memory.masks)
