"""Statistics of experts on data: how many tokens each receives, and how large its outputs are.

Law: nothing changes, and names of classes do not matter. An expert's contribution for a token is its outputs times the
model's own weight for them, renormalized where the model does that; padding, and tokens with a contribution of zero, do
not count.

The weight is the derivative of the mixture's output by the expert's: the mixture is run once more on its inputs, one
output gradient is used for all tokens, and the gradient at an expert's outputs is that gradient times the weight. So it
is the same for experts that run in turn or all at once, with the weight on their outputs or inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from secateur.blockwise import Tokens, gathered, prepared
from secateur.coupling import Axis, Coupling, Group, tensors_of_tree
from secateur.shrinking.measuring import check_finite
from secateur.support import Forward, device_of, mapped, moved, run_batch, tensors_in, track, unchanged, unwrapped

__all__ = ["RANKS", "Routed", "Watching", "check_seen", "mixture_of", "routed_in_memory", "scores_by", "signs"]

RANKS = ("reap", "frequency", "criterion")

Array = npt.NDArray[np.float64]


@dataclass(eq=False)
class Routed:
    """Sums over the tokens that were sent to each unit: how many, and of the weight times the norm of the outputs."""

    tokens: Array
    weighted: Array

    @classmethod
    def zeros(cls, units: int) -> Routed:
        return cls(np.zeros(units), np.zeros(units))

    def everywhere(self) -> Routed:
        """The sums of all processes."""
        tokens, weighted = (sum(gathered(each)) for each in (self.tokens, self.weighted))
        return Routed(np.asarray(tokens), np.asarray(weighted))

    @property
    def unreached(self) -> tuple[int, ...]:
        """Units that no token was sent to."""
        return tuple(np.flatnonzero(self.tokens == 0).tolist())

    def scores(self, rank: str) -> Array:
        """Of each unit, higher = keep; zero for one that no token was sent to.

        >>> Routed(np.array([2.0, 0.0]), np.array([3.0, 0.0])).scores("reap")
        array([1.5, 0. ])
        """
        if rank == "frequency":
            return self.tokens.copy()
        return self.weighted / np.maximum(self.tokens, 1)


def scores_by(rank: str, routed: Routed, by_criterion: Array, *, unreached_first: bool) -> Tensor:
    """Scores of experts by their statistics on data, higher = keep; the criterion orders equal ones.

    An expert that no token reached has no statistics: the criterion places it among all, unless it is to leave first.

    >>> routed = Routed(np.array([1.0, 0.0, 1.0, 1.0]), np.array([5.0, 0.0, 1.0, 3.0]))
    >>> scores_by("reap", routed, np.array([1.0, 9.0, 2.0, 3.0]), unreached_first=False).argsort().tolist()
    [2, 3, 0, 1]
    >>> scores_by("reap", routed, np.array([1.0, 9.0, 2.0, 3.0]), unreached_first=True).argsort().tolist()
    [1, 2, 3, 0]
    """
    if rank == "criterion":
        return torch.from_numpy(by_criterion)
    scores, reached = routed.scores(rank), routed.tokens > 0
    count = len(scores)
    places = np.empty(count)
    places[np.argsort(by_criterion, kind="stable")] = np.arange(count)
    if reached.any() and not unreached_first:
        known = np.sort(scores[reached])
        share = places[~reached] / max(1, count - 1)
        scores[~reached] = np.interp(share, np.linspace(0, 1, len(known)), known)
    elif not unreached_first:
        scores = places.copy()
    else:
        scores[~reached] = -1.0
    ranks = np.empty(count)
    ranks[np.lexsort((places, scores))] = np.arange(1, count + 1)
    return torch.from_numpy(ranks)


def mixture_of(model: nn.Module, group: Group) -> tuple[str, nn.Module]:
    """The innermost module with a forward pass that holds all members of a group: its router and its experts."""
    paths = [name.split(".")[:-1] for name, _ in group.members]
    common: list[str] = []
    for steps in zip(*paths, strict=False):
        if len(set(steps)) > 1:
            break
        common.append(steps[0])
    while common and not _runs(model.get_submodule(".".join(common))):
        common.pop()
    path = ".".join(common)
    return path, model.get_submodule(path)


def _runs(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


@dataclass(eq=False)
class Watching:
    """While it is entered, sums what the mixtures of a model do; `routed` is of each group."""

    model: nn.Module
    coupling: Coupling
    groups: Sequence[Group]
    tokens: Tokens = field(default_factory=Tokens)
    routed: dict[Axis, Routed] = field(default_factory=dict)

    def forward(self, forward: Forward | None) -> Forward:
        """A forward function that knows which tokens of a batch are padding."""

        def run(model: nn.Module, batch: Any) -> Any:
            self.tokens = Tokens.of(batch)
            return run_batch(model, batch) if forward is None else forward(model, batch)

        return run

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        hooks = []
        for group in self.groups:
            self.routed.setdefault(group.axis, Routed.zeros(group.size))
            _, module = mixture_of(self.model, group)
            hooks.append(module.register_forward_hook(self._hook(group), with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, group: Group) -> Any:
        def see(module: nn.Module, args: Any, kwargs: Any, _output: Any) -> None:
            self._see(group, module, args, kwargs)

        return see

    def _see(self, group: Group, module: nn.Module, args: Any, kwargs: Any) -> None:
        parameters = dict(self.model.named_parameters())
        owned = {name: parameters[name] for name, at in group.members if at == 0 and name in parameters}
        places = {name: self.coupling.indices(group, name, 0) for name in owned}
        args, kwargs = mapped((args, kwargs), lambda tensor: tensor.detach().clone())
        watch = _Outputs({name: (each, places[name]) for name, each in owned.items()})
        with torch.enable_grad(), watch:
            again = module.forward(*args, **kwargs)
        out = next(tensor for tensor in tensors_in(again) if tensor.is_floating_point())
        if not watch.seen or not out.requires_grad:
            return
        ways = torch.ones_like(out) * signs(out.shape[-1]).to(out)
        own = self.tokens.own
        if own is not None and own.numel() == out.shape[:-1].numel():
            ways = ways * own.reshape(out.shape[:-1]).to(ways)[..., None]
        with torch.enable_grad():
            moved_by = (out * ways).sum()
        slopes = torch.autograd.grad(moved_by, [leaf for leaf, _ in watch.seen], allow_unused=True)
        found = self.routed[group.axis]
        for (leaf, units), slope in zip(watch.seen, slopes, strict=True):
            if slope is None or not leaf.numel():
                continue
            norms = leaf.detach().double().norm(dim=-1)
            weights = slope.double().norm(dim=-1) / leaf.shape[-1] ** 0.5
            sent = (weights * norms) > 0
            for total, each in ((found.tokens, sent), (found.weighted, weights * norms)):
                np.add.at(total, units, each.reshape(len(units), -1).sum(1).cpu().numpy())


class _Outputs(TorchFunctionMode):
    """Sees the outputs of calls that take an expert's part of a parameter: whose they are; a slope reaches those that
    nothing else of the experts is multiplied with or added to."""

    def __init__(self, owned: Mapping[str, tuple[Tensor, npt.NDArray[np.int64]]]) -> None:
        super().__init__()
        self.owned = {each.untyped_storage().data_ptr(): (each, units) for each, units in owned.values()}
        self.seen: list[tuple[Tensor, list[int]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not isinstance(out, Tensor) or not out.is_floating_point() or not out.dim() or self._is_theirs(out):
            return out
        found = [
            units for each in tensors_of_tree((args, kwargs or {})) if (units := self._units_of(each, out)) is not None
        ]
        if not found:
            return out
        leaf = out.detach().requires_grad_()
        self.seen.append((leaf, found[0]))
        return leaf.clone()  # what the model changes in place is no leaf

    def _is_theirs(self, tensor: Tensor) -> bool:
        return tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() in self.owned

    def _units_of(self, tensor: Tensor, out: Tensor) -> list[int] | None:
        """The unit whose part this is, or those of all along the first dimension of the output."""
        if not self._is_theirs(tensor) or not tensor.numel():
            return None
        parameter, units = self.owned[tensor.untyped_storage().data_ptr()]
        if tensor.numel() == parameter.numel():
            each_has_its_own = tensor.dim() == out.dim() == 3 and tensor.shape[0] == out.shape[0] == len(units)
            return units.tolist() if each_has_its_own else None
        row = parameter.stride(0)
        first = (tensor.storage_offset() - parameter.storage_offset()) // row
        its = set(units[first : first + -(-tensor.numel() // row)].tolist())
        return list(its) if len(its) == 1 and min(its) >= 0 else None


def signs(width: int) -> Tensor:
    """A way to move outputs, the same for all tokens; no sum over it vanishes for reasons of symmetry."""
    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (width,), generator=draw) * 2.0 - 1.0


def routed_in_memory(
    model: nn.Module, coupling: Coupling, groups: Sequence[Group], batches: Iterable[Any], forward: Forward | None
) -> dict[Axis, Routed]:
    """The statistics of the experts of these groups, from one run of the batches through a model in memory.

    Raises:
        ValueError: of no expert of a mixture were outputs seen.
    """
    inner = unwrapped(model)
    watching = Watching(inner, coupling, groups)
    run = watching.forward(forward)
    with unchanged(inner), prepared(inner), torch.no_grad(), watching.watching():
        for batch in track(list(batches), "watching experts"):
            run(inner, moved(batch, device_of(inner)))
    try:
        check_seen(groups, watching.routed)
    except ValueError:
        check_finite(inner)  # which may be why
        raise
    return watching.routed


def check_seen(groups: Sequence[Group], routed: Mapping[Axis, Routed]) -> None:
    """Raises ValueError for a mixture whose outputs were not seen, or are not finite."""
    for group in groups:
        found = routed[group.axis]
        if not found.tokens.any():
            raise ValueError(
                f"{group.name}: no outputs of the experts that it chooses between were seen while the batches ran, so "
                'data cannot rank them; say rank_experts="criterion".'
            )
        if not np.isfinite(found.weighted).all():
            raise ValueError(f"{group.name}: the outputs of its experts hold NaN or infinity; correct the weights.")
