"""Units that are chosen between, such as the experts of a mixture: which dimensions hold them.

Law: a model without such a unit is the model in which its score is minus infinity, where it is made and wherever it is
compared with others. A dimension that is compared along, and is not known to be of that kind, stays whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from secateur.coupling.axes import Product, freeze, leaves, resolved
from secateur.coupling.trace import Dims, Trace

__all__ = ["settle_choices"]


def settle_choices(trace: Trace, weights: Iterable[Dims]) -> None:
    """Freeze what is compared along, unless it is chosen between, and its scores come from a product.

    ``weights`` are the dimensions of the model's tensors: beside a router there have to be some that it chooses from.
    """
    chosen = {axis for dim in trace.chosen for axis in leaves(dim)}
    made = {axis for look in trace.looks if look.made for axis in leaves(look.dim)}
    ordered = [(rank, axis) for rank, axis in trace.ranked.items() if made.issuperset(leaves(axis))]
    ranks = {axis for rank, _ in ordered for axis in leaves(rank)}
    for look in trace.looks:
        whole = resolved(look.dim)
        if isinstance(whole, Product) and chosen.issuperset(leaves(whole)):
            for factor in whole.factors[:-1]:
                if ranks.isdisjoint(leaves(factor)):
                    freeze(factor, "groups of what is chosen between, which have equally many")
    matrices = Counter(
        axis
        for dims in weights
        if len(dims) > 1
        for axis in {axis for dim in dims for axis in leaves(dim) if axis.looks}
    )
    for axis in {axis for dims in trace.everything() for dim in dims for axis in leaves(dim) if axis.looks}:
        if axis in ranks:
            continue  # as many as of what is in order
        if not axis.reasons and axis in chosen and axis in made and matrices[axis] < 2:
            freeze(axis, "no tensor has a part for each of what it chooses: modules of their own, perhaps")
        if axis.reasons or axis not in chosen or axis not in made:
            for reason in axis.looks:
                freeze(axis, reason)
