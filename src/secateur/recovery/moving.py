"""What training moves: whole parameters, or low-rank updates of them, with what was removed left as it is.

Law: the model's own tensors are not written to before all is done and found good; until then it computes with copies,
in float32 or wider, and if anything fails it has its own tensors back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from secateur.recovery.zeros import groups_of, settled
from secateur.support import is_sharded, private

__all__ = ["Factors", "Moving", "Whole", "check_loaded", "movers_for", "moving", "widened_batch"]


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
        drawn = torch.rand((*batch, rank, inputs), generator=self.generator, dtype=torch.float32)
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

    ``own`` are the model's tensors, which are not written to before `finish`; ``masks`` what is removed of them.
    """

    parameters: Mapping[str, nn.Parameter]
    masks: Mapping[str, Tensor]
    own: Mapping[str, Tensor]

    def values(self) -> dict[str, Tensor]:
        """What `finish` will write: of each parameter the new values, in its own dtype."""
        return {
            name: settled(self.own[name], parameter.detach(), self.masks.get(name))
            for name, parameter in self.parameters.items()
        }

    @torch.no_grad()
    def finish(self) -> None:
        """Writes the new values into the model's own tensors."""
        for name, values in self.values().items():
            self.own[name].copy_(values)


@contextlib.contextmanager
def moving(model: nn.Module, trained: Collection[str], masks: Mapping[str, Tensor]) -> Iterator[Moving]:
    """A context in which the model computes with copies of the named parameters, in float32 where their dtype is
    narrower.

    Raises:
        ValueError: a parameter can't be trained here: it is on the meta device, sharded, or made under inference_mode.
    """
    every = dict(model.named_parameters())
    for name in trained:
        _check(name, every[name])
    own = {name: each.data for name, each in every.items() if name in trained}  # in one order, however they are named
    narrow = [each for each in (*every.values(), *model.buffers()) if _is_narrow(each)]
    before = [(each, each.data) for each in [*(every[name] for name in own), *narrow]]
    try:
        for names in groups_of({name: every[name] for name in own}):
            copy = own[names[0]].to(torch.float32 if _is_narrow(every[names[0]]) else None, copy=True)
            for name in names:
                every[name].data = copy
        for each in narrow:
            if _is_narrow(each):
                each.data = each.data.float()
        yield Moving({name: every[name] for name in own}, masks, own)
    finally:
        for each, data in before:
            each.data = data


def check_loaded(name: str, parameter: nn.Parameter) -> None:
    """ValueError for a parameter without values."""
    if parameter.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values; load the model first.")


def _check(name: str, parameter: nn.Parameter) -> None:
    check_loaded(name, parameter)
    if is_sharded(parameter):
        raise ValueError(f"{name} is sharded; recover trains a model that one process holds.")
    if parameter.is_inference():
        raise ValueError(f"{name} was made under torch.inference_mode and can't be trained; make the model without it.")


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() < 4 and not tensor.is_meta


def widened_batch(tensor: Tensor) -> Tensor:
    """A tensor of a batch as a model in float32 takes it."""
    return tensor.float() if _is_narrow(tensor) else tensor


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
