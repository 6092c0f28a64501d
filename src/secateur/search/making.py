"""Makes levels: one walk over the dense model collects the statistics for all levels of all groups.

Law: the model does not change; arguments are checked before it is run; a run that was killed goes on with the
groups that are on disk, to the same bytes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur import patterns, solvers
from secateur.allocation import narrowest
from secateur.coupling import Coupling, Group, Scope, find_coupling
from secateur.evidence import needs
from secateur.models import (
    InMemory,
    InputStats,
    Job,
    MatrixJob,
    Pruned,
    Solve,
    Solved,
    WeightView,
    check_finite,
    choose_targets,
    digest,
    example_of,
    full_name,
    naming_batch,
    parts_of,
    shorter,
    slopes,
)
from secateur.patterns import Pattern
from secateur.search.costs import TARGETS, Variable, bill_of, stored
from secateur.search.levels import (
    FILE,
    Fingerprint,
    Kept,
    Levels,
    Stored,
    digest_of,
    in_order,
    read_entry,
    tensor_of,
    together,
    write_entry,
)
from secateur.shrinking import (
    OVERFLOWING,
    Grading,
    RepairedLevel,
    Request,
    TiedGroups,
    check_globs,
    counts_at,
    for_slopes,
    free_in,
    gradable,
    names_of,
    not_finite,
    pruning_target,
    slopes_of,
    ties_around,
)
from secateur.solvers import admm
from secateur.support import (
    Forward,
    all_gather,
    alone,
    check_batches,
    check_data,
    described,
    everywhere,
    globs_of,
    matches,
    naming_example,
    on_rank_zero,
    rank_and_world,
    refuse_sharded,
    refuse_unloaded,
    unwrapped,
    warn,
)
from secateur.targets import computed_weights

SHARES = (0.1, 0.3, 0.5, 0.7)
FINE = tuple(round(0.05 * at, 2) for at in range(1, 19))  # of units, where one elimination makes all of them
OVER = ("shrink", "oneshot")
UNSTRUCTURED = "unstructured"


def make_levels(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    over: str | Sequence[str] = ("shrink",),
    shares: Sequence[float] = SHARES,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    solver: str | Solve = admm,
    pattern: str | Pattern | None = None,
    round_to: int | None = None,
    verify: bool = True,
    example_inputs: Any = None,
    forward: Forward | None = None,
    store: str | Path | None = None,
) -> Levels:
    """Prunes and repairs every group alone at several shares, and returns these levels with their errors and costs. The
    model is not changed.

    One walk over the dense model sums the Gram matrix of the inputs of everything that has levels, and all shares are
    made of that: of a group's units the elimination goes on from 10 % to 70 %, and a layer is solved for each share. It
    costs two passes over the batches and a backward pass of the first of them, however many groups and shares there
    are; the rest is linear algebra.

    - ``"shrink"``: units of coupled groups leave, MLP units, heads, channels, as `secateur.shrink` with batches
      chooses and repairs them where this group alone leaves. The width of a residual stream that runs through several
      blocks has no levels. Units that a statistic counts, such as a norm over them, are made as before, and what
      consumes them is repaired without them.
    - ``"oneshot"``: entries of each matrix leave, as `secateur.oneshot` solves them on the dense model's inputs. Their
      names end in ``":layer"``.

    Args:
        model: any module, with its weights.
        batches: what a DataLoader yields.
        over: which kinds of levels.
        shares: how much leaves, each in (0, 1); of units the nearest count that there is.
        include, exclude: globs over the names of groups and tensors.
        solver: for "oneshot"; see `secateur.solvers`.
        pattern: for "oneshot": which entries leave together, or compete, as `secateur.oneshot` takes it; or a word,
            such as ``"16x1"``. A pattern that fixes how much leaves, such as ``"2:4"``, is the only level of a matrix.
        round_to: counts of units are multiples of this; by default of 16 in groups of 64 units or more.
        verify: prove that units may leave, on random weights in float64.
        example_inputs: what the model is called with, to find what leaves together; by default the first rows of the
            first batch, of which multiply-adds are counted.
        forward: ``(model, batch) -> outputs``, how a batch is run; then example_inputs are needed.
        store: a folder, in which each group is written once it is made. A run that was killed goes on there; levels of
            the same model, batches and arguments that are there already are loaded. Without one all values are in
            memory: of each share what consumers become.

    Raises:
        ValueError: nothing has levels, a share is none, there are no batches, a glob matches nothing, the model runs a
            block twice, a weight is not finite, or the store is of something else.

    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2)))
    >>> levels = make_levels(model, [torch.randn(64, 4)], over=("shrink", "oneshot"), shares=(0.25, 0.5))
    >>> [each for each in levels if each.startswith("1.")]
    ['1.0.weight', '1.0.weight:layer', '1.2.weight:layer']
    >>> errors = [level.error for level in levels["1.0.weight"]]
    >>> errors == sorted(errors) and errors[0] == 0
    True
    """
    kinds = (over,) if isinstance(over, str) else tuple(over)
    shares = _checked(kinds, shares)
    solver = solvers.parse(solver)
    pattern = narrowest(solver) if pattern is None else patterns.parse(pattern)
    include, exclude = globs_of(include), globs_of(exclude)
    check_batches(batches)
    held = list(batches)
    check_data(held, "since levels are measured by running the model")
    if forward is not None and example_inputs is None:
        raise ValueError("with forward= the batches do not say what the model is called with; pass example_inputs=.")
    inner = unwrapped(model)
    refuse_sharded(inner, "what makes levels")
    check_values(inner)
    check_finite(inner)
    asked = {
        "over": sorted(kinds),
        "shares": list(shares),
        "include": include,
        "exclude": exclude,
        "solver": described(solver) if "oneshot" in kinds else None,
        "round_to": round_to,
        "verify": verify,
        "example_inputs": None if example_inputs is None else digest([example_inputs]),
        "forward": None if forward is None else described(forward),
    }
    if "oneshot" in kinds and (word := patterns.word_of(pattern)) != UNSTRUCTURED:
        asked["pattern"] = word
    made = Fingerprint(digest_of(inner), digest(held), asked)
    folder = None if store is None else Path(store)
    if folder is not None and (folder / FILE).exists():
        found = Levels.load(folder)
        if found.made.digest != made.digest:
            raise ValueError(
                f"{folder}: holds levels of another model, other batches or other arguments; name another folder."
            )
        return found
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    example = example_of(inner, held[0]) if example_inputs is None else example_inputs
    with naming_batch(held, held[0]) if example_inputs is None else naming_example(inner, example):
        coupling = find_coupling(inner, example)
    request = Request(include=include, exclude=exclude or (), round_to=round_to, verify=verify)
    parts = parts_of(inner)
    tied: list[TiedGroups] = []
    left_alone: dict[str, str] = {}
    scope = Scope.of(coupling)
    subject = pruning_target(inner, scope, [shorter(example)], proved_on=inner if verify else None)
    parameters = {name for name, _ in inner.named_parameters(remove_duplicate=False)}
    known = names_of(coupling) | {name for name, _ in inner.named_modules()} if "shrink" in kinds else set()
    check_globs(known | parameters, request.globs)
    if "shrink" in kinds:
        tied, left_alone, scope = gradable(subject, request, parts, shares)
    layers: dict[str, nn.Parameter] = {}
    if "oneshot" in kinds:
        these, others = (None if each is None else _matching(each, parameters) for each in (include, exclude))
        layers, alone = ({}, {}) if these == [] else choose_targets(inner, parts, these, others)
        left_alone |= {f"{name}:layer": why for why, names in alone.items() for name in names}
    making = _Making(inner, coupling, tied, layers, shares, solver, pattern, made.digest, folder)
    making.walk(held, forward)
    left_alone |= making.missing()
    entries, variables = making.entries()
    if not entries:
        left_alone |= {f"{name} dimension {at}": reason for (name, at), reason in scope.frozen.items()}
        said = "".join(f"\n  {name}: {reason}" for name, reason in list(left_alone.items())[:10])
        raise ValueError(f"nothing of the model has levels.{computed_weights(inner)}{said}")
    levels = Levels(entries, bill_of(inner, coupling, variables), made, left_alone, making.in_blocks)
    if folder is not None:
        levels.save(folder)
        return Levels.load(folder)  # whose weights are in the files
    return levels


def made_by_all(make: Callable[[Path | None], Levels], store: Path | None) -> Levels:
    """Levels of which all processes hold the same. In a store the first one makes them, and the others read them there;
    without one each makes its own, since nothing is summed in another order then."""

    def mine() -> Levels:
        with alone():
            return make(store)

    if store is None or rank_and_world()[1] == 1:
        return everywhere(mine)
    on_rank_zero(lambda: mine().made.digest)
    return everywhere(functools.partial(Levels.load, store))


def check_alike(levels: Levels, model: nn.Module, batches: Sequence[Any], *asked: object) -> None:
    """ValueError where processes were given other things, or computed other levels of them."""
    if rank_and_world()[1] == 1:
        return
    numbers = {name: [(each.kept, each.error, each.loss) for each in its] for name, its in levels.items()}
    said = levels.made.digest, digest_of(unwrapped(model)), digest(list(batches)), repr(asked), numbers
    if any(each != said for each in all_gather(said)):
        raise ValueError("the processes hold other models, batches or arguments: give all of them the same.")


def _checked(kinds: Sequence[str], shares: Sequence[float]) -> tuple[float, ...]:
    if not kinds or not set(kinds) <= set(OVER):
        raise ValueError(f"over says which kinds of levels, of {', '.join(map(repr, OVER))}; got {kinds!r}.")
    found = tuple(sorted({float(share) for share in shares}))
    if not found or not all(0 < share < 1 for share in found):
        raise ValueError(f"shares must be fractions in (0, 1), the parts that leave; got {shares!r}.")
    return found


def _matching(globs: Iterable[str], names: Iterable[str]) -> list[str]:
    """Those that name one; others may name groups or modules."""
    return [glob for glob in globs if any(matches(name, [glob]) for name in names)]


def check_values(model: nn.Module) -> None:
    refuse_unloaded(model)
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(f"{name} has no shape yet; run the model once on an example before.")


@dataclass(eq=False)
class _Making:
    """What is to be made of one model, and what is made already."""

    model: nn.Module
    coupling: Coupling
    tied: Sequence[TiedGroups]
    layers: Mapping[str, nn.Parameter]
    shares: Sequence[float]
    solver: Solve
    pattern: Pattern
    digest: str
    folder: Path | None
    grades: dict[str, Sequence[RepairedLevel]] = field(default_factory=dict)
    done: dict[str, Stored] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    in_blocks: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.around = ties_around(self.coupling, [group for each in self.tied for group in each.groups])
        self.by_axis = {group.name: each for each in self.tied for group in each.groups}
        self.wanted: dict[str, Variable] = {_name_of(each): each for each in self.tied}
        self.wanted |= {f"{name}:layer": name for name in self.layers}
        for name in self.wanted if self.folder is not None else ():
            # what is not made yet, or by another request, is made again in its place
            with contextlib.suppress(FileNotFoundError, ValueError):
                self.done[name] = read_entry(self.folder, name, self.digest)  # type: ignore[arg-type]

    def walk(self, batches: Sequence[Any], forward: Forward | None) -> None:
        """One walk over the dense model, for what is not made yet."""
        tied = [each for each in self.tied if _name_of(each) not in self.done]
        layers = {name: each for name, each in self.layers.items() if f"{name}:layer" not in self.done}
        groups = [group for each in tied for group in each.groups]
        if not groups and not layers:
            return
        counts = {
            group.name: [each.counts(parts)[group.name] for _, parts in counts_at(each, self.shares)]
            for each in tied
            for group in each.groups
        }
        parts = parts_of(self.model)
        grading = Grading(self.coupling, groups, counts, {}, free_in(self.model, parts), self._graded)
        names = {*grading.targets, *layers}
        found = slopes(self.model, for_slopes(batches), names, forward=forward)
        if (wrong := not_finite(found)) is not None:
            check_finite(self.model)
            warn(OVERFLOWING.format(name=wrong), RuntimeWarning)
            found = {}
        grading.slopes = found
        job = _Both(grading, layers, self.shares, self.solver, self.pattern, found, self._solved)
        for pruned in InMemory(self.model, batches, forward=forward).walk(job):
            self.in_blocks |= pruned.in_blocks
        self.reasons |= grading.ungraded | {f"{name}:layer": why for name, why in job.left_alone.items()}

    def entries(self) -> tuple[list[Stored], list[Variable]]:
        """In the order of the model; and what the bill counts of each."""
        every = (
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        )
        order = {name: at for at, (name, _) in enumerate(every)}

        def first(name: str) -> int:
            each = self.wanted[name]
            members = [each] if isinstance(each, str) else [one for group in each.groups for one, _ in group.members]
            return min(order[member] for member in members)

        there = sorted((name for name in self.wanted if name in self.done), key=first)
        return [self.done[name] for name in there], [self.wanted[name] for name in there]

    def missing(self) -> dict[str, str]:
        """Why what was to have levels has none."""
        never = "the batches never ran it"
        return {name: self.reasons.get(name, never) for name in self.wanted if name not in self.done}

    def _add(self, entry: Stored) -> None:
        if self.folder is None:
            self.done[entry.name] = entry
        else:
            write_entry(self.folder, entry)
            self.done[entry.name] = read_entry(self.folder, entry.name, self.digest)

    def _graded(self, group: Group, grades: Sequence[RepairedLevel]) -> None:
        """Once all groups of a tie are there, it is made."""
        tied = self.by_axis[group.name]
        self.grades[group.name] = grades
        if all(each.name in self.grades for each in tied.groups):
            self._add(self._of_tie(tied, [self.grades.pop(each.name) for each in tied.groups]))

    def _of_tie(self, tied: TiedGroups, grades: Sequence[Sequence[RepairedLevel]]) -> Stored:
        tensors: dict[str, Tensor] = {}
        members: list[tuple[str, int, int]] = []
        parameters = dict(self.model.named_parameters())
        for number, (group, its) in enumerate(zip(tied.groups, grades, strict=True)):
            repaired = its[-1].values if group.notes else ()  # zeros would be counted: made as before
            for name, dim in group.members:
                if name in parameters:  # where a weight is zero, statistics and constants have no effect
                    units = self.coupling.indices(group, name, dim).astype(np.int32)
                    if repaired and name not in repaired:
                        units[:] = -1
                    tensors[f"units.{len(members)}"] = torch.from_numpy(units)
                    members.append((name, dim, number))
        levels = []
        at_shares, across = counts_at(tied, self.shares), zip(*grades, strict=True)  # of each level all groups' grades
        for number, ((share, parts), at) in enumerate(zip(at_shares, across, strict=True), 1):
            values: dict[str, list[Tensor]] = {}
            for place, grade in enumerate(at):
                tensors[f"kept.{number}.{place}"] = tensor_of(grade.kept)
                for name, value in grade.values.items():
                    values.setdefault(name, []).append(value)
            for name, several in values.items():
                tensors[f"value.{number}.{name}"] = together(parameters[name].detach(), several)
            kept = sum(int(each.kept.sum()) for each in at)
            error = _error(sum(each.lost for each in at), sum(each.whole for each in at))
            known = all(each.loss is not None for each in at)
            loss = sum(each.loss or 0.0 for each in at) if known else None
            levels.append(Kept(share, kept, error, loss, dict.fromkeys(TARGETS, float(parts)), tuple(values)))
        sizes = tuple(group.size for group in tied.groups)
        kind = "heads" if tied.groups[0].tied in self.around else "width"
        names = tuple(group.name for group in tied.groups)
        return Stored(
            self.digest, _name_of(tied), kind, sum(sizes), names, sizes, tuple(members), in_order(levels), tensors
        )

    def _solved(self, name: str, new: Sequence[tuple[float, Tensor, float | None, float | None]]) -> None:
        """``new``: share, values, error and loss of each level."""
        tensors: dict[str, Tensor] = {}
        levels = []
        whole, itemsize = self.layers[name].numel(), self.layers[name].element_size()
        for at, (share, values, error, loss) in enumerate(new, 1):
            if error is None:
                self.reasons[f"{name}:layer"] = "no token met it"
                return
            tensors[f"value.{at}.{name}"] = values
            kept = int(values.count_nonzero())
            density = kept / whole if self.pattern.density is None else max(kept / whole, self.pattern.density)
            left = {"params": density, "macs": density, "bytes": stored(density, itemsize)}
            levels.append(Kept(share, kept, error, loss, left, (name,)))
        self._add(
            Stored(self.digest, f"{name}:layer", "layer", whole, (name,), (whole,), (), in_order(levels), tensors)
        )


def _name_of(tied: TiedGroups) -> str:
    return tied.groups[0].name


def _error(lost: float, whole: float) -> float:
    return lost / whole if whole > 0 else 0.0 if lost <= 0 else 1.0


@dataclass(eq=False)
class _Both(Job):
    """The job of the one walk: units are graded, and layers solved, of what one run of the dense block gives."""

    grading: Grading
    layers: Mapping[str, nn.Parameter]
    shares: Sequence[float]
    solver: Solve
    pattern: Pattern
    slopes: Mapping[WeightView, Tensor]
    on_layer: Callable[[str, Sequence[tuple[float, Tensor, float | None, float | None]]], None]
    left_alone: dict[str, str] = field(default_factory=dict)
    around = True
    changes = False

    @property
    def targets(self) -> Collection[str]:
        return {*self.grading.targets, *self.layers}

    @property
    def words(self) -> Collection[str]:
        return {*self.grading.words, *(needs(self.solver) if self.layers else ())}

    def solve_stage(
        self, block: str, module: nn.Module, stage: Mapping[str, Tensor], found: Mapping[WeightView, InputStats]
    ) -> tuple[Mapping[str, Solved], Pruned]:
        self.grading.solve_stage(block, module, stage, found)
        wanted = {name: each for name, each in stage.items() if full_name(block, name) in self.layers}
        solved: dict[str, list[tuple[float, Tensor, float | None, float | None]]] = {}
        density = self.pattern.density
        for share in () if not wanted else self.shares if density is None else (1 - density,):
            sparsity = share if density is None else None  # the pattern says it
            sparsities = dict.fromkeys((full_name(block, name) for name in wanted), sparsity)
            job = MatrixJob(self.solver, self.pattern, sparsities, tuple(needs(self.solver)))
            new, said = job.solve_stage(block, module, wanted, found)
            self.left_alone |= {name: why for why, names in said.left_alone.items() for name in names}
            errors = {layer.name: layer.error for layer in said.layers}
            for name, each in new.items():
                full = full_name(block, name)
                loss = self._loss(block, name, stage[name], each.values, found)
                solved.setdefault(full, []).append((share, each.values, errors[full], loss))
        for full, levels in solved.items():
            self.on_layer(full, levels)
        return {}, Pruned(block)

    def _loss(
        self, block: str, name: str, dense: Tensor, new: Tensor, found: Mapping[WeightView, InputStats]
    ) -> float | None:
        """What the model's outputs lose by these values, to second order."""
        total = 0.0
        for piece, met in found.items():
            if piece.name != name or not met.tokens:
                continue
            slopes = slopes_of(self.slopes, piece, met, full_name(block, name))
            if slopes is None or met.sums.gram is None:
                return None
            change = piece.of(new).double() - piece.of(dense).double()
            squares = (change @ met.sums.gram.double() * change).sum(1).clamp_min(0)
            total += float((squares * slopes.double()).sum()) / (2 * met.tokens)
        return total
