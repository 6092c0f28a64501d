"""Prune one weight and repair what is left: ``(weight, sparsity, pattern, *, gram, …) -> (new_weight, mask)``.

Law: exactly as many units are kept as the pattern and the sparsity say; a new weight is of the old one's dtype and
exactly 0 where its mask is False; what is passed in is never written to, and its strides do not matter. Sums are taken
in float32 or wider.

Modules and the functions in them share names; here the name is the function.
"""

from secateur.solvers.adapters import from_criterion, parse, with_refit, with_rounding
from secateur.solvers.admm import admm
from secateur.solvers.alps import alps
from secateur.solvers.dsnot import dsnot
from secateur.solvers.elimination import Elimination, aimed, eliminated
from secateur.solvers.gram import SolverWarning, scale_of
from secateur.solvers.least_squares import Solver, best_mask, check_pattern, output_error, refit
from secateur.solvers.sparsegpt import round_kept, sparsegpt

__all__ = [
    "Elimination",
    "Solver",
    "SolverWarning",
    "admm",
    "aimed",
    "alps",
    "best_mask",
    "check_pattern",
    "dsnot",
    "eliminated",
    "from_criterion",
    "output_error",
    "parse",
    "refit",
    "round_kept",
    "scale_of",
    "sparsegpt",
    "with_refit",
    "with_rounding",
]
