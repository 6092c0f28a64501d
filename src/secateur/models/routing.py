"""Statistics of experts on data: how many tokens each receives, and how large its outputs are.

Law: nothing changes, and names of classes do not matter. An expert's contribution for a token is its outputs times
the model's own weight for them, renormalized where the model does that; padding, and tokens with a contribution of
zero, do not count.

The weight is the derivative of the mixture's output by the expert's: the mixture is run once more on its inputs,
one output gradient is used for all tokens, and the gradient at an expert's outputs is that gradient times the
weight. So it is the same for experts that run in turn or all at once, with the weight on their outputs or inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from secateur.coupling import Coupling, Group, name_of, operation, tensors_of_tree
from secateur.models.batches import check_finite
from secateur.models.hosts import Host
from secateur.models.jobs import RunAlong
from secateur.models.products import Tokens
from secateur.models.replay import Replay
from secateur.support import Between, all_gather, mapped, tensors_in

MOST = 1e300  # of a sum

Array = npt.NDArray[np.float64]


@dataclass(eq=False)
class Routed:
    """Sums over the tokens that were sent to each unit: how many, and of the weight times the norm of the outputs."""

    tokens: Annotated[Array, Between(0, MOST)]
    weighted: Annotated[Array, Between(0, MOST)]

    @classmethod
    def zeros(cls, units: int) -> Routed:
        return cls(np.zeros(units), np.zeros(units))

    def everywhere(self) -> Routed:
        """The sums of all processes."""
        tokens, weighted = (sum(all_gather(each)) for each in (self.tokens, self.weighted))
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
    while common and not has_forward(model.get_submodule(".".join(common))):
        common.pop()
    path = ".".join(common)
    return path, model.get_submodule(path)


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called: a list of modules cannot."""
    return type(module).forward is not nn.Module.forward


@dataclass(eq=False)
class Watching:
    """While it is entered, sums what the mixtures of a model do; `routed` is of each group."""

    model: nn.Module
    coupling: Coupling
    groups: Sequence[Group]
    replay: Replay | None = None
    routed: dict[str, Routed] = field(default_factory=dict)
    last: dict[str, set[str]] = field(default_factory=dict)  # the parameters whose products the mixture adds up

    def run(self, host: Host) -> None:
        """Runs a model on its batches, watched."""
        with self.watching(), host.running() as (replay, blocks):
            self.replay = replay
            for _ in blocks:
                pass

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        hooks = []
        for group in self.groups:
            self.routed.setdefault(group.name, Routed.zeros(group.size))
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
        assert self.replay is not None
        own = Tokens.of(self.replay.batches[self.replay.at]).own
        if own is not None and own.numel() == out.shape[:-1].numel():
            ways = ways * own.reshape(out.shape[:-1]).to(ways)[..., None]
        with torch.enable_grad():
            moved_by = (out * ways).sum()
        slopes = torch.autograd.grad(moved_by, [leaf for leaf, *_ in watch.seen], allow_unused=True)
        found = self.routed[group.name]
        for (leaf, units, names), slope in zip(watch.seen, slopes, strict=True):
            if slope is None or not leaf.numel():
                continue
            self.last.setdefault(group.name, set()).update(names)
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
        self.owned = {each.untyped_storage().data_ptr(): (each, units, name) for name, (each, units) in owned.items()}
        self.seen: list[tuple[Tensor, list[int], frozenset[str]]] = []  # and of which parameters it is made
        self._gave: dict[int, tuple[Tensor, frozenset[str]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not isinstance(out, Tensor) or not out.is_floating_point() or not out.dim() or self._is_theirs(out):
            return out
        given = [*tensors_of_tree((args, kwargs or {}))]
        found = {id(each): units for each in given if (units := self._units_of(each, out)) is not None}
        if not found:
            return out
        leaf = out.detach().requires_grad_()
        names = {self.owned[each.untyped_storage().data_ptr()][2] for each in given if id(each) in found}
        if operation(name_of(func)).stream == "sum":  # of a product and a bias
            names.update(*(self._gave[id(each)][1] for each in given if id(each) in self._gave))
        self.seen.append((leaf, next(iter(found.values())), frozenset(names)))
        gave = leaf.clone()  # what the model changes in place is no leaf
        self._gave[id(gave)] = gave, self.seen[-1][2]
        return gave

    def _is_theirs(self, tensor: Tensor) -> bool:
        return tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() in self.owned

    def _units_of(self, tensor: Tensor, out: Tensor) -> list[int] | None:
        """The unit whose part this is, or those of all along the first dimension of the output."""
        if not self._is_theirs(tensor) or not tensor.numel():
            return None
        parameter, units, _ = self.owned[tensor.untyped_storage().data_ptr()]
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
    return torch.randint(0, 2, (width,), generator=draw, device="cpu") * 2.0 - 1.0


def last_products(host: Host, coupling: Coupling, groups: Sequence[Group]) -> dict[str, set[str]]:
    """Of each group the parameters whose products a mixture adds up, with what is added to them, as it runs."""
    watching = Watching(host.model, coupling, groups)
    watching.run(host)
    return watching.last


def routed_by(host: Host, coupling: Coupling, groups: Sequence[Group]) -> dict[str, Routed]:
    """The statistics of the experts of these groups, from one run of a model's batches, of all processes.

    Raises:
        ValueError: of no expert of a mixture were outputs seen.
    """
    watching = Watching(host.model, coupling, groups)
    watching.run(host)
    alone = {group.name: Routed.zeros(group.size) for group in groups}
    found = alone if isinstance(host.batches, RunAlong) else watching.routed
    routed = {axis: each.everywhere() for axis, each in found.items()}
    try:
        check_seen(groups, routed)
    except ValueError:
        check_finite(host.model)  # which may be why
        raise
    return routed


def check_seen(groups: Sequence[Group], routed: Mapping[str, Routed]) -> None:
    """Raises ValueError for a mixture whose outputs were not seen, or are not finite."""
    for group in groups:
        found = routed[group.name]
        if not found.tokens.any():
            raise ValueError(
                f"{group.name}: no outputs of the experts that it chooses between were seen while the batches ran, so "
                'data cannot rank them; say Experts(..., rank="criterion").'
            )
        if not np.isfinite(found.weighted).all():
            raise ValueError(f"{group.name}: the outputs of its experts hold NaN or infinity; correct the weights.")
