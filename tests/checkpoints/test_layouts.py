"""The layout's two directions, and which tensors are turned."""

import pytest
import torch

from secateur.checkpoints.inspect import Layout, layout_of

GPT2 = {"model_type": "gpt2"}


@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize("experts", [False, True])
def test_from_rows_is_the_inverse_of_to_rows(inputs_first, experts):
    shape = (3, 4, 5) if experts else (4, 5)
    stored = torch.arange(60).reshape(3, 4, 5) if experts else torch.arange(20).reshape(4, 5)
    layout = Layout(shape, inputs_first=inputs_first, experts=experts)
    rows = layout.to_rows(stored)
    assert tuple(rows.shape) == layout.rows_shape
    assert torch.equal(layout.from_rows(rows), stored)


@pytest.mark.parametrize(
    "name", ["h.0.attn.c_attn.weight", "transformer.h.11.mlp.c_fc.weight", "h.3.mlp.c_proj.weight"]
)
def test_gpt2_stores_inputs_first(name):
    assert layout_of(name, (6, 8), GPT2).inputs_first
    assert not layout_of(name, (6, 8), {"model_type": "gpt_bigcode"}).inputs_first  # StarCoder has Linear
    assert not layout_of(name, (6, 8), {}).inputs_first


@pytest.mark.parametrize("name", ["wte.weight", "h.0.attn.c_attn.bias", "lm_head.weight", "h.0.mlp.xc_fc.weight"])
def test_other_tensors_of_gpt2_are_as_everywhere(name):
    assert not layout_of(name, (6, 8), GPT2).inputs_first


@pytest.mark.parametrize(
    ("name", "shape", "config", "inputs_first"),
    [
        ("mlp.experts.gate_up_proj", (2, 8, 24), {"hidden_size": 8}, True),  # Llama 4
        ("mlp.experts.gate_up_proj", (2, 24, 8), {"hidden_size": 8}, False),  # Mixtral since transformers 5
        ("mlp.experts.down_proj", (2, 12, 8), {"hidden_size": 8}, True),
        ("mlp.experts.down_proj", (2, 8, 12), {"text_config": {"hidden_size": 8}}, False),
        ("mlp.experts.down_proj", (2, 8, 8), {"hidden_size": 8, "model_type": "gpt_oss"}, True),
        ("mlp.experts.down_proj", (2, 8, 8), {"hidden_size": 8}, False),
    ],
)
def test_experts_are_told_apart_by_the_hidden_size(name, shape, config, inputs_first):
    layout = layout_of(name, shape, config)
    assert layout.experts
    assert layout.inputs_first is inputs_first


def test_a_config_may_hold_anything():
    for value in ([], {}, None, 3, True):
        config = {"model_type": value, "hidden_size": value, "text_config": value}
        assert not layout_of("h.0.mlp.c_fc.weight", (6, 8), config).inputs_first
        assert layout_of("experts.w", (2, 6, 8), config).experts
