"""How many units each tensor keeps: functions ``(scores, sparsity, pattern) -> {name: units kept in each group}``.

Law: `everywhere` and `erk` remove exactly ``round(sparsity · units)`` units over all tensors, `uniform` in each group.
Only `everywhere` holds some of each tensor back.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from secateur.patterns import Pattern, Unstructured
from secateur.progress import track
from secateur.selection import LazyScores, comparable, counts_kept_overall, removed_lowest

__all__ = ["Allocation", "Tables", "check_nesting", "check_sparsity", "erk", "everywhere", "kept_by_pattern", "uniform"]

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
        among = self.scores.among if isinstance(self.scores, LazyScores) else None
        if among is None or name not in among:
            return math.prod(self.shape(name))
        return int((self._pool(name, _whole(among[name]).ne(0).to(torch.float32)) > 0).sum())

    def _pool(self, name: str, scores: Tensor) -> Tensor:
        try:
            table = self.pattern.pool(scores)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if table.dim() != 2:
            raise ValueError(f"{name}: {self.pattern}.pool returned shape {tuple(table.shape)}, not (groups, units).")
        return table


def uniform(scores: Mapping[str, Tensor], sparsity: float, pattern: Pattern) -> Counts:
    """The same sparsity in every group of every tensor, rounded half to even within each.

    >>> from secateur.patterns import Unstructured
    >>> uniform({"a": torch.rand(10), "b": torch.rand(4)}, 0.5, Unstructured())
    {'a': 5, 'b': 2}
    """
    check_sparsity(sparsity)
    tables = Tables(scores, pattern)
    return {name: units - round(sparsity * units) for name in scores for _, units in [tables.shape(name)]}


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
    shapes = {name: tables.shape(name) for name in scores}
    units = {name: math.prod(shape) for name, shape in shapes.items()}
    kept = sum(units.values()) - round(sparsity * sum(units.values()))
    left = {name: tables.left(name) for name in units}
    check_nesting(sum(left.values()), kept, "the model")
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
    return {name: dealt_out(counts[name], *shapes[name]) for name in units}


def erk(scores: Mapping[str, Tensor], sparsity: float, pattern: Pattern) -> Counts:
    """Density in proportion to ``Σ dims / Π dims``: Erdős-Rényi-Kernel (Mocanu et al. 2018, arXiv:1707.04780; Evci et
    al. 2020, arXiv:1911.11134).

    Layers that would be more than dense stay dense and the rest is shared out again; the total is exact, by largest
    remainders. Small layers stay denser than large ones, whatever their scores.

    >>> from secateur.patterns import Unstructured
    >>> erk({"small": torch.rand(4, 4), "large": torch.rand(40, 40)}, 0.8, Unstructured())
    {'small': 16, 'large': 307}
    """
    check_sparsity(sparsity)
    tables = Tables(scores, pattern)
    shapes = {name: tables.shape(name) for name in scores}
    units = {name: math.prod(shape) for name, shape in shapes.items()}
    kept = sum(units.values()) - round(sparsity * sum(units.values()))
    raw = {
        name: sum(shape) / math.prod(shape) if math.prod(shape) else 0.0
        for name in scores
        for shape in [shape_of(scores, name)]
    }
    dense: set[str] = set()
    while True:
        sharing = [name for name in units if name not in dense]
        weight = sum(raw[name] * units[name] for name in sharing)
        scale = (kept - sum(units[name] for name in dense)) / weight if weight else 0.0
        most = max((raw[name] for name in sharing), default=0.0)
        if most * scale <= 1:
            break
        dense |= {name for name in sharing if raw[name] == most}
    ideal = {name: float(units[name]) if name in dense else scale * raw[name] * units[name] for name in units}
    counts = _rounded_to(ideal, kept, units)
    return {name: dealt_out(counts[name], *shapes[name]) for name in units}


def kept_by_pattern(scores: Mapping[str, Tensor], pattern: Pattern) -> Counts:
    """Counts where the pattern itself says the density, as n:m does.

    >>> from secateur.patterns import NM
    >>> kept_by_pattern({"weight": torch.rand(4, 8)}, NM(2, 4))
    {'weight': 2}
    """
    assert pattern.density is not None
    tables = Tables(scores, pattern)
    return {name: round(pattern.density * units) for name in scores for _, units in [tables.shape(name)]}


def dealt_out(total: int, groups: int, units: int) -> int | Tensor:
    """A tensor's count for each of its groups: equal but for one, the first groups having one more.

    >>> dealt_out(7, 3, 5)
    tensor([3, 2, 2])
    """
    if groups <= 1:
        return total
    each, more = divmod(total, groups)
    assert each + (more > 0) <= units
    if not more:
        return each
    counts = torch.full((groups,), each, device="cpu")
    counts[:more] += 1
    return counts


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
    """``ValueError`` if more units are asked for than earlier masks left."""
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


def _rounded_to(ideal: dict[str, float], total: int, units: dict[str, int]) -> dict[str, int]:
    """Integers near the ideal counts that sum to the total; the largest remainders are rounded up."""
    counts = {name: min(math.floor(value + 1e-9), units[name]) for name, value in ideal.items()}
    for name in sorted(ideal, key=lambda name: counts[name] - ideal[name]):
        if sum(counts.values()) >= total:
            break
        if counts[name] < units[name]:
            counts[name] += 1
    assert sum(counts.values()) == total
    return counts


def _whole(tensor: Tensor) -> Tensor:
    """A DTensor gathered, for patterns whose groups or units may cross its shards; others as they are."""
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()
