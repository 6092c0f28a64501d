"""A checkpoint's tensors as those of a model: what is not pruned keeps its bytes."""

import torch

from secateur.blockwise import oneshot
from support.families import batches, make
from support.stacks import WANDA


def test_a_wider_dtype_in_the_file_keeps_what_is_not_pruned(tmp_path):
    from safetensors.torch import load_file, save_file

    make("llama", dtype=torch.bfloat16).save_pretrained(tmp_path / "dense")
    tensors = load_file(tmp_path / "dense/model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = torch.randn(16, 24)  # float32 among bfloat16
    save_file(tensors, tmp_path / "dense/model.safetensors", metadata={"format": "pt"})
    oneshot(tmp_path / "dense", batches("llama"), 0.5, solver=WANDA, out=tmp_path / "out")
    found = load_file(tmp_path / "out/model.safetensors")[name]
    assert found.dtype == torch.float32
    kept = found.ne(0)
    assert int(kept.sum()) == 16 * 24 // 2
    assert torch.equal(found[kept], tensors[name][kept])
