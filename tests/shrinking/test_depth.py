"""Laws of blocks that leave whole: fields are learnt, and what is built without blocks passes on where they were."""

import contextlib
import copy

import pytest
import torch

from secateur.models import example_for
from secateur.shrinking.configuration import Described
from secateur.shrinking.kinds import blocks as depth
from secateur.shrinking.kinds.blocks import Stack, narrowed, passed_on, prove_without, stacks_of
from support.families import EVERY_FAMILY, make


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_of_each_family_a_block_leaves_as_its_configuration_says(family):
    model = make(family)
    described = Described(model)
    stacks = stacks_of(model, described)
    example = example_for(model)
    right = []
    for stack in stacks:
        assert stack.fields(described, ()) == {}
        for block in stack.blocks:
            words = prove_without(described, stacks, [block], example, {})
            assert words is None or "relative_attention_bias" in words  # which T5's first block holds for all others
            right += [block] if words is None else []
    assert len(right) >= len(stacks)


def test_fields_that_have_an_entry_for_each_block_lose_the_same(monkeypatch):
    model = make(
        "gemma2", num_hidden_layers=3, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    )
    described = Described(model)
    (stack,) = stacks_of(model, described)
    gone = ["model.layers.1"]
    fields = stack.fields(described, gone)
    assert fields == {("num_hidden_layers",): 2, ("layer_types",): ["sliding_attention"] * 2}
    example = example_for(model)
    assert prove_without(described, [stack], gone, example, {}) is None
    other = {("num_hidden_layers",): 2, ("layer_types",): ["sliding_attention", "full_attention"]}
    long = {"input_ids": torch.arange(1, 25).reshape(2, 12), "attention_mask": torch.ones(2, 12), "use_cache": False}
    monkeypatch.setattr(Stack, "fields", lambda *_: other)
    assert "differs" in prove_without(described, [stack], gone, long, {})


def test_a_wrong_order_is_found(monkeypatch):
    model = make("llama", num_hidden_layers=4)
    described = Described(model)
    stacks = stacks_of(model, described)
    monkeypatch.setattr(Stack, "stay", lambda *_: [0, 3, 1])
    assert "differs" in prove_without(described, stacks, ["model.layers.2"], example_for(model), {})


def test_a_model_whose_blocks_no_field_counts_is_refused():
    model = make("llama")
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    with pytest.raises(ValueError, match="no field of the configuration of LlamaForCausalLM counts its blocks"):
        stacks_of(model, Described(model))


def test_a_narrow_model_is_as_deep():
    model = make("llama", num_hidden_layers=5, vocab_size=512, intermediate_size=256)
    described = Described(model)
    stacks = stacks_of(model, described)
    whole = sum(each.numel() for each in model.parameters())
    small = narrowed(described, stacks, whole // 3)
    built = described.build(small)
    assert len(built.model.layers) == 5
    assert sum(each.numel() for each in built.parameters()) <= whole // 3
    assert narrowed(described, stacks) == {}
    with pytest.raises(ValueError, match="no narrow model of this class was found"):
        narrowed(described, stacks, 10)


def test_what_passes_on_is_the_stream_it_is_given():
    x, others = torch.ones(2, 3), (torch.zeros(1), {"cache": torch.ones(4)})
    found = passed_on((x,), {"mask": torch.ones(2)}, (2 * x, *others))
    assert found[0] is x
    assert found[1] is others[0]
    assert passed_on((torch.zeros(2, 3, dtype=torch.long),), {"hidden": x}, 3 * x) is x
    for output in (torch.ones(2, 4), ()):
        with pytest.raises(ValueError, match="returns another shape than it is given"):
            passed_on((x,), {}, output)


def test_what_would_not_show_proves_nothing(monkeypatch):
    model = make("llama")
    described = Described(model)
    monkeypatch.setattr(depth, "passing", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(depth, "difference", lambda *_: None)
    words = prove_without(described, stacks_of(model, described), ["model.layers.0"], example_for(model), {})
    assert "nothing can be compared" in words
