"""Prune one weight and repair what is left: ``(weight, sparsity, pattern, *, gram, …) -> (new_weight, mask)``."""

from secateur.solvers.layerwise import Solver, best_mask, check_pattern, dsnot, from_criterion, sparsegpt, with_refit
from secateur.solvers.least_squares import SolverWarning, output_error, refit, scale_of
from secateur.solvers.mask_search import admm, alps, parse

__all__ = [
    "Solver",
    "SolverWarning",
    "admm",
    "alps",
    "best_mask",
    "check_pattern",
    "dsnot",
    "from_criterion",
    "output_error",
    "parse",
    "refit",
    "scale_of",
    "sparsegpt",
    "with_refit",
]
