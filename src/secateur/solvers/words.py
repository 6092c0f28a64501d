"""The words for solvers, and the adapter that takes them.

Law: a word means one solver everywhere, and a function means itself.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from secateur import criteria
from secateur.solvers.adapters import from_criterion, refitted, rounding
from secateur.solvers.admm import admm
from secateur.solvers.alps import alps
from secateur.solvers.dsnot import dsnot
from secateur.solvers.search import Solver
from secateur.solvers.sparsegpt import sparsegpt
from secateur.support import function_of

__all__ = ["parse", "with_refit", "with_rounding"]


def parse(word: str | Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The solver of this name: admm, alps, sparsegpt, dsnot; wanda, ria and magnitude stand for `from_criterion`
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
