"""Functions along a dimension that keep it: cumulative sums and products, sorts, transforms.

Law: the dimension stays whole.
"""

from __future__ import annotations

from secateur.coupling.axes import freeze, size_of
from secateur.coupling.operations import rule
from secateur.coupling.rules.arguments import places
from secateur.coupling.trace import Call, tensors_of_tree, without_rule

__all__: list[str] = []


@rule(
    "fft_fft",
    "fft_ifft",
    "fft_rfft",
    "fft_irfft",
    "fft_fftn",
    "fft_ifftn",
    "sparsemax",
    "multinomial",
    "renorm",
    "roll_one",
    "gumbel_softmax",
    "kthvalue",
    "diff",
    "fliplr",
    "flipud",
    "cummax",
    "cummin",
    "unique_consecutive",
    "rot90",
    "cumprod",
    "sort",
    "argsort",
    "softmin",
    "logcumsumexp",
)
@rule("flip", rows="moved")
def _across(call: Call) -> None:
    """Functions that look along a dimension, or choose in it: it is frozen, and of the result it is its own."""
    x = call.dims(call.args[0])
    position = {"kthvalue": 2, "diff": 2, "gumbel_softmax": 4}
    default = dict.fromkeys(("sort", "argsort", "kthvalue", "diff", "gumbel_softmax"), -1)
    if call.name.startswith("fft_"):
        position[call.name] = 2
        if not call.name.endswith("n"):
            default[call.name] = -1
    given = call.get(position.get(call.name, 1), "dim", call.kwargs.get("dims", default.get(call.name)))
    if isinstance(given, bool) or not isinstance(given, int | tuple | list) or not x:
        without_rule(call)
        return
    over = places(given, len(x))
    for at in over:
        freeze(x[at], f"{call.name} along it")
    for out in tensors_of_tree(call.out):
        if out.dim() == len(x):
            kept = [call.fresh(out.shape[at]) if at in over else dim for at, dim in enumerate(x)]
        else:
            kept = [dim for at, dim in enumerate(x) if at not in over]
        if [size_of(dim) for dim in kept] != list(out.shape):
            without_rule(call)
            return
        call.returns(kept, out)


@rule("diagonal", "diag", "diag_embed", "tril", "triu")
def _diagonal(call: Call) -> None:
    x = call.dims(call.args[0])
    for dim in x[-2:] if call.name in ("tril", "triu") else x:
        freeze(dim, "a diagonal")
    if call.name in ("tril", "triu"):
        call.returns(x)
    else:
        call.returns(call.fresh(size, "a diagonal") for size in call.out.shape)


@rule("roll", rows="moved")
def _roll(call: Call) -> None:
    x = call.dims(call.args[0])
    given = call.get(2, "dims")
    for at in places(None if given == () else given, len(x)):
        freeze(x[at], "rolled")
    call.returns(x)
