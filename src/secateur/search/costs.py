"""Budgets: limits on the cost of the result, or the share of the score that it has to keep. Compares finished models by
their loss, row by row, and picks one. The cost of a model at any choice of levels: parameters, multiply-adds and
bytes, as polynomials in what stays.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur import runtimes
from secateur.coupling import Axis, Coupling, Expression, Group, Product, leaves, resolved
from secateur.runtimes import Elsewhere, Runtime
from secateur.shrinking import CostPolynomial, TiedGroups, active_params, cache_terms, kv_bytes, shares_of_a_token
from secateur.support import Between, printable, tensors_of, unknown

# ---- Budgets: limits on the cost of the result, or the share of the score that it has to keep.
#
# Law: a budget holds values, not words; arguments that are not allowed are refused before the model runs.

COSTS = {
    "params": "parameters that are not zero",
    "active_params": "those of them that one token passes through",
    "macs": "multiply-adds of the example",
    "bytes": "bytes of parameters and buffers",
    "kv_bytes": "bytes of keys and values that are kept of each token",
    "latency": "milliseconds of the example",
}
_ABOVE = 1 - 1e-9  # of a limit: a share times a size is no exact number


@dataclass(frozen=True)
class Budget:
    """Limits on the cost of a fitted model, or the share of the score that it has to keep: one of the two.

    Attributes:
        limits: ``{word of COSTS: limit}``: up to 1 a share of what the dense model costs, above that the cost itself.
        keep: the share of the dense model's score that has to be kept, or ``{text: share}`` of each that is guarded;
            None where there are limits.
        target: the word of the cost that is minimized, where a score is kept.
        runtime: where a latency is measured.
    """

    limits: Mapping[str, float]
    keep: float | Mapping[str, float] | None = None
    target: str = "params"
    runtime: Runtime | Elsewhere = field(default=runtimes.Torch())

    @property
    def words(self) -> tuple[str, ...]:
        """Of the costs that have to be known."""
        return tuple(self.limits) or (self.target,)

    def of(self, dense: Mapping[str, float]) -> dict[str, float]:
        """``{word: the most that may be spent}``, given what the dense model costs.

        >>> parse_budget({"bytes": 300e6, "macs": 0.5}).of({"bytes": 500e6, "macs": 80.0})
        {'bytes': 300000000.0, 'macs': 40.0}
        """
        return {word: limit * dense[word] if limit <= 1 else float(limit) for word, limit in self.limits.items()}


def holds(limits: Mapping[str, float], costs: Mapping[str, float]) -> bool:
    """Whether nothing costs more than it may."""
    return all(costs[word] <= limit / _ABOVE for word, limit in limits.items())


def parse_budget(
    budget: Mapping[str, float] | None,
    keep: float | Mapping[str, float] | None = None,
    *,
    target: str = "params",
    runtime: Any = None,
) -> Budget:
    """The value that the arguments of `secateur.fit` mean.

    Args:
        budget: ``{word: limit}``.
        keep: the share of the dense model's score, or ``{text: share}``.
        target: what is to be little where a score is kept.
        runtime: where a latency is measured.

    Raises:
        ValueError: both or none of the two, a word that means no cost, a number that is no limit, a runtime where
            nothing is timed.
        TypeError: a budget that is no mapping, or a limit that is no number.

    >>> parse_budget({"latency": 0.6}).words
    ('latency',)
    """
    for word in (target, *(budget if isinstance(budget, Mapping) else ())):
        if word not in COSTS:
            raise unknown(str(word), COSTS, "cost")
    if (budget is None) == (keep is None):
        which = "neither" if budget is None else "both"
        raise ValueError(
            f'give either budget={{"latency": 0.6}}, limits of costs, or keep=0.99, a share of the score; got {which}.'
        )
    if keep is not None:
        if isinstance(keep, Mapping) and not keep:
            raise ValueError('keep= names no text; name one and its share, such as {"mine": 0.99}.')
        for name, share in keep.items() if isinstance(keep, Mapping) else [("keep", keep)]:
            _number(name, share)
            if not 0 < share <= 1:
                raise ValueError(
                    f"{name} is the share of the dense model's score that has to stay, in (0, 1], not {share}: 0.99 is "
                    "99 %."
                )
        timed = runtimes.timed_by(runtime, target == "latency")
        return Budget({}, {**keep} if isinstance(keep, Mapping) else float(keep), target, timed)
    if not isinstance(budget, Mapping):
        raise TypeError(f'a budget is a mapping such as {{"latency": 0.6}}, not a {type(budget).__name__}.')
    if not budget:
        raise ValueError('the budget is empty; name a cost and its limit, such as {"params": 0.5}.')
    for word, limit in budget.items():
        _number(word, limit)
        if limit <= 0:
            raise ValueError(f"{word}: a limit is a share in (0, 1] or an amount above 1, not {limit}: 0.6 is 60 %.")
    timed = runtimes.timed_by(runtime, "latency" in budget, mixed={*budget} <= {"latency", "bytes"})
    return Budget({word: float(limit) for word, limit in budget.items()}, None, target, timed)


def budget_in_words(words: Iterable[str], option: str = "--budget") -> dict[str, float]:
    """``{"latency": 0.6}`` of ``["latency=0.6"]``, as it is typed.

    Raises:
        ValueError: no ``NAME=NUMBER``, or a name twice.

    >>> budget_in_words(["latency=0.6", "bytes=300e6"])
    {'latency': 0.6, 'bytes': 300000000.0}
    """
    found: dict[str, float] = {}
    for word in words:
        name, sign, number = word.partition("=")
        try:
            limit = float(number) if sign else math.nan
        except ValueError:
            limit = math.nan
        if math.isnan(limit):
            raise ValueError(f"{option} is NAME=NUMBER, such as latency=0.6, not {word!r}.")
        if name in found:
            raise ValueError(f"{option} names {name} twice.")
        found[name] = limit
    return found


def shares_in_words(words: str) -> float | dict[str, float]:
    """What ``--keep`` says.

    >>> shares_in_words("0.99"), shares_in_words("code=0.99,maths=0.9")
    (0.99, {'code': 0.99, 'maths': 0.9})
    """
    try:
        return float(words)
    except ValueError:
        return budget_in_words(words.split(","), "--keep")


def words_of_budget(budget: Budget) -> str:
    """As it is said: ``latency 60.0%``.

    >>> words_of_budget(parse_budget({"latency": 0.6, "bytes": 3e8})), words_of_budget(parse_budget(None, 0.99))
    ('latency 60.0%, bytes 300,000,000', '99.0% of the score, at as few params as it gets')
    """
    how = "by" if isinstance(budget.runtime, Elsewhere) else "timed in"
    where = "" if budget.runtime == runtimes.Torch() else f", {how} {budget.runtime}"
    if budget.keep is not None:
        return f"{words_of_shares(budget.keep)} of the score, at as few {budget.target} as it gets{where}"
    limits = ", ".join(
        f"{word} {limit:.1%}" if limit <= 1 else f"{word} {limit:,.10g}" + (" ms" if word == "latency" else "")
        for word, limit in budget.limits.items()
    )
    return f"{limits}{where}"


def words_of_shares(keep: float | Mapping[str, float]) -> str:
    """As it is said.

    >>> words_of_shares(0.99), words_of_shares({"mine": 0.99, "theirs": 0.9})
    ('99.0%', '99.0% on mine and 90.0% on theirs')
    """
    if isinstance(keep, Mapping):
        return " and ".join(f"{share:.1%} on {printable(name)}" for name, share in keep.items())
    return f"{keep:.1%}"


def _number(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what}: a limit is a number, not {value!r}.")
    if not math.isfinite(value):
        raise ValueError(f"{what}: a limit is a finite number, not {value}.")


# ---- Compares finished models by their loss, row by row, and picks one.
#
# Law: what is taken loses no more than any fixed allocation that was finished beside it; and what is no fixed
# allocation is taken only where it loses less than the best of them by more than the noise of what both are judged
# by.


@dataclass(frozen=True, eq=False)
class Judged:
    """The loss of a finished model.

    Attributes:
        loss: where there are rows the mean over the sets of their means.
        sets: for each set of batches, such as those held back, the loss of each row of each batch. Empty with a custom
            score, which is one number.
    """

    loss: float
    sets: Sequence[Sequence[Tensor]] = ()

    @staticmethod
    def by(*sets: Sequence[Tensor]) -> Judged:
        """Of sets that count alike, however many rows they have.

        >>> Judged.by([torch.tensor([1.0, 3.0])], [torch.tensor([4.0])]).loss
        3.0
        """
        means = [float(torch.cat([*rows]).double().mean()) for rows in sets]
        loss = sum(means) / len(means)
        return Judged(math.inf if math.isnan(loss) else max(0.0, loss), sets)

    def beats(self, other: Judged) -> bool:
        """Whether it loses less by more than the standard error of the difference, which is taken row by row: what both
        lose of a hard example says nothing of which is the better one. It is as of independent rows, or as of
        independent batches, whichever is more. Without rows of both there is no error that is known, and less is less.

        >>> one, other = (torch.tensor(each) for each in ([1.0, 2.0, 9.0, 4.0], [1.1, 2.1, 9.1, 4.1]))
        >>> Judged.by([one]).beats(Judged.by([other])), Judged.by([one]).beats(Judged.by([other.flip(0)]))
        (True, False)
        """
        return other.loss - self.loss > self._noise(other)

    def _noise(self, other: Judged) -> float:
        if not (self.sets and other.sets and math.isfinite(self.loss) and math.isfinite(other.loss)):
            return 0.0
        by_rows, parts = 0.0, []
        mean = self.loss - other.loss
        for mine, its in zip(self.sets, other.sets, strict=True):
            apart = [one.double() - another.double() for one, another in zip(mine, its, strict=True)]
            every = torch.cat(apart)
            weight = 1 / (len(self.sets) * len(every))
            by_rows += float((every - every.mean()).square().sum()) * weight**2 * _bessel(len(every))
            parts += [weight * float((each - mean).sum()) for each in apart]
        by_batches = sum(each**2 for each in parts) * _bessel(len(parts))
        return math.sqrt(max(by_rows, by_batches))


def _bessel(count: int) -> float:
    return count / (count - 1) if count > 1 else 1.0


def taken_of(judged: Mapping[str, Judged], fixed: Collection[str]) -> str:
    """Which of the finished models is taken: the one that loses least, unless the best of the fixed allocations is as
    good but for noise. The least of many looks better than it is, and most of these were made to look good; so the one
    that was not is believed within a standard error, as smaller trees are by Breiman et al. 1984 (*Classification and
    Regression Trees*, 3.4.3).

    >>> taken_of({"uniform": Judged(0.2), "searched": Judged(0.1)}, {"uniform"})
    'searched'
    """
    best = min(judged, key=lambda name: judged[name].loss)
    safe = min((name for name in judged if name in fixed), key=lambda name: judged[name].loss, default=best)
    return best if best in fixed or judged[best].beats(judged[safe]) else safe


# The cost of a model at any choice of levels: parameters, multiply-adds and bytes, as polynomials in what stays.
#
# Law: it equals a count by hand on the model of that choice, also where two groups share a tensor.

TARGETS = ("params", "macs", "bytes")
BESIDE = ("active_params", "kv_bytes")  # counted where they are asked for: not every model has them


@dataclass(frozen=True)
class CostModel:
    """The cost model: parameters, multiply-adds and bytes as functions of what is left of each entry.

    Attributes:
        amounts: ``{target: polynomial}`` in what is left of each entry, by its number.
        dense: what is left of each entry in the dense model: parts of units, or 1.
    """

    amounts: Mapping[str, CostPolynomial]
    dense: Sequence[float]

    def of(self, target: str, left: Mapping[int, float]) -> float:
        """What the model costs when so much is left of these entries, and all of the others."""
        there = np.array(self.dense, dtype=np.float64)
        for at, value in left.items():
            there[at] = value
        return self.amounts[target](there)

    def own(self, target: str, at: int, left: float) -> float:
        """Of a cost what goes with an entry, of which so much is left while the others are whole."""
        return float(self.amounts[target].changes(self.dense, at, [left])[0] - self._without(target, at))

    def fixed(self, target: str) -> float:
        """So that with the dense levels' own costs it is the whole model's."""
        own = math.fsum(self.own(target, at, value) for at, value in enumerate(self.dense))
        return self.of(target, {}) - own

    def _without(self, target: str, at: int) -> float:
        return float(self.amounts[target].changes(self.dense, at, [0.0])[0])

    def terms(self) -> CostTerms:
        """As plain values."""
        return CostTerms(
            tuple(map(float, self.dense)),
            {
                target: tuple(
                    (int(times), tuple(tuple((number, tuple(ties)) for ties, number in factor) for factor in term))
                    for term, times in sorted(amount.terms.items())
                )
                for target, amount in self.amounts.items()
            },
        )


_Count = Annotated[int, Between(0, 2**62 - 1)]
_Term = tuple[_Count, tuple[tuple[tuple[_Count, tuple[_Count, ...]], ...], ...]]


@dataclass(frozen=True)
class CostTerms:
    """A cost model as plain values: of each target its terms, which are products of sums over what is left."""

    dense: tuple[Annotated[float, Between(0, 2**53)], ...]
    terms: Mapping[str, tuple[_Term, ...]]

    def wrong(self) -> str | None:
        """What of them is none of a cost model, if something is."""
        if {*self.terms} != {*TARGETS}:
            return f"is not of {', '.join(TARGETS)}"
        ties = (ties for terms in self.terms.values() for _, term in terms for factor in term for _, ties in factor)
        return None if all(max(each, default=-1) < len(self.dense) for each in ties) else "names an entry too many"

    def model(self) -> CostModel:
        """What `CostModel.terms` made them of."""
        amounts = {
            target: CostPolynomial.of(
                {
                    tuple(tuple((ties, number) for number, ties in factor) for factor in term): times
                    for times, term in terms
                },
                len(self.dense),
            )
            for target, terms in self.terms.items()
        }
        return CostModel(amounts, self.dense)


Variable = TiedGroups | str


def bill_of(
    model: nn.Module,
    coupling: Coupling,
    entries: Sequence[Variable],
    example_inputs: Any = None,
    words: Iterable[str] = (),
) -> CostModel:
    """The cost model of a model whose tied groups keep parts, and whose parameters keep a share of their entries; with
    an example, of these words of `BESIDE`, too.

    A contraction is matched to a parameter by the two dimensions that it shares with it, of several parameters of
    the same two by their order.
    """
    ones: dict[str, Axis] = {}  # of which the share of a parameter's entries is the size
    tied: list[TiedGroups] = []
    for number, each in enumerate(entries):
        if isinstance(each, TiedGroups):
            tied.append(each)
            continue
        ones[each] = Axis(1)
        tied.append(TiedGroups([Group(str(number), ones[each], 1, (), -1 - number, ())], 1, {}))
    tensors = tensors_of(model)

    def dims(name: str) -> list[Expression]:
        return [*coupling.dims(name), *([ones[name]] if name in ones else [])]

    waiting: dict[frozenset[int], list[str]] = {}
    for name in ones:
        waiting.setdefault(_places(coupling.dims(name)[:2]), []).append(name)
    given = dict.fromkeys(waiting, 0)
    contractions: list[tuple[Sequence[Expression], int]] = []
    for product, times in coupling.contractions():
        there, more = _places(product), list[Expression]()
        key = next((key for key in waiting if key and key <= there), None)
        if key is not None:
            names = waiting[key]
            more.append(ones[names[given[key] % len(names)]])
            given[key] += 1
        contractions.append(([*product, *more], times))
    amounts = {
        "params": CostPolynomial([(dims(name), 1) for name, _ in model.named_parameters()], tied),
        "macs": CostPolynomial(contractions, tied),
        "bytes": CostPolynomial([(dims(name), each.element_size()) for name, each in tensors.items()], tied),
    }
    if "active_params" in words:
        shares = shares_of_a_token(model)
        each_of = [(dims(name), shares.get(name, 1)) for name, _ in model.named_parameters()]
        amounts["active_params"] = CostPolynomial(each_of, tied)
    if "kv_bytes" in words:
        amounts["kv_bytes"] = CostPolynomial(cache_terms(model, coupling, example_inputs), tied)
    return CostModel(amounts, [float(each.parts) for each in tied])


def _places(dims: Sequence[Expression]) -> frozenset[int]:
    """Dimensions by what they are, as far as they are larger than 1."""
    found = set()
    for dim in dims:
        whole = resolved(dim)
        parts = whole.factors if isinstance(whole, Product) else [whole]
        found |= {id(resolved(leaf)) for part in parts for leaf in leaves(part) if leaf.size > 1}
    return frozenset(found)


def stored(density: float, itemsize: int) -> float:
    """The bytes of a sparse tensor over those of the dense one: what is kept, and a bit an entry; or dense.

    >>> stored(0.5, 4), stored(0.99, 4)
    (0.53125, 1.0)
    """
    return min(1.0, density + 1 / (8 * itemsize))


def beside(model: nn.Module, example_inputs: Any, words: Iterable[str]) -> dict[str, float]:
    """What a model costs of these words of `BESIDE`, counted.

    >>> beside(nn.LayerNorm(4), None, ["active_params"])
    {'active_params': 4.0}
    """
    count = {"active_params": lambda: active_params(model), "kv_bytes": lambda: kv_bytes(model, example_inputs)}
    return {word: count[word]() for word in words if word in count}


def nonzeros(model: nn.Module) -> int:
    """The entries of parameters that are not zero.

    >>> nonzeros(nn.LayerNorm(4))
    4
    """
    return sum(int(each.detach().count_nonzero()) for each in model.parameters())
