"""What tests of storage share."""

import json

import pytest
import torch
from safetensors.torch import save_file

from secateur.storage import save_compressed
from support.stored import sparse


@pytest.fixture
def compressed(tmp_path):
    tensors = {"weight": sparse(64, 64), "wide": sparse(64, 64, sparsity=0.5), "bias": torch.ones(5)}
    save_compressed(tensors, tmp_path / "file.safetensors")
    return tmp_path / "file.safetensors"


@pytest.fixture
def sharded(tmp_path):
    """As transformers writes one."""
    source = tmp_path / "dense"
    (source / "1_Pooling").mkdir(parents=True)
    shards = [
        {"embed.weight": torch.randn(40, 16), "layers.0.weight": sparse(64, 64), "norm.weight": torch.ones(16)},
        {"layers.1.weight": sparse(64, 64, sparsity=0.5).bfloat16(), "steps": torch.tensor(7)},
    ]
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-00002.safetensors"
        save_file(shard, source / name, metadata={"format": "pt", "more": 'ä\n"x"'})
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": 1, "total_parameters": 2}, "weight_map": weight_map}
    (source / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    (source / "config.json").write_text('{"model_type": "bert"}')
    (source / "1_Pooling/config.json").write_text("{}")
    return source
