"""Units that are chosen between, such as the experts of a mixture: which dimensions hold them. Watching forward passes,
to find which slices of which tensors live and die together: `find_coupling`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import secateur.coupling.rules  # noqa: F401  they register themselves
from secateur.coupling.axes import Axis, Expression, Product, Sum, concatenated, freeze, leaves, multiplied, resolved
from secateur.coupling.groups import Coupling
from secateur.coupling.numbers import numbers_that_remember
from secateur.coupling.residual_streams import Branch, Flow, branches_of, in_all
from secateur.coupling.trace import CallSites, Dims, Trace, Unseen
from secateur.support import (
    device_of,
    in_mode,
    moved,
    private,
    refuse_unloaded,
    refuse_unseen,
    restored,
    run_example,
    seeded,
    tensors_in,
    tensors_of,
)

# ---- Units that are chosen between, such as the experts of a mixture: which dimensions hold them.
#
# Law: a model without such a unit is the model in which its score is minus infinity, where it is made and wherever it
# is compared with others. A dimension that is compared along, and is not known to be of that kind, stays whole.


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


# ---- Watching forward passes, to find which slices of which tensors live and die together: `find_coupling`.
#
# Law: whatever is removed of the groups' axes, from all members at the same indices, the model still runs and
# computes what the original computes with the removed entries zeroed. What is not sure to do so is frozen, with the
# reason.

OUTPUT = "an output of the model"  # why what is returned stays whole
UNUSED = "not used in the forward pass"  # why what no function was given does

_TURNS = 64  # passes with other choices, at most


def find_coupling(
    model: nn.Module,
    example_inputs: Any,
    *,
    modes: Iterable[bool] | None = None,
    more_inputs: Iterable[Any] = (),
    outputs: Iterable[str] = (),
    also: Callable[[], Iterable[Tensor]] | None = None,
) -> Coupling:
    """Watch forward passes of a model, and find what leaves together. Changes nothing.

    Args:
        model: any module, also on the meta device.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        modes: which of evaluation (False) and training (True) to watch; by default both, if the model can train on the
            example.
        more_inputs: further inputs of the same form; what is found with each is joined.
        outputs: modules whose outputs may leave what the model returns, where each is a position of a dimension.
        also: gives, after the first pass, tensors that it made on the way: their dimensions are `Coupling.also`.

    Raises:
        ValueError: a lazy module was not run yet, or accelerate offloads weights.

    >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> (group,) = find_coupling(model, torch.zeros(1, 3)).groups
    >>> group, group.members
    (Group('0.weight', size=8, members=3), (('0.weight', 0), ('0.bias', 0), ('2.weight', 1)))
    """
    tensors = tensors_of(model)
    if lazy := [name for name, tensor in tensors.items() if nn.parameter.is_lazy(tensor)]:
        raise ValueError(f"{lazy[0]} has no shape yet; run the model once on an example before.")
    if private.offloads(model):  # what lends it weights would put others in their places
        refuse_unloaded(model)
    trace = Trace()
    for tensor in tensors.values():
        trace.declare(tensor, [Axis(size) for size in tensor.shape])
    trace.weights = {id(tensor) for tensor in tensors.values() if isinstance(tensor, nn.Parameter)}
    trace.outputs = [model.get_submodule(path) for path in outputs]
    used: set[int] = set()
    trace.where = CallSites(model)
    passes: list[tuple[int, bool]] = []
    made: list[Dims] = []
    branches: list[list[Branch]] = []  # of each pass
    more_inputs = list(more_inputs)
    for inputs in (example_inputs, *more_inputs):
        refuse_unseen(inputs, device_of(model))
    if any(tensor.is_meta for tensor in tensors.values()) and private.are_fakes_of_one_device():
        example_inputs, *more_inputs = moved([example_inputs, *more_inputs], torch.device("meta"))
    for number, inputs in enumerate((example_inputs, *more_inputs)):
        for training in (False, True) if modes is None else modes:
            trace.in_pass = (number, training)
            try:
                found = _watch(model, inputs, trace, tensors, None if passes or also is None else (also, made))
            except Exception as error:  # such as a batch normalization in training on a batch of one
                if modes is None and training:
                    continue
                if empty := [tuple(each.shape) for each in tensors_in(inputs) if not each.numel()]:
                    raise ValueError(
                        f"the model fails on the example, in which a tensor of shape {empty[0]} holds nothing "
                        f"({error}); give an example of at least one sample."
                    ) from error
                raise
            passes.append(trace.in_pass)
            branches.append(found)
            used |= trace.touched
    turns = _in_turns(model, (example_inputs, *more_inputs), trace, tensors, used, passes)
    for copy, buffer, again in private.copies_of_buffers(model):
        if id(copy) not in used and id(buffer) in used and copy.shape == buffer.shape:
            trace.declare(copy, trace.dims(buffer))
            used.add(id(copy))
        for dim in [*trace.dims(buffer), *trace.dims(copy)] if again else ():
            freeze(dim, "computed again for longer inputs")
    for tensor in tensors.values():
        if id(tensor) not in used:
            for dim in trace.dims(tensor):
                freeze(dim, UNUSED)
    reached = {leaf for axis in trace.reached for leaf in leaves(axis)}
    for tensor in tensors.values():
        if id(tensor) not in used:
            continue
        for axis in {leaf for dim in trace.dims(tensor) for leaf in leaves(dim)} - reached:
            freeze(axis, "not reached by the example")  # such as positions beyond its length
    settle_choices(trace, [trace.dims(tensor) for tensor in tensors.values()])
    trace.forget(tensors.values())
    return Coupling(trace, tensors, passes, in_all(branches), turns, made)


def dims_of_made(
    coupling: Coupling, model: nn.Module, example_inputs: Any, made: Callable[[], Iterable[Tensor]]
) -> list[Dims]:
    """The dimensions, in axes of a coupling, of tensors that the model makes on the way when it is called with this.

    Raises:
        ValueError: called so, it computes with its weights otherwise than what was watched.

    >>> held = []
    >>> model, x = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)), torch.zeros(1, 3)
    >>> _ = model[0].register_forward_hook(lambda _, args, out: held.append(out))
    >>> coupling = find_coupling(model, x)
    >>> ((_, width),) = dims_of_made(coupling, model, x, lambda: held[-1:])
    >>> resolved(width) is resolved(coupling.dims("0.weight")[0])
    True
    """
    modes = dict.fromkeys(training for _, training in coupling.passes)
    other = find_coupling(model, example_inputs, modes=modes, also=made)
    known: dict[Axis, Axis] = {}
    for name in coupling.names():
        mine, its = ([axis for dim in each.dims(name) for axis in leaves(dim)] for each in (coupling, other))
        if [axis.size for axis in mine] != [axis.size for axis in its]:
            raise ValueError(f"{name} is computed with otherwise when the model is called in another way.")
        known |= zip(its, mine, strict=True)

    def ours(dim: Expression) -> Expression:
        whole = resolved(dim)
        if isinstance(whole, Axis):
            return known.get(whole, whole)
        return (
            multiplied(map(ours, whole.factors))
            if isinstance(whole, Product)
            else concatenated(map(ours, whole.segments))
        )

    return [[ours(dim) for dim in dims] for dims in other.also]


def _in_turns(
    model: nn.Module,
    inputs: Sequence[Any],
    trace: Trace,
    tensors: Mapping[str, Tensor],
    used: set[int],
    passes: Iterable[tuple[int, bool]],
) -> int:
    """Watch with other choices, such as of experts, as long as that uses more of the model; how many it took."""
    trace.own = {leaf for tensor in tensors.values() for dim in trace.dims(tensor) for leaf in leaves(dim)}
    # what no state dict holds is computed from the configuration: a choice is never between such tensors alone
    unsaved = {
        id(buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name in private.unsaved_buffers_of(module)
    }
    turns = 0
    for turn in range(_TURNS if trace.looks else 0):
        trace.turn = turn
        if used.issuperset({*map(id, tensors.values())} - unsaved):
            break
        more: set[int] = set()
        for number, training in passes:
            trace.in_pass = (number, training)
            try:
                _watch(model, inputs[number], trace, tensors)
            except Exception:  # a choice that the model never makes; what it used is not known to the end
                continue
            more |= trace.touched - used
        if more.isdisjoint(map(id, tensors.values())):
            break
        used |= more
        turns += 1
    trace.turn = None
    return turns


def _watch(
    model: nn.Module,
    inputs: Any,
    trace: Trace,
    tensors: Mapping[str, Tensor],
    also: tuple[Callable[[], Iterable[Tensor]], list[Dims]] | None = None,
) -> list[Branch]:
    again = bool(trace.touched)
    trace.touched.clear()
    trace.calls.clear()
    first, trace.products = trace.products, []
    training = trace.in_pass[1]
    remembering = numbers_that_remember(model, trace.equations)
    assert trace.where is not None
    try:
        with in_mode(model, training=training), restored(model), seeded(), remembering, trace.where:
            for each in tensors_in(inputs):
                trace.declare(each, [_frozen(size, "an input of the model") for size in each.shape])
            flow = Flow(model, trace, trace.in_pass, tensors_in(inputs))
            values = _without_values(model, tensors)
            with torch.no_grad(), private.uncached_shapes(), values, Unseen(trace), trace, flow, _given(trace):
                out = run_example(model, inputs)
            own = _own_outputs(trace)
            trace.returned[trace.in_pass] = [trace.dims(each) for each in tensors_in(out)]
            for each in tensors_in(out):
                trace.freeze_pooled(each, f"a statistic over it is {OUTPUT}")
                for dim in trace.dims(each):
                    whole = resolved(dim)
                    for part in whole.segments if isinstance(whole, Sum) else (whole,):
                        if part not in own:
                            freeze(part, OUTPUT)
    finally:
        if again:
            trace.products = first  # the cost is that of the first pass
    if also is not None:
        also[1][:] = [trace.dims(each) for each in also[0]()]
    branches = branches_of(flow, tensors_in(out))
    trace.forget(tensors.values())
    return branches


@contextlib.contextmanager
def _given(trace: Trace) -> Iterator[None]:
    """What the modules give whose outputs may leave; of one that only holds others, what these give."""

    def given(_: nn.Module, __: object, out: object) -> None:
        trace.given += [trace.dims(each) for each in tensors_in(out)]

    with contextlib.ExitStack() as hooks:
        parts = [*trace.outputs]
        while parts:
            part = parts.pop()
            if type(part).forward is nn.Module.forward:
                parts += part.children()
            else:
                hooks.callback(part.register_forward_hook(given).remove)
        yield


def _own_outputs(trace: Trace) -> set[Axis]:
    """The axes of these outputs: of weights that make them, and, where the modules are called, of what they give."""
    made = set[Axis]()
    for part in (each for module in trace.outputs for each in module.modules()):
        for parameter in part.parameters(recurse=False):
            if parameter.dim():
                transposed = parameter.dim() > 1 and getattr(part, "transposed", False)
                made |= {*leaves(trace.dims(parameter)[1 if transposed else 0])}
    given = {axis for dims in trace.given for dim in dims for axis in leaves(dim)}
    return made & given if trace.given else made


def _frozen(size: int, why: str) -> Axis:
    return Axis(size, reasons=[why])


@contextlib.contextmanager
def _without_values(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """For a model on meta: code that asks for values sees that there are none, as while it is exported."""
    if not any(tensor.is_meta for tensor in tensors.values()):
        yield
        return
    try:
        with private.fake_values():
            yield
    finally:
        for cached in private.caches_of(model):  # what they remember now is for no other model
            cached.cache_clear()
