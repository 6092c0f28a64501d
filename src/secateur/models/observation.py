"""Runs a model up to a block and through it: statistics of the inputs of the block's weights, and the block's outputs.

Law: sums are over every batch, and finite; the block's weights do not change here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from secateur.models.blocks import WHOLE, experts_owners, full_name
from secateur.models.jobs import RunAlong, reduced
from secateur.models.pairs import Order, PairedStats
from secateur.models.products import (
    AllMetError,
    Bias,
    InputStats,
    Products,
    Tokens,
    WeightView,
    encoder_states,
    silenced,
)
from secateur.models.recall import Recall
from secateur.models.replay import RUNS_AGAIN, Replay
from secateur.support import all_gather, mapped, private, share_of, tensors_in, track


@contextlib.contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """A context for replaying: evaluation mode, no key/value caches (a second run of a block would attend to its
    first), no scores of routers (a loss would take them from all blocks at once), and experts one after the other, so
    that each one's product is seen. The fused attention of nn.TransformerEncoder reads the weights of its layers
    without running them, and is off. Weights that lie otherwise than their shape says, or with gaps, lie as others do
    meanwhile: products are recognised by their memory."""
    model.eval()
    turned = [(each, each.data) for each in model.parameters() if _lies_otherwise(each)]
    whole = {(data.data_ptr(), data.shape, data.stride()): data.contiguous() for _, data in turned}  # ties stay so
    for parameter, data in turned:
        parameter.data = whole[data.data_ptr(), data.shape, data.stride()]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    changed: list[tuple[Any, str, Any]] = []
    for config in configs.values():
        for key, value in (("use_cache", False), ("output_router_logits", False), private.experts_in_turn()):
            if hasattr(config, key) and getattr(config, key) not in (value, None):
                changed.append((config, key, getattr(config, key)))
                setattr(config, key, value)
    try:
        yield
    finally:
        for parameter, data in turned:
            with torch.inference_mode(data.is_inference()):
                parameter.data = data.copy_(parameter.data)
        torch.backends.mha.set_fastpath_enabled(fast)
        for config, key, value in changed:
            setattr(config, key, value)


def _lies_otherwise(weight: Tensor) -> bool:
    """Than products tell by their memory: whole, or as the transpose of a matrix. One number in all places stays."""
    if weight.layout != torch.strided or weight.dim() < 2 or 0 in weight.stride():
        return False
    return not (weight.is_contiguous() or (weight.dim() == 2 and weight.mT.is_contiguous()))


def stages_of(replay: Replay, name: str, wanted: Mapping[str, Tensor]) -> tuple[list[dict[str, Tensor]], bool]:
    """The block's weights in the order in which they compute, those side by side together, and whether one of them is
    used twice; from one run of a batch.

    Raises:
        ValueError: the model runs the block more than once.
    """
    order, first = Order(wanted, unfolds=name == WHOLE), None
    batch = replay.batches[0]
    tokens = Tokens.of(batch)

    def watch(reached: str, args: Any, kwargs: Any, call: Callable[[], Any]) -> None:
        nonlocal first
        masks = tokens.for_block(replay.blocks[reached], args, kwargs, batch)
        with order.watching(masks), order.marks:
            output = call()
        first = mapped(output, lambda tensor: tensor.detach().clone())

    replay.run(0, batch, watch)
    if replay.is_run_again(name, batch, first):
        raise ValueError(RUNS_AGAIN.format(name=name))
    order.joined()
    return order.stages(), order.repeated


def observe(
    replay: Replay,
    name: str,
    wanted: Mapping[str, Tensor],
    words: Iterable[str],
    *,
    new: Mapping[str, Tensor] | None = None,
    repeated: bool = False,
    beside_dense: bool = False,
    around: bool = False,
    keep: bool = False,
    keep_dense: bool = False,
    widths: Mapping[str, int] | None = None,
    recall: Recall | None = None,
) -> dict[WeightView, InputStats]:
    """The statistics of the inputs of the block's weights when the batches are run up to it and through it, summed over
    all processes; one without a share of its own adds nothing.

    Args:
        new: the values of those of its weights that are solved already, one stage or more; None where no stage is, and
            all are wanted.
        repeated: with ``new``, whether a weight of the block is used twice.
        beside_dense: each batch is run through the dense block first, which gives the residual of each product.
        around: the sums that the products' outputs are added to have statistics, too.
        keep: what the block returns is stored, as by `store`: it is run to its end.
        keep_dense: the same of the dense block.
        widths: ``{name: inputs of a block}`` of the weights whose inputs are summed in blocks.
        recall: of the passes for the stages before; what is wanted now and later is opened.

    Raises:
        ValueError: a batch does not run the block, the model runs it more than once, or a sum is not finite.
    """
    block, batches = replay.blocks[name], replay.batches
    owners, whole = experts_owners(block), name == WHOLE
    kind = PairedStats if beside_dense or around else Products
    products = kind(wanted, frozenset(words), unfolds=whole, widths=widths)
    pairs = products if isinstance(products, PairedStats) else None
    products.repeated = repeated
    tokens, first, dense = Tokens(), None, False

    def watch(reached: str, args: Any, kwargs: Any, call: Callable[[], Any]) -> None:
        nonlocal first
        if reached != name:
            return
        kept = keep_dense if dense else keep
        masks = tokens.for_block(block, args, kwargs, batch)
        states = encoder_states(block, args, kwargs)
        # what a block returns is asked for once; the last product of the other passes need not be computed
        with contextlib.suppress(AllMetError), contextlib.ExitStack() as stack:
            for owner in owners:
                stack.callback(owner.register_forward_pre_hook(silenced(masks.own), with_kwargs=True).remove)
            if isinstance(batches, RunAlong):
                pass  # to keep step with the other processes
            elif pairs is None:
                stops = not kept and (number > 0 or new is not None)
                stack.enter_context(products.watching(masks, states, stops=stops))
            else:
                count = None if whole and not owners else _tokens_in(args, kwargs)
                stack.enter_context(pairs.beside(masks, states, count, dense=dense, to_the_end=kept))
                stack.enter_context(pairs.learning())
            if recall is not None:
                stack.enter_context(recall.passing((dense, number), (args, kwargs)))
            output = call()
            if kept:
                replay.keep(name, output)
            if number == 0 and new is None:
                first = mapped(output, lambda tensor: tensor.detach().clone())

    recall = None if isinstance(batches, RunAlong) else recall
    if pairs is not None and recall is not None and not owners:
        _learn(replay, pairs, kind(wanted, frozenset(words), unfolds=whole, widths=widths), block, new, recall)
    for number, batch in enumerate(track(batches, f"calibrating {name or 'the model'}")):
        tokens = Tokens.of(batch)
        if beside_dense:
            dense = True
            with replay.of_dense():
                replay.run(number, batch, watch)
                if keep_dense:
                    replay.drop_unneeded(name, number, batch)
            dense = False
        with in_place(block, new or {}):
            reached = replay.run(number, batch, watch)
        if reached != name:
            raise ValueError(
                f"batch {number} does not run {name}, which the first batch runs; pass batches of one kind."
            )
        if keep:
            replay.drop_unneeded(name, number, batch)
        if pairs is not None and not isinstance(batches, RunAlong):
            pairs.end_batch()
    if new is None and replay.is_run_again(name, batches[0], first):
        raise ValueError(RUNS_AGAIN.format(name=name))
    found = reduced(products)
    if any(weight.dim() == 1 for weight in block.parameters()):
        found = _with_biases(found, products.biases_in(dict(block.named_parameters())))
    if widths:
        wholes = {piece: matrix for each in all_gather(products.wholes) for piece, matrix in each.items()}
        found = {piece: replace(met, whole=wholes.get(piece)) for piece, met in found.items()}
    for sums in {id(met.sums): met.sums for met in found.values()}.values():
        sums.finish()
    for piece, met in found.items():
        if not met.is_finite():
            for local, weight in wanted.items():  # which may be why
                if not bool(weight.isfinite().all()):
                    shape = tuple(weight.shape)
                    raise ValueError(
                        f"{full_name(name, local)}: the weight of shape {shape} has entries that are NaN or infinite."
                    )
            raise ValueError(
                f"{full_name(name, piece.name)}: what it is multiplied with holds NaN or infinity, or squares beyond "
                "float64; look at the batches, at the model's configuration (config.json) and its weights, or run the "
                "model in a wider dtype (float16 overflows where bfloat16 does not)."
            )
    return found


def _learn(
    replay: Replay,
    pairs: PairedStats,
    scout: Products,
    block: nn.Module,
    new: Mapping[str, Tensor] | None,
    recall: Recall,
) -> None:
    """Which products end in a sum, from two examples: to learn it a pass runs to its end, and marks all it computes."""
    assert isinstance(scout, PairedStats)
    batch = replay.batches[0]
    examples = next((each.shape[0] for each in tensors_in(batch) if each.dim()), 1)
    few = share_of(batch, min(1.0, 2 / max(1, examples)))
    masks = Tokens.of(few)

    def watch(reached: str, args: Any, kwargs: Any, call: Callable[[], Any]) -> None:
        states = encoder_states(block, args, kwargs)
        here = masks.for_block(replay.blocks[reached], args, kwargs, few)
        scout.repeated = pairs.repeated
        beside = scout.beside(here, states, None, dense=False, to_the_end=True)
        with beside, scout.learning(), recall.passing("few", (args, kwargs)):
            call()

    with in_place(block, new or {}):
        replay.run(0, few, watch)
    scout.end_batch()
    pairs.expected, pairs.repeated = scout.expected, scout.repeated


def _with_biases(
    found: Mapping[WeightView, InputStats], here: Mapping[WeightView, Bias]
) -> dict[WeightView, InputStats]:
    """With what is added to the outputs of each; of several processes some may not have met it."""
    everywhere = {piece: bias for biases in all_gather(dict(here)) for piece, bias in biases.items()}
    return {piece: replace(met, bias=everywhere.get(piece)) for piece, met in found.items()}


@contextlib.contextmanager
def in_place(block: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which the block computes with these values, by names in it; its own parameters are not written
    to.
    """
    own = dict(block.named_parameters(remove_duplicate=False))
    other = {id(own[name]): nn.Parameter(value, requires_grad=False) for name, value in values.items()}
    places = [
        (module, key, parameter)
        for module in block.modules()
        for key, parameter in private.parameters_of(module).items()
        if parameter is not None and id(parameter) in other
    ]
    _put((module, key, other[id(parameter)]) for module, key, parameter in places)
    try:
        yield
    finally:
        _put(places)


def _put(places: Iterable[tuple[nn.Module, str, nn.Parameter]]) -> None:
    for module, key, parameter in places:
        private.parameters_of(module)[key] = parameter
        if isinstance(module, nn.RNNBase):
            private.flatten_anew(module)


def _tokens_in(args: Any, kwargs: Any) -> int:
    """How many tokens a block is given, by its first argument with features."""
    for each in tensors_in((args, kwargs)):
        if each.is_floating_point() and each.dim() >= 2:
            return each.numel() // max(each.shape[-1], 1)
    return -1
