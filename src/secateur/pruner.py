"""Pruning while training: a Pruner moves through a schedule as the optimizer steps, and keeps zeros zero.

Law: weights stay plain parameters; after every optimizer step what a mask removed is zero, and at the end of the
schedule exactly the target is removed. The same seed and state give the same run, bit for bit.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.allocation import Allocation, Tables, settled
from secateur.batches import Forward, Loss, repeatable, unwrapped
from secateur.criteria import lamp
from secateur.evidence import collect, needs
from secateur.masks import apply_, choose_masks
from secateur.patterns import NM, Pattern, Unstructured
from secateur.regrowth import DropAndGrow, Held, Regrowth
from secateur.regularization import Penalty, Regularization
from secateur.schedules import Moment, Schedule, constant, cubic, resolve, step_of
from secateur.shards import count_nonzero, is_sharded, laid_out, local, whole
from secateur.targets import find_layers, left_alone, stored_inputs_first, turned, turned_evidence

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
            masks are attached to the model, or no unit can leave. The model is unchanged then.

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
        self._seed = seed
        if total_steps is None and epochs is not None and steps_per_epoch is not None:
            total_steps = round(epochs * steps_per_epoch)
        self._total_steps = total_steps
        self.schedule = resolve(
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
        self._until = 0
        if isinstance(self._regrow, DropAndGrow):
            if self._pattern.density is not None:
                raise ValueError(f"{self._pattern} says how much each group keeps: use sr_ste() to let weights return.")
            self._until = step_of(self._regrow.until, total_steps, steps_per_epoch)
        self._every = self._interval(every, total_steps, steps_per_epoch)
        self._penalty: Penalty | None = None
        if regularize is not None:
            moment = functools.partial(step_of, total_steps=total_steps, steps_per_epoch=steps_per_epoch)
            self._penalty = Penalty(regularize, self._model, self._optimizers, moment, total_steps)

        self.step = 0  # optimizer steps so far
        self._target = 0.0  # the sparsity last brought about
        self._masks: dict[str, Tensor] = {}  # of the weight's dtype: what is multiplied. Weights without one are dense
        self._held: dict[str, Tensor] = {}  # values of removed weights, 0 elsewhere
        self._movement: dict[str, Tensor] = {}
        self._grad_sq: dict[str, Tensor] = {}
        self._grad_sq_steps = 0
        self._removed: dict[str, int] = dict.fromkeys(self._weights, 0)
        self._churn = 0.0
        self._places = [_Place(self._weights)]
        self._undo: dict[str, tuple[Tensor, int]] = {}
        self._opened = False
        self._begin(within)
        self._hooks = [each.register_step_post_hook(self._after_step) for each in self._optimizers]
        if self._holds or "grad_sq" in set(needs(criterion)) & self._gathered:
            self._hooks += [each.register_step_pre_hook(self._before_step) for each in self._optimizers]
        if verbose and _is_first_rank():
            print(self)

    # What is asked of it from outside

    @property
    def masks(self) -> dict[str, Tensor]:
        """``{name: bool tensor, True = kept}`` of all pruned weights, as they are now."""
        return {
            name: self._masks[name].ne(0) if name in self._masks else torch.ones_like(weight, dtype=torch.bool)
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
        penalty = self._penalty
        return {
            "step": self.step,
            "target": float(self.schedule(self.step)),
            "sparsity": sum(self._removed.values()) / max(sum(sizes.values()), 1),
            "churn": self._churn,
            **({} if penalty is None else {"penalty": penalty.strength(self.step), "leaving": penalty.leaving}),
            **{f"sparsity/{name}": self._removed[name] / max(size, 1) for name, size in sizes.items()},
        }

    def prune(self, sparsity: float | None = None) -> None:
        """Choose new masks now: at the given sparsity, or the schedule's at this step.

        For rounds of one's own, as lottery tickets are found. From the next step on the schedule holds again, but
        never below what is removed.
        """
        with torch.no_grad():
            self._update(float(self.schedule(self.step)) if sparsity is None else sparsity)

    def rewind(self, model_state: Mapping[str, Any], optimizer_state: Mapping[str, Any] | None = None) -> None:
        """Put back saved weights, and the optimizer's state, but keep the masks: lottery tickets (arXiv:1803.03635).

        Args:
            model_state: ``copy.deepcopy(model.state_dict())`` of an earlier step (arXiv:1912.05671), or of step 0.
            optimizer_state: likewise; where it is None, the optimizer's state is emptied. With several optimizers,
                that of the first.

        The schedule goes on from where it is; what was held of removed weights is forgotten.
        """
        if optimizer_state is None and any(each.state for each in self._optimizers):
            for each in self._optimizers:
                each.state.clear()
        self._model.load_state_dict(model_state)
        if optimizer_state is not None:
            self._optimizers[0].load_state_dict(dict(optimizer_state))
        self._held = {name: torch.zeros_like(value) for name, value in self._held.items()}
        self._zero()
        if self._penalty is not None:
            self._penalty.after_step(self.step, counted=False)
        self._zero_state(self._masks)

    def follow(self, model: nn.Module) -> None:
        """Keep the same zeros in another model: the average of `torch.optim.swa_utils.AveragedModel`, or a copy.

        >>> layer = nn.Linear(4, 2)
        >>> average = torch.optim.swa_utils.AveragedModel(layer)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> pruner = Pruner(layer, optimizer, lambda step: 0.5, verbose=False)
        >>> pruner.follow(average)
        >>> int((average.module.weight == 0).sum())
        4
        """
        inside = unwrapped(model)
        parameters = dict(inside.named_parameters())
        if isinstance(averaged := getattr(inside, "module", None), nn.Module):
            parameters = dict(averaged.named_parameters()) | parameters
        if missing := [name for name in self._weights if name not in parameters]:
            raise KeyError(f"{type(model).__name__} has no weight {missing[0]!r}; follow takes a copy of the model.")
        if self._penalty is not None:
            self._penalty.follow(parameters, self.step)
        self._places.append(_Place({name: parameters[name] for name in self._weights}))
        self._zero()

    def finish(self) -> dict[str, Tensor]:
        """End pruning and return the masks: the schedule's last sparsity is reached now if the run was shorter.

        The zeros stay; but the optimizer is let go, and a step after this may change them.
        """
        with torch.no_grad():
            moments = getattr(self.schedule, "moments", None)
            last = max(moments) if moments else self._total_steps or self.step
            if self.step < last:
                self._update(float(self.schedule(last)), regrow=False)
            if self._penalty is not None:
                self._penalty.hold()
            for hook in self._hooks:
                hook.remove()
            apply_({**self._weights}, {name: mask.ne(0) for name, mask in self._masks.items()})  # no negative zeros
        return self.masks

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on: masks as bits, the position in the schedule, what rules remember.

        Plain values and tensors, which ``torch.load(weights_only=True)`` reads. A sharded model's masks are gathered
        (never its weights), so that the state fits any number of ranks.
        """
        state: dict[str, Any] = {
            "version": 1,
            "seed": self._seed,
            "step": self.step,
            "target": self._target,
            "churn": self._churn,
            "names": list(self._masks),
            "shapes": [tuple(mask.shape) for mask in self._masks.values()],
            "masks": _packed(whole(mask.ne(0)).cpu() for mask in self._masks.values()),
        }
        for word in ("_held", "_movement", "_grad_sq"):
            if values := getattr(self, word):
                state[word.removeprefix("_")] = {name: whole(value).cpu().clone() for name, value in values.items()}
        if self._grad_sq:
            state["grad_sq_steps"] = self._grad_sq_steps
        if self._penalty is not None:
            state["regularize"] = self._penalty.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; load the model's and the optimizer's own states too, in any order.

        Raises:
            ValueError: the state is of another model or from a newer version. Nothing is changed then.
        """
        if state.get("version") != 1:
            raise ValueError(f"this is no Pruner's state of version 1: {sorted(map(str, state))[:8]}.")
        shapes = dict(zip(state["names"], map(tuple, state["shapes"]), strict=True))
        for name, shape in shapes.items():
            if name not in self._weights or tuple(self._weights[name].shape) != shape:
                has = tuple(self._weights[name].shape) if name in self._weights else "no such weight"
                raise ValueError(f"{name}: the state has a mask of shape {shape}, the model has {has}.")
        remembered = {word: state.get(word, {}) for word in ("held", "movement", "grad_sq")}
        for word, values in remembered.items():
            for name, value in values.items():
                if name not in self._weights or value.shape != self._weights[name].shape:
                    raise ValueError(f"{name}: the state's {word} does not fit the model.")
        masks = _unpacked(state["masks"], shapes)
        if ("regularize" in state) != (self._penalty is not None):
            with_it, without = ("state", "Pruner") if self._penalty is None else ("Pruner", "state")
            raise ValueError(f"the {with_it} has regularize, the {without} has not: make the Pruner as it was saved.")
        leaving = None if self._penalty is None else self._penalty.read(state["regularize"])
        with torch.no_grad():
            if self._penalty is not None and leaving is not None:
                self._penalty.take(leaving)
            self._put_back()
            for word, values in remembered.items():
                mine = {name: laid_out(value, self._weights[name]) for name, value in values.items()}
                setattr(self, f"_{word}", mine)
            self._grad_sq_steps = state.get("grad_sq_steps", 0)
            self._masks = {
                name: _factor(mask, weight)
                for name, weight in self._weights.items()
                if (mask := masks.get(name)) is not None
            }
            self._count()
            self._zero()
            self._opened = False
        self.step, self._target, self._churn = state["step"], state["target"], state["churn"]
        self._seed = state["seed"]

    def __str__(self) -> str:
        weights = sum(weight.numel() for weight in self._weights.values())
        total = sum(parameter.numel() for parameter in self._model.parameters())
        lines = [
            f"Pruner: {weights:,} weights in {len(self._weights)} tensors of {total:,} parameters; "
            f"{_name(self._criterion)}, {self._pattern}, {_name(self._allocate)}"
            + (f", {self._regrow}" if self._regrow else "")
        ]
        moments = list(getattr(self.schedule, "moments", ()))
        last = max([*moments, self._until]) or self._total_steps or 0
        steps = sorted({*moments, *(round(last * part / 4) for part in range(5))})
        lines.append(f"  schedule: {self.schedule if hasattr(self.schedule, 'moments') else _name(self.schedule)}")
        lines += [f"  step {step:>8,}  sparsity {float(self.schedule(step)):.4f}" for step in steps[:12]]
        end = f"then recovery until step {self._total_steps:,}" if self._total_steps else "then it stays there"
        lines.append(f"  an update every {self._every:,} step{'s' * (self._every > 1)}; {end}")
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
            for name, grad in gradients.items():
                self._movement[name] = self._moved(name, grad)
        if "grad_sq" in asked:
            for name, grad in gradients.items():
                square = grad.float().square() if grad.dtype != torch.float64 else grad.square()
                self._grad_sq[name] = self._grad_sq[name].add_(square) if name in self._grad_sq else square
            self._grad_sq_steps += 1
        if self._trains_removed and self._held:
            self._opened = True
            torch._foreach_add_(_locals(self._weights[name] for name in self._held), _locals(self._held.values()))
            trained = [name for name in self._held if self._weights[name].grad is not None]
            if isinstance(self._regrow, Held) and self._regrow.decay and trained:
                grads = _locals(gradients[name] for name in trained)
                torch._foreach_add_(grads, _locals(self._held[name] for name in trained), alpha=self._regrow.decay)

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._undo = {}
        if self.step == 0 and not self._trains_removed:
            self._zero_state(self._masks)
        counted = optimizer is self._optimizers[0] and not self._is_skipped(optimizer)
        if counted:
            self.step += 1
        if self._penalty is not None:
            self._penalty.after_step(self.step, counted=counted)
        if counted and self._is_due(self.step):
            with torch.no_grad():
                self._update(float(self.schedule(self.step)))
            return
        if self._opened:
            for name, mask in self._masks.items():
                self._held[name] = self._weights[name].detach() * (1 - mask)
            self._opened = False
        self._zero()

    def _is_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a fused optimizer left the step out, as GradScaler asks it to by this attribute."""
        found = getattr(optimizer, "found_inf", None)
        return bool(found is not None and found > 0)

    # Choosing

    def _begin(self, within: Mapping[str, Tensor] | None) -> None:
        """Start from earlier masks, and prune at once where the schedule begins above zero."""
        before = {name: weight.detach() for name, weight in self._weights.items()}
        with torch.no_grad():
            if within:
                if unknown := [name for name in within if name not in self._weights]:
                    raise ValueError(f"there is a mask for {unknown[0]!r}, but it is not among the pruned weights.")
                for name, mask in within.items():
                    if mask.shape != self._weights[name].shape:
                        raise ValueError(
                            f"{name}: a mask of shape {tuple(mask.shape)} for a weight of shape "
                            f"{tuple(self._weights[name].shape)}."
                        )
            start = dict(within or {})
            self._target = self._share_removed(start)
            target = float(self.schedule(0))
            waits = bool(set(needs(self._criterion)) & self._gathered)
            if target > self._target and not waits:
                start = self._chosen(before, target, start, regrow=False)
                self._target = target
            if not start:
                return
            # kept until the first step, so that a state loaded meanwhile finds the weights as they were
            undo = {name: before[name].clone() for name in start}
            self._install(start, before, zero_state=False)
            self._undo = {name: (value, self._weights[name]._version) for name, value in undo.items()}

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

    def _put_back(self) -> None:
        """Undo what the start removed, where nobody has written to the weight since."""
        for name, (value, version) in self._undo.items():
            if self._weights[name]._version == version:
                self._weights[name].copy_(value)
        self._undo = {}

    def _update(self, target: float, *, regrow: bool = True) -> None:
        for kept in (self._masks, self._held, self._movement, self._grad_sq):
            for name in kept:  # where model.to has taken the weights meanwhile
                kept[name] = kept[name].to(self._weights[name].device)
        if not self._opened:
            self._zero()  # criteria such as LAMP's sums see what the step left in removed weights
        weights = {name: self._dense(name, weight.detach()) for name, weight in self._weights.items()}
        masks = self._chosen(weights, target, self.masks if self._masks else {}, regrow=regrow)
        self._install(masks, weights)
        self._target = target if self._holds else max(target, self._target)
        self._grad_sq, self._grad_sq_steps = {}, 0

    def _chosen(
        self, weights: Mapping[str, Tensor], target: float, old: Mapping[str, Tensor], *, regrow: bool
    ) -> dict[str, Tensor]:
        """The masks for a target, given those that there are."""
        masks = turned(old, self._inputs_first)
        weights, old = turned(weights, self._inputs_first), masks
        with self._own_randomness():
            if self._holds or target > self._target:
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
        share = rule.share(self.step, self._until)
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
        stays: dict[str, Tensor] = {}
        changed, made = 0, dict(self._masks)
        for name, mask in masks.items():
            weight = self._weights[name].detach()
            new = _factor(mask, weight)
            old = self._masks.get(name)
            changed += count_nonzero(new.eq(0) if old is None else new.ne(old))
            stays[name] = new if old is None else new * old
            if self._holds:
                self._held[name] = weights[name] * (1 - new)
                if old is not None and weights[name] is not weight:
                    weight.copy_(weights[name])
            made[name] = new
        self._masks = made
        self._opened = False
        self._churn = changed / max(sum(weight.numel() for weight in self._weights.values()), 1)
        self._count()
        self._zero()
        if zero_state and not self._trains_removed:
            self._zero_state(stays)

    # Small parts

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

    def _interval(self, every: Moment | None, total_steps: int | None, steps_per_epoch: float | None) -> int:
        if every is not None:
            return max(1, step_of(every, total_steps, steps_per_epoch))
        if self._trains_removed:
            return 1
        if isinstance(self._regrow, DropAndGrow):
            return max(1, min(100, self._until // _UPDATES))
        moments: tuple[int, ...] | None = getattr(self.schedule, "moments", None)
        if moments is None:  # a function of one's own: when its value changes
            return max(1, total_steps // _UPDATES) if total_steps else 1
        return max(1, (moments[-1] - moments[0] if len(moments) > 1 else moments[-1]) // _UPDATES)

    def _is_due(self, step: int) -> bool:
        if isinstance(self._regrow, DropAndGrow) and step < self._until and step % self._every == 0:
            return True
        on_time = step % self._every == 0 or step == self._total_steps or step in getattr(self.schedule, "moments", ())
        return on_time and (self._holds or float(self.schedule(step)) > self._target)

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
        for word, total in (("grad_sq", self._grad_sq), ("movement", self._movement)):
            if word in words & self._gathered:
                for name in weights:
                    evidence[name][word] = total.get(name, torch.zeros_like(self._weights[name]))
                    if word == "grad_sq":
                        evidence[name][word] = evidence[name][word] / max(self._grad_sq_steps, 1)
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
        total = self._movement[name].sub_(step) if name in self._movement else step.neg_()
        if self._regrow.penalty:
            risen = torch.sigmoid(total)
            total.sub_(self._regrow.penalty * risen * (1 - risen))
        return total

    def _dense(self, name: str, weight: Tensor) -> Tensor:
        """The weight with the values that are held of it."""
        if name not in self._held or self._opened:
            return weight
        return weight + self._held[name]

    def _zero(self) -> None:
        """Multiply the weights by their masks, in one call for all that lie in one place.

        What is handed to that call is kept from step to step: on a small network the rest would cost more than it.
        """
        for place in self._places:
            if place.masks is not self._masks or place.is_stale:
                place.gather(self._masks)
            if place.values:
                torch._foreach_mul_(place.values, place.factors)

    def _zero_state(self, stays: Mapping[str, Tensor]) -> None:
        """Zero what optimizers remember of weights that are removed or have just returned."""
        for optimizer in self._optimizers:
            for name, mask in stays.items():
                weight = self._weights[name]
                for value in optimizer.state.get(weight, {}).values():
                    if isinstance(value, Tensor) and value.shape == weight.shape and value.is_floating_point():
                        local(value).mul_(local(mask))

    def _count(self) -> None:
        self._removed = {
            name: count_nonzero(self._masks[name].eq(0)) if name in self._masks else 0 for name in self._weights
        }

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Random numbers that depend on the seed and the step alone: the same on all ranks and after a resume."""
        with torch.random.fork_rng(devices=[]):
            # the CPU's generator alone: torch.manual_seed would also reach those of devices. The first number keeps it
            # off the stream of manual_seed(0), which drew the weights of many a model
            torch.default_generator.manual_seed((0x5EC8 << 32) + (self._seed * 1_000_003 + self.step) % 2**32)
            yield


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


def _factor(mask: Tensor, weight: Tensor) -> Tensor:
    """A mask as what a weight is multiplied by: of its dtype, device, memory layout and shards."""
    if is_sharded(weight):
        return laid_out(mask, weight).to(weight.dtype)
    return torch.empty_like(weight).copy_(mask)


def _locals(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [local(tensor.detach()) for tensor in tensors]


def _packed(masks: Iterable[Tensor]) -> Tensor:
    """Eight entries a byte, each mask from a byte of its own."""
    parts = [torch.from_numpy(np.packbits(mask.reshape(-1).numpy())) for mask in masks]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8)


def _unpacked(packed: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    masks, at = {}, 0
    needed = sum(-(-math.prod(shape) // 8) for shape in shapes.values())
    if packed.dtype != torch.uint8 or packed.numel() != needed:
        raise ValueError(f"the state's masks are {packed.numel()} bytes of {packed.dtype}, not {needed} of uint8.")
    for name, shape in shapes.items():
        size = math.prod(shape)
        piece = packed[at : at + -(-size // 8)].numpy()
        masks[name] = torch.from_numpy(np.unpackbits(piece, count=size).astype(bool)).reshape(shape)
        at += -(-size // 8)
    return masks


def _is_first_rank() -> bool:
    from torch import distributed

    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def _name(what: Any) -> str:
    while isinstance(what, functools.partial):
        what = what.func
    return str(getattr(what, "__name__", what))
