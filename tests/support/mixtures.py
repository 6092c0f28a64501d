"""Small mixtures of transformers: their sizes, but for those of experts, and tokens to run them on."""

import torch

SMALL = {
    "vocab_size": 53,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}


def batches(count=4):
    draw = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, 53, (2, 16), generator=draw)} for _ in range(count)]
