"""A model run up to a block and through it: what meets the block's weights, and what it passes on.

Law: sums are over every batch, and finite; the block's weights do not change here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateur.blockwise.finding import experts_owners
from secateur.blockwise.processes import reduced
from secateur.blockwise.products import AllMetError, Met, Piece, Products, Tokens, encoder_states, silenced
from secateur.blockwise.replay import RUNS_AGAIN, Replay
from secateur.blockwise.request import RunAlong
from secateur.support import mapped, private, track

__all__ = ["find_next", "observe", "prepared", "store"]


@contextlib.contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """For replaying: evaluation mode, no key/value caches (a second run of a block would attend to its first), and
    experts one after the other, so that each one's product is seen. The fused attention of nn.TransformerEncoder reads
    the weights of its layers without running them, and is off."""
    model.eval()
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    changed: list[tuple[Any, str, Any]] = []
    for config in configs.values():
        for key, value in (("use_cache", False), private.experts_in_turn()):
            if hasattr(config, key) and getattr(config, key) not in (value, None):
                changed.append((config, key, getattr(config, key)))
                setattr(config, key, value)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for config, key, value in changed:
            setattr(config, key, value)


def find_next(replay: Replay, batches: Sequence[Any]) -> str | None:
    """The block that the model runs next, or None where it comes to its end."""
    return replay.run(0, batches[0], lambda *_: None)


def observe(
    replay: Replay, batches: Sequence[Any], name: str, wanted: Mapping[str, Tensor], words: Iterable[str]
) -> dict[Piece, Met]:
    """The sums of what meets the block's weights when the batches are run up to it and through it, over all processes;
    one without a share of its own adds nothing.

    Raises:
        ValueError: a batch does not run the block, the model runs it more than once, or a sum is not finite.
    """
    block = replay.blocks[name]
    products = Products(wanted, frozenset(words))
    tokens, first = Tokens(), None

    def watch(reached: str, args: Any, kwargs: Any, call: Callable[[], Any]) -> None:
        nonlocal first
        if reached != name:
            return
        masks = tokens.for_block(block, args, kwargs, batch)
        states = encoder_states(block, args, kwargs)
        # what a block returns is asked for once; the last product of the other passes need not be computed
        with contextlib.suppress(AllMetError), contextlib.ExitStack() as stack:
            for owner in owners:
                stack.callback(owner.register_forward_pre_hook(silenced(masks.own), with_kwargs=True).remove)
            if not isinstance(batches, RunAlong):
                stack.enter_context(products.watching(masks, states, stops=number > 0))
            output = call()
            if number == 0:
                first = mapped(output, lambda tensor: tensor.detach().clone())

    owners = experts_owners(block)
    for number, batch in enumerate(track(batches, f"calibrating {name}")):
        tokens = Tokens.of(batch)
        if replay.run(number, batch, watch) != name:
            raise ValueError(
                f"batch {number} does not run {name}, which the first batch runs; pass batches of one kind."
            )
    if replay.is_run_again(name, batches[0], first):
        raise ValueError(RUNS_AGAIN.format(name=name))
    found = reduced(products)
    for met in {id(met): met for met in found.values()}.values():
        met.sums.finish()
    for piece, met in found.items():
        if not met.is_finite():
            for local, weight in wanted.items():  # which may be why
                if not bool(weight.isfinite().all()):
                    shape = tuple(weight.shape)
                    raise ValueError(
                        f"{name}.{local}: the weight of shape {shape} has entries that are NaN or infinite."
                    )
            raise ValueError(
                f"{name}.{piece.name}: what it is multiplied with holds NaN or infinity, or squares beyond float64; "
                "look at the batches, at the model's configuration (config.json) and its weights, or run the model in "
                "a wider dtype (float16 overflows where bfloat16 does not)."
            )
    return found


def store(replay: Replay, batches: Sequence[Any], name: str) -> None:
    """Runs a block with the weights that it has now, and stores what it returns; it is finished then."""
    replay.store(name, track(batches, f"running {name}"))
