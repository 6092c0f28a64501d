"""Solvers made of something else: of a criterion, or of another solver and least squares. The words for solvers, and
the adapter that takes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from secateur import criteria, solvers
from secateur.criteria import scope_of
from secateur.patterns import Pattern
from secateur.solvers.gram import checked
from secateur.solvers.least_squares import Solver, best_mask, finished, refit
from secateur.solvers.sparsegpt import round_kept, sparsegpt
from secateur.support import described, function_of, name_of

# ---- Solvers made of something else: of a criterion, or of another solver and least squares.
#
# Law: an adapter names the evidence, and the scope, of what it is made of, and is a value: it can be pickled where
# that can be.


def from_criterion(criterion: str | Callable[..., Tensor]) -> Solver:
    """The solver that keeps the best scores of a criterion and changes no kept weight: magnitude, Wanda, RIA, or a
    custom one.

    It names the evidence that the criterion names, so that `secateur.evidence.needs` and `oneshot` see it.

    Args:
        criterion: ``(weight, *, <evidence>) -> scores``, higher = keep; or a word, such as ``"wanda"``.

    >>> import torch
    >>> from secateur import Rows
    >>> solve = from_criterion("wanda")
    >>> solve(torch.tensor([[3.0, -2.0]]), 0.5, Rows(), input_norm=torch.tensor([[1.0, 5.0]]))
    (tensor([[ 0., -2.]]), tensor([[False,  True]]))
    """
    return _FromCriterion(criteria.parse(criterion))


def refitted(solver: Solver, iterations: int, tolerance: float) -> Solver:
    """`secateur.solvers.with_refit` of a solver that is no word any more."""
    return _Refitted(solver, iterations, tolerance)


def rounding(solver: Solver, damping: float) -> Solver:
    """`secateur.solvers.with_rounding` of a solver that is no word any more."""
    return _Rounding(solver, damping)


class _Adapter:
    """What adapters share: a name (and one with the settings, for records), a signature that shows which evidence is
    asked for, and a scope.

    They are attributes of the instance, as a function has them, and are set again when it is unpickled.
    """

    def _present(
        self, kind: str, part: Callable[..., Any], asked: list[inspect.Parameter], settings: str | None = None
    ) -> None:
        own = [inspect.Parameter(word, inspect.Parameter.POSITIONAL_ONLY) for word in ("weight", "sparsity", "pattern")]
        said = ", ".join(filter(None, [described(part), settings]))
        shown = {"__name__": f"{kind}({name_of(part)})", "__qualname__": f"{kind}({said})"}
        scope = scope_of(part, "layer")
        vars(self).update(shown, compares=scope, __signature__=inspect.Signature([*own, *asked]))

    def __reduce__(self) -> tuple[Any, ...]:
        parts: Any = self
        return type(self), tuple(getattr(self, field.name) for field in fields(parts))


@dataclass(frozen=True)
class _FromCriterion(_Adapter):
    criterion: Callable[..., Tensor]

    def __post_init__(self) -> None:
        asked = [p for p in _parameters(self.criterion) if p.kind is p.KEYWORD_ONLY]
        self._present("from_criterion", self.criterion, asked)

    def __call__(
        self, weight: Tensor, sparsity: float | None, pattern: Pattern, /, **evidence: Tensor
    ) -> tuple[Tensor, Tensor]:
        checked(weight)
        laid_out = {word: value.contiguous() for word, value in evidence.items()}
        mask = best_mask(self.criterion(weight.detach().contiguous(), **laid_out), sparsity, pattern)
        return finished(weight.detach(), mask, weight), mask


@dataclass(frozen=True)
class _OnGram(_Adapter):
    """What works on the Gram matrix after a solver that may not ask for it."""

    solver: Solver

    @property
    def _uses_gram(self) -> bool:
        return any(p.name == "gram" and p.kind is p.KEYWORD_ONLY for p in _parameters(self.solver))

    def _solved(
        self, weight: Tensor, sparsity: float | None, pattern: Pattern, evidence: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        own = evidence if self._uses_gram else {word: value for word, value in evidence.items() if word != "gram"}
        return self.solver(weight, sparsity, pattern, **own)


@dataclass(frozen=True)
class _Refitted(_OnGram):
    iterations: int
    tolerance: float

    def __post_init__(self) -> None:
        asked = [p for p in _parameters(self.solver) if p.kind is p.KEYWORD_ONLY]
        more = [] if self._uses_gram else [inspect.Parameter("gram", inspect.Parameter.KEYWORD_ONLY, annotation=Tensor)]
        settings = f"iterations={self.iterations}, tolerance={self.tolerance}"
        self._present("with_refit", self.solver, [*asked, *more], settings)

    def __call__(
        self, weight: Tensor, sparsity: float | None, pattern: Pattern, /, **evidence: Tensor
    ) -> tuple[Tensor, Tensor]:
        gram = evidence["gram"]
        new, mask = self._solved(weight, sparsity, pattern, evidence)
        return refit(weight, mask, gram=gram, start=new, iterations=self.iterations, tolerance=self.tolerance), mask


@dataclass(frozen=True)
class _Rounding(_OnGram):
    damping: float

    @property
    def _is_one_sweep(self) -> bool:
        solver: object = self.solver
        return solver is sparsegpt

    def __post_init__(self) -> None:
        asked = [p for p in _parameters(self.solver) if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
        if not self._uses_gram:
            asked.append(inspect.Parameter("gram", inspect.Parameter.KEYWORD_ONLY, annotation=Tensor))
        self._present("with_rounding", self.solver, asked, f"damping={self.damping}")

    def __call__(
        self, weight: Tensor, sparsity: float | None, pattern: Pattern, /, **evidence: Tensor
    ) -> tuple[Tensor, Tensor]:
        gram = evidence["gram"]
        if self._is_one_sweep:
            return sparsegpt(weight, sparsity, pattern, gram=gram, damping=self.damping, values="int8")
        new, mask = self._solved(weight, sparsity, pattern, evidence)
        return round_kept(new, mask, gram=gram, damping=self.damping), mask


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # built-in functions such as torch.abs show no signature
        return []


# ---- The words for solvers, and the adapter that takes them.
#
# Law: a word means one solver everywhere, and a function means itself.


def parse(word: str | Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The solver of this name, one that `secateur.solvers` has; wanda, ria and magnitude stand for `from_criterion` of
    them. A function is returned as it is.

    Raises:
        ValueError: no solver is called so. TypeError: it is neither a word nor a function.

    >>> parse("alps") is solvers.alps
    True
    >>> parse("wanda").__name__
    'from_criterion(wanda)'
    """
    known: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
        name: each
        for name, each in vars(solvers).items()
        if inspect.isfunction(each) and [*inspect.signature(each).parameters][:3] == ["weight", "sparsity", "pattern"]
    }
    known |= {each.__name__: from_criterion(each) for each in (criteria.wanda, criteria.ria, criteria.magnitude)}
    return function_of(word, known, "solver")


def with_refit(solver: str | Solver, *, iterations: int = 20, tolerance: float = 1e-3) -> Solver:
    """A solver followed by least squares for its mask (`refit`).

    It names the evidence that the solver names, and the Gram matrix.

    Args:
        solver: or a word for one, as `parse` takes it.

    >>> import torch
    >>> from secateur import Rows
    >>> solve = with_refit("magnitude")
    >>> solve(torch.tensor([[1.0, 3.0]]), 0.5, Rows(), gram=torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
    (tensor([[0.0000, 3.5000]]), tensor([[False,  True]]))
    """
    return refitted(parse(solver), iterations, tolerance)


def with_rounding(solver: str | Solver, *, damping: float = 0.01) -> Solver:
    """A solver whose kept weights are rounded to int8 with a scale for each output, so that `secateur.pack` with
    ``values="int8"`` changes nothing more: `round_kept`. Of `sparsegpt` pruning and rounding are one sweep. What rounds
    to 0 is zero, too, so that there are a few more zeros than were asked for; the mask, which is the pattern's, calls
    them kept.

    It names the evidence that the solver names, and the Gram matrix. The weights stay in their dtype: float32 holds
    the rounded numbers exactly, a half nearly.

    Args:
        solver: or a word for one, as `parse` takes it.
        damping: as in `sparsegpt`.

    >>> import torch
    >>> from secateur import Rows
    >>> solve = with_rounding("magnitude")
    >>> solve(torch.tensor([[1.0, 126.7, 50.3, 127.0]]), 0.25, Rows(), gram=torch.eye(4))[0]
    tensor([[  0., 127.,  50., 127.]])
    """
    return rounding(parse(solver), damping)
