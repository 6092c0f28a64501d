"""Budgets: limits on the cost of the result, or the share of the score that it has to keep.

Law: a budget holds values, not words; arguments that are not allowed are refused before the model runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from secateur.support import unknown

__all__ = [
    "Budget",
    "COSTS",
    "budget_in_words",
    "holds",
    "parse_budget",
    "words_of_budget",
]

COSTS = {
    "params": "parameters that are not zero",
    "macs": "multiply-adds of the example",
    "bytes": "bytes of parameters and buffers",
    "latency": "milliseconds of the example",
}
_ABOVE = 1 - 1e-9  # of a limit: a share times a size is no exact number


@dataclass(frozen=True)
class Budget:
    """Limits on the cost of a fitted model, or the share of the score that it has to keep: one of the two.

    Attributes:
        limits: ``{word of COSTS: limit}``: up to 1 a share of what the dense model costs, above that the cost itself.
        keep: the share of the dense model's score that has to be kept; None where there are limits.
        target: the word of the cost that is minimized, where a score is kept.
    """

    limits: Mapping[str, float]
    keep: float | None = None
    target: str = "params"

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


def parse_budget(budget: Mapping[str, float] | None, keep: float | None = None, *, target: str = "params") -> Budget:
    """The value that the arguments of `secateur.fit` mean.

    Args:
        budget: ``{word: limit}``.
        keep: the share of the dense model's score.
        target: what is to be little where a score is kept.

    Raises:
        ValueError: both or none of the two, a word that means no cost, a number that is no limit.
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
        _number("keep", keep)
        if not 0 < keep <= 1:
            raise ValueError(
                f"keep is the share of the dense model's score that has to stay, in (0, 1], not {keep}: 0.99 is 99 %."
            )
        return Budget({}, float(keep), target)
    if not isinstance(budget, Mapping):
        raise TypeError(f'a budget is a mapping such as {{"latency": 0.6}}, not a {type(budget).__name__}.')
    if not budget:
        raise ValueError('the budget is empty; name a cost and its limit, such as {"params": 0.5}.')
    for word, limit in budget.items():
        _number(word, limit)
        if limit <= 0:
            raise ValueError(f"{word}: a limit is a share in (0, 1] or an amount above 1, not {limit}: 0.6 is 60 %.")
    return Budget({word: float(limit) for word, limit in budget.items()}, None, target)


def budget_in_words(words: Iterable[str]) -> dict[str, float]:
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
            raise ValueError(f"--budget is NAME=NUMBER, such as latency=0.6, not {word!r}.")
        if name in found:
            raise ValueError(f"--budget names {name} twice.")
        found[name] = limit
    return found


def words_of_budget(budget: Budget) -> str:
    """As it is said: ``latency 60.0%``.

    >>> words_of_budget(parse_budget({"latency": 0.6, "bytes": 3e8})), words_of_budget(parse_budget(None, 0.99))
    ('latency 60.0%, bytes 300,000,000', '99.0% of the score, at as few params as it gets')
    """
    if budget.keep is not None:
        return f"{budget.keep:.1%} of the score, at as few {budget.target} as it gets"
    return ", ".join(
        f"{word} {limit:.1%}" if limit <= 1 else f"{word} {limit:,.10g}" + (" ms" if word == "latency" else "")
        for word, limit in budget.limits.items()
    )


def _number(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what}: a limit is a number, not {value!r}.")
    if not math.isfinite(value):
        raise ValueError(f"{what}: a limit is a finite number, not {value}.")
