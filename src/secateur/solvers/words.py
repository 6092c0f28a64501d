"""The words for solvers.

Law: a word means one solver everywhere, and a function means itself.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from secateur import criteria
from secateur.solvers.adapters import from_criterion
from secateur.solvers.admm import admm
from secateur.solvers.alps import alps
from secateur.solvers.dsnot import dsnot
from secateur.solvers.sparsegpt import sparsegpt
from secateur.support import function_of

__all__ = ["parse"]


def parse(word: str | Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The solver that a word means: admm, alps, sparsegpt, dsnot; wanda, ria and magnitude stand for `from_criterion`
    of them. A function is returned as it is.

    Raises:
        ValueError: no solver is called so. TypeError: it is neither a word nor a function.

    >>> parse("alps") is alps
    True
    >>> parse("wanda").__name__
    'from_criterion(wanda)'
    """
    known: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
        "admm": admm,
        "alps": alps,
        "sparsegpt": sparsegpt,
        "dsnot": dsnot,
        "wanda": from_criterion(criteria.wanda),
        "ria": from_criterion(criteria.ria),
        "magnitude": from_criterion(criteria.magnitude),
    }
    return function_of(word, known, "solver")
