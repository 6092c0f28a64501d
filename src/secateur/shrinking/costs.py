"""The cost of a model by the units that stay: parameters, those that one token passes through, bytes of it or of its
keys and values, multiply-adds or time; tied groups, and the loss where no data says it.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.allocation import Counts, everywhere
from secateur.coupling import Axis, Coupling, Expression, Group, Product, dims_of_made, resolved
from secateur.patterns import Pattern
from secateur.runtimes import Elsewhere, Runtime, Timer
from secateur.shrinking.apply import carry_out
from secateur.shrinking.plan import plan_of
from secateur.support import in_mode, on_rank_zero, printable, run_example, tensors_of
from secateur.targets import is_expert

# ---- Tied groups: they keep the same share of their units.
#
# Law: a count is the same whole number of parts of each of them, not below the least and a multiple of the step.

ROUNDED = 16  # kernels run other counts no faster


def by_tie(groups: Iterable[Group]) -> list[list[Group]]:
    tied: dict[int, list[Group]] = {}
    for group in groups:
        tied.setdefault(group.tied, []).append(group)
    return list(tied.values())


class TiedGroups:
    """Tied groups, which keep the same share of their units: groups of 36 and 3 keep 12 and 1, or 24 and 2, or all.

    Args:
        groups: all that are tied to each other.
        round_to: counts are multiples of this; None: of ``rounded`` in groups of 64 or more.
        minimum: fewer may not stay.
    """

    def __init__(
        self, groups: Sequence[Group], round_to: int | None, minimum: Mapping[str, int], rounded: int = ROUNDED
    ) -> None:
        self.groups = groups
        self.parts = math.gcd(*(group.size for group in groups))
        self.step, self.least = 1, 1
        for group in groups:
            step = (rounded if group.size >= 64 else 1) if round_to is None else round_to
            step = math.lcm(step, group.multiple)
            self.step = math.lcm(self.step, step // math.gcd(step, group.size // self.parts))
            self.least = max(self.least, -(-minimum.get(group.name, 1) * self.parts // group.size))

    def choices(self) -> npt.NDArray[np.int64]:
        """Of how many parts the groups can keep, all first; what is no multiple comes only as all."""
        least = -(-self.least // self.step) * self.step
        fewer = np.arange((self.parts - 1) // self.step * self.step, least - 1, -self.step)
        return np.concatenate([[self.parts], fewer])

    def mean(self, counts: Mapping[str, int]) -> float:
        """Of how many of the parts the groups keep."""
        return sum(counts[group.name] * self.parts / group.size for group in self.groups) / len(self.groups)

    def counts(self, parts: int) -> dict[str, int]:
        """How many units each group keeps when the tie keeps so many parts."""
        parts = min(max(parts, self.step, self.least), self.parts)
        return {group.name: group.size // self.parts * parts for group in self.groups}


# ---- The cost of a model as a polynomial in the number of units that each tied group keeps.
#
# Equal terms are merged, so that an evaluation is cheap.
#
# Law: it equals a count by hand, and keeping more of a tie never costs less.

Amounts = npt.NDArray[np.float64]
Parts = npt.NDArray[np.int64] | npt.NDArray[np.float64]  # of how many parts each tie keeps
Term = tuple[Sequence[Expression], float]  # dimensions whose sizes multiply, and how often that counts

Factor = tuple[tuple[tuple[int, ...], int], ...]  # a sum of products of ties, each so many times
_AT_ONCE = 256  # numbers of parts, for which all terms are held


class CostPolynomial:
    """The cost of a model: ``sum(times * product(dims))``, dimensions being given by how many parts each tie keeps.

    Attributes:
        terms: ``{factors: times}``; a factor is a sum of ``(ties, number)``: the number times what these ties keep.

    >>> from secateur.coupling import Group
    >>> rows, columns = Axis(6), Axis(4)
    >>> tied = [TiedGroups([Group("", axis, axis.size, (), 0, ())], 1, {}) for axis in (rows, columns)]
    >>> weight = CostPolynomial([((rows, columns), 1), ((rows,), 1)], tied)  # a matrix and a bias
    >>> weight([6, 4]), weight([3, 4]), weight.changes([6, 4], 1, [1, 2]).tolist()
    (30.0, 15.0, [-18.0, -12.0])
    """

    def __init__(self, terms: Iterable[Term], tied: Sequence[TiedGroups]) -> None:
        units = {group.axis: (at, group.size // each.parts) for at, each in enumerate(tied) for group in each.groups}
        known: dict[int, tuple[Expression, Factor]] = {}
        merged = dict[tuple[Factor, ...], float]()
        for dims, times in terms:
            factors: list[Factor] = []
            for dim in dims:
                whole = resolved(dim)
                if id(whole) not in known:  # and held, or another would get its id
                    known[id(whole)] = whole, _factor(whole, units)
                factor = known[id(whole)][1]
                if len(factor) == 1:  # its number is the term's: terms that differ in nothing else are one
                    ((product, number),) = factor
                    times *= number
                    factor = ((product, 1),) if product else ()
                if factor:
                    factors.append(factor)
            key = tuple(sorted(factors))
            merged[key] = merged.get(key, 0) + times
        self._settle(merged, len(tied))

    @classmethod
    def of(cls, terms: Mapping[tuple[Factor, ...], float], ties: int) -> CostPolynomial:
        """The one that has these `terms`, of so many ties."""
        found = cls.__new__(cls)
        found._settle(terms, ties)
        return found

    def _settle(self, merged: Mapping[tuple[Factor, ...], float], ties: int) -> None:
        self.terms = dict(merged)
        self._ties = ties
        self._all, self._sums = _Sum(merged, ties), dict[int, _Sum]()
        self._having: dict[int, dict[tuple[Factor, ...], float]] = {}
        for term, times in merged.items():
            for at in {at for factor in term for product, _ in factor for at in product}:
                self._having.setdefault(at, {})[term] = times

    def __call__(self, parts: Parts | Sequence[float]) -> float:
        """The cost when each tie keeps so many of its parts; fractions are allowed."""
        return float(self._all(np.asarray(parts, dtype=np.float64)[:, None])[0])

    def changes(self, parts: Parts | Sequence[float], at: int, values: Parts | Sequence[float]) -> Amounts:
        """The change of the cost when one tie keeps other numbers of parts."""
        here, values = np.asarray(parts, dtype=np.float64)[:, None], np.asarray(values, dtype=np.float64)
        having = self._of(at)
        found = np.empty(len(values))
        for start in range(0, len(values), _AT_ONCE):
            piece = values[start : start + _AT_ONCE]
            there = np.repeat(here, len(piece), axis=1)
            there[at] = piece
            found[start : start + _AT_ONCE] = having(there)
        return found - having(here)

    def _of(self, at: int) -> _Sum:
        """The terms that one tie is in."""
        if at not in self._sums:
            self._sums[at] = _Sum(self._having.get(at, {}), self._ties)
        return self._sums[at]


class _Sum:
    """Terms as tables of indices: for many numbers of parts at a time."""

    def __init__(self, terms: Mapping[tuple[Factor, ...], float], ties: int) -> None:
        places = {factor: at for at, factor in enumerate(dict.fromkeys(each for term in terms for each in term))}
        products = [product for factor in places for product in factor]
        self._starts = np.cumsum([0, *map(len, places)])[:-1].astype(np.int64)
        self._numbers = np.array([number for _, number in products], dtype=np.float64)
        self._products = _padded([product for product, _ in products], ties)
        self._factors = _padded([[places[each] for each in term] for term in terms], len(places))
        self._times = np.array(list(terms.values()), dtype=np.float64)

    def __call__(self, parts: Amounts) -> Amounts:
        """Of ``(ties, n)`` parts the n sums."""
        one = np.ones((1, parts.shape[1]))
        factors = one
        if len(self._starts):
            products = _multiplied(np.concatenate([parts, one]), self._products) * self._numbers[:, None]
            factors = np.concatenate([np.add.reduceat(products, self._starts), one])
        found: Amounts = self._times @ _multiplied(factors, self._factors)
        return found


def _multiplied(values: Amounts, rows: npt.NDArray[np.int64]) -> Amounts:
    found = np.ones((len(rows), values.shape[1]))
    for column in rows.T:
        found *= values[column]
    return found


def _padded(rows: Sequence[Sequence[int]], padding: int) -> npt.NDArray[np.int64]:
    """Rows of one length; at the end of the shorter the index of a one."""
    found = np.full((len(rows), max(map(len, rows), default=0)), padding, dtype=np.int64)
    for at, row in enumerate(rows):
        found[at, : len(row)] = row
    return found


def _factor(expression: Expression, units: Mapping[Axis, tuple[int, int]]) -> Factor:
    """The size of a dimension; of a sum of a hundred segments it stays one factor, or two would make ten thousand."""
    whole = resolved(expression)
    if isinstance(whole, Axis):
        at, number = units.get(whole, (None, whole.size))
        return (((() if at is None else (at,)), number),)
    found = Counter[tuple[int, ...]]()
    if isinstance(whole, Product):
        found[()] = 1
        for factor in whole.factors:
            before, found = found, Counter()
            for other, times in _factor(factor, units):
                for one, number in before.items():
                    found[tuple(sorted((*one, *other)))] += number * times
    else:
        for segment in whole.segments:
            for one, number in _factor(segment, units):
                found[one] += number
    return tuple(sorted(found.items()))


# ---- The default loss curve of tied groups when there is no calibration data.
#
# Law: all groups lose the same share of their units, but the width of a residual stream begins when the others have
# lost half, and groups around others, such as heads, when those are used up.

Loss = Callable[[TiedGroups, int], float]  # when so many of the parts stay that it can keep: 0 of all, of fewer no less

# by how much of their share others are ahead; of 0, 0.5 and 2 for streams 0.5 was right most often over two networks
# (`benchmarks/shrinking/RESULTS.md`)
AROUND, STREAM = 1.0, 0.5


def even(amount: CostPolynomial, tied: Sequence[TiedGroups], behind: Mapping[int, float] | None = None) -> Loss:
    """``∫ (behind + share that left) d(what that saves)``: what a group saves by its next unit costs its share.

    So the groups that are behind by 0 lose equal shares, whatever a unit of them costs, and one that is behind by b
    loses what the others do less b.
    """
    curves: dict[TiedGroups, dict[int, float]] = {}
    whole = [each.parts for each in tied]
    for at, each in enumerate(tied):
        choices = each.choices()
        saved = -amount.changes(whole, at, choices)
        left = (behind or {}).get(each.groups[0].tied, 0.0) + 1 - choices / each.parts
        losses = np.concatenate([[0.0], np.cumsum((left[1:] + left[:-1]) / 2 * np.diff(saved))])
        curves[each] = dict(zip(choices.tolist(), losses.tolist(), strict=True))
    return lambda each, parts: curves[each][parts]


def late(coupling: Coupling, groups: Sequence[Group]) -> dict[int, float]:
    """The ties that lose units later than others: ``{number of the tie: by which share}``."""
    return dict.fromkeys(_streams(coupling, groups), STREAM) | dict.fromkeys(ties_around(coupling, groups), AROUND)


def ties_around(coupling: Coupling, groups: Sequence[Group]) -> set[int]:
    """Groups that contain other groups wherever they are rows, such as heads around the widths of heads.

    Both at one share would take its square; and of a small vision transformer at equal multiply-adds, what is left
    with all heads was right more often (`benchmarks/shrinking/RESULTS.md`).
    """
    alone: set[Axis] = set()
    around: set[Axis] = set()

    def look(expression: Expression, *, within: bool) -> None:
        dim = resolved(expression)
        if isinstance(dim, Axis):
            (around if within else alone).add(dim)
        elif isinstance(dim, Product):
            for at, factor in enumerate(dim.factors):
                look(factor, within=within or at + 1 < len(dim.factors))
        else:
            for segment in dim.segments:
                look(segment, within=within)

    for group in groups:
        for name, at in group.members:
            if at == 0 and len(coupling.dims(name)) > 1:
                look(coupling.dims(name)[at], within=False)
    return {group.tied for group in groups if group.axis in around} - {
        group.tied for group in groups if group.axis in alone
    }


def _streams(coupling: Coupling, groups: Sequence[Group]) -> set[int]:
    """Which groups are the width of a residual stream: a branch reads and writes it, and matrices of others have it."""
    insides = [{*branch.parameters} for branch in coupling.branches]
    found = set()
    for group in groups:
        matrices = [(name, at) for name, at in group.members if len(coupling.dims(name)) > 1]
        for inside in insides:
            sides = {at for name, at in matrices if name in inside}
            if len(sides) > 1 and any(name not in inside for name, _ in matrices):
                found.add(group.tied)
    return found


# The cost of a model when so many units stay: parameters, multiply-adds, or time relative to the whole model's.
#
# Law: the model is not changed; a cost follows from counts alone, and only for the time a model is cut.

TARGETS = ("params", "active_params", "macs", "bytes", "kv_bytes", "latency", "units")
SECONDS = 0.3  # that two models are timed in turns


def by_cost(scores: Mapping[str, Tensor], sparsity: float, pattern: Pattern) -> Counts:
    """`everywhere`, of scores per cost: what leaves first gains most of the target for the score that it loses.

    An allocation for `secateur.shrink`, which divides each group's scores by what one of its units costs of the target
    before (parameters, multiply-adds); of "latency" and "units" all cost the same.

    >>> import torch
    >>> from secateur import shrink
    >>> layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=4), nn.ReLU(), nn.Conv2d(8, 2, 1)
    >>> model = nn.Sequential(*layers)
    >>> _ = shrink(model, torch.zeros(1, 1, 16, 16), 0.4, target="macs", allocate=by_cost)
    >>> model[0].out_channels < model[2].out_channels  # eight times the positions
    True
    """
    return everywhere(scores, sparsity, pattern)


def prices_of(amount: CostPolynomial, tied: Sequence[TiedGroups]) -> dict[str, float]:
    """The cost of one unit of each group while all others are there; the mean over tied groups, which leave
    together.
    """
    found: dict[str, float] = {}
    whole = [each.parts for each in tied]
    for at, each in enumerate(tied):
        fewer = each.counts(each.parts - each.step)
        units = sum(group.size - fewer[group.name] for group in each.groups)
        price = -float(amount.changes(whole, at, [each.mean(fewer)])[0]) / units if units else 0.0
        found |= {group.name: price or 1.0 for group in each.groups}
    return found


def amount_of(
    model: nn.Module, coupling: Coupling, example_inputs: Any, target: str, tied: Sequence[TiedGroups]
) -> CostPolynomial:
    """The value of the target when ties keep so many of their parts.

    Of "latency", which has to be measured, what stands for it: multiply-adds, or parameters where there are none.
    """
    if target == "units":
        return CostPolynomial([([group.axis], 1) for each in tied for group in each.groups], tied)
    if target == "latency":
        target = "macs" if coupling.contractions() else "params"
    return CostPolynomial(terms_of(model, coupling, example_inputs, target), tied)


def terms_of(model: nn.Module, coupling: Coupling, example_inputs: Any, target: str) -> list[Term]:
    """The terms whose sum the target is: of all but times."""
    if target == "macs":
        return [*coupling.contractions()]
    if target == "kv_bytes":
        return cache_terms(model, coupling, example_inputs)
    if target == "bytes":
        return [(coupling.dims(name), each.element_size()) for name, each in tensors_of(model).items()]
    shares = shares_of_a_token(model) if target == "active_params" else {}
    return [(coupling.dims(name), shares.get(name, 1)) for name, _ in model.named_parameters()]


def cost_of(
    model: nn.Module, coupling: Coupling, example_inputs: Any, target: str, runtime: Runtime | Elsewhere | None = None
) -> Callable[[Mapping[str, int]], float]:
    """The value of the target when so many units stay of each group; a time in this runtime, torch if left out."""
    if target == "latency":
        return _latency(model, coupling, example_inputs, runtime)
    terms = terms_of(model, coupling, example_inputs, target)
    return lambda counts: coupling.total(terms, counts)


def _latency(
    model: nn.Module, coupling: Coupling, example_inputs: Any, runtime: Runtime | Elsewhere | None
) -> Callable[[Mapping[str, int]], float]:
    """The time of a forward pass over the model's own, in turns: the median of the ratios; of the same counts once."""
    dense, sizes = copy.deepcopy(model).eval(), {group.name: group.size for group in coupling.groups}
    timer = Timer(dense, example_inputs, runtime, seconds=SECONDS)

    measured: dict[tuple[tuple[str, int], ...], float] = {}

    def ratio(counts: Mapping[str, int]) -> float:
        less = tuple(sorted((name, count) for name, count in counts.items() if count < sizes[name]))
        if less and less not in measured:
            measured[less] = timed(counts)
        return measured.get(less, 1.0)

    def timed(counts: Mapping[str, int]) -> float:
        smaller = copy.deepcopy(dense)
        kept = {name: np.arange(sizes[name]) < count for name, count in counts.items()}
        carry_out(smaller, plan_of(smaller, coupling, kept), None)
        before, after = timer(smaller)
        return after / before

    return ratio


def timed_amount(
    model: nn.Module, coupling: Coupling, example_inputs: Any, runtime: Runtime | Elsewhere, tied: Sequence[TiedGroups]
) -> CostPolynomial:
    """The time of the model over its own, as linear in what ties keep: of ties that save as many multiply-adds by as
    many parts, as layers that are alike do, all lose half at once, and each part saves its share of the time. So little
    is lost in the noise. It saves a tenth of what its multiply-adds say at least.
    """
    time = cost_of(model, coupling, example_inputs, "latency", runtime)
    amount = amount_of(model, coupling, example_inputs, "latency", tied)
    whole = [each.parts for each in tied]
    alike: dict[tuple[int, float], list[int]] = {}
    for at, each in enumerate(tied):
        saved = -float(amount.changes(whole, at, [each.parts / 2])[0]) / max(amount(whole), 1e-300)
        alike.setdefault((each.parts, round(saved, 12)), []).append(at)

    def saved_by(ats: Sequence[int]) -> tuple[float, float]:
        """The share of the time, and of the parts of each."""
        first, choices = tied[ats[0]], tied[ats[0]].choices()
        half = int(choices[np.abs(choices - first.parts / 2).argmin()])
        counts = {name: count for at in ats for name, count in tied[at].counts(half).items()}
        return 1 - time(counts), 1 - half / first.parts

    found = on_rank_zero(lambda: [saved_by(ats) for ats in alike.values()])
    terms: dict[tuple[Factor, ...], float] = {}
    for ((parts, saved), ats), (gone, share) in zip(alike.items(), found, strict=True):
        most = max(gone / len(ats) / share if share else 0.0, 0.2 * saved)  # by all the parts of a tie
        terms |= {((((at,), 1),),): most / parts for at in ats}
    terms[()] = 1.0 - sum(times * whole[term[0][0][0][0]] for term, times in terms.items())
    return CostPolynomial.of(terms, len(tied))


# ---- What one token passes through of a mixture, and what a model keeps of each token that it has read.
#
# Law: what is said of counts is what a model of these counts has: its parameters, and the bytes in its cache.

_AT_A_TIME = ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k")


def shares_of_a_token(model: nn.Module) -> dict[str, float]:
    """``{parameter of experts: k / experts}``, where each token is sent to k of them, as their router or else the
    model's configuration says.

    Raises:
        ValueError: there are experts, and neither says k.
    """
    found: dict[str, float] = {}
    of: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        at = next((at for at, part in enumerate(parts) if is_expert(part)), None)
        if at is None:
            continue
        path = ".".join(parts[: at + 1])
        if path not in of:
            modules = len(parts) > at + 2  # one for each expert; else all of them are in each tensor
            count = len([*model.get_submodule(path).children()]) if modules else parameter.shape[0]
            of[path] = min(1.0, _at_a_time(model, ".".join(parts[:at]), path) / count)
        found[name] = of[path]
    return found


def _at_a_time(model: nn.Module, holder: str, experts: str) -> int:
    module, config = model.get_submodule(holder), getattr(model, "config", None)
    for place in (module, *module.children(), config, getattr(config, "text_config", None)):
        for word in _AT_A_TIME:
            if type(value := getattr(place, word, None)) is int and value > 0:
                return value
    raise ValueError(
        f"{printable(experts)}: neither its router nor the configuration says to how many experts a token is sent "
        f"({', '.join(_AT_A_TIME[:2])}), so active_params cannot be counted; ask for params."
    )


def active_params(model: nn.Module) -> float:
    """Parameters that are not zero and that one token passes through: all but of experts, of which k of each mixture
    count, by their mean. Embeddings and the head are among them, as in what Mixtral, DeepSeek-V3 and Qwen3 say of
    themselves (12.9, 37 and 3.3 billion).

    >>> active_params(nn.Linear(4, 2))
    10.0
    """
    shares = shares_of_a_token(model)
    counts = {name: int(each.detach().count_nonzero()) for name, each in model.named_parameters()}
    return float(sum(count * shares.get(name, 1) for name, count in counts.items()))


def kv_bytes(model: nn.Module, example_inputs: Any) -> float:
    """Bytes of keys and values that a model keeps of each token of a sequence, over all layers, as it runs."""
    called, held = _with_cache(model, example_inputs)
    with torch.no_grad(), in_mode(model, training=False):
        run_example(model, called)
    return float(sum(each.shape[1] * each.shape[3] * each.element_size() for each in _kept(model, held)))


def cache_terms(model: nn.Module, coupling: Coupling, example_inputs: Any) -> list[Term]:
    called, held = _with_cache(model, example_inputs)
    sizes: list[int] = []

    def made() -> list[Tensor]:
        kept = _kept(model, held)
        sizes[:] = [each.element_size() for each in kept]
        return kept

    dims = dims_of_made(coupling, model, called, made)  # (sequences, heads, tokens, width)
    return [((heads, width), size) for (_, heads, _, width), size in zip(dims, sizes, strict=True)]


def _with_cache(model: nn.Module, example_inputs: Any) -> tuple[dict[str, Any], list[Tensor]]:
    """The arguments with a cache that keeps nothing, and what it is given in a run."""
    taken = inspect.signature(model.forward).parameters
    name = next((each for each in ("past_key_values", "cache") if each in taken), None)  # the latter since 5.24
    if name is None:
        raise ValueError(
            f"kv_bytes is of models that keep keys and values of what they have read, and {type(model).__name__} takes "
            "no past_key_values."
        )
    if not isinstance(example_inputs, Mapping):
        example_inputs = {getattr(model, "main_input_name", "input_ids"): example_inputs}
    from transformers import DynamicCache

    held: list[Tensor] = []

    class Watched(DynamicCache):
        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            held.extend((key_states, value_states))
            return key_states, value_states

    return {**example_inputs, name: Watched(), "use_cache": False}, held


def _kept(model: nn.Module, held: list[Tensor]) -> list[Tensor]:
    if not held or any(each.dim() != 4 for each in held):
        raise ValueError(
            f"{type(model).__name__} keeps no keys and values of heads on the example: kv_bytes has nothing to count."
        )
    return held
