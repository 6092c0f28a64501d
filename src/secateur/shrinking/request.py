"""The arguments that `shrink` and the verbs for directories share, checked once.

Law: a request holds values, not words; arguments that are not allowed are refused before the model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from secateur import allocation, criteria
from secateur.allocation import Allocation, check_sparsity
from secateur.criteria import magnitude
from secateur.shrinking.costs import TARGETS
from secateur.shrinking.routing import RANKS

__all__ = ["Request", "request"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """The checked arguments of `secateur.shrink`: how much leaves, and how it is chosen.

    Attributes:
        sparsity: the fraction of ``target`` that leaves; None: what is zero.
        target: one of `TARGETS`.
        criterion: ``(weight, *, <evidence>) -> scores``.
        allocate: how many units each group keeps; None: the same share, residual streams and heads later.
        evidence: ``{name: {keyword: Tensor}}``, for the criterion.
        include: globs of what may leave; None: all.
        exclude: globs of what stays whole.
        round_to: counts are multiples of this; None: of 16 in groups of 64 or more, where such a step is small.
        uniform: the counts are those that a configuration can say.
        verify: nothing leaves that is not proved to change nothing else.
        branches: the fraction of the residual branches that leave first, or the names of those.
        experts: the fraction of the experts that leave before other units, or how many of each mixture.
        rank_experts: one of `RANKS`; None: "reap" with batches, else "criterion".
        unreached_first: experts that no token of the batches reaches leave before others.
    """

    sparsity: float | None = None
    target: str = "params"
    criterion: Callable[..., Tensor] = field(default=magnitude, repr=False)
    allocate: Allocation | None = field(default=None, repr=False)
    evidence: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict, repr=False)
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    round_to: int | None = None
    uniform: bool = False
    verify: bool = True
    branches: float | tuple[str, ...] = 0.0
    experts: float = 0.0
    rank_experts: str | None = None
    unreached_first: bool = False

    @property
    def globs(self) -> tuple[str, ...]:
        """All of them: each has to match something."""
        return (*(self.include or ()), *self.exclude)


def request(
    *,
    criterion: str | Callable[..., Tensor] = magnitude,
    allocate: str | Allocation | None = None,
    evidence: Mapping[str, Mapping[str, Tensor]] | None = None,
    branches: float | Iterable[str] = 0.0,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    **given: Any,
) -> Request:
    """The request that the arguments of a verb make: words become values, one glob a tuple of one.

    Raises:
        ValueError: a number that is no share, a word that means nothing.

    >>> request(sparsity=0.5, exclude="head.*").exclude
    ('head.*',)
    """
    made = Request(
        criterion=criteria.parse(criterion),
        allocate=None if allocate is None else allocation.parse(allocate),
        evidence=evidence or {},
        include=None if include is None else _globs(include),
        exclude=() if exclude is None else _globs(exclude),
        branches=branches if isinstance(branches, int | float) else tuple(dict.fromkeys(_globs(branches))),
        **given,
    )
    if made.target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(map(repr, TARGETS))}, not {made.target!r}.")
    if made.sparsity is not None:
        check_sparsity(made.sparsity)
    if made.round_to is not None and made.round_to < 1:
        raise ValueError(f"round_to must be at least 1, not {made.round_to}.")
    if made.rank_experts not in (None, *RANKS):
        raise ValueError(f"rank_experts must be one of {', '.join(map(repr, RANKS))}, not {made.rank_experts!r}.")
    if not isinstance(made.branches, tuple):
        check_sparsity(made.branches)
    if not (0 <= made.experts < 1 or (made.experts >= 1 and made.experts == int(made.experts))):
        raise ValueError(f"experts must be a fraction in [0, 1), or a number of experts, not {made.experts}.")
    if made.branches and made.uniform:
        raise ValueError("no configuration describes removed branches: leave out uniform, or branches.")
    return made


def _globs(given: str | Iterable[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)
