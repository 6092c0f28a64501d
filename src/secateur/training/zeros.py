"""Where masks act: the weights of a model, or of one that follows it, multiplied in one call after each step. The
weights of a run and which of their entries are zero: what steps show of them, new masks, keeping to masks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from secateur.pipeline import Masks, check_mask
from secateur.regrowth import Held
from secateur.support import Undo, is_sharded, local, private, refuse_unloaded, unwrapped
from secateur.targets import find_layers
from secateur.training.choosing import (
    EvidenceSource,
    chosen,
    gathered,
    gradients_of,
    movement_after,
    own_randomness,
    share_removed,
    squares_after,
)
from secateur.training.optimizers import zero_remembered
from secateur.training.rules import Rules
from secateur.training.state import Memory, with_masks

# ---- Where masks act: the weights of a model, or of one that follows it, multiplied in one call after each step.
#
# Law: values are written in place, into the memory that the weights have now.


class Place:
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
        self.values = locals_of(weights)
        self.factors = [local(mask).to(value.device) for mask, value in zip(masks.values(), self.values, strict=True)]
        self._pointers = [] if self._sharded else [(weight, weight.data_ptr()) for weight in weights]

    def zero(self, masks: Mapping[str, Tensor]) -> None:
        """Multiply the weights by masks, in one call for all that lie here.

        What is handed to that call is kept from step to step: on a small network the rest would cost more than it.
        """
        if self.masks is not masks or self.is_stale:
            self.gather(masks)
        if self.values:
            private.multiply_all(self.values, self.factors)


def weights_to_prune(
    model: nn.Module, include: str | Iterable[str] | None, exclude: str | Iterable[str] | None
) -> dict[str, Tensor]:
    """``{name: weight}`` of a model's layers that a Pruner can prune.

    Raises:
        ValueError: one belongs to a mask that is attached, or has no values.
    """
    weights: dict[str, Tensor] = {**find_layers(model, include=include, exclude=exclude)}
    if attached := [name for name in weights if name.endswith("_orig")]:
        raise ValueError(f"{attached[0]} belongs to a mask that is attached: detach(model) first.")
    refuse_unloaded(model, weights)
    return weights


def parameters_that_follow(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of a copy of a model, or of an average of it, by their names in the model.

    Raises:
        KeyError: one of the weights is missing.
        ValueError: one can't have the zeros of the model's.
    """
    inside = unwrapped(model)
    parameters: dict[str, Tensor] = dict(inside.named_parameters())
    if isinstance(averaged := getattr(inside, "module", None), nn.Module):
        parameters = dict(averaged.named_parameters()) | parameters
    if missing := [name for name in weights if name not in parameters]:
        raise KeyError(f"{type(model).__name__} has no weight {missing[0]!r}; follow takes a copy of the model.")
    for name, weight in weights.items():
        check_follower(name, parameters[name], weight)
    return parameters


def locals_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's parts, sharing memory."""
    return [local(tensor.detach()) for tensor in tensors]


def check_follower(name: str, weight: Tensor, own: Tensor) -> None:
    """``ValueError`` unless a weight can have the zeros of another."""
    if weight.shape != own.shape:
        raise ValueError(f"{name} has shape {tuple(weight.shape)} in the model that follows, {tuple(own.shape)} here.")
    if weight.is_meta or not weight.is_floating_point():
        raise ValueError(
            f"{name} is of {weight.dtype} on {weight.device} in the model that follows: it can't be zeroed."
        )
    if is_sharded(weight) != is_sharded(own) or getattr(weight, "placements", None) != getattr(own, "placements", None):
        raise ValueError(f"{name} is not sharded in the model that follows as it is here.")


# The weights of a run and which of their entries are zero: what steps show of them, new masks, keeping to masks.
#
# Law: masks are chosen from weights, earlier masks and evidence alone; all is computed before a weight changes.


class Zeros:
    """What is removed of weights, here and in the models that follow. When that changes, the Pruner says."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        rules: Rules,
        optimizers: Sequence[torch.optim.Optimizer],
        source: EvidenceSource,
        seed: int,
    ) -> None:
        self.weights = weights
        self.rules = rules
        self.memory = Memory(seed)
        self.opened = False  # whether what is held lies in the weights just now, to be trained
        self._optimizers = optimizers
        self._source = source
        self._places = [Place(weights)]
        self._start: dict[str, tuple[Tensor, int]] = {}  # weights before the start removed some, and their versions

    @property
    def masks(self) -> Masks:
        """``{name: bool tensor, True = kept}`` of all weights."""
        masks = self.memory.masks
        return Masks(
            (name, masks[name].ne(0) if name in masks else torch.ones_like(weight, dtype=torch.bool))
            for name, weight in self.weights.items()
        )

    # The start

    def begin(self, within: Mapping[str, Tensor] | None, target: float, undo: Undo) -> None:
        """Start from earlier masks, and remove at once what the schedule begins with."""
        before = {name: weight.detach() for name, weight in self.weights.items()}
        start: dict[str, Tensor] = {}
        for name, mask in (within or {}).items():
            if name not in self.weights:
                raise ValueError(f"there is a mask for {name!r}, but it is not among the pruned weights.")
            check_mask(name, mask, self.weights[name].shape)
            start[name] = mask.ne(0)
        self.memory = replace(self.memory, target=share_removed(self.rules, self.weights, start))
        if target > self.memory.target and not self.rules.watched:  # else the first step has to show it
            start = self._chosen(before, target, start)
            self.memory = replace(self.memory, target=target)
        if start:
            # kept until the first step, so that a state loaded meanwhile finds the weights as they were
            values = dict(zip(start, undo.values(*(self.weights[name] for name in start)), strict=True))
            self._install(start, before, zero_state=False)
            self.keep_start(values)

    def keep_start(self, values: Mapping[str, Tensor]) -> None:
        """Remember what weights were before the start removed some of their entries."""
        self._start = {name: (value, private.version_of(self.weights[name])) for name, value in values.items()}

    def untouched_start(self) -> dict[str, Tensor]:
        """Of these, the ones that nobody has written to since."""
        return {
            name: value
            for name, (value, version) in self._start.items()
            if private.version_of(self.weights[name]) == version
        }

    # A step

    def observe(self) -> None:
        """Before a step: sum up what its gradients show, and lay what is held back into the weights to be trained."""
        gradients, memory, rules = gradients_of(self.weights), self.memory, self.rules
        if "movement" in rules.watched and isinstance(rules.regrow, Held):
            moved = {
                name: movement_after(
                    memory.movement.get(name),
                    self._dense(name, self.weights[name].detach()),
                    grad,
                    rules.regrow.penalty,
                )
                for name, grad in gradients.items()
            }
            memory = replace(memory, movement=moved)
        if "grad_sq" in rules.watched:
            squares = {name: squares_after(memory.grad_sq.get(name), grad) for name, grad in gradients.items()}
            memory = replace(memory, grad_sq=squares, grad_sq_steps=memory.grad_sq_steps + 1)
        self.memory = memory
        held = memory.held
        if rules.trains_removed and held:
            self.opened = True
            private.add_all(locals_of(self.weights[name] for name in held), locals_of(held.values()))
            trained = [name for name in held if self.weights[name].grad is not None]
            if isinstance(rules.regrow, Held) and rules.regrow.decay and trained:
                grads = locals_of(gradients[name] for name in trained)
                private.add_all(grads, locals_of(held[name] for name in trained), alpha=rules.regrow.decay)

    def stepped(self, *, counted: bool) -> None:
        """After a step: count it; what the start removed is now gone for good."""
        self._start = {}
        if self.memory.step == 0:
            self.forget_remembered()
        if counted:
            self.memory = replace(self.memory, step=self.memory.step + 1)

    def keep(self) -> None:
        """After a step without an update: take out what was trained of removed weights, and zero what is removed."""
        if self.opened:
            held = {name: self.weights[name].detach() * (1 - mask) for name, mask in self.memory.masks.items()}
            self.memory = replace(self.memory, held=held)
            self.opened = False
        self.zero()

    def zero(self) -> None:
        """Multiply the weights by their masks, here and in the models that follow."""
        for place in self._places:
            place.zero(self.memory.masks)

    def forget_remembered(self) -> None:
        """Zero what optimizers remember of removed weights, unless these are trained on."""
        if not self.rules.trains_removed:
            zero_remembered(self._optimizers, self.weights, self.memory.masks)

    # An update

    def update(self, target: float, share: float = 0.0) -> None:
        """Choose new masks: a target is reached, and a share of what is kept is dropped and grown elsewhere."""
        memory = self.memory
        self.memory = replace(
            memory,
            masks=self._beside_weights(memory.masks),
            held=self._beside_weights(memory.held),
            movement=self._beside_weights(memory.movement),
            grad_sq=self._beside_weights(memory.grad_sq),
        )
        if not self.opened:
            self.zero()  # criteria such as LAMP's sums see what the step left in removed weights
        weights = {name: self._dense(name, weight.detach()) for name, weight in self.weights.items()}
        masks = self._chosen(weights, target, self.masks if self.memory.masks else {}, share)
        self._install(masks, weights)
        reached = target if self.rules.holds else max(self.memory.target, target)
        self.memory = replace(self.memory, target=reached, grad_sq={}, grad_sq_steps=0)

    def _beside_weights(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """On the weights' devices, where model.to has taken these meanwhile."""
        return {name: value.to(self.weights[name].device) for name, value in values.items()}

    def _dense(self, name: str, weight: Tensor) -> Tensor:
        """The weight with the values that are held of it."""
        held = self.memory.held
        return weight if name not in held or self.opened else weight + held[name]

    def _chosen(
        self, weights: Mapping[str, Tensor], target: float, old: Mapping[str, Tensor], share: float = 0.0
    ) -> dict[str, Tensor]:
        """The masks for a target, given those that there are."""
        removes = self.rules.holds or target > self.memory.target
        with own_randomness(self.memory.seed, self.memory.step):
            return chosen(self.rules, weights, old, target if removes else None, evidence=self._evidence, share=share)

    def _evidence(self, words: Iterable[str]) -> dict[str, dict[str, Tensor]]:
        return gathered(words, self.weights, self.rules, self.memory, self._source)

    def _install(self, masks: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, zero_state: bool = True) -> None:
        """Make chosen masks the current ones: the weights, what is held of them, and the optimizer's state."""
        before = self.memory
        after, stays = with_masks(before, masks, self.weights, held_from=weights if self.rules.holds else None)
        # all is computed: from here on things change
        for name in masks:
            if name in before.held and not self.opened:
                self.weights[name].detach().copy_(weights[name])
        self.memory = after
        self.opened = False
        self.zero()
        if zero_state and not self.rules.trains_removed:
            zero_remembered(self._optimizers, self.weights, stays)

    # From outside of a run's steps; each takes what will change of it to the caller's Undo

    def values(self) -> list[Tensor]:
        """All tensors that zeroing writes to."""
        return [weight for place in self._places for weight in place.weights.values()]

    def follow(self, followers: Mapping[str, Tensor], undo: Undo) -> None:
        """Keep the same zeros in the weights of another model."""
        undo.attributes(self, "_places")
        self._places = [*self._places, Place(followers)]
        self._places[-1].zero(self.memory.masks)  # the model's own would lose what the start removed

    def note(self, undo: Undo) -> dict[str, Tensor]:
        """Have what is remembered put back if what follows fails; returns what the start removed, where untouched."""
        untouched = self.untouched_start()
        undo.attributes(self, "memory", "opened")
        undo.call(self.keep_start, untouched)
        return untouched

    def take(self, memory: Memory, undo: Undo) -> None:
        """Go on with the memory of another run; what the start removed here comes back first."""
        untouched = self.note(undo)
        undo.values(*self.values())
        for name, value in untouched.items():
            self.weights[name].copy_(value)
        self._start = {}
        self.opened = False
        self.memory = memory

    def forget_held(self) -> None:
        """Of removed weights nothing is held any more; what is removed is zero, in the weights and in optimizers."""
        zeros = {name: torch.zeros_like(value) for name, value in self.memory.held.items()}
        self.memory = replace(self.memory, held=zeros)
        self.zero()
        zero_remembered(self._optimizers, self.weights, self.memory.masks)
