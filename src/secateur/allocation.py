"""How many units each tensor keeps: functions ``(scores, sparsity, pattern) -> {name: units kept in each group}``.

Law: `everywhere`, `erk`, `owl`, `progression` and (by default) `by_name` remove exactly
``round(sparsity · units)`` units over all tensors, `uniform` in each group, `above` at most that many. But for
`uniform`, none asks to keep more of a group than earlier masks left of it. Only `everywhere` holds some of each tensor
back.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from secateur import criteria, patterns
from secateur.patterns import Pattern, Rows, Unstructured
from secateur.selection import LazyScores, comparable, counts_kept_overall, refuse_meta, removed_lowest
from secateur.support import function_of, matches, no_match, track, warn

__all__ = [
    "Allocation",
    "Counts",
    "Tables",
    "above",
    "by_name",
    "check_nesting",
    "check_sparsity",
    "erk",
    "everywhere",
    "kept_by_pattern",
    "narrowest",
    "owl",
    "parse",
    "progression",
    "settled",
    "uniform",
]

_watch = functools.partial(track, description="ranking")

Counts = dict[str, int | Tensor]
Allocation = Callable[[Mapping[str, Tensor], float, Pattern], Mapping[str, int | Tensor]]


class Tables(Mapping[str, Tensor]):
    """``{name: pattern.pool(scores)}``, computed on access; a unit that an earlier mask removed has the score -inf.

    >>> from secateur.patterns import Rows
    >>> Tables({"weight": torch.zeros(3, 2, 2)}, Rows()).shape("weight")
    (3, 4)
    """

    def __init__(self, scores: Mapping[str, Tensor], pattern: Pattern) -> None:
        self.scores = scores
        self.pattern = pattern

    def __getitem__(self, name: str) -> Tensor:
        among = self.scores.among if isinstance(self.scores, LazyScores) else None
        if among is None or name not in among or isinstance(self.pattern, Unstructured):
            return self._pool(name, _whole(self.scores[name]))
        assert isinstance(self.scores, LazyScores)
        scores = _whole(self.scores.before_masking(name))
        alive = _whole(among[name]).ne(0).to(scores.device)
        table = comparable(self._pool(name, scores.masked_fill(~alive, 0)))
        return removed_lowest(table, self._pool(name, alive.to(torch.float32)) > 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self.scores)

    def __len__(self) -> int:
        return len(self.scores)

    def only(self, names: Iterable[str]) -> Tables:
        """The tables of some of the tensors."""
        if isinstance(self.scores, LazyScores):
            return Tables(self.scores.only(names), self.pattern)
        return Tables({name: self.scores[name] for name in names}, self.pattern)

    def shape(self, name: str) -> tuple[int, int]:
        """(groups, units) of a table, without computing its scores."""
        groups, units = self._pool(name, torch.empty(shape_of(self.scores, name), device="meta")).shape
        return groups, units

    def left(self, name: str) -> int:
        """How many units of a table no earlier mask removed, without computing its scores."""
        in_groups = self.left_in_groups(name)
        return math.prod(self.shape(name)) if in_groups is None else int(in_groups.sum())

    def left_in_groups(self, name: str) -> Tensor | None:
        """The same for each group, an integer tensor on the host; None if there is no earlier mask."""
        among = self.scores.among if isinstance(self.scores, LazyScores) else None
        if among is None or name not in among:
            return None
        return (self._pool(name, _whole(among[name]).ne(0).to(torch.float32)) > 0).sum(1).cpu()

    def dealt_out(self, name: str, total: int) -> int | Tensor:
        """A tensor's count for each of its groups, as equal as what is left in them allows."""
        groups, units = self.shape(name)
        if groups <= 1:
            return total
        left = self.left_in_groups(name)
        return dealt_out(total, torch.full((groups,), units, dtype=torch.int64, device="cpu") if left is None else left)

    def _pool(self, name: str, scores: Tensor) -> Tensor:
        try:
            table = self.pattern.pool(scores)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if table.dim() != 2:
            raise ValueError(f"{name}: {self.pattern}.pool returned shape {tuple(table.shape)}, not (groups, units).")
        return table


def parse(word: str | Allocation) -> Allocation:
    """The allocation that a word means: everywhere, uniform, erk, owl or progression; a function is returned as it is.

    Raises:
        ValueError: no allocation is called so. TypeError: it is neither a word nor a function.

    >>> parse("erk") is erk
    True
    """
    known = {"everywhere": everywhere, "uniform": uniform, "erk": erk, "owl": owl, "progression": progression}
    return function_of(word, known, "allocation")


def narrowest(criterion: Callable[..., Any]) -> Pattern:
    """`Rows` where the scores of a criterion, or of a solver, compare within an output alone; else `Unstructured`.

    >>> narrowest(criteria.wanda), narrowest(criteria.ria)
    (Rows(), Unstructured())
    """
    return Rows() if criteria.scope_of(criterion) == "row" else Unstructured()


def settled(
    criterion: str | Callable[..., Tensor],
    pattern: str | Pattern | None,
    allocate: str | Allocation | None,
) -> tuple[Callable[..., Tensor], Pattern, Allocation]:
    """What a verb was asked for as values: words are looked up, and None is what the criterion's scores allow.

    Scores that compare within a row get `Rows` and `uniform`, within a layer `Unstructured` and `uniform`, over the
    model `Unstructured` and `everywhere`. A wider competition that is asked for is carried out, with a warning.

    >>> settled("wanda", None, None)[1:] == (Rows(), uniform)
    True
    """
    criterion = criteria.parse(criterion)
    scope = criteria.scope_of(criterion)
    chosen = narrowest(criterion) if pattern is None else patterns.parse(pattern)
    shared = (everywhere if scope == "model" else uniform) if allocate is None else parse(allocate)
    who = getattr(criterion, "__name__", "the criterion")
    if scope == "row" and isinstance(chosen, Unstructured):
        warn(
            f"{who} scores the weights of one output against each other, and {chosen} lets all outputs of a layer "
            "compete; leave pattern out, or pass Rows() or an n:m such as NM(2, 4).",
        )
    if scope != "model" and chosen.density is None and criteria.scope_of(shared, "layer") == "model":
        warn(
            f"{who} scores the weights of one {'output' if scope == 'row' else scope} against each other, and this "
            "allocation ranks them over the whole model, where they don't compare: a layer may lose nearly all of its "
            "weights; leave allocate out, or pass one that ranks within layers, such as 'uniform' or 'erk'.",
        )
    return criterion, chosen, shared


def uniform(scores: Mapping[str, Tensor], sparsity: float, pattern: Pattern) -> Counts:
    """The same sparsity in every group of every tensor, rounded half to even within each.

    What leaves is the nearest whole number, as in every solver. So 95 % of a row of 9 weights are all 9, and the row is
    empty; Wanda's code (github.com/locuslab/wanda), which rounds down how many leave, would keep one of them.

    >>> from secateur.patterns import Rows, Unstructured
    >>> uniform({"a": torch.rand(10), "b": torch.rand(4)}, 0.5, Unstructured())
    {'a': 5, 'b': 2}
    >>> uniform({"a": torch.rand(3, 9)}, 0.95, Rows()), uniform({"a": torch.rand(3, 9)}, 0.94, Rows())
    ({'a': 0}, {'a': 1})
    """
    check_sparsity(sparsity)
    tables = Tables(scores, pattern)
    return {name: units - round(sparsity * units) for name in scores for _, units in [tables.shape(name)]}


@criteria.compares("model")
def everywhere(scores: Mapping[str, Tensor], sparsity: float, pattern: Pattern, *, min_kept: int = 1) -> Counts:
    """One competition over all tensors: the counts that follow from one exact threshold (global pruning).

    Args:
        scores: comparable between tensors, such as magnitudes or LAMP's.
        sparsity: fraction of all units that goes; exactly ``round(sparsity · units)`` of them go.
        pattern: where its groups are smaller than a tensor (rows), a tensor's count is dealt out to its groups.
        min_kept: each tensor keeps at least this many units (or all that it has, or that earlier masks left of it),
            unless ``sparsity`` is 1.

    Raises:
        ValueError: the tensors can't all keep ``min_kept`` at this sparsity, or earlier masks left too few.

    >>> from secateur.patterns import Unstructured
    >>> everywhere({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])}, 0.5, Unstructured())
    {'a': 1, 'b': 1}
    >>> everywhere({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])}, 0.5, Unstructured(), min_kept=0)
    {'a': 0, 'b': 2}
    """
    check_sparsity(sparsity)
    tables = Tables(scores, pattern)
    units, left, kept = _budget(tables, sparsity)
    floors = {name: min(min_kept, size) if sparsity < 1 else 0 for name, size in left.items()}
    if sum(floors.values()) > kept:
        raise ValueError(
            f"sparsity {sparsity} leaves {kept} of {sum(units.values())} units, too few for {min_kept} in each of "
            f"{len(units)} tensors; ask for less, or pass functools.partial(everywhere, min_kept=0)."
        )
    at_floor: dict[str, int] = {}
    while True:
        free = [name for name in units if name not in at_floor]
        counts = _counts(tables, free, kept - sum(at_floor.values()))
        short = {name: floors[name] for name in free if counts[name] < floors[name]}
        if not short:
            break
        at_floor |= short
    counts |= at_floor
    return {name: tables.dealt_out(name, counts[name]) for name in units}


def erk(scores: Mapping[str, Tensor], sparsity: float, pattern: Pattern) -> Counts:
    """Density in proportion to ``Σ dims / Π dims``: Erdős-Rényi-Kernel (Mocanu et al. 2018, arXiv:1707.04780; Evci et
    al. 2020, arXiv:1911.11134).

    The sums and products are over the weight's dimensions, kernels included. Layers that would be more than dense stay
    dense and the rest is shared out again; the total is exact, by largest remainders. Small layers stay denser than
    large ones, whatever their scores. Within earlier masks, a layer is full at what they left of it.

    Raises:
        ValueError: earlier masks left fewer units than the sparsity keeps.

    >>> from secateur.patterns import Unstructured
    >>> erk({"small": torch.rand(4, 4), "large": torch.rand(40, 40)}, 0.8, Unstructured())
    {'small': 16, 'large': 307}
    """
    check_sparsity(sparsity)
    tables = Tables(scores, pattern)
    units, left, kept = _budget(tables, sparsity)
    raw = {name: units[name] * _erdos_renyi(shape_of(scores, name)) for name in units}

    def at(scale: float) -> dict[str, float]:
        return {name: min(scale * raw[name], float(left[name])) for name in units}

    full = max((2 * left[name] / raw[name] for name in units if raw[name]), default=0.0)
    counts = _rounded_to(_where_the_sum_is(kept, at, 0.0, full), kept, left)
    return {name: tables.dealt_out(name, counts[name]) for name in units}


def owl(
    scores: Mapping[str, Tensor], sparsity: float, pattern: Pattern, *, outlier: float = 5.0, spread: float = 0.08
) -> Counts:
    """Density by the share of outliers, ``2 · spread · (D - min D) / (max D - min D) + shift``: OWL (Yin et al. 2023,
    arXiv:2310.05175).

    D is the share of a block's scores that are above ``outlier`` times their mean, taken over all tensors of the block
    together. Tensors are of one block if their names agree up to the first number (``model.layers.3``); one without a
    number is a block of its own. The shift makes the total exact, which for blocks of one size is what the authors'
    code does, and densities end at 0 and 1: at a sparsity near 1 choose ``spread`` below half the density, or the
    blocks with the fewest outliers may be emptied. Where all blocks have the same share, all have the same density.
    What earlier masks removed counts as a score of 0. Published with Wanda's scores and `Rows`, at 0.7.

    Args:
        scores: not negative, as magnitudes or Wanda's are.
        outlier: M in the paper, which takes 3, 5, 7 or 10.
        spread: λ in the paper; densities differ by at most twice this.

    Raises:
        ValueError: scores that are negative on average, a knob out of range, or earlier masks left too few.

    >>> from secateur.patterns import Rows
    >>> flat, peaked = torch.ones(4, 100), torch.ones(4, 100)
    >>> peaked[:, :5] = 50
    >>> owl({"layers.0.weight": flat, "layers.1.weight": peaked}, 0.7, Rows())
    {'layers.0.weight': 22, 'layers.1.weight': 38}
    """
    check_sparsity(sparsity)
    if not 0 < outlier < math.inf or not 0 <= spread <= 1:
        raise ValueError(f"outlier is a positive multiple of the mean, spread lies in [0, 1]; got {outlier}, {spread}.")
    tables = Tables(scores, pattern)
    units, left, kept = _budget(tables, sparsity)
    blocks: dict[str, list[str]] = {}
    for name in units:
        blocks.setdefault(_block_of(name), []).append(name)
    shares = {block: _share_of_outliers(scores, blocks[block], outlier) for block in track(blocks, "finding outliers")}
    lowest = min(shares.values(), default=0.0)
    widest = max(shares.values(), default=0.0) - lowest
    tilt = {
        name: 2 * spread * (shares[block] - lowest) / widest if widest else 0.0
        for block, names in blocks.items()
        for name in names
    }

    def at(shift: float) -> dict[str, float]:
        return {name: min(max(tilt[name] + shift, 0.0) * units[name], float(left[name])) for name in units}

    counts = _rounded_to(_where_the_sum_is(kept, at, -2.0, 2.0), kept, left)
    return {name: tables.dealt_out(name, counts[name]) for name in units}


def progression(scores: Mapping[str, Tensor], sparsity: float, pattern: Pattern, *, spread: float = 0.05) -> Counts:
    """Sparsity that grows by the same step from each block to the next: an arithmetic progression (Huang et al. 2025,
    arXiv:2502.14770).

    From ``sparsity - spread`` in the first block to ``sparsity + spread`` in the last: errors of early blocks add up in
    all that follow. Blocks are those of `owl`, a model's stacks (encoder, decoder) each have a progression of their
    own, and a tensor outside of blocks has the sparsity of the whole. No score is looked at. The total is exact: where
    blocks are of several sizes, all densities are shifted alike, and they end at 0 and 1.

    Args:
        spread: half the difference between the last block's sparsity and the first's; negative for the reverse. The
            paper searches the step, β = 2 · spread / (blocks - 1), by perplexity.

    >>> from secateur.patterns import Rows
    >>> progression({f"layers.{n}.weight": torch.rand(4, 100) for n in range(3)}, 0.5, Rows(), spread=0.1)
    {'layers.0.weight': 60, 'layers.1.weight': 50, 'layers.2.weight': 40}
    """
    check_sparsity(sparsity)
    if not -1 <= spread <= 1:
        raise ValueError(f"spread is a difference of sparsities, in [-1, 1]; got {spread}.")
    tables = Tables(scores, pattern)
    units, left, kept = _budget(tables, sparsity)
    stacks: dict[str, list[str]] = {}
    for block in dict.fromkeys(map(_block_of, units)):
        stacks.setdefault(block.rpartition(".")[0] if block.rpartition(".")[2].isdecimal() else block, []).append(block)
    tilt = {
        block: spread * (1 - 2 * at / (len(blocks) - 1)) if len(blocks) > 1 else 0.0
        for blocks in stacks.values()
        for at, block in enumerate(sorted(blocks, key=_last_number))
    }

    def at(shift: float) -> dict[str, float]:
        return {name: min(max(tilt[_block_of(name)] + shift, 0.0) * units[name], float(left[name])) for name in units}

    counts = _rounded_to(_where_the_sum_is(kept, at, -2.0, 2.0), kept, left)
    return {name: tables.dealt_out(name, counts[name]) for name in units}


def by_name(shares: Mapping[str, float | Allocation], *, otherwise: Allocation | None = None) -> Allocation:
    """The allocation that treats tensors by their names: ``{glob: sparsity, or an allocation for those tensors}``.

    A tensor follows the first glob that matches it. A sparsity is taken in every group, as `uniform` does; an
    allocation is called with those tensors and the sparsity of the whole. The tensors that no glob matches make up
    what is missing, by `everywhere`, so that the total is exact; with ``otherwise`` they follow that at the sparsity of
    the whole, and the total is what comes of it.

    Args:
        shares: globs over the tensors' names, as `find_targets` takes them.
        otherwise: `everywhere`, say. It is what fits a schedule that starts at 0: the named tensors may then be sparser
            than the whole is so far.

    Raises:
        ValueError: a glob decides about no tensor, the named tensors alone keep too much or too little for the total
            to be exact, or every tensor is named and the globs contradict the sparsity.
        TypeError: a share is neither a number nor a function.

    >>> from secateur.patterns import Unstructured
    >>> scores = {"body.0": torch.rand(60), "body.1": torch.rand(40), "head": torch.rand(20)}
    >>> counts = by_name({"head": 0.0})(scores, 0.75, Unstructured())
    >>> counts["head"], sum(counts.values())
    (20, 30)
    >>> by_name({"head": 0.5}, otherwise=uniform)(scores, 0.75, Unstructured())
    {'body.0': 15, 'body.1': 10, 'head': 10}
    """
    for glob, share in shares.items():
        if not callable(share):
            if not isinstance(share, int | float):
                raise TypeError(f"{glob!r}: a share is a sparsity or an allocation, not {share!r}.")
            check_sparsity(share)
    return _ByName(dict(shares), otherwise)


@dataclass(frozen=True, eq=False)
class _ByName:
    """What `by_name` makes: a value, so that it is pickled as every other allocation is."""

    __name__: ClassVar[str] = "by_name"
    shares: Mapping[str, float | Allocation]
    otherwise: Allocation | None

    @property
    def compares(self) -> criteria.Scope:
        """As widely as the widest of the parts."""
        parts = [*filter(callable, self.shares.values()), everywhere if self.otherwise is None else self.otherwise]
        return "model" if any(criteria.scope_of(part, "layer") == "model" for part in parts) else "layer"

    def __call__(self, scores: Mapping[str, Tensor], sparsity: float, pattern: Pattern) -> Counts:
        check_sparsity(sparsity)
        tables = Tables(scores, pattern)
        named, rest = _by_first_glob(list(self.shares), scores)
        counts: Counts = {}
        for glob, names in named.items():
            share = self.shares[glob]
            part = tables.only(names).scores
            counts |= share(part, sparsity, pattern) if callable(share) else uniform(part, share, pattern)
        others = tables.only(rest).scores
        if self.otherwise is not None:
            if rest:
                counts |= self.otherwise(others, sparsity, pattern)
            return {name: counts[name] for name in scores}
        units, left, kept = _budget(tables, sparsity)
        groups = {name: tables.shape(name)[0] for name in units}
        fixed = sum(_total(count, groups[name]) for name, count in counts.items())
        if rest:
            size = sum(units[name] for name in rest)
            removed = size - _missing(kept, fixed, sum(left[name] for name in rest), sparsity)
            counts |= everywhere(others, removed / size if size else 0.0, pattern)
        elif abs(fixed - kept) > sum(groups.values()):  # more than rounding explains
            raise ValueError(
                f"every tensor has a glob, and together they keep {fixed} of {sum(units.values())} units, where "
                f"sparsity {sparsity} keeps {kept}; give the sparsity that they come to, or leave tensors unnamed."
            )
        return {name: counts[name] for name in scores}


def above(threshold: float) -> Allocation:
    """The allocation that keeps the units whose scores are above a threshold; the sparsity is the most that may go.

    In each group the count is ``max(units above the threshold, units - round(sparsity · units))``, so that no tensor is
    emptied: at 0.995 at least half a percent stays, as in the code of movement pruning (Sanh et al. 2020,
    arXiv:2005.07683), and at 1 the threshold decides alone. What the sparsity comes to, `secateur.sparsity_of` the
    masks says.

    Args:
        threshold: in the scores' own scale; for `secateur.criteria.soft_movement` between 0 and 1.

    >>> from secateur.patterns import Unstructured
    >>> above(0.1)({"a": torch.tensor([0.3, 0.1, 0.2, 0.0]), "b": torch.zeros(8)}, 0.75, Unstructured())
    {'a': 2, 'b': 2}
    """
    if math.isnan(threshold):
        raise ValueError("a threshold is a number in the scores' own scale, not NaN.")
    return _Above(threshold)


@dataclass(frozen=True)
class _Above:
    """What `above` makes, a value as `_ByName` is."""

    __name__: ClassVar[str] = "above"
    threshold: float
    compares: ClassVar[criteria.Scope] = "model"

    def __call__(self, scores: Mapping[str, Tensor], sparsity: float, pattern: Pattern) -> Counts:
        check_sparsity(sparsity)
        tables = Tables(scores, pattern)
        counts: Counts = {}
        for name in scores:
            table = tables[name]
            groups, units = table.shape
            left = tables.left_in_groups(name)
            least = torch.full((groups,), units - round(sparsity * units), dtype=torch.int64, device="cpu")
            over = (table > self.threshold).sum(1).cpu()
            counts[name] = _one_if_equal(over.maximum(least if left is None else least.minimum(left)))
        return counts


def kept_by_pattern(scores: Mapping[str, Tensor], pattern: Pattern) -> Counts:
    """Counts where the pattern itself says the density, as n:m does.

    >>> from secateur.patterns import NM
    >>> kept_by_pattern({"weight": torch.rand(4, 8)}, NM(2, 4))
    {'weight': 2}
    """
    assert pattern.density is not None
    tables = Tables(scores, pattern)
    return {name: round(pattern.density * units) for name in scores for _, units in [tables.shape(name)]}


def dealt_out(total: int, left: Tensor) -> int | Tensor:
    """A tensor's count for each of its groups: as equal as what is ``left`` in them allows, the first having one more.

    >>> dealt_out(7, torch.tensor([5, 5, 5]))
    tensor([3, 2, 2])
    >>> dealt_out(7, torch.tensor([5, 1, 5]))
    tensor([3, 1, 3])
    """
    if left.numel() <= 1:
        return total
    low, high = 0, int(left.max())  # the most that every group can have, where it has as much
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if int(left.clamp(max=middle).sum()) <= total else (low, middle - 1)
    counts = left.clamp(max=low)
    more = total - int(counts.sum())
    can_take = left > low
    assert 0 <= more <= int(can_take.sum())
    return _one_if_equal(counts + (can_take & (can_take.cumsum(0) <= more)))


def check_sparsity(sparsity: float) -> None:
    """``ValueError`` unless it is a fraction in [0, 1].

    >>> check_sparsity(50)
    Traceback (most recent call last):
    ...
    ValueError: sparsity is the fraction that is removed, in [0, 1]; got 50. For 50 percent write 0.5.
    """
    if isinstance(sparsity, bool) or not isinstance(sparsity, int | float) or not 0 <= sparsity <= 1:
        hint = (
            f" For {sparsity:g} percent write {sparsity / 100:g}."
            if type(sparsity) in (int, float) and sparsity > 1
            else " Pass a Python number: float(sparsity)."
            if hasattr(sparsity, "__float__") and not isinstance(sparsity, int | float)
            else ""
        )
        raise ValueError(f"sparsity is the fraction that is removed, in [0, 1]; got {sparsity!r}.{hint}")


def check_nesting(left: int, kept: int, where: str) -> None:
    """``ValueError`` if more units are asked for than earlier masks left.

    >>> check_nesting(10, 12, "weight")
    Traceback (most recent call last):
    ...
    ValueError: weight: the earlier masks keep fewer units than the sparsity asks to keep; ask for more sparsity.
    """
    if left < kept:
        raise ValueError(
            f"{where}: the earlier masks keep fewer units than the sparsity asks to keep; ask for more sparsity."
        )


def shape_of(scores: Mapping[str, Tensor], name: str) -> torch.Size:
    """The shape of one tensor's scores, without computing them."""
    return scores.shape(name) if isinstance(scores, LazyScores) else scores[name].shape


def _counts(tables: Tables, names: list[str], kept: int) -> dict[str, int]:
    part = tables if len(names) == len(tables) else tables.only(names)
    # Unstructured tables are the scores themselves: ranked from there, they are computed piece by piece
    return counts_kept_overall(part.scores if isinstance(part.pattern, Unstructured) else part, kept, watch=_watch)


def _budget(tables: Tables, sparsity: float) -> tuple[dict[str, int], dict[str, int], int]:
    """(units of each tensor, what earlier masks left of them, how many stay in all)"""
    units = {name: math.prod(tables.shape(name)) for name in tables}
    kept = sum(units.values()) - round(sparsity * sum(units.values()))
    left = {name: tables.left(name) for name in units}
    check_nesting(sum(left.values()), kept, "the model")
    return units, left, kept


def _erdos_renyi(shape: torch.Size) -> float:
    """``Σ dims / Π dims``; a scalar has the density of a vector of one."""
    return (sum(shape) or 1) / math.prod(shape) if math.prod(shape) else 0.0


def _where_the_sum_is(kept: int, at: Callable[[float], dict[str, float]], low: float, high: float) -> dict[str, float]:
    """The counts ``at(x)`` whose sum is ``kept``; they grow with x and reach it between ``low`` and ``high``."""
    for _ in range(100):  # to the last bit
        middle = (low + high) / 2
        low, high = (middle, high) if math.fsum(at(middle).values()) < kept else (low, middle)
    return at(high)


def _rounded_to(ideal: dict[str, float], total: int, most: dict[str, int]) -> dict[str, int]:
    """Integers near the ideal counts that sum to the total; the largest remainders are rounded up."""
    counts = {name: min(math.floor(value + 1e-9), most[name]) for name, value in ideal.items()}
    missing = total - sum(counts.values())
    for name in sorted(ideal, key=lambda name: counts[name] - ideal[name]):
        if missing and counts[name] < most[name]:
            counts[name] += 1
            missing -= 1
    assert missing == 0
    return counts


def _block_of(name: str) -> str:
    """The name up to its first number, ``model.layers.3``; all of it if there is none."""
    parts = name.split(".")
    first = next((at for at, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[: first + 1])


def _last_number(block: str) -> int:
    last = block.rpartition(".")[2]
    return int(last) if last.isdecimal() else 0


def _share_of_outliers(scores: Mapping[str, Tensor], names: list[str], outlier: float) -> float:
    """The fraction of the scores of all these tensors that are above so many times their mean."""

    def values(name: str) -> Tensor:
        found = comparable(_whole(scores[name]))
        refuse_meta(name, found)
        return found.masked_fill(found == -torch.inf, 0)  # removed earlier

    entries = sum(shape_of(scores, name).numel() for name in names)
    mean = math.fsum(float(values(name).sum(dtype=torch.float64)) for name in names) / max(entries, 1)
    if mean < 0:
        raise ValueError(
            f"{names[0]}: scores that are negative on average have no outliers; use owl with magnitudes or Wanda's."
        )
    return sum(int((values(name) > outlier * mean).sum()) for name in names) / max(entries, 1)


def _by_first_glob(globs: list[str], names: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
    """({glob: names that it is the first to match}, names that none matches)"""
    names = list(names)
    named: dict[str, list[str]] = {glob: [] for glob in globs}
    rest: list[str] = []
    for name in names:
        first = next((glob for glob in globs if matches(name, [glob])), None)
        (rest if first is None else named[first]).append(name)
    for glob in [glob for glob in globs if not named[glob]]:
        if any(matches(name, [glob]) for name in names):
            raise ValueError(f"{glob!r} matches only tensors that an earlier glob took; put it before the wider one.")
        raise no_match(glob, names, "tensor")
    return named, rest


def _missing(kept: int, fixed: int, left: int, sparsity: float) -> int:
    """How many units the unnamed tensors keep, so that the total is exact; ``ValueError`` if they can't."""
    missing = kept - fixed
    if missing < 0 or (missing == 0 < left and sparsity < 1):
        raise ValueError(
            f"the named tensors keep {fixed} units, and sparsity {sparsity} keeps {kept} in all: none are left for the "
            "others; name higher sparsities, or say with otherwise= what the others follow."
        )
    if missing > left:
        raise ValueError(
            f"the named tensors keep {fixed} units and the others have {left}, fewer than the {kept} in all that "
            f"sparsity {sparsity} keeps; name lower sparsities, or say with otherwise= what the others follow."
        )
    return missing


def _total(count: int | Tensor, groups: int) -> int:
    return int(count.sum()) if isinstance(count, Tensor) else count * groups


def _one_if_equal(counts: Tensor) -> int | Tensor:
    return int(counts[0]) if counts.numel() and bool(counts.eq(counts[0]).all()) else counts


def _whole(tensor: Tensor) -> Tensor:
    """A DTensor gathered, for patterns whose groups or units may cross its shards; others as they are."""
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()
