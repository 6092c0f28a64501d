"""`find_coupling`: finds which slices of which tensors have to leave together."""

from secateur.coupling.axes import (
    Axis,
    Expression,
    Product,
    concatenated,
    cut,
    factored,
    kept_positions,
    leaves,
    multiplied,
    resolved,
    size_of,
    unify,
)
from secateur.coupling.equations import Polynomial, counted, evaluated, representative
from secateur.coupling.finding import OUTPUT, UNUSED, find_coupling
from secateur.coupling.flow import SameDraws
from secateur.coupling.groups import Coupling, Group, Kept
from secateur.coupling.operations import Operation, Weight, declare, name_of, operation, rule, written_in_others
from secateur.coupling.removed import Removed, replacement
from secateur.coupling.residual_streams import Branch
from secateur.coupling.spots import Spot, Whereabouts
from secateur.coupling.trace import Call, Look, tensors_of_tree
from secateur.coupling.turns import in_turn

__all__ = [
    "Axis",
    "Branch",
    "Call",
    "Coupling",
    "Expression",
    "Group",
    "Kept",
    "Look",
    "OUTPUT",
    "Operation",
    "Polynomial",
    "Product",
    "Removed",
    "SameDraws",
    "Spot",
    "UNUSED",
    "Weight",
    "Whereabouts",
    "concatenated",
    "counted",
    "cut",
    "declare",
    "evaluated",
    "factored",
    "find_coupling",
    "in_turn",
    "kept_positions",
    "leaves",
    "multiplied",
    "name_of",
    "operation",
    "replacement",
    "representative",
    "resolved",
    "rule",
    "size_of",
    "tensors_of_tree",
    "unify",
    "written_in_others",
]
