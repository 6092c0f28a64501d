"""The reference for a model without some of its experts: the original, whose router can not choose them. An offloaded
probe of a large model: its blocks have their weights only while they run.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from secateur.coupling import (
    CallSites,
    Coupling,
    Group,
    Kept,
    Spot,
    cycle_choices,
    leaves,
    name_of,
    tensors_of_tree,
    written_in_others,
)
from secateur.models import RunAgain, Weights, find_blocks
from secateur.shrinking.apply import carry_out, sliced, zero
from secateur.shrinking.plan import Factors, Plan, factors_of, multiplied
from secateur.support import private, tensors_of

# ---- The reference for a model without some of its experts: the original, whose router can not choose them.
#
# Law: a model without expert e equals the original whose router's logit for e is minus infinity: where the logit is
# made, and wherever a value made from it is compared with others', such as behind a bias that was added to a share.
# Beside the choices that the weights make, each expert that stays is preferred once: an expert that receives no token
# would not be compared at all.

_TURNS = 2  # choices in which others are preferred


@dataclass(frozen=True)
class RouterMask:
    """Which units the router can not choose, and which it prefers.

    Attributes:
        looks: where scores are made and compared, ``{spot: (made, dimension, which stay)}``.
        gone: whether the others are still in the model, and have to be masked.
        turn: which of those that stay are preferred, one an entry after the other; None: those that are.
    """

    looks: Mapping[Spot, Sequence[tuple[bool, int, npt.NDArray[np.bool_]]]] = field(repr=False)
    gone: bool
    turn: int | None = None

    def through(
        self, spot: Spot, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """The result of a call at a spot, as the router masks it."""
        can_choose, more = self._compares(spot, args, kwargs)
        out = call(*can_choose, **more)
        return self._made(spot, self._taken(args, kwargs, out) if name == "topk" else out)

    def _compares(
        self, spot: Spot, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments of a call: those that are gone have a score of minus infinity."""
        if not self.gone or spot not in self.looks:
            return args, kwargs
        first = next(iter(tensors_of_tree((args, kwargs))), None)
        for made, at, stays in self.looks[spot]:
            if made or first is None or not first.is_floating_point() or first.shape[at] != len(stays):
                continue
            without = first.masked_fill(_along(~stays, first, at), -math.inf)
            args = tuple(without if each is first else each for each in args)
            kwargs = {key: without if each is first else each for key, each in kwargs.items()}
            first = without
        return args, kwargs

    def _taken(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Any:
        """The result of a ``topk``. One that takes all only puts them in order, those without a chance last: each has
        the value that its logit of minus infinity gave it, such as a share of zero, and not minus infinity."""
        first = next(iter(tensors_of_tree((args, kwargs))))
        if not self.gone or out.values.shape != first.shape:
            return out
        at = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        return type(out)((first.gather(at, out.indices), out.indices))

    def _made(self, spot: Spot, out: Any) -> Any:
        """The result of a call."""
        for made, at, stays in self.looks.get(spot, ()):
            if not made or not isinstance(out, Tensor):
                continue
            there = stays if self.gone else stays[stays]
            if out.shape[at] != len(there):
                continue
            if self.turn is not None:
                places = torch.from_numpy(np.flatnonzero(there)).to(out.device)
                out = cycle_choices(out, at, places, self.turn)
            if self.gone:
                out = out.masked_fill(_along(~stays, out, at), -math.inf)
        return out


def _along(mask: npt.NDArray[np.bool_], tensor: Tensor, at: int) -> Tensor:
    shape = [1] * tensor.dim()
    shape[at] = -1
    return torch.from_numpy(mask).reshape(shape).to(tensor.device)


@contextlib.contextmanager
def without_experts(model: nn.Module, coupling: Coupling, kept: Kept) -> Iterator[None]:
    """A context in which the router of a model can choose only the units that stay."""
    mask = RouterMask(_looks(coupling, kept), gone=True)
    with CallSites(model) as where, _Masked(mask, where):
        yield


class _Masked(TorchFunctionMode):
    """Calls as a router mask lets them be."""

    def __init__(self, mask: RouterMask, where: CallSites) -> None:
        super().__init__()
        self.mask, self.where = mask, where

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = name_of(func)
        body = written_in_others(func, name)
        if body is not None:
            with self:
                return body(*args, **kwargs or {})
        return self.mask.through(self.where.spot(name), name, func, args, kwargs or {})


def _looks(coupling: Coupling, kept: Kept) -> dict[Spot, list[tuple[bool, int, npt.NDArray[np.bool_]]]]:
    looks: dict[Spot, list[tuple[bool, int, npt.NDArray[np.bool_]]]] = {}
    for look in coupling.looks():
        looks.setdefault(look.spot, []).append((look.made, look.at, coupling.positions(look.dim, kept)))
    return looks


def oracles(coupling: Coupling, kept: Kept) -> tuple[list[RouterMask | None], list[RouterMask | None]]:
    """Pairs of router masks to compare: for the original without the units that leave, and for the smaller model.
    [None] where no such units leave, and the example reaches all of them."""
    names = {each.name for each in coupling.groups if each.chosen and each.name in kept and not kept[each.name].all()}
    if not names and not coupling.turns:
        return [None], [None]
    looks = _looks(coupling, {name: mask for name, mask in kept.items() if name in names})
    turns = [None, *range(max(_TURNS, coupling.turns))]
    return (
        [RouterMask(looks, gone=True, turn=turn) for turn in turns],
        [RouterMask(looks, gone=False, turn=turn) for turn in turns],
    )


def zeroed_of(coupling: Coupling, kept: Kept) -> Kept:
    """What becomes zero in the original: not those that are chosen between, which have no chance, nor outputs, which
    only stay out of the comparison."""
    zeroed = {group.name for group in coupling.groups if group.zeroed}
    return {name: mask for name, mask in kept.items() if name in zeroed}


def zero_all(tensors: Mapping[str, Tensor], plan: Plan) -> None:
    """The entries that a plan takes are zero, in copies of the data."""
    for name, (_, indices) in plan.tensors.items():
        if not isinstance(tensors[name], nn.Parameter):
            continue  # where a weight is zero, statistics and constants have no effect
        tensors[name].data = tensors[name].data.clone()
        for at, places in indices.items():
            gone = torch.ones(tensors[name].shape[at], dtype=torch.bool, device="cpu")
            gone[torch.from_numpy(places)] = False
            zero(tensors[name], at, gone)


def kept_by(coupling: Coupling, plan: Plan) -> dict[str, npt.NDArray[np.bool_]]:
    """The units that a plan keeps of each group that a router chooses from, or whose units are outputs."""
    found = {}
    for group in coupling.groups:
        if group.zeroed:
            continue
        for name, at in group.members:
            if at in plan.tensors.get(name, ((), {}))[1]:
                found[group.name] = _stays(coupling, group, name, at, plan.tensors[name][1][at])
                break
    return found


def without_chosen(coupling: Coupling, plan: Plan) -> Plan:
    """What a plan takes of other dimensions than those of units that are chosen between, or outputs."""
    axes = {group.axis for group in coupling.groups if not group.zeroed}
    tensors = {}
    for name, (shape, kept) in plan.tensors.items():
        cuts = dict(kept)
        for at in kept:
            if not axes.isdisjoint(leaves(coupling.dims(name)[at])):
                cuts[at] = _without(coupling, axes, name, at, kept[at])
        tensors[name] = (shape, cuts)
    return Plan(tensors, [])


def _without(
    coupling: Coupling, axes: Iterable[Any], name: str, at: int, indices: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The positions that stay of a dimension if all units of these axes stay."""
    dim = coupling.dims(name)[at]
    others = {
        group.name: _stays(coupling, group, name, at, indices)
        for group in coupling.groups
        if group.axis not in axes and group.axis in leaves(dim)
    }
    return np.flatnonzero(coupling.positions(dim, others))


def _stays(
    coupling: Coupling, group: Group, name: str, at: int, indices: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Which units of a group have a position among these of a dimension."""
    return np.isin(np.arange(group.size), coupling.indices(group, name, at)[indices])


# ---- An offloaded probe of a large model: its blocks have their weights only while they run.
#
# Law: the probe holds at any moment the weights of one block in float64, beside those outside of blocks; every pass
# sees the same weights, all of them random. A removal that is found right here is right as in
# `secateur.shrinking.proof`; any other result is inconclusive and needs a whole probe.

LARGE = 1 << 24  # parameters in blocks: copies of a smaller model in float64 stay below half a gigabyte
_TABLE = 1 << 22  # entries, from which on a parameter outside of blocks is a table, such as an embedding
_POOL = 1_048_573  # random numbers, again and again: a prime, so that no two rows of a matrix have the same ones


class OffloadedProbe(Weights):
    """A module in float64 whose blocks have their weights only while they run. In a backward pass, blocks are run
    again.

    Args:
        module: its parameters inside blocks are on the meta device.
        blocks: their names.
        names: ``{id of such a parameter: what its values are known by}``.
        values: of parameters, as they are now; asked each time a block runs.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[str], names: Mapping[int, str], values: _Values) -> None:
        self.module, self.names, self.values = module, names, values
        self._others: list[OffloadedProbe] = []
        self._away: dict[str, list[tuple[dict[str, Any], str, nn.Parameter]]] = {}
        self._blocks = {name: module.get_submodule(name) for name in blocks}
        for name, block in self._blocks.items():
            again = RunAgain(name, block.forward, self, _run)
            block.forward = functools.partial(self._called, name, block.forward, again)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Lets go of the module: a circle of references would keep it until it is looked for."""
        for block in self._blocks.values():
            del block.forward
        for other in self._others:
            other.__exit__()

    def load(self, name: str, *, finished: bool) -> None:  # noqa: ARG002
        """A block has its weights, which are forgotten afterwards."""
        lent: dict[int, nn.Parameter] = {}
        away = self._away.setdefault(name, [])
        with private.unwatched(), torch.no_grad():
            for module in self._blocks[name].modules():
                held = private.parameters_of(module)
                for key, parameter in held.items():
                    if parameter is not None and id(parameter) in self.names:
                        if id(parameter) not in lent:
                            value = self.values(self.names[id(parameter)])
                            lent[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                        away.append((held, key, parameter))
                        held[key] = lent[id(parameter)]

    def unload(self, name: str) -> None:
        for held, key, parameter in self._away.pop(name, []):
            held[key] = parameter

    def _called(self, name: str, forward: Callable[..., Any], again: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return again(*args, **kwargs)
        self.load(name, finished=False)
        try:
            return forward(*args, **kwargs)
        finally:
            self.unload(name)

    def zero(self, plan: Plan) -> None:
        """The entries that a plan removes are zero from now on."""
        lent = set(self.names.values())
        zero_all(
            tensors_of(self.module), Plan({name: each for name, each in plan.tensors.items() if name not in lent}, [])
        )
        self.values.zeros = plan

    def cut(self, plan: Plan) -> None:
        """A plan is carried out."""
        carry_out(self.module, plan, None)
        self.values.cut(plan)

    def also(self, built: nn.Module, plan: Plan) -> OffloadedProbe:
        """A model of the same tensors, whose parameters are on the meta device, with the weights that a plan leaves; it
        scales those of blocks alone.

        Raises:
            RuntimeError: it has others.
        """
        every = dict(self.module.named_parameters(remove_duplicate=False))
        lent = {name: self.names[id(each)] for name, each in every.items() if id(each) in self.names}
        built.load_state_dict(self.module.state_dict(), assign=True)
        held = dict(built.named_parameters(remove_duplicate=False))
        names = {id(held[name]): known for name, known in lent.items()}
        values = copy.copy(self.values)
        values.cut(plan)
        self._others.append(OffloadedProbe(built, list(self._blocks), names, values))
        return self._others[-1]


def _run(_: str, run: Callable[[], None]) -> None:
    run()


def lending_of(model: nn.Module) -> OffloadedProbe | None:
    """A probe of a model, made as `secateur.shrinking.proof.probe_of` makes one; None for a model that is small,
    or has no blocks to take apart."""
    try:
        blocks = find_blocks(model)
    except ValueError:
        return None
    inside = {module for block in blocks.values() for module in block.modules()}
    others = [module for module in model.modules() if module not in inside]
    outside = {id(each) for module in others for each in module.parameters(recurse=False)}
    ours = {id(each) for block in blocks.values() for each in block.parameters()} - outside
    lent = {name: each for name, each in model.named_parameters() if id(each) in ours}
    if sum(each.numel() for each in lent.values()) < LARGE or any(map(private.flat_weights_of, inside)):
        return None
    values = _Values(model)
    resting: dict[str, nn.Parameter] = {}
    for name, each in model.named_parameters():
        with torch.no_grad():
            value = torch.empty_like(each, device="meta") if name in lent else values(name)
        # what large tables would get as gradients takes more memory than all else; they pass gradients on all the same
        is_learned = each.requires_grad and (name in lent or each.numel() < _TABLE)
        resting[name] = nn.Parameter(value, requires_grad=is_learned)
    memo = {id(each): resting[name] for name, each in model.named_parameters()}
    probe = copy.deepcopy(model, memo).double()
    for each in probe.parameters():
        if not each.is_meta and each.requires_grad:  # that there is a gradient is enough
            each.register_post_accumulate_grad_hook(_forget)  # type: ignore[no-untyped-call]
    return OffloadedProbe(probe, list(blocks), {id(resting[name]): name for name in lent}, values)


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


class _Values:
    """The values of a probe: those of a model and as much noise, then as plans say."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors = dict(model.named_parameters())
        self.zeros: Plan | None = None
        self.cuts: Plan | None = None
        self._factors: Mapping[str, Factors] = {}
        self._spread: dict[str, float] = {}
        self._pool = torch.randn(_POOL, dtype=torch.float64, generator=torch.Generator().manual_seed(0), device="cpu")

    def cut(self, plan: Plan) -> None:
        self.cuts, self._factors = plan, factors_of(plan)

    def __call__(self, name: str) -> Tensor:
        tensor = self.tensors[name].detach()
        if not tensor.is_floating_point():
            value = tensor.clone()
        else:
            value = tensor.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
            self._noisy(name, value)
        if self.cuts is not None:
            return multiplied(sliced(value, self.cuts.tensors.get(name, ((), {}))[1]), self._factors.get(name, []))
        if self.zeros is not None:
            for at, places in self.zeros.tensors.get(name, ((), {}))[1].items():
                gone = torch.ones(value.shape[at], dtype=torch.bool, device="cpu")
                gone[torch.from_numpy(places)] = False
                zero(value, at, gone)
        return value

    def _noisy(self, name: str, value: Tensor) -> None:
        """As `probe_of` makes a weight noisy, with numbers that are known by its name."""
        if name not in self._spread:
            self._spread[name] = max(0.5 * (float(value.std()) if value.numel() > 1 else 0.0), 0.02)
        flat, start, done = value.view(-1), zlib.crc32(name.encode()) % _POOL, 0
        while done < len(flat):
            part = self._pool[start : start + len(flat) - done].to(value.device)
            flat[done : done + len(part)].add_(part, alpha=self._spread[name])
            start, done = 0, done + len(part)
