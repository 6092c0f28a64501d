"""Tensors that the code makes: of zeros, of random numbers, of its own numbers.

Law: a size that remembers is followed; one that is written in the code, or values that depend on their place, stay.
"""

from __future__ import annotations

from secateur.coupling.axes import Axis, Expression
from secateur.coupling.numbers import Known
from secateur.coupling.operations import declare, rule
from secateur.coupling.trace import Call, tensors_of_tree, without_rule
from secateur.support import private

__all__ = ["sized"]


def sized(call: Call, number: int, why: str) -> Expression:
    """A dimension made at a size that the code asks for: it follows that number."""
    if not isinstance(number, Known):
        return call.fresh(number, f"{why} of {int(number)}, which is written in the code")
    made = Axis(int.__index__(number))
    call.trace.agree(number, made, f"{why} of {int.__index__(number)}")
    return made


@rule("zeros", "ones", "empty", "full")
@rule("rand", "randn", draws=True)
def _made(call: Call) -> None:
    given = call.get(0, "size") if call.name == "full" else call.sequence(0, "size")
    sizes = [each for each in given if isinstance(each, int)]
    if len(sizes) != call.out.dim():
        without_rule(call)
    else:
        call.returns(sized(call, size, "a tensor made") for size in sizes)


@rule("arange", "eye", "linspace", "logspace", "tensor", "scalar_tensor", "as_tensor", "from_numpy", "empty_strided")
def _counted(call: Call) -> None:
    """Values that depend on their place, or come from elsewhere: the sizes that they were made at stay."""
    for number in private.tree_leaves((call.args, dict(call.kwargs))):
        if isinstance(number, Known):
            number.stays(f"counted by {call.name}")
    for out in tensors_of_tree(call.out):
        if not call.trace.knows(out):
            call.returns([call.fresh(size, call.name) for size in out.shape], out)


@rule("new_zeros", "new_ones", "new_empty", "new_full")
def _new(call: Call) -> None:
    given = call.get(1, "size") if call.name == "new_full" else call.sequence(1, "size")
    given = [given] if isinstance(given, int) else given
    call.returns(sized(call, size, "a tensor made") for size in given)


declare("randint", "randperm", draws=True)
