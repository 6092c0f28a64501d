"""Which entries of a model's weights are removed, and how new values are written beside them. What training moves:
whole parameters, or low-rank updates of them, with what was removed left as it is. AdamW with a warm-up, a cosine
decay and clipped gradients, which can be resumed after any step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from secateur.pipeline import Masks, attached_masks, check_mask
from secateur.support import (
    count_nonzero,
    everywhere,
    is_narrow,
    is_sharded,
    laid_out,
    local,
    private,
    rank_and_world,
    refuse_unloaded,
    sharded_as,
    summed,
    times_the_mean,
    whole,
)
from secateur.targets import find_targets, identity_of

# ---- Which entries of a model's weights are removed, and how new values are written beside them.
#
# Law: an entry that was removed keeps its bits, and one that was not zero does not become zero, whatever it was
# trained or rounded to: the zeros afterwards are those before, to the last one.

Zeros = dict[str, tuple[int, int]]  # {name: (before, after)}


def removed_of(model: nn.Module, masks: Any = None, also: Collection[str] = ()) -> Masks:
    """``{parameter: bool, True = kept}`` of the weights of which something is removed, by their first names.

    An entry is removed if a mask says so, one that is given or one that is attached; and if it is zero, in the weights
    that pruning may touch (`secateur.targets.find_targets`).

    Args:
        model: any module.
        masks: ``{name: mask}``, or what has them as ``masks``, such as a `Pruner`.
        also: other parameters whose zeros count as removed.

    Raises:
        ValueError: a mask is of no parameter of the model, of another shape, or of entries that are not zero.

    >>> layer = nn.Linear(2, 1)
    >>> _ = layer.weight.data.copy_(torch.tensor([[0.0, 1.0]]))
    >>> removed_of(layer)
    {'weight': tensor([[False,  True]])}
    """
    given = getattr(masks, "masks", masks) or {}
    if not isinstance(given, Mapping):
        raise TypeError(f"masks= is {{name: mask}} or a Pruner, not a {type(masks).__name__}.")
    every = dict(model.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, Tensor] = {}

    def remove(name: str, mask: Tensor) -> None:
        own = first[id(every[name])]
        found[own] = mask if own not in found else found[own] & mask

    for name, mask in given.items():
        full = name if name in every else f"{name}_orig"
        if full not in every:
            raise ValueError(f"there is a mask for {name!r}, but the model has no such parameter.")
        check_mask(name, mask, every[full].shape)
        kept = laid_out(mask, every[full]).ne(0)
        if not full.endswith("_orig") and count_nonzero(every[full].detach().ne(0) & ~kept):
            raise ValueError(f"{name}: the mask removes entries that are not zero; write the zeros first, with apply_.")
        remove(full, kept)
    for name, mask in attached_masks(model, every).items():
        remove(name, mask.ne(0))
    for name in (*touchable(model), *(name for name in also if name in every)):
        if not name.endswith("_orig"):
            remove(name, every[name].detach().ne(0))
    return Masks((name, mask) for name, mask in found.items() if count_nonzero(mask) < mask.numel())


def touchable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that pruning may touch."""
    try:
        return find_targets(model)
    except ValueError:  # there is none, as in a model of embeddings
        return {}


def settled(old: Tensor, new: Tensor, mask: Tensor | None) -> Tensor:
    """The new values in the old ones' dtype; where the mask is False, and where rounding would make a zero of what was
    none, the old ones.

    Raises:
        ValueError: a value is not finite in that dtype.

    >>> settled(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([5.0, 6.0, 0.0]), torch.tensor([False, True, True]))
    tensor([0., 6., 2.])
    """
    rounded = new.detach().to(old.dtype)
    if not bool(rounded.isfinite().all()):
        raise ValueError(f"a weight of shape {tuple(old.shape)} grew beyond what {old.dtype} holds; lower rate=.")
    stays = rounded.eq(0) & old.ne(0)
    if mask is not None:
        stays |= ~mask
    return torch.where(stays, old, rounded)


def count_zeros(weights: Mapping[str, Tensor], masks: Mapping[str, Tensor] | None = None) -> dict[str, int]:
    """How many entries of each weight are zero, or are hidden by an attached mask.

    >>> count_zeros({"weight": torch.tensor([0.0, 2.0, 0.0])})
    {'weight': 2}
    """
    found = {}
    for name, weight in weights.items():
        there = weight.detach().ne(0)
        if masks is not None and name.endswith("_orig") and name in masks:
            there = there & masks[name]
        found[name] = there.numel() - count_nonzero(there)
    return found


def groups_of(parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Names of parameters that are one memory, seen in the same way, together."""
    groups: dict[Any, list[str]] = {}
    for name, parameter in parameters.items():
        groups.setdefault(identity_of(parameter), []).append(name)
    return list(groups.values())


# ---- What training moves: whole parameters, or low-rank updates of them, with what was removed left as it is.
#
# Law: the model's own tensors are not written to before all is done and found good; until then it computes with
# copies, in float32 or wider, and if anything fails it has its own tensors back.


@dataclass(eq=False)
class Whole:
    """A parameter that moves by itself; ``others`` are parameters of the same memory, whose gradients are its own."""

    parameter: nn.Parameter
    mask: Tensor | None = None
    others: Sequence[nn.Parameter] = ()

    @property
    def leaves(self) -> list[Tensor]:
        return [self.parameter]

    def gather(self) -> None:
        """The gradient of what may move."""
        gradient = _gradient(self.parameter, self.others)
        if gradient is not None and self.mask is not None:
            gradient.mul_(self.mask)

    def place(self) -> None:
        """The model computes with the parameter itself."""


@dataclass(eq=False)
class Factors:
    """``W + mask ∘ (B A)`` of one parameter, of which A (rank, inputs) and B (outputs, rank) move: LoRA (Hu et al.
    2021, arXiv:2106.09685) under a mask, as in SQFT's SparsePEFT (arXiv:2410.03750).

    The model computes with the merged weight at every step, so that merging in the end changes nothing. A is drawn
    uniformly as torch draws a linear layer's weight, B is 0. Of a tensor of matrices, such as fused experts, each has
    its own factors; a convolution's filters are rows.
    """

    parameter: nn.Parameter
    mask: Tensor | None
    rank: int
    generator: torch.Generator
    flat: bool = False
    others: Sequence[nn.Parameter] = ()
    start: Tensor = field(init=False)
    down: Tensor = field(init=False)
    up: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.parameter.detach().clone()
        *batch, outputs, inputs = self._matrix(self.start).shape
        rank = min(self.rank, outputs, inputs)
        drawn = torch.rand((*batch, rank, inputs), generator=self.generator, dtype=torch.float32, device="cpu")
        self.down = ((2 * drawn - 1) / max(inputs, 1) ** 0.5).to(self.start).requires_grad_()
        self.up = torch.zeros(
            (*batch, outputs, rank), dtype=self.start.dtype, device=self.start.device
        ).requires_grad_()

    @property
    def leaves(self) -> list[Tensor]:
        return [self.down, self.up]

    def gather(self) -> None:
        gradient = _gradient(self.parameter, self.others)
        if gradient is None:
            self.down.grad = self.up.grad = None
            return
        if self.mask is not None:
            gradient = gradient * self.mask
        matrix = self._matrix(gradient)
        self.down.grad = self.up.detach().mT @ matrix
        self.up.grad = matrix @ self.down.detach().mT
        self.parameter.grad = None

    @torch.no_grad()
    def place(self) -> None:
        update = (self.up @ self.down).view_as(self.start)
        self.parameter.copy_(self.start + (update if self.mask is None else update * self.mask))

    def _matrix(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(len(tensor), -1) if self.flat else tensor.contiguous()


Mover = Whole | Factors


def _gradient(parameter: nn.Parameter, others: Sequence[nn.Parameter]) -> Tensor | None:
    for other in others:
        if other.grad is not None:
            parameter.grad = other.grad if parameter.grad is None else parameter.grad.add_(other.grad)
            other.grad = None
    return parameter.grad


@dataclass(eq=False)
class Moving:
    """The parameters of a model while they are trained.

    ``own`` are the model's tensors, which are not written to before `finish`; ``masks`` what is removed of them. What
    is sharded can't be taken out of its module, and trains in its place: ``own`` are copies then, of this process's
    parts, which are put back if anything fails.
    """

    parameters: Mapping[str, nn.Parameter]
    masks: Mapping[str, Tensor]
    own: Mapping[str, Tensor]
    in_place: bool = False

    def values(self) -> dict[str, Tensor]:
        """What `finish` will write: of each parameter the new values, in its own dtype; of what is sharded this
        process's part."""
        return everywhere(
            lambda: {
                name: settled(self.own[name], local(parameter.detach()), local_mask(self.masks.get(name)))
                for name, parameter in self.parameters.items()
            }
        )

    @torch.no_grad()
    def finish(self) -> None:
        """Writes the new values into the model's own tensors."""
        for name, values in self.values().items():
            self.own[name].copy_(values)

    @torch.no_grad()
    def put_back(self) -> None:
        """What trained in its place is what `own` says."""
        for name, parameter in self.parameters.items() if self.in_place else ():
            local(parameter).copy_(self.own[name])


def local_mask(mask: Tensor | None) -> Tensor | None:
    """This process's part of a mask."""
    return None if mask is None else local(mask)


@contextlib.contextmanager
def moving(model: nn.Module, trained: Collection[str], masks: Mapping[str, Tensor]) -> Iterator[Moving]:
    """A context in which the model computes with copies of the named parameters, in float32 where their dtype is
    narrower.

    Raises:
        ValueError: a parameter can't be trained here: it is on the meta device, sharded otherwise than by FSDP2 or in
            half precision, or made under inference_mode.
    """
    every = dict(model.named_parameters())
    refuse_unloaded(model, trained)
    for name in trained:
        _check(name, every[name])
    if any(is_sharded(every[name]) for name in trained):
        copies = {name: local(each.detach()).clone() for name, each in every.items() if name in trained}
        sharded = Moving({name: every[name] for name in copies}, masks, copies, in_place=True)
        try:
            yield sharded
        finally:
            sharded.put_back()
        return
    own = {name: each.data for name, each in every.items() if name in trained}  # in one order, however they are named
    narrow = [each for each in (*every.values(), *model.buffers()) if is_narrow(each)]
    before = [(each, each.data) for each in [*(every[name] for name in own), *narrow]]
    try:
        for names in groups_of({name: every[name] for name in own}):
            copy = own[names[0]].to(torch.float32 if is_narrow(every[names[0]]) else None, copy=True)
            for name in names:
                every[name].data = copy
        for each in narrow:
            if is_narrow(each):
                each.data = each.data.float()
        yield Moving({name: every[name] for name in own}, masks, own)
    finally:
        for each, data in before:
            each.data = data


def _check(name: str, parameter: nn.Parameter) -> None:
    if is_sharded(parameter) and is_narrow(parameter):
        raise ValueError(
            f"{name} is sharded in {parameter.dtype}: shard it in float32, and let autocast= or fully_shard's "
            "MixedPrecisionPolicy compute in half precision."
        )
    if parameter.is_inference():
        raise ValueError(f"{name} was made under torch.inference_mode and can't be trained; make the model without it.")


def movers_for(
    model: nn.Module,
    named: Mapping[str, nn.Parameter],
    masks: Mapping[str, Tensor],
    *,
    rank: int | None = None,
    adapted: Collection[str] = (),
    generator: torch.Generator | None = None,
) -> list[Mover]:
    """What moves each of the named parameters, each memory once: itself, or factors where it is ``adapted``."""
    flat = {
        id(each) for module in model.modules() if private.is_convolution(module)
        for each in private.parameters_of(module).values()
    }  # fmt: skip
    movers: list[Mover] = []
    for names in groups_of(named):
        first, others = named[names[0]], [named[name] for name in names[1:]]
        mask = next((masks[name] for name in names if name in masks), None)
        if rank is not None and any(name in adapted for name in names):
            assert generator is not None
            movers.append(Factors(first, mask, rank, generator, id(first) in flat, others))
        else:
            movers.append(Whole(first, mask, others))
    return movers


# ---- AdamW with a warm-up, a cosine decay and clipped gradients, which can be resumed after any step.
#
# Law: what a step does follows from the state before it and its number alone; a step that is not finite is an error,
# and changes nothing. Of several processes each takes the slope of its part of the loss; all step by the sum.

WARMUP = 0.1  # of the steps
FUSED = ("cpu", "cuda")  # where AdamW takes one pass over memory, in place of one for each of its operations


def rate_at(step: int, steps: int, rate: float) -> float:
    """The learning rate of a step from 0: linearly up over a tenth of the steps, then down by half a cosine.

    >>> [round(rate_at(step, 10, 1.0), 3) for step in range(10)]
    [1.0, 0.976, 0.905, 0.794, 0.655, 0.5, 0.345, 0.206, 0.095, 0.024]
    """
    warm = max(1, round(WARMUP * steps))
    if step < warm:
        return rate * (step + 1) / warm
    return rate * 0.5 * (1 + math.cos(math.pi * (step - warm + 1) / (steps - warm + 1)))


def order_of(seed: int, round_: int, count: int) -> list[int]:
    """The order of so many batches in one round, which follows from the seed and the number of the round.

    >>> sorted(order_of(0, 3, 5)), order_of(0, 3, 5) == order_of(0, 3, 5)
    ([0, 1, 2, 3, 4], True)
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + round_) % (1 << 63))
    return [int(each) for each in torch.randperm(count, generator=generator, device="cpu")]


CLIP = 1.0  # the largest norm of a step's gradients; they are scaled down to it


@torch.no_grad()
def add_slopes(leaves: Sequence[Tensor], shared: int) -> None:
    """The gradients of all processes' parts of a loss, added up where each has one of its own. What FSDP shards has
    their mean already, of losses that were taken so many times (``shared``)."""
    if rank_and_world()[1] == 1:
        return
    whole_ones = [leaf for leaf in leaves if not is_sharded(leaf)]
    if not whole_ones:
        return
    there = summed(
        torch.tensor([leaf.grad is not None for leaf in whole_ones], dtype=torch.bool, device=leaves[0].device).int()
    )
    for leaf, count in zip(whole_ones, there.tolist(), strict=True):
        if count:  # of experts some processes may have reached none
            leaf.grad = summed(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).div_(shared)


class Descent:
    """The optimizer of some movers (`secateur.recovery.descent`).

    Args:
        movers: what moves.
        steps: how many there will be.
        rate: the highest learning rate.
    """

    def __init__(self, movers: Sequence[Mover], steps: int, *, rate: float) -> None:
        self.movers, self.steps, self.rate = movers, steps, rate
        self.leaves = [leaf for mover in movers for leaf in mover.leaves]
        self.device = self.leaves[0].device
        # fused looks at no strides
        fused = all(leaf.device.type in FUSED and leaf.is_contiguous() for leaf in self.leaves)
        self.optimizer = torch.optim.AdamW(self.leaves, lr=rate, weight_decay=0.0, fused=fused)
        self.done = 0

    def step(self, loss: Tensor) -> float:
        """One step down a loss, which is returned as a number.

        Raises:
            ValueError: the loss or its gradients are NaN or infinite, or it depends on nothing that moves.
        """
        number, step = float(summed(loss.detach())), self.done + 1
        if not math.isfinite(number):
            raise ValueError(f"the loss of step {step} is {number}; look at the batches, or lower rate=.")
        if not loss.requires_grad:
            raise ValueError("the loss depends on no parameter that is trained; was the model run under no_grad?")
        sharded = next(filter(is_sharded, self.leaves), None)
        shared = 1 if sharded is None else rank_and_world()[1] // times_the_mean(sharded)
        (loss * shared if shared > 1 else loss).backward()  # type: ignore[no-untyped-call]
        for mover in self.movers:
            mover.gather()
        add_slopes(self.leaves, shared)
        norm = whole(torch.nn.utils.clip_grad_norm_(self.leaves, CLIP))
        if not bool(norm.isfinite()):
            raise ValueError(f"the gradients of step {step} are not finite; look at the batches, or lower rate=.")
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(self.done, self.steps, self.rate)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for mover in self.movers:
            mover.place()
        self.done += 1
        return number

    def state(self) -> dict[str, Tensor]:
        """What is to be kept for a run that goes on: the leaves, and what the optimizer remembers of each; of what is
        sharded this process's part."""
        found: dict[str, Tensor] = {}
        for at, leaf in enumerate(self.leaves):
            found[f"{at}.value"] = local(leaf.detach())
            for key, value in self.optimizer.state.get(leaf, {}).items():
                found[f"{at}.{key}"] = local(value.detach())
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], done: int) -> None:
        """Goes on after so many steps.

        Raises:
            ValueError: the state is of other leaves, or holds what is no number.
        """
        remembered: list[dict[str, Any]] = [{} for _ in self.leaves]
        values: list[Tensor | None] = [None] * len(self.leaves)
        for name, value in state.items():
            at, _, key = name.partition(".")
            if (
                not at.isdecimal()
                or int(at) >= len(self.leaves)
                or key not in ("value", "step", "exp_avg", "exp_avg_sq")
            ):
                raise ValueError(f"holds {name}, which is nothing of these parameters")
            leaf = self.leaves[int(at)]
            shape = torch.Size() if key == "step" else local(leaf).shape
            if value.shape != shape or (key != "step" and value.dtype != leaf.dtype):
                raise ValueError(f"{name} has shape {tuple(value.shape)} of {value.dtype}")
            if not bool(value.isfinite().all()):
                raise ValueError(f"{name} is not finite")
            if key == "value":
                values[int(at)] = value
            else:
                there = key != "step" or self.optimizer.defaults["fused"]
                put = value.to(leaf.device if there else value.device, copy=True)
                remembered[int(at)][key] = put if key == "step" else sharded_as(put, leaf)
        if any(value is None for value in values) or any(len(each) not in (0, 3) for each in remembered):
            raise ValueError("has no full state of the optimizer")
        for leaf, held, own in zip(self.leaves, values, remembered, strict=True):
            assert held is not None
            local(leaf).copy_(held)
            if own:
                self.optimizer.state[leaf] = own
        for mover in self.movers:
            mover.place()
        self.done = done
