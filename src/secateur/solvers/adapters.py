"""Solvers made of something else: of a criterion, or of another solver and least squares.

Law: an adapter names the evidence, and the scope, of what it is made of.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from secateur.criteria import Scope, scope_of
from secateur.patterns import Pattern
from secateur.solvers.gram import checked
from secateur.solvers.least_squares import finished, refit
from secateur.solvers.search import Solver, best_mask

__all__ = ["from_criterion", "with_refit"]


def from_criterion(criterion: Callable[..., Tensor]) -> Solver:
    """The solver that keeps what scores best and changes no kept weight: magnitude, Wanda, RIA, or one's own.

    It names the evidence that the criterion names, so that `secateur.evidence.needs` and `oneshot` see it.

    Args:
        criterion: ``(weight, *, <evidence>) -> scores``, higher = keep.

    >>> import torch
    >>> from secateur import Rows, criteria
    >>> solve = from_criterion(criteria.wanda)
    >>> solve(torch.tensor([[3.0, -2.0]]), 0.5, Rows(), input_norm=torch.tensor([[1.0, 5.0]]))
    (tensor([[ 0., -2.]]), tensor([[False,  True]]))
    """

    def solve(weight: Tensor, sparsity: float | None, pattern: Pattern, /, **evidence: Tensor) -> tuple[Tensor, Tensor]:
        checked(weight)
        laid_out = {word: value.contiguous() for word, value in evidence.items()}
        mask = best_mask(criterion(weight.detach().contiguous(), **laid_out), sparsity, pattern)
        return finished(weight.detach(), mask, weight), mask

    asked = [p for p in _parameters(criterion) if p.kind is p.KEYWORD_ONLY]
    return _named(solve, f"from_criterion({_name(criterion)})", asked, scope_of(criterion, "layer"))


def with_refit(solver: Solver, *, iterations: int = 20, tolerance: float = 1e-3) -> Solver:
    """The solver, and then least squares for its mask, from the weights that it left: `refit`.

    It names the evidence that the solver names, and the Gram matrix.

    >>> import torch
    >>> from secateur import Rows, criteria
    >>> solve = with_refit(from_criterion(criteria.magnitude))
    >>> solve(torch.tensor([[1.0, 3.0]]), 0.5, Rows(), gram=torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
    (tensor([[0.0000, 3.5000]]), tensor([[False,  True]]))
    """
    asked = [p for p in _parameters(solver) if p.kind is p.KEYWORD_ONLY]
    uses_gram = any(p.name == "gram" for p in asked)

    def solve(weight: Tensor, sparsity: float | None, pattern: Pattern, /, **evidence: Tensor) -> tuple[Tensor, Tensor]:
        gram = evidence["gram"]
        own = evidence if uses_gram else {word: value for word, value in evidence.items() if word != "gram"}
        new, mask = solver(weight, sparsity, pattern, **own)
        return refit(weight, mask, gram=gram, start=new, iterations=iterations, tolerance=tolerance), mask

    gram = [] if uses_gram else [inspect.Parameter("gram", inspect.Parameter.KEYWORD_ONLY, annotation=Tensor)]
    return _named(solve, f"with_refit({_name(solver)})", [*asked, *gram], scope_of(solver, "layer"))


def _named(
    solve: Callable[..., tuple[Tensor, Tensor]], name: str, asked: list[inspect.Parameter], scope: Scope
) -> Solver:
    """The function under a name, with a signature that shows which evidence it asks for, and its scope."""
    own = [inspect.Parameter(word, inspect.Parameter.POSITIONAL_ONLY) for word in ("weight", "sparsity", "pattern")]
    shown: Any = solve
    shown.__signature__ = inspect.Signature([*own, *asked])
    shown.__name__ = shown.__qualname__ = name
    shown.compares = scope
    named: Solver = shown
    return named


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", repr(function)))


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # built-in functions such as torch.abs show no signature
        return []
