"""The stages of a block: weights whose inputs do not depend on one another's outputs are solved together.

Law: no names. A run of one batch is followed operation by operation: what a weight went into carries its mark, and the
marks of what a weight is first multiplied with say after which others it comes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from secateur.blockwise.processes import gathered
from secateur.blockwise.products import Inputs, Piece, Products
from secateur.support import private

__all__ = ["Marks", "Order"]

# what they return has the shape of what they are given and nothing else of it, or is new
_NOTHING_OF = re.compile(
    r"aten::(empty|zeros|ones|full|rand|randn|randint)_like|aten::new_(empty|zeros|ones|full)|aten::lift_fresh"
)


class Marks(private.DispatchMode):  # type: ignore[no-untyped-call]
    """For each memory the weights whose outputs it holds something of, as the bits of a number."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own = {_memory(weight): 1 << at for at, weight in enumerate(weights)}
        self.of_memory: dict[int, int] = {}

    def __enter__(self) -> Self:
        self.of_memory.clear()  # what was made outside may lie where something marked was
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def of(self, tensor: Tensor) -> int:
        memory = _memory(tensor)
        return self.own.get(memory, 0) | self.of_memory.get(memory, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        known = _known(func)
        given = {_memory(each) for each in private.tensors_of_tree((args, kwargs))}
        marks = 0
        if not known.nothing_of:
            for memory in given:
                marks |= self.own.get(memory, 0) | self.of_memory.get(memory, 0)
        for each in private.tensors_of_tree(output):
            memory = _memory(each)
            # memory that is new may have been another's before; so may that of what comes from Python, which no
            # operation gave it
            old = self.of_memory.get(memory, 0) if memory in given and not known.lifts else 0
            self.of_memory[memory] = marks | old
        for at in known.writes:
            if at < len(args) and isinstance(args[at], Tensor):
                memory = _memory(args[at])
                self.of_memory[memory] = self.of_memory.get(memory, 0) | marks
        self.of_memory.pop(0, None)  # of tensors without entries
        return output


@dataclass(frozen=True)
class _Known:
    """Of an operator of ATen: whether its results hold nothing of its arguments, and which arguments it writes to."""

    nothing_of: bool
    lifts: bool
    writes: tuple[int, ...]


@functools.cache
def _known(operator: Any) -> _Known:
    name, arguments = str(operator.name()), private.arguments_of(operator)
    writes = (at for at, each in enumerate(arguments) if each.alias_info is not None and each.alias_info.is_write)
    return _Known(_NOTHING_OF.match(name) is not None, name == "aten::lift_fresh", tuple(writes))


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse ones, say, have none
        return 0


class Order(Products):
    """Watches one run through a block; `stages` then says which of its weights are solved together.

    >>> import torch
    >>> from secateur.blockwise.products import Tokens
    >>> up, gate, down = torch.nn.Linear(4, 8), torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
    >>> order = Order({"up": up.weight, "gate": gate.weight, "down": down.weight})
    >>> with torch.no_grad(), order.watching(Tokens()), order.marks:
    ...     x = torch.randn(3, 4)
    ...     _ = x + down(up(x) * gate(x).sigmoid())
    >>> [list(stage) for stage in order.stages()]
    [['up', 'gate'], ['down']]
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, unfolds: bool = False) -> None:
        super().__init__(parameters, frozenset(), unfolds=unfolds)
        self.by_name = dict(parameters)
        self.marks = Marks(list(parameters.values()))
        self.after: dict[str, int] = {}

    def _add(self, piece: Piece, inputs: Inputs, key: Any) -> None:  # noqa: ARG002
        self.after.setdefault(piece.name, self.marks.of(inputs.x))

    def joined(self) -> Order:
        """With what all processes saw, so that each comes to the same stages; the first one's word counts."""
        everyone = gathered((self.after, self.repeated))
        self.after = {}
        for after, repeated in everyone:
            self.repeated = self.repeated or repeated
            for name, marks in after.items():
                self.after.setdefault(name, marks)
        return self

    def stages(self) -> list[dict[str, Tensor]]:
        """The weights in stages, first to last. One that the run did not meet, such as an expert's that no token was
        sent to, goes with those of its shape and its name but for numbers, else with the last."""
        names, level = list(self.by_name), dict[str, int]()
        for name, marks in self.after.items():  # in the order in which they ran
            before = [level[other] for at, other in enumerate(names) if marks >> at & 1 and other in level]
            level[name] = 1 + max(before, default=-1)
        last = max(level.values(), default=0)
        alike = {_kind(name, self.by_name[name]): at for name, at in level.items()}
        for name, weight in self.by_name.items():
            level.setdefault(name, alike.get(_kind(name, weight), last))
        found: list[dict[str, Tensor]] = [{} for _ in range(last + 1)]
        for name, weight in self.by_name.items():
            found[level[name]][name] = weight
        return [stage for stage in found if stage]


def _kind(name: str, weight: Tensor) -> tuple[str, tuple[int, ...]]:
    return re.sub(r"\d+", "*", name), tuple(weight.shape)
