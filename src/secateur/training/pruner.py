"""What a Pruner says of itself, before it has changed anything. Pruning while training: a Pruner moves through a
schedule as the optimizer steps, and keeps zeros zero.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from secateur.allocation import Allocation, check_sparsity, settled
from secateur.criteria import lamp
from secateur.patterns import Pattern
from secateur.pipeline import Masks, apply_
from secateur.regrowth import DropAndGrow, Regrowth
from secateur.report import Reported
from secateur.schedules import Moment, Schedule, step_of
from secateur.support import Forward, Loss, Part, Undo, name_of, percent, repeatable, unwrapped
from secateur.targets import check_lengths, left_alone
from secateur.training.choosing import EvidenceSource
from secateur.training.optimizers import inner_optimizers, is_skipped, put_back, warn_of_other_weights
from secateur.training.regularization import Growing, Penalty
from secateur.training.rules import Rules, Timetable, rules_for, schedule_of, timetable_for
from secateur.training.state import read, written
from secateur.training.zeros import Zeros, parameters_that_follow, weights_to_prune

# ---- What a Pruner says of itself, before it has changed anything.
#
# Law: it is text; who prints it, and whether that works, is no matter of pruning.


def description(
    model: nn.Module, weights: Mapping[str, Tensor], rules: Rules, timetable: Timetable, penalty: Penalty | None
) -> str:
    """What is pruned, when, by what, and what is left alone and why."""
    pruned = sum(weight.numel() for weight in weights.values())
    total = sum(parameter.numel() for parameter in model.parameters())
    lines = [
        f"Pruner: {pruned:,} weights in {len(weights)} tensors of {total:,} parameters; "
        f"{name_of(rules.criterion)}, {rules.pattern}, {name_of(rules.allocate)}"
        + (f", {rules.regrow}" if rules.regrow else "")
    ]
    lines += timetable.lines()
    if penalty is not None:
        lines.append(f"  {penalty}")
    reasons = Counter(left_alone(model, weights).values())
    if reasons:
        alone = ", ".join(f"{count} × {reason}" for reason, count in reasons.most_common())
        lines.append(f"  left alone: {alone}")
    return "\n".join(lines)


def is_first_rank() -> bool:
    """Whether this process is the one that speaks."""
    from torch import distributed

    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


# ---- Pruning while training: a Pruner moves through a schedule as the optimizer steps, and keeps zeros zero.
#
# Law: weights stay plain parameters; after every optimizer step what a mask removed is zero, and at the end of the
# schedule exactly the target is removed. The same seed and state give the same run, bit for bit.


class Pruner(Reported):
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
        regularize: `secateur.training.growing(...)`: training draws whole units to zero, biases and
            normalizations included, for `shrink` to take out. `masks` and the sparsities of `metrics` don't count them.
        every: the interval between updates, a moment as in `secateur.schedules`; about a hundredth of the schedule by
            default. Where the schedule ends, there is an update in any case.
        total_steps, epochs, steps_per_epoch: the length of the run in optimizer steps, where a moment needs it;
            ``epochs · steps_per_epoch`` serve as ``total_steps``.
        within: masks to begin with, such as `masks_from_zeros` finds in a checkpoint.
        batches, loss, forward: what a DataLoader yields, and how that is run, as in `evidence.collect`, which then
            gathers evidence for each update.
        seed: of the Pruner's own random numbers; the global generators are never touched.
        verbose: print the timetable (``str(pruner)``), on the first rank.

    Raises:
        ValueError: there is nothing to prune, a moment can't be resolved, the target lies beyond the end of the run,
            masks are attached to the model, or no unit can leave. Then, and if the schedule or a custom criterion
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
        regularize: Growing | None = None,
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
        self._model = unwrapped(model)
        weights = weights_to_prune(self._model, include, exclude)
        self._optimizers = inner_optimizers(optimizer)
        warn_of_other_weights(self._optimizers, weights)
        rules = rules_for(self._model, weights, criterion, pattern, allocate, regrow, collects=batches is not None)
        if rules.trains_removed and len(self._optimizers) > 1:
            raise ValueError("training removed weights straight through works with one optimizer, not several.")
        source = EvidenceSource(model, () if batches is None else repeatable(batches), loss, forward)
        self._zeros = Zeros(weights, rules, self._optimizers, source, operator.index(seed))
        if total_steps is None and epochs is not None and steps_per_epoch is not None:
            total_steps = round(epochs * steps_per_epoch)
        asked = schedule_of(schedule, pattern, regularized=regularize is not None)
        self._timetable = timetable_for(asked, rules.regrow, every, total_steps, steps_per_epoch)
        self._penalty: Penalty | None = None
        if regularize is not None:
            moment = functools.partial(step_of, total_steps=total_steps, steps_per_epoch=steps_per_epoch)
            self._penalty = Penalty(regularize, self._model, self._optimizers, moment, total_steps)

        told = str(self) if verbose and is_first_rank() else None  # asks the schedule, before anything is changed
        with Undo() as undo, torch.no_grad():
            undo.optimizers(self._optimizers)
            self._zeros.begin(within, float(self.schedule(0)), undo)
            check_lengths(self._model, self._zeros.memory.masks)
            self._hooks = [each.register_step_post_hook(self._after_step) for each in self._optimizers]
            if rules.holds or "grad_sq" in rules.watched:
                self._hooks += [each.register_step_pre_hook(self._before_step) for each in self._optimizers]
            if told is not None:
                with suppress(OSError, ValueError):  # a closed pipe, file or character set is no reason not to prune
                    print(told)

    # What is asked of it from outside

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return self._zeros.memory.step

    @property
    def schedule(self) -> Schedule:
        """``step -> sparsity``, every moment of it in steps."""
        return self._timetable.schedule

    @property
    def masks(self) -> Masks:
        """``{name: bool tensor, True = kept}`` of all pruned weights, as they are now; printed, a table."""
        return self._zeros.masks

    def metrics(self) -> dict[str, float]:
        """A plain dict for any logger.

        ``step``; ``target``, the schedule's sparsity at this step; ``sparsity`` of all pruned weights together and
        ``sparsity/<name>`` of each; ``churn``, the fraction of the weights whose mask the last update changed. With
        ``regularize``, ``penalty``, its strength, and ``leaving``, the fraction of the model's parameters that leave
        with the units that it has chosen.

        >>> layer = nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> Pruner(layer, optimizer, lambda step: 0.5, verbose=False).metrics()
        {'step': 0, 'target': 0.5, 'sparsity': 0.5, 'churn': 0.5, 'sparsity/weight': 0.5}
        """
        sizes = {name: weight.numel() for name, weight in self._zeros.weights.items()}
        penalty, memory = self._penalty, self._zeros.memory
        return {
            "step": self.step,
            "target": float(self.schedule(self.step)),
            "sparsity": sum(memory.removed.values()) / max(sum(sizes.values()), 1),
            "churn": memory.churn,
            **({} if penalty is None else {"penalty": penalty.strength(self.step), "leaving": penalty.leaving}),
            **{f"sparsity/{name}": memory.removed.get(name, 0) / max(size, 1) for name, size in sizes.items()},
        }

    def prune(self, sparsity: float | None = None) -> None:
        """Choose new masks now: at the given sparsity, or the schedule's at this step.

        For custom rounds, as for lottery tickets. From the next step on the schedule holds again, but
        never below what is removed.
        """
        if sparsity is not None:
            check_sparsity(sparsity)
        with torch.no_grad():
            self._update(self.schedule(self.step) if sparsity is None else sparsity)

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
        with Undo() as undo, torch.no_grad():
            self._zeros.note(undo)
            put_back(self._model, self._optimizers, self._zeros.weights, model_state, optimizer_state, undo)
            self._zeros.forget_held()
            if self._penalty is not None:
                self._penalty.after_step(self.step, counted=False)

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
            KeyError, ValueError: a weight is missing, of another shape, or without values. Nothing is changed
                then.
        """
        weights = self._zeros.weights
        parameters = parameters_that_follow(model, weights)
        followers = {name: parameters[name] for name in weights}
        if self._penalty is not None:
            self._penalty.check_follower(parameters)
        changing = followers if self._penalty is None else parameters
        with Undo() as undo, torch.no_grad():
            undo.values(*{id(each): each for each in changing.values()}.values())
            if self._penalty is not None:
                undo.attributes(self._penalty, "_places")
                self._penalty.follow(parameters, self.step)
            self._zeros.follow(followers, undo)

    def finish(self) -> Masks:
        """End pruning and return the masks: the schedule's last sparsity is reached now if the run was shorter.

        The zeros stay; but the optimizer is let go, and a step after this may change them.
        """
        with torch.no_grad():
            last = self._timetable.target_at
            if last is not None and self.step < last:
                self._update(self.schedule(last), regrow=False)
            if self._penalty is not None:
                self._penalty.hold()
            for hook in self._hooks:
                hook.remove()
            masks = {name: mask.ne(0) for name, mask in self._zeros.memory.masks.items()}
            apply_({**self._zeros.weights}, masks)  # no negative zeros
        return self.masks

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on: masks as bits, the position in the schedule, what rules remember.

        Plain values and tensors, which ``torch.load(weights_only=True)`` reads. A sharded model's masks are gathered
        (never its weights), so that the state fits any number of ranks.
        """
        return written(self._zeros.memory, None if self._penalty is None else self._penalty.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; load the model's and the optimizer's own states too, in any order.

        Raises:
            ValueError: the state is of another model or Pruner, of a newer version, or damaged. Nothing is changed
                then.
        """
        memory = read(state, self._zeros.weights, self._zeros.rules.remembered)
        if ("regularize" in state) != (self._penalty is not None):
            with_it, without = ("state", "Pruner") if self._penalty is None else ("Pruner", "state")
            raise ValueError(f"the {with_it} has regularize, the {without} has not: make the Pruner as it was saved.")
        leaving = None if self._penalty is None else self._penalty.read(state["regularize"])
        try:
            self.schedule(memory.step)
        except Exception as error:
            raise ValueError(f"the schedule has no sparsity for the state's step, {memory.step}: {error!r}") from error
        with Undo() as undo, torch.no_grad():
            self._zeros.take(memory, undo)
            if self._penalty is not None and leaving is not None:
                undo.attributes(self._penalty, "_leaving")
                self._penalty.take(leaving)
            self._zeros.zero()

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise TypeError(
            "a Pruner can't be pickled or copied: its hooks on the optimizer would not come along. Save state_dict(), "
            "make the Pruner as this one was made, and load_state_dict() there."
        )

    def content(self) -> Iterator[Part]:
        yield from str(self).splitlines()
        told = self.metrics()
        yield (
            f"Step {self.step:,}: {percent(told['sparsity'])} of these weights is removed, "
            f"{percent(told['target'])} is asked for; the last update changed {percent(told['churn'])} of their masks."
        )
        yield ""
        yield from self.masks.content()

    def __str__(self) -> str:
        return description(self._model, self._zeros.weights, self._zeros.rules, self._timetable, self._penalty)

    # The hooks

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if optimizer is self._optimizers[0] and not self._zeros.opened and not is_skipped(optimizer):
            self._zeros.observe()

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        counted = optimizer is self._optimizers[0] and not is_skipped(optimizer)
        self._zeros.stepped(counted=counted)
        if self._penalty is not None:
            self._penalty.after_step(self.step, counted=counted)
        if counted and self._is_due(self.step):
            with torch.no_grad():
                self._update(self.schedule(self.step))
        else:
            self._zeros.keep()

    def _is_due(self, step: int) -> bool:
        if self._timetable.regrows_at(step):
            return True
        more = self._zeros.rules.holds or float(self.schedule(step)) > self._zeros.memory.target
        return more and self._timetable.updates_at(step)

    def _update(self, target: float, *, regrow: bool = True) -> None:
        rule = self._zeros.rules.regrow
        share = rule.share(self.step, self._timetable.until) if regrow and isinstance(rule, DropAndGrow) else 0.0
        self._zeros.update(float(target), share)
        check_lengths(self._model, self._zeros.memory.masks)
