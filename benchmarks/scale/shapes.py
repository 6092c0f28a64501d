"""Llamas by their shapes alone: what of each lies inside blocks, and how wide the inputs of its matrices are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.shrinking.shards import EIGHT_BILLION

ONE_BILLION: dict[str, Any] = {
    **EIGHT_BILLION,
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
WIDER: dict[str, dict[str, Any]] = {
    "1 B": ONE_BILLION,
    "8 B": EIGHT_BILLION,
    "30 B": {
        **EIGHT_BILLION,
        "vocab_size": 32000,
        "hidden_size": 6656,
        "intermediate_size": 17920,
        "num_hidden_layers": 60,
        "num_attention_heads": 52,
        "num_key_value_heads": 52,
    },
    "70 B": {
        **EIGHT_BILLION,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}


@dataclass(frozen=True)
class Shapes:
    """Of one model: how many blocks, the (outputs, inputs) of a block's matrices, parameters of a block and outside."""

    blocks: int
    matrices: tuple[tuple[int, int], ...]
    block: int
    outside: int
    width: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        return self.blocks * self.block + self.outside

    @property
    def inputs(self) -> tuple[int, ...]:
        """The sizes of a block's Gram matrices: query, key and value see one input, and so do gate and up."""
        query, _, _, output, gate, _, down = (size for _, size in self.matrices)
        return query, output, gate, down


def shapes_of(config: dict[str, Any]) -> Shapes:
    """From a model of one block on the meta device."""
    import transformers

    one = transformers.LlamaConfig.from_dict({**config, "num_hidden_layers": 1})
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(one)
    block = model.model.layers[0]
    inside = sum(each.numel() for each in block.parameters())
    matrices = tuple(tuple(each.shape) for each in block.parameters() if each.dim() == 2)
    outside = sum(math.prod(each.shape) for each in model.parameters()) - inside
    return Shapes(config["num_hidden_layers"], matrices, inside, outside, config["hidden_size"], config["vocab_size"])
