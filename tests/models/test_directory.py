"""A checkpoint's tensors as those of a model: what is not pruned keeps its bytes."""

import torch

from secateur.checkpoints import open_checkpoint
from secateur.models import build_on_meta, oneshot
from secateur.models.files import groups_of
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


def test_experts_are_joined_row_by_row_to_the_same_bits(tmp_path):
    """Each from its own tensors in files, never all of them at once."""
    import transformers

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    config = transformers.Qwen3MoeConfig(
        vocab_size=19, moe_intermediate_size=24, num_experts=12, num_experts_per_tok=2, head_dim=8, **sizes
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "dense")
    checkpoint = open_checkpoint(tmp_path / "dense")
    fused = [group for group in groups_of(build_on_meta(checkpoint), checkpoint) if len(group.sources) > 1]
    assert len(fused) == 2
    for group in fused:
        assert len(group.parts) == 12
        whole = group.read([checkpoint[name] for name in group.sources])
        rows = group.read_from(checkpoint)
        assert whole.keys() == rows.keys()
        assert all(torch.equal(whole[name], rows[name]) for name in whole)
