"""Prune one weight and repair what is left: ``(weight, sparsity, pattern, *, gram, …) -> (new_weight, mask)``.

Law: exactly as many units are kept as the pattern and the sparsity say; a new weight is of the old one's dtype and
exactly 0 where its mask is False; what is passed in is never written to, and its strides do not matter. Sums are taken
in float32 or wider.

Modules and the functions in them share names; here the name is the function.
"""

from secateur.solvers.adapters import from_criterion as from_criterion
from secateur.solvers.adapters import parse as parse
from secateur.solvers.adapters import with_refit as with_refit
from secateur.solvers.adapters import with_rounding as with_rounding
from secateur.solvers.admm import admm as admm
from secateur.solvers.alps import alps as alps
from secateur.solvers.dsnot import dsnot as dsnot
from secateur.solvers.elimination import Elimination as Elimination
from secateur.solvers.elimination import aimed as aimed
from secateur.solvers.elimination import eliminated as eliminated
from secateur.solvers.gram import SolverWarning as SolverWarning
from secateur.solvers.gram import scale_of as scale_of
from secateur.solvers.held_out import UNSEEN as UNSEEN
from secateur.solvers.held_out import Fit as Fit
from secateur.solvers.held_out import ScaleFit as ScaleFit
from secateur.solvers.held_out import best_damping as best_damping
from secateur.solvers.held_out import is_held_out as is_held_out
from secateur.solvers.least_squares import Solver as Solver
from secateur.solvers.least_squares import best_mask as best_mask
from secateur.solvers.least_squares import check_pattern as check_pattern
from secateur.solvers.least_squares import output_error as output_error
from secateur.solvers.least_squares import refit as refit
from secateur.solvers.sparsegpt import round_kept as round_kept
from secateur.solvers.sparsegpt import sparsegpt as sparsegpt
