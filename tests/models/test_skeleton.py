"""A configuration as a model without weights: refused at once where it promises too much."""

import json

import pytest
import torch

from secateur.checkpoints import CheckpointError, families
from secateur.models import oneshot
from support.families import batches


def test_files_and_configurations_that_promise_too_much_are_refused_at_once(llama, tmp_path, monkeypatch):
    from safetensors.torch import load_file, save_file
    from transformers import core_model_loading

    kept = json.loads((llama / "config.json").read_text())
    for config in ({"num_hidden_layers": 10**7}, {"num_hidden_layers": 2, "text_config": {"n_layers": 10**7}}):
        (llama / "config.json").write_text(json.dumps({**kept, **config}))
        with pytest.raises(CheckpointError, match="layers is 10000000, and the files hold 21 tensors"):
            oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out")
    (llama / "config.json").write_text(json.dumps({**kept, "num_hidden_layers": 40}))
    with monkeypatch.context() as patched:
        patched.setattr(families, "most_parameters", lambda names: 50)
        with pytest.raises(CheckpointError, match="asks for more than 50 parameters, and the files hold 21 tensors"):
            oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out")
    (llama / "config.json").write_text(json.dumps({**kept, "num_hidden_layers": 3}))
    shard = min(llama.glob("*.safetensors"))
    (llama / "model.safetensors.index.json").unlink()
    many = {f"model.layers.{number}.junk.weight": torch.zeros(0) for number in range(11_000)}
    save_file(load_file(shard) | many, shard, metadata={"format": "pt"})
    monkeypatch.setattr(core_model_loading, "rename_source_key", None)  # takes a second for so many
    with pytest.raises(CheckpointError, match="holds 11,000 tensors that LlamaForCausalLM has no place for"):
        oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out")
