"""The parts of blocks of many families: attention up to the residual sum, and the rest; every parameter in one."""

import pytest
import torch
from torch import nn

from secateur.models import find_blocks, prepared
from secateur.recovery.local import parts_of_block, run_to, stream_in
from support.families import batches, make

ENDS = {
    "llama": ["post_attention_layernorm", ""],
    "qwen3": ["post_attention_layernorm", ""],
    "gemma2": ["pre_feedforward_layernorm", ""],
    "gpt2": ["ln_2", ""],
    "bert": ["attention.output.LayerNorm", ""],
    "mixtral": ["post_attention_layernorm", ""],
    "gpt_neox": [""],  # attention and MLP side by side
    "bart": ["self_attn_layer_norm", ""],
}


@pytest.mark.parametrize("family", ENDS)
def test_a_block_ends_in_the_middle_where_attention_joins_the_stream(family):
    model = make(family)
    block = next(iter(find_blocks(model).values()))
    found = []

    def look(module, args, kwargs, output):
        if not found:
            found.append(0)  # the runs below are of the block itself
            parameters = dict(block.named_parameters())
            found[0] = parts_of_block(block, parameters, lambda: block(*args, **kwargs))
            ends = [run_to(block, part.end, lambda: block(*args, **kwargs)) for part in found[0]]
            found.append([end.shape == stream_in(output).shape for end in ends])

    with torch.no_grad(), prepared(model):
        handle = block.register_forward_hook(look, with_kwargs=True)
        batch = batches(family)[0]
        model(**batch) if isinstance(batch, dict) else model(batch)
        handle.remove()
    parts, comparable = found
    assert [part.end for part in parts] == ENDS[family]
    assert all(comparable)
    every = [local for part in parts for local in part.parameters]
    assert sorted(every) == sorted(local for local, _ in block.named_parameters())
    assert len(set(every)) == len(every)
    matrices = [any(block.get_parameter(each).dim() > 1 for each in part.parameters) for part in parts]
    assert all(matrices)


def test_torchs_own_layer_has_halves_and_a_plain_one_is_one_part():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 3, 8)
    parts = parts_of_block(layer, dict(layer.named_parameters()), lambda: layer(x))
    assert [part.end for part in parts] == ["norm1", ""]
    assert "self_attn.in_proj_weight" in parts[0].parameters
    linear = nn.Linear(4, 4)
    assert [
        part.end for part in parts_of_block(linear, dict(linear.named_parameters()), lambda: linear(x[..., :4]))
    ] == [""]
    assert not any(each.requires_grad for each in layer.requires_grad_(False).parameters())
    parts_of_block(layer, dict(layer.named_parameters()), lambda: layer(x))
    assert not any(each.requires_grad for each in layer.parameters()), "as it was"


def test_a_block_that_takes_another_way_is_told():
    with pytest.raises(ValueError, match="a Sequential did not run its 0, as it did before; pass batches of one kind"):
        run_to(nn.Sequential(nn.LayerNorm(2)), "0", lambda: None)
    with pytest.raises(ValueError, match="a Identity returns no tensor of features"):
        run_to(nn.Identity(), "", lambda: None)
