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
from secateur.coupling.axes import tied_to as representative
from secateur.coupling.equations import Polynomial, counted, evaluated
from secateur.coupling.finding import OUTPUT, UNUSED, find_coupling
from secateur.coupling.groups import Coupling, Group, Kept, Removed, Scope, may_leave, replacement
from secateur.coupling.operations import Operation, Weight, declare, name_of, operation, rule, written_in_others
from secateur.coupling.residual_streams import Branch, SameDraws
from secateur.coupling.trace import Call, CallSites, Look, Spot, cycle_choices, tensors_of_tree

__all__ = [
    "Axis",
    "Branch",
    "Call",
    "CallSites",
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
    "Scope",
    "Spot",
    "UNUSED",
    "Weight",
    "concatenated",
    "counted",
    "cut",
    "cycle_choices",
    "declare",
    "evaluated",
    "factored",
    "find_coupling",
    "kept_positions",
    "leaves",
    "may_leave",
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
