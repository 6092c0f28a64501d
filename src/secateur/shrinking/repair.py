"""Repair of what stays: columns that leave, streams behind removed branches, and normalizations that lost entries."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.coupling import Coupling, Group, Kept
from secateur.models import (
    Host,
    InputStats,
    Job,
    Pruned,
    RunAlong,
    Solved,
    Tokens,
    WeightView,
    full_name,
)
from secateur.shrinking.apply import carry_out
from secateur.shrinking.measure import (
    WORDS,
    Columns,
    Measured,
    chunk_of,
    columns_of,
    counts_of,
    elimination_of,
    slopes_of,
    with_constant,
)
from secateur.shrinking.plan import Plan
from secateur.solvers import Elimination, aimed, eliminated
from secateur.support import all_gather, in_mode

# ---- The repair of what stays: columns leave their matrices as units, and the others are solved by least squares.
#
# Law: as many units stay of each group as was chosen; on the calibration, the outputs of a matrix are never further
# from their target than without repair; weights are solved in float64 and rounded once.

DAMPING = 0.1  # of the mean diagonal: SmolLM2 without 20 % has perplexity 18.2, and 18.8 at 0.01
AIM = 0.5  # of the way to the dense stream: MiniLM without half of its MLPs' units .940; .938 at 0, .937 at 1


@dataclass(eq=False)
class Repairing(Job):
    """The `Job` that removes columns and repairs matrices in a walk over the model; see `secateur.models`.

    A matrix' columns that left are zeros; where it has a bias, that moves with the others. Where all consumers of
    a group are solved in one stage, the units that leave are chosen again from the inputs there; else ``chosen`` holds.
    A matrix that loses nothing is aimed at the dense stream, too. Without ``again``, ``chosen`` holds everywhere. With
    ``swaps`` units that are chosen again are swapped as long as less is lost.

    Attributes:
        free: the matrices and biases that may move: `free_in`.
        kept: which units stay, after the walk.
        errors: ``{name: error}``: the squared error of a matrix' outputs with its new values, as a share of the
            variance of the stream that they are added to, or of their own.
        biases: which moved with their matrices.
    """

    coupling: Coupling
    groups: Sequence[Group]
    chosen: Kept
    measured: Measured
    free: Collection[str]
    repair: bool = True
    aim: float = AIM
    damping: float = DAMPING
    again: bool = True
    swaps: bool = False
    in_stages = True
    around = True
    by_the_first = True
    kept: dict[str, npt.NDArray[np.bool_]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    biases: set[str] = field(default_factory=set)
    words = WORDS

    def __post_init__(self) -> None:
        self.kept.update(self.chosen)
        self.groups = [group for group in self.groups if not self.chosen[group.name].all()]

    @property
    def beside_dense(self) -> bool:
        return self.repair and self.aim > 0

    @property
    def targets(self) -> Collection[str]:
        lose = {name for group in self.groups for name in self.measured.consumers.get(group.name, ())}
        if not (self.beside_dense and lose):
            return lose
        return lose | {
            name for name in self.coupling.names() if name in self.free and len(self.coupling.dims(name)) > 1
        }

    def solve_stage(
        self,
        block: str,
        module: nn.Module,
        stage: Mapping[str, Tensor],
        found: Mapping[WeightView, InputStats],
    ) -> tuple[Mapping[str, Solved], Pruned]:
        found = {piece: self._with_free_bias(block, met) for piece, met in found.items()}
        layers: dict[WeightView, Elimination] = {}
        columns: dict[WeightView, Mapping[str, Columns]] = {}
        for piece, met in found.items():
            name = full_name(block, piece.name)
            its = columns_of(self.coupling, self.groups, name, piece, stage[piece.name])
            moves = self.repair and name in self.free
            if its or (moves and met.residual_cross is not None):
                matrix, columns[piece] = piece.of(stage[piece.name]), its
                slopes = slopes_of(self.measured.slopes, piece, met, name)
                aim = self.aim if moves else 0.0
                layers[piece] = elimination_of(name, matrix, met, slopes, damping=self.damping, aim=aim)
        here = {full_name(block, name) for name in stage}
        for group in self.groups:  # heads before what is within them
            behind = [(layer, columns[at][group.name]) for at, layer in layers.items() if group.name in columns[at]]
            if behind:
                self._remove(group, behind, again=self.again and self.measured.consumers[group.name] <= here)
        for layer in layers.values():
            layer.finish()
        new: dict[str, Solved] = {}
        for piece in list(layers):
            layer = layers.pop(piece)  # each holds several matrices of its size
            parameter = stage[piece.name]
            solved = new.setdefault(
                piece.name, Solved(parameter.detach().clone(), torch.ones_like(parameter, dtype=torch.bool))
            )
            gone = np.zeros(piece.shape[1], dtype=bool)
            for key, units in columns[piece].items():
                gone[[column for at, its in enumerate(units) if not self.kept[key][at] for column in its]] = True
            mask = torch.from_numpy(~gone).to(parameter.device)
            matrix, met = piece.of(parameter), found[piece]
            bias = None  # as blocks of inputs before this one have moved it
            if met.bias is not None:
                moved_already = new.get(met.bias.name)
                dense = module.get_parameter(met.bias.name)
                bias = met.bias.of(dense if moved_already is None else moved_already.values)
            name = full_name(block, piece.name)
            moves = self.repair and name in self.free
            values, moved, lost = repaired(matrix, bias, layer, met, mask, moves=moves, aim=self.aim)
            piece.of(solved.values).copy_(values[:, : piece.shape[1]])
            if met.bias is not None and moved is not None:
                self.biases.add(full_name(block, met.bias.name))
                old = module.get_parameter(met.bias.name)
                whole = Solved(old.detach().clone(), torch.ones_like(old, dtype=torch.bool))
                met.bias.of(new.setdefault(met.bias.name, whole).values).copy_(moved)
            piece.of(solved.mask).copy_(mask.expand(piece.shape))
            self.errors[name] = self.errors.get(name, 0.0) + float((lost * counts_of(matrix, met).to(lost)).sum())
        return new, Pruned(block)

    def _with_free_bias(self, block: str, met: InputStats) -> InputStats:
        """Where something else holds the bias, as if there were none."""
        free = met.bias is None or full_name(block, met.bias.name) in self.free
        return met if free else replace(met, bias=None)

    def _remove(self, group: Group, layers: Sequence[tuple[Elimination, Columns]], *, again: bool) -> None:
        count = int(self.chosen[group.name].sum())
        if again:
            left, _ = eliminated(layers, count, chunk_of(group.size), chunk_of(group.size) if self.swaps else 0)
            self.kept[group.name] = np.ones(group.size, dtype=bool)
            self.kept[group.name][left] = False
            return
        for layer, units in layers:
            layer.remove([column for at in np.flatnonzero(~self.kept[group.name]) for column in units[at]])


def repaired(
    matrix: Tensor,
    bias: Tensor | None,
    layer: Elimination,
    met: InputStats,
    mask: Tensor,
    *,
    moves: bool = True,
    aim: float = 0.0,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The repaired weight and its bias, or the old ones with zeros where columns left if these are nearer to
    the target; the weight with a column for the constant where it has a bias. And the squared error of each
    output against the target.

    Args:
        matrix: (outputs, inputs), dense.
        bias: (outputs,), what is added to this product's outputs and no other's.
        layer: from which the columns left.
        met: the statistics of the matrix' inputs.
        mask: (inputs,), False where a column left.
        moves: whether anything may move; else columns are zeroed.
        aim: the share of the residual to the dense model that is the target, from 0 to 1; the layer's own.
    """
    given = with_constant(matrix, met)
    plain = given.matrix.clone()
    plain[:, : len(mask)] *= mask.to(matrix.dtype)
    if not moves:
        return plain, None, layer.squares(plain)
    wide = layer.settled(met.tokens)
    found, moved = wide.to(matrix.dtype).to(wide), None
    if bias is not None and given.constant is not None:
        moved = (bias.double() + given.constant * wide[:, -1]).to(bias.dtype)
        found[:, -1] = (moved.double() - bias.double()) / given.constant
    if given.residual_cross is None:  # then the layer aims at the matrix
        lost, least = layer.squares(found), layer.squares(plain)
        return (found, moved, lost) if float(lost.sum()) <= float(least.sum()) else (plain, None, least)
    towards = given.matrix.double() @ layer.gram
    towards += given.residual_cross.double() * (aim / layer.scale)

    def distance(values: Tensor) -> float:  # over the scale, and but for what does not depend on the values
        wide = values.double()
        return float(torch.sub(wide @ layer.gram, towards, alpha=2).mul_(wide).sum())

    if distance(found) <= distance(plain):
        return found, moved, layer.squares(found)
    return plain, None, layer.squares(plain)


def free_in(model: nn.Module, parts: Mapping[str, nn.Module]) -> frozenset[str]:
    """The names of the parameters that only these parts of the model hold. A shared one, such as an embedding that is
    the head, too, is left out: least squares for one use would be wrong for the other.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
    >>> model[2].weight = model[0].weight
    >>> sorted(free_in(model, {"": model}))
    ['1.bias', '1.weight', '2.bias']
    """
    places = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return frozenset(
        full_name(part, name)
        for part, module in parts.items()
        for name, parameter in module.named_parameters()
        if places[id(parameter)] == 1
    )


# ---- Repair behind removed branches: matrix by matrix, the residual stream is moved towards the dense model's.
#
# Law: a matrix is changed only where its outputs come nearer to what is aimed at, on the calibration; what it is
# changed by is damped. Those before the first branch that leaves stay as they are, bit for bit.
#
# The walk runs the dense model beside the smaller one. For that the matrices that make the terms of the branches
# become zeros when their stage is solved; they leave afterwards, with their branches.


@dataclass(eq=False)
class StreamCorrection(Job):
    """The job of a walk over the model that loses branches; see `secateur.models`.

    Attributes:
        given: ``{name: values}`` of parameters that are what they are: zeros, and what was patched.
        moved: the matrices that aim at the dense stream.
    """

    given: Mapping[str, Tensor]
    moved: Collection[str]
    aim: float = AIM
    damping: float = DAMPING
    in_stages = True
    beside_dense = True
    words = ("gram",)
    _done: set[str] = field(default_factory=set)

    @property
    def targets(self) -> Collection[str]:
        return {name for name, values in self.given.items() if values.dim() == 2} | {*self.moved}

    def solve_stage(
        self, block: str, module: nn.Module, stage: Mapping[str, Tensor], found: Mapping[WeightView, InputStats]
    ) -> tuple[Mapping[str, Solved], Pruned]:
        inside = {full_name(block, name): name for name, _ in module.named_parameters()}
        watched = self.targets
        new: dict[str, Solved] = {}
        for name, values in self.given.items():  # biases and scales with the first stage, matrices with theirs
            if name in inside and name not in self._done and (inside[name] in stage or name not in watched):
                self._done.add(name)
                new[inside[name]] = _whole(values)
        for piece, met in found.items():
            name = full_name(block, piece.name)
            if name in self.given or met.residual_cross is None or not met.tokens:
                continue
            parameter = stage[piece.name]
            solved = new.setdefault(piece.name, _whole(parameter.detach().clone()))
            matrix = piece.of(parameter)
            piece.of(solved.values).copy_(self._nearer(matrix, met, met.residual_cross.double()))
        return new, Pruned(block)

    def _nearer(self, matrix: Tensor, met: InputStats, residual_cross: Tensor) -> Tensor:
        assert met.sums.gram is not None  # one of the words
        gram, old = met.sums.gram.double(), matrix.double()
        new = aimed(old, residual_cross, gram=gram, aim=self.aim, damping=self.damping).to(matrix.dtype)
        change = new.double() - old
        # how much further from what is aimed at
        further = (change @ gram * change).sum() - 2 * self.aim * (change * residual_cross).sum()
        return new if bool(further < 0) else matrix  # not where it is no number


def _whole(values: Tensor) -> Solved:
    return Solved(values, torch.ones_like(values, dtype=torch.bool))


# Re-fits the weights and biases of normalizations whose width lost entries, so that the other entries keep their
# scale.
#
# Law: normalizations are found by what they compute, never by their class; others do not change; on the calibration,
# the outputs are nearer to the dense ones afterwards. Of entries that were zero nothing is seen any more, but for
# rounding and what is added to a variance.


_ROWS = 64  # by which it is told what a normalization is over


@dataclass(frozen=True)
class _Sums:
    """Over tokens, (entries,), float64: of g, the factor of a weight; of e, the residual of the outputs; of g·g and
    of g·e."""

    tokens: int
    values: Tensor

    def plus(self, other: _Sums | None) -> _Sums:
        return self if other is None else _Sums(self.tokens + other.tokens, self.values + other.values)


@dataclass(eq=False)
class _Norm:
    """A module that multiplies each entry of a width by its own weight; ``smaller`` is what the plan leaves of it."""

    module: nn.Module
    smaller: nn.Module
    kept: Tensor
    sums: _Sums | None = None

    def see(self, x: Tensor, y: Tensor, own: Tensor | None) -> None:
        rows, wanted = (each.detach().reshape(-1, each.shape[-1])[:, self.kept].double() for each in (x, y))
        if own is not None and own.numel() == len(rows):
            index = own.reshape(-1).to(rows.device)
            rows, wanted = rows[index], wanted[index]
        weight = _own(self.smaller)["weight"]
        found = self.smaller(rows)
        before = weight.clone()
        weight += 1
        slope = self.smaller(rows) - found
        weight.copy_(before)
        residual = wanted - found
        more = torch.stack([each.sum(0) for each in (slope, residual, slope * slope, slope * residual)])
        self.sums = _Sums(len(rows), more).plus(self.sums)


def _settled(own: Mapping[str, Tensor], kept: Tensor, sums: _Sums | None) -> dict[str, Tensor]:
    """Least squares for each entry by itself, the constant going to the bias, if there is one; nothing where a sum is
    not finite."""
    if sums is None or not bool(sums.values.isfinite().all()):
        return {}
    slope, residual, squares, products = sums.values
    if "bias" in own:
        squares, products = squares - slope * slope / sums.tokens, products - slope * residual / sums.tokens
    more = torch.where(squares > 1e-12 * sums.values[2], products / squares, 0.0)
    new = {key: each.clone() for key, each in own.items()}
    new["weight"][kept] += more.to(new["weight"].dtype)
    if "bias" in own:
        new["bias"][kept] += ((residual - more * slope) / sums.tokens).to(new["bias"].dtype)
    return new


def rescaled(host: Host, plan: Plan) -> dict[str, Tensor]:
    """New weights and biases, ``{name: values}``, of modules over a width of which the plan takes entries; it is not
    carried out yet. The same on all processes.

    One pass over the batches, where there are such modules. The model computes with the whole width meanwhile; in a
    directory with the copy that is written, but for these modules themselves.
    """
    paths = list(_along_widths(host.model, plan))
    if not paths:
        return {}
    found: dict[str, tuple[dict[str, Tensor], Tensor, _Sums | None]] = {}
    norms: dict[str, _Norm | None] = {}
    seen: dict[str, set[int]] = {path: set() for path in paths}
    dense = {host.model.get_submodule(path) for path in paths}
    with host.running(written=True, dense=dense) as (replay, blocks), contextlib.ExitStack() as stack:

        def see(path: str, module: nn.Module, given: Any, output: Any) -> None:
            again = bool(replay.blocks) and replay.at in seen[path]  # what lies outside of blocks, for each of them
            if again or module not in dense or isinstance(host.batches, RunAlong):  # or it is a smaller copy
                return
            seen[path].add(replay.at)
            if path not in norms:
                norms[path] = None  # to try it runs it, and comes here again
                if _is_seen(given, output) and (norm := _norm_at(host.model, path, plan, given[0], output)) is not None:
                    norms[path] = norm
                    found[path] = {key: each.clone() for key, each in _own(module).items()}, norm.kept, None
            norm = norms[path]
            if norm is not None and _is_seen(given, output):
                norm.see(given[0], output, Tokens.of(host.batches[replay.at]).own)

        for path in paths:
            hook = host.model.get_submodule(path).register_forward_hook(functools.partial(see, path))
            stack.callback(hook.remove)
        for _ in blocks:
            pass
    for path, norm in norms.items():
        if norm is not None:
            found[path] = (*found[path][:2], norm.sums)
    new: dict[str, Tensor] = {}
    everyone = all_gather(found)
    for path in sorted({path for each in everyone for path in each}):
        seen_by = [each[path] for each in everyone if path in each]
        sums: _Sums | None = None
        for _, _, its in seen_by:
            sums = sums if its is None else its.plus(sums)
        own, kept, _ = seen_by[0]
        new |= {full_name(path, key): value for key, value in _settled(own, kept, sums).items()}
    return new


def _is_seen(given: Any, output: Any) -> bool:
    """Whether a module was given one tensor and gave another of its shape."""
    return (
        bool(given) and isinstance(given[0], Tensor) and isinstance(output, Tensor) and given[0].shape == output.shape
    )


def _along_widths(model: nn.Module, plan: Plan) -> Iterator[str]:
    """The paths of modules whose own tensors are a weight, and a bias, along a width of which entries leave."""
    for path, module in model.named_modules():
        own = _own(module)
        names = [full_name(path, key) for key in own]
        if "weight" not in own or own.keys() - {"weight", "bias"} or any(module.children()):
            continue
        if any(each.dim() != 1 for each in own.values()) or any(True for _ in module.buffers()):
            continue
        if not all(name in plan.tensors and 0 in plan.tensors[name][1] for name in names):
            continue
        cuts = [plan.tensors[name][1][0] for name in names]
        if all(np.array_equal(cuts[0], each) for each in cuts):
            yield path


def _norm_at(model: nn.Module, path: str, plan: Plan, x: Tensor, y: Tensor) -> _Norm | None:
    """The module there, which made y of x, if its outputs change with what is counted."""
    module = model.get_submodule(path)
    names = {key: full_name(path, key) for key in _own(module)}
    kept = torch.as_tensor(plan.tensors[names["weight"]][1][0], device=_own(module)["weight"].device)
    norm = _Norm(module, _smaller(module, path, names, plan), kept)
    return norm if _counts(norm) and _is_by_rows(module, x, y) else None


def _own(module: nn.Module) -> dict[str, Tensor]:
    return {key: each.detach() for key, each in module.named_parameters(recurse=False)}


def _smaller(module: nn.Module, path: str, names: dict[str, str], plan: Plan) -> nn.Module:
    """A copy of a module as the plan leaves it."""
    holder = nn.Module()
    holder.add_module("it", copy.deepcopy(module))
    tensors = {f"it.{key}": plan.tensors[name] for key, name in names.items()}
    numbers = [(("it", *place[1:]), old, new) for place, old, new in plan.numbers if place[0] == path]
    carry_out(holder, Plan(tensors, numbers), None)
    return holder.get_submodule("it").double().eval()


def _counts(norm: _Norm) -> bool:
    """Whether it is a normalization over its last dimension: of entries that are all alike the others see each one."""
    size = len(_own(norm.module)["weight"])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, size, generator=generator, dtype=torch.float32, device="cpu").to(_own(norm.module)["weight"])
    try:
        with torch.no_grad(), in_mode(norm.module, training=False):
            whole, part = norm.module(x)[:, norm.kept].double(), norm.smaller(x[:, norm.kept].double())
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False  # it wants something else
    return whole.shape == part.shape and not torch.allclose(whole, part, rtol=1e-2, atol=1e-2)


def _is_by_rows(module: nn.Module, x: Tensor, y: Tensor) -> bool:
    """Whether it made y of x row by row, and not of the channels of a picture, which are as many as a row is long."""
    size = len(_own(module)["weight"])
    if x.shape[-1] != size:
        return False
    rows, wanted = (each.detach().reshape(-1, size)[:_ROWS] for each in (x, y))
    with torch.no_grad(), in_mode(module, training=False):
        return torch.allclose(module(rows), wanted, rtol=1e-2, atol=1e-2)
