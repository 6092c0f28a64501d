"""Which slices of which tensors live and die together: `find_coupling`."""

from secateur.coupling.axes import Axis, Expression, Product, leaves, resolved, size_of
from secateur.coupling.groups import (
    Coupling,
    Group,
    Kept,
    find_coupling,
)
from secateur.coupling.numbers import Polynomial, counted, evaluated, representative
from secateur.coupling.residual_streams import Branch, SameDraws, replacement
from secateur.coupling.trace import WITHOUT_DROPOUT, name_of, rule, tensors_of_tree, written_in_others

__all__ = [
    "Axis",
    "Branch",
    "Coupling",
    "Expression",
    "Group",
    "Kept",
    "Polynomial",
    "Product",
    "SameDraws",
    "WITHOUT_DROPOUT",
    "counted",
    "evaluated",
    "find_coupling",
    "leaves",
    "name_of",
    "replacement",
    "representative",
    "resolved",
    "rule",
    "size_of",
    "tensors_of_tree",
    "written_in_others",
]
