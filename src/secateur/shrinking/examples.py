"""Example inputs for tracing a model: made from its configuration, or the first rows of a batch.

Law: an example asks for nothing that a model returns beside its results: no cache, and no scores of its routers, from
which a loss is made. What is returned stays whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from secateur.support import mapped, tensors_in

__all__ = ["example_for", "example_of", "shorter"]

_ROWS = 2  # of a batch, that are watched to find what leaves together: sizes say nothing of it
_TOKENS = 8  # of a text
_BESIDE = ("use_cache", "output_router_logits")


def example_of(model: nn.Module, batch: Any, rows: int | None = _ROWS) -> Any:
    """The example inputs that a batch gives, as `run_batch` passes them: its first rows, or all of them."""
    given = batch if isinstance(batch, Mapping | Tensor) else batch[0]
    sizes = {each.shape[0] if each.dim() else 0 for each in tensors_in(given)}
    if rows is not None and len(sizes) == 1 and min(sizes) > rows:
        given = mapped(given, lambda tensor: tensor[:rows])
    main = getattr(model, "main_input_name", None)
    if isinstance(given, Tensor) and isinstance(main, str):
        given = {main: given}
    return {**given, **_nothing_beside(model)} if isinstance(given, Mapping) else given


def shorter(example: Any) -> Any:
    """The first tokens of a text: enough for the proof."""
    ids = example.get("input_ids") if isinstance(example, Mapping) else None
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] <= _TOKENS:
        return example
    return {
        name: each[:, :_TOKENS] if isinstance(each, Tensor) and each.shape == ids.shape else each
        for name, each in example.items()
    }


def example_for(model: nn.Module) -> dict[str, Any]:
    """Example inputs for a model of transformers, by the names of its arguments."""
    known = inspect.signature(model.forward).parameters
    config: Any = model.config
    name = getattr(model, "main_input_name", None)
    if name == "input_ids":
        tokens = torch.tensor([[7, 6, 5, 4, 1], [1, 2, 3, 5, 4]])
        # with a mask, no model has to look for padding, which it cannot on meta
        found = {name: tokens, "attention_mask": torch.ones_like(tokens)}
    elif name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        found = {name: torch.zeros(2, getattr(config, "num_channels", 3), config.image_size, config.image_size)}
    else:
        raise ValueError(f"give example_inputs: {type(model).__name__} takes {name}, of which no example is known.")
    if config.is_encoder_decoder and "decoder_input_ids" in known:
        found.setdefault("decoder_input_ids", found["input_ids"])
    return {**{key: value for key, value in found.items() if key in known}, **_nothing_beside(model)}


def _nothing_beside(model: nn.Module) -> dict[str, bool]:
    known = inspect.signature(model.forward).parameters
    return {key: False for key in _BESIDE if key in known}
