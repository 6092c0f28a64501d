"""The cost of a model at any choice of levels: parameters, multiply-adds and bytes, as polynomials in what stays.

Law: it equals a count by hand on the model of that choice, also where two groups share a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from secateur.coupling import Axis, Coupling, Expression, Group, Product, leaves, resolved
from secateur.shrinking import Amount, Tied
from secateur.support import Fields, tensors_of

__all__ = ["Bill", "TARGETS", "Variable", "bill_in", "bill_of", "nonzeros", "stored"]

TARGETS = ("params", "macs", "bytes")


@dataclass(frozen=True)
class Bill:
    """The cost model: parameters, multiply-adds and bytes as functions of what is left of each entry.

    Attributes:
        amounts: ``{target: polynomial}`` in what is left of each entry, by its number.
        dense: what is left of each entry in the dense model: parts of units, or 1.
    """

    amounts: Mapping[str, Amount]
    dense: Sequence[float]

    def of(self, target: str, left: Mapping[int, float]) -> float:
        """What the model costs when so much is left of these entries, and all of the others."""
        there = np.array(self.dense, dtype=np.float64)
        for at, value in left.items():
            there[at] = value
        return self.amounts[target](there)

    def own(self, target: str, at: int, left: float) -> float:
        """Of a cost what goes with an entry, of which so much is left while the others are whole."""
        return float(self.amounts[target].changes(self.dense, at, [left])[0] - self._without(target, at))

    def fixed(self, target: str) -> float:
        """So that with the dense levels' own costs it is the whole model's."""
        own = math.fsum(self.own(target, at, value) for at, value in enumerate(self.dense))
        return self.of(target, {}) - own

    def _without(self, target: str, at: int) -> float:
        return float(self.amounts[target].changes(self.dense, at, [0.0])[0])

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "dense": [float(each) for each in self.dense],
            "terms": {
                target: [
                    [times, [[[number, list(ties)] for ties, number in factor] for factor in term]]
                    for term, times in sorted(amount.terms.items())
                ]
                for target, amount in self.amounts.items()
            },
        }


def bill_in(read: Fields) -> Bill:
    """What `Bill.to_json` made."""
    read.only("dense", "terms")
    dense = read.each("dense", float, least=0, most=2**53)
    terms = read.inner("terms")
    terms.only(*TARGETS)
    amounts = {}
    for target in TARGETS:
        found: dict[Any, int] = {}
        for at, term in enumerate(terms.each(target, list)):
            if not _is_term(term, len(dense)):
                raise terms.wrong(f"{target}[{at}]", f"is no term of {len(dense)} entries")
            key = tuple(tuple((tuple(ties), number) for number, ties in factor) for factor in term[1])
            found[key] = term[0]
        amounts[target] = Amount.of(found, len(dense))
    return Bill(amounts, dense)


def _is_term(term: Any, entries: int) -> bool:
    def is_number(value: Any) -> bool:
        return type(value) is int and 0 <= value < 2**62

    return (
        len(term) == 2
        and is_number(term[0])
        and isinstance(term[1], list)
        and all(
            isinstance(factor, list)
            and all(
                isinstance(part, list)
                and len(part) == 2
                and is_number(part[0])
                and isinstance(part[1], list)
                and all(is_number(tie) and tie < entries for tie in part[1])
                for part in factor
            )
            for factor in term[1]
        )
    )


Variable = Tied | str


def bill_of(model: nn.Module, coupling: Coupling, entries: Sequence[Variable]) -> Bill:
    """The cost model of a model whose tied groups keep parts, and whose parameters keep a share of their entries.

    A contraction is matched to a parameter by the two dimensions that it shares with it, of several parameters of
    the same two by their order.
    """
    ones: dict[str, Axis] = {}  # of which the share of a parameter's entries is the size
    tied: list[Tied] = []
    for number, each in enumerate(entries):
        if isinstance(each, Tied):
            tied.append(each)
            continue
        ones[each] = Axis(1)
        tied.append(Tied([Group(str(number), ones[each], 1, (), -1 - number, ())], 1, {}))
    tensors = tensors_of(model)

    def dims(name: str) -> list[Expression]:
        return [*coupling.dims(name), *([ones[name]] if name in ones else [])]

    waiting: dict[frozenset[int], list[str]] = {}
    for name in ones:
        waiting.setdefault(_places(coupling.dims(name)[:2]), []).append(name)
    given = dict.fromkeys(waiting, 0)
    contractions: list[tuple[Sequence[Expression], int]] = []
    for product, times in coupling.contractions():
        there, more = _places(product), list[Expression]()
        key = next((key for key in waiting if key and key <= there), None)
        if key is not None:
            names = waiting[key]
            more.append(ones[names[given[key] % len(names)]])
            given[key] += 1
        contractions.append(([*product, *more], times))
    return Bill(
        {
            "params": Amount([(dims(name), 1) for name, _ in model.named_parameters()], tied),
            "macs": Amount(contractions, tied),
            "bytes": Amount([(dims(name), each.element_size()) for name, each in tensors.items()], tied),
        },
        [float(each.parts) for each in tied],
    )


def _places(dims: Sequence[Expression]) -> frozenset[int]:
    """Dimensions by what they are, as far as they are larger than 1."""
    found = set()
    for dim in dims:
        whole = resolved(dim)
        parts = whole.factors if isinstance(whole, Product) else [whole]
        found |= {id(resolved(leaf)) for part in parts for leaf in leaves(part) if leaf.size > 1}
    return frozenset(found)


def stored(density: float, itemsize: int) -> float:
    """The bytes of a sparse tensor over those of the dense one: what is kept, and a bit an entry; or dense.

    >>> stored(0.5, 4), stored(0.99, 4)
    (0.53125, 1.0)
    """
    return min(1.0, density + 1 / (8 * itemsize))


def nonzeros(model: nn.Module) -> int:
    """The entries of parameters that are not zero.

    >>> nonzeros(nn.LayerNorm(4))
    4
    """
    return sum(int(each.detach().count_nonzero()) for each in model.parameters())
