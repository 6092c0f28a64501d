"""Stages of a block, solved together; and the residual of each product of the pruned model to the dense one."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from secateur.evidence import CONVOLUTIONS, RECURRENT, Sums, in_range
from secateur.models.products import AllMetError, Inputs, InputStats, Products, Rows, Tokens, WeightView
from secateur.support import all_gather, private

# ---- The stages of a block: weights whose inputs do not depend on one another's outputs are solved together.
#
# Law: no names. A run of one batch is followed operation by operation: what a weight went into carries its mark, and
# the marks of what a weight is first multiplied with say after which others it comes.

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
    >>> from secateur.models.products import Tokens
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

    def _add(self, piece: WeightView, inputs: Inputs, key: Any) -> None:  # noqa: ARG002
        self.after.setdefault(piece.name, self.marks.of(inputs.x))

    def joined(self) -> Order:
        """With what all processes saw, so that each comes to the same stages; the first one's word counts."""
        everyone = all_gather((self.after, self.repeated))
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


# ---- The residual of each product of the pruned model: the dense model's output minus its own, on the same tokens.
#
# Law: nothing is held longer than one batch but the sums; tokens that are not the same in both runs are not compared.
#
# The residual of a product inside a block is ``X Wᵀ - X' Wᵀ``, X being the dense model's inputs and X' the pruned
# one's. If the output is added to a tensor of its shape, such as the residual stream, it is the residual of that sum;
# where several products of one stage are added up, each has an equal share of it. Such sums are found as they are
# computed: an output is recognised by its memory, through views, functions that return it unchanged, and the adding
# of a bias, up to a sum of two tensors of its shape.

_AROUND = frozenset(["input_mean", "input_var"])
_ADDITIONS = {
    torch.add,
    Tensor.add,
    Tensor.add_,
    Tensor.__add__,
    Tensor.__iadd__,
    Tensor.__radd__,
}


class ProductCall(NamedTuple):
    """The n-th product with a piece in a pass."""

    piece: WeightView
    number: int


@dataclass(eq=False)
class _Inputs:
    """The inputs of one product; ``same`` where another run has these tokens in that order. Only a copy can be looked
    at later: what is added to in place, such as a residual stream, is no longer what it was."""

    inputs: Inputs
    index: Tensor | None
    same: bool
    copied: bool


@dataclass(eq=False)
class _Sum:
    """Outputs of this stage's products that were added up: whose, in which order their tokens lie (turned: sequence and
    batch are the other way round), and the sum with something else, once there is one."""

    members: dict[ProductCall, bool]
    value: Tensor | None = None


@dataclass(eq=False)
class _Pass:
    """What one run of a batch showed."""

    inputs: dict[ProductCall, _Inputs] = field(default_factory=dict)
    known: dict[Any, _Inputs] = field(default_factory=dict)
    times: dict[WeightView, int] = field(default_factory=dict)
    following: list[tuple[Tensor, _Sum]] = field(default_factory=list)

    def count(self, piece: WeightView) -> int:
        """How many products with it there were."""
        number = self.times.get(piece, 0)
        self.times[piece] = number + 1
        return number

    def sums(self) -> dict[ProductCall, tuple[Tensor, int]]:
        """For each product the rows of the sum that it ended in, and how many products share that sum."""
        found = {}
        for each in {id(group): group for _, group in self.following}.values():
            if each.value is not None:
                for meeting, turned in each.members.items():
                    rows = each.value.transpose(0, 1) if turned else each.value
                    found[meeting] = rows.reshape(-1, rows.shape[-1]), len(each.members)
        return found


class PairedStats(Products):
    """Watches a batch twice: first in the dense model, within `of_dense`, then in the pruned one, whose products are
    summed as `Products` does. The parameters are those of one stage, and the same tensors in both runs.

    The first batch is watched to the end of the block, within `learning`, to learn which products end in a sum.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        words: frozenset[str],
        *,
        unfolds: bool = False,
        widths: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(parameters, words, unfolds=unfolds, widths=widths)
        self.by_name = dict(parameters)
        self.before: _Pass | None = None  # of the dense model
        self.now = _Pass()
        self.is_dense = False
        self.count: int | None = -1  # tokens of what the block is given; None where none are sent anywhere
        self.expected: dict[WeightView, int] | None = None  # of those that end in a sum: how many share it
        self.crossed: dict[WeightView, Tensor] = {}  # (X - X')' [X' 1] of the pieces that share their inputs
        self.around: dict[WeightView, Sums] = {}  # of the sums themselves
        self.added: dict[WeightView, Tensor] = {}  # (T - X' W')' [X' 1] of those that end in a sum
        self.just_met: list[ProductCall] = []
        self.marks = Marks(list(parameters.values()))
        self.bits = {name: 1 << at for at, name in enumerate(parameters)}

    def beside(
        self, tokens: Tokens, states: Tensor | None, count: int | None, *, dense: bool, to_the_end: bool = False
    ) -> PairedStats:
        """For one run; ``count`` is how many tokens the block is given, padding among them, where some of them may be
        sent somewhere, such as to experts."""
        self.watching(tokens, states, stops=self.expected is not None and not to_the_end)
        self.is_dense, self.count = dense, count
        self.before, self.now = (None, _Pass()) if dense else (self.now, _Pass())
        return self

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Around the runs of the first batch: sums of a product's output with something computed from it,
        as in some activations, are excluded."""
        with self.marks if self.expected is None else contextlib.nullcontext():
            yield

    def end_batch(self) -> None:
        """After both runs: what they differ in is added to the sums."""
        sums, dense_sums = self.now.sums(), {} if self.before is None else self.before.sums()
        if self.expected is None:
            self.expected = {meeting.piece: shared for meeting, (_, shared) in sums.items()}
        crossed = set()
        for meeting, here in self.now.inputs.items():
            if meeting in sums:
                rows = sums[meeting][0]
                if here.index is not None and len(here.index) == len(rows):
                    rows = rows[here.index]
                self.around.setdefault(meeting.piece, Sums(_AROUND)).add_inputs(rows)
            there = None if self.before is None else self.before.inputs.get(meeting)
            if there is None or not (here.same and there.same) or here.inputs.x.shape != there.inputs.x.shape:
                continue
            piece = meeting.piece
            if meeting in sums and meeting in dense_sums and piece in self.expected:
                (after, shared), (wanted, _) = sums[meeting], dense_sums[meeting]
                residual = (in_range(wanted) - in_range(after)) / shared
                residual = residual if here.index is None else residual[here.index]
                self.added[piece] = _plus(self.added.get(piece), residual, *here.inputs.rows())
                continue
            leader = self.shared.get(piece, piece)
            in_a_sum = piece in self.expected or piece in self.wholes  # then its own: so many numbers as the weight
            if not there.copied or (not in_a_sum and (leader, meeting.number) in crossed):
                continue
            crossed.add((leader, meeting.number))
            for wanted, rows in zip(there.inputs.rows(), here.inputs.rows(), strict=True):
                residual = in_range(wanted) - in_range(rows)
                if in_a_sum:
                    weight = piece.of(self.by_name[piece.name]).to(residual.dtype)
                    self.added[piece] = _plus(self.added.get(piece), residual @ weight.T, rows)
                else:
                    self.crossed[leader] = _plus(self.crossed.get(leader), residual, rows)
        self.before, self.now = None, _Pass()

    def found(self) -> dict[WeightView, InputStats]:
        """The statistics of `Products`, each with its residual; sums that matrices share are still one object."""
        return {
            piece: replace(met, around=self.around.get(piece)).with_residual(self._lacking(piece))
            for piece, met in super().found().items()
        }

    def _lacking(self, piece: WeightView) -> Tensor | None:
        crossed = self.crossed.get(self.shared.get(piece, piece))
        if piece in self.added or crossed is None or (self.expected and piece in self.expected):
            return self.added.get(piece)
        return piece.of(self.by_name[piece.name]).to(crossed.dtype) @ crossed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.just_met = []
        output = super().__torch_function__(func, types, args, kwargs)
        if func in _ADDITIONS:
            self._follow_addition(args, kwargs or {}, output)
        elif self.wholes and any(each.piece in self.wholes for each in self.just_met):
            self._see_outputs(func, output)
        elif (meeting := self.product_of(func, args, kwargs or {})) is not None:
            value = output[0] if isinstance(output, tuple) else output
            ends = self.expected is None or meeting.piece in self.expected
            if ends and value.shape[-1] == meeting.piece.shape[0]:
                self.now.following.append((value, _Sum({meeting: False})))
        if self.stops and self._has_met_all() and self._sums_are_there():
            raise AllMetError
        return output

    def _see_outputs(self, func: Any, output: Any) -> None:
        """The outputs of matrices whose inputs are summed in blocks: what those blocks' outputs are added up to."""
        if self.is_dense or not isinstance(output, Tensor) or not (func in CONVOLUTIONS or func is functional.linear):
            return
        parts: dict[WeightView, list[ProductCall]] = {}
        for meeting in self.just_met:
            if meeting.piece in self.wholes:
                parts.setdefault(self.wholes[meeting.piece], []).append(meeting)
        at = output.dim() - 1 - CONVOLUTIONS.get(func, 0)
        rows = output.detach().movedim(at, -1).flatten(0, -2)
        for number, its in enumerate(parts.values()):
            outputs = its[0].piece.shape[0]
            index = self.now.inputs[its[0]].index
            own = rows[:, number * outputs :][:, :outputs]
            sums = self.around.setdefault(its[0].piece, Sums(_AROUND))
            sums.add_inputs(own if index is None else own[index])
            self.around.update((meeting.piece, sums) for meeting in its)

    def _has_seen_all(self) -> bool:
        return not self.expected and not self.wholes and self._has_met_all()

    def _sums_are_there(self) -> bool:
        found = self.now.sums()
        last = {meeting.piece: shared for meeting, (_, shared) in found.items()}
        return all(last.get(piece) == shared for piece, shared in (self.expected or {}).items())

    def _add(self, piece: WeightView, inputs: Inputs, key: Any) -> None:
        if self.is_dense:
            self.seen.setdefault(key, (inputs.x, piece))
        else:
            super()._add(piece, inputs, key)
        meeting = ProductCall(piece, self.now.count(piece))
        self.just_met.append(meeting)
        if key not in self.now.known:
            # tokens that were sent somewhere, such as to experts, are not the same ones in both runs
            x, index = inputs.x, inputs.index if isinstance(inputs, Rows) else None
            same = self.count is None or x.dim() >= 3 or x.shape[:-1].numel() == self.count
            copied = not (self.is_dense and self.expected and piece in self.expected)
            self.now.known[key] = _Inputs(inputs.copied() if copied else inputs, index, same, copied)
        self.now.inputs[meeting] = self.now.known[key]

    def product_of(self, func: Any, args: Any, kwargs: Any) -> ProductCall | None:
        """The product that a call's output is the output of, tokens first."""
        if func is functional.multi_head_attention_forward:
            weight = inspect.signature(func).bind(*args, **kwargs).arguments["out_proj_weight"]
            owner = self.parameters.get(weight.untyped_storage().data_ptr())
            named = [each for each in self.just_met if owner is not None and each.piece.name == owner[0]]
            return named[-1] if len(named) == 1 else None
        if len(self.just_met) != 1 or func in CONVOLUTIONS or func in RECURRENT:
            return None  # none, or experts side by side, or no rows of outputs
        first = args[0] if args else kwargs.get("input")
        tokens_are_columns = (
            isinstance(first, Tensor) and first.untyped_storage().data_ptr() in self.parameters
        ) and func is not functional.linear
        return None if tokens_are_columns else self.just_met[0]

    def _follow_addition(self, args: Any, kwargs: Any, output: Any) -> None:
        operands = [*args, *(kwargs[name] for name in ("input", "other") if name in kwargs)]
        if kwargs.get("alpha", 1) != 1 or len(operands) != 2 or not isinstance(output, Tensor):
            return
        if not all(isinstance(each, Tensor) for each in operands):
            return
        tracked = [self._followed(each) for each in operands]
        if tracked[0] is None and tracked[1] is None:
            return
        one, other = tracked
        if one is not None and other is not None:  # two of this stage's: they share the residual of the sum
            if one is other:
                return
            one.members.update(other.members)
            if one.value is not None or other.value is not None:
                one.value = output.detach().clone()
            self.now.following = [(tensor, one if group is other else group) for tensor, group in self.now.following]
            self.now.following.append((output, one))
            return
        at = 0 if one is not None else 1
        group = one if one is not None else other
        assert group is not None
        if group.value is not None or operands[at].shape != output.shape:
            return  # it has ended already
        if self.expected is None:
            own = sum({self.bits[meeting.piece.name] for meeting in group.members})
            if self.marks.of(operands[1 - at]) & own:
                return  # what is added was made of the output itself
        if operands[1 - at].shape == output.shape:
            group.value = output.detach().clone()
        self.now.following.append((output, group))

    def _followed(self, operand: Tensor) -> _Sum | None:
        """The sum that a tensor is, by its memory; the order of its tokens is that of this tensor from now on."""
        for tensor, group in reversed(self.now.following):
            if tensor.untyped_storage().data_ptr() == operand.untyped_storage().data_ptr():
                turned = is_turned(tensor, operand)
                if turned is None:
                    return None
                if turned:
                    group.members.update({meeting: not before for meeting, before in group.members.items()})
                return group
        return None


def is_turned(tensor: Tensor, view: Tensor) -> bool | None:
    """Whether a view has the first two dimensions the other way round; None where tokens lie in it some other way."""
    if view.numel() != tensor.numel() or not view.dim() or view.shape[-1] != tensor.shape[-1]:
        return None
    if view.is_contiguous() and tensor.is_contiguous():
        return False
    if view.shape == tensor.shape and view.stride() == tensor.stride():
        return False
    if tensor.dim() == 3:
        other = tensor.transpose(0, 1)
        if view.shape == other.shape and view.stride() == other.stride():
            return True
    return None


def _plus(total: Tensor | None, residual: Tensor, rows: Tensor) -> Tensor:
    """Adds ``residual' [rows 1]``, in float32 or wider."""
    wide = in_range(rows)
    both = torch.promote_types(residual.dtype, wide.dtype)
    both = both if total is None else torch.promote_types(both, total.dtype)
    with torch.autocast(rows.device.type, enabled=False):
        more = torch.cat([residual.to(both).T @ wide.to(both), residual.to(both).sum(0)[:, None]], 1)
        return more if total is None else total.to(both).add_(more)
