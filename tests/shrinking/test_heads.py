"""Heads that are named leave, as if what they give were zero; anything that is not just these is refused."""

import contextlib
import copy
import inspect
import json
import re

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    T5Config,
    T5Model,
    ViTConfig,
    ViTModel,
)

from secateur import load_shrunken, save_shrunken, shrink
from secateur.kinds import Heads

SIZES = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2, "intermediate_size": 64}
TOKENS = {"input_ids": torch.arange(14).reshape(2, 7)}
# by a mask queries of a key leave beside every transformers; without one older ones say nowhere how many there are
PADDED = {**TOKENS, "attention_mask": torch.tensor([[1] * 7, [1] * 6 + [0]])}


def bert(**more):
    torch.manual_seed(0)
    return BertModel(BertConfig(vocab_size=50, initializer_range=0.2, **SIZES, **more)).eval()


def vit():
    torch.manual_seed(0)
    return ViTModel(ViTConfig(image_size=32, patch_size=16, initializer_range=0.2, **SIZES)).eval()


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=50, num_key_value_heads=2, initializer_range=0.2, **SIZES)
    return LlamaModel(config).eval()


def gpt2():
    torch.manual_seed(0)
    special = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_embd=48, n_layer=2, n_head=6, initializer_range=0.2, **special)
    ).eval()


CASES = {
    "bert": (bert, TOKENS, {0: [1, 4], "encoder.layer.1.attention": [0, 2, 3, 5]}, ".*.{}.attention.output.dense"),
    "vit": (vit, torch.linspace(-1, 1, 6144).view(2, 3, 32, 32), {1: [5, 0]}, ".*.{}.attention.(o_proj|output.dense)"),
    "llama": (llama, PADDED, {0: [1, 4], 1: [0, 3]}, "layers.{}.self_attn.o_proj"),
    "llama, whole keys": (llama, PADDED, {1: [3, 4, 5]}, "layers.{}.self_attn.o_proj"),
}


def test_a_cache_that_nobody_asked_for_keeps_no_heads():
    """The model returns one unless it is told not to; who says that it is wanted keeps its keys and values."""
    for make in (gpt2, llama):
        assert make().config.use_cache
        whole, less = make(), make()
        shrink(less, PADDED, leave=Heads({0: [0, 1, 2]}))
        assert sum(each.numel() for each in less.parameters()) < sum(each.numel() for each in whole.parameters())
        assert less(**PADDED).past_key_values is not None
    with pytest.raises(ValueError, match="layer 0 has no heads that can leave: an output of the model"):
        shrink(gpt2(), {**TOKENS, "use_cache": True}, leave=Heads({0: [0]}))


@pytest.mark.long
def test_layers_that_share_their_heads_lose_them_together():
    """T5's add one table of biases, so a head of one layer is that of all."""
    torch.manual_seed(0)
    config = T5Config(vocab_size=50, d_model=48, d_kv=8, d_ff=64, num_layers=2, num_heads=6)
    model = T5Model(config).eval()
    both = {**TOKENS, "decoder_input_ids": TOKENS["input_ids"]}
    whole = sum(each.numel() for each in model.parameters())
    for heads in ({0: [1]}, {0: [1], 1: [2]}):
        with pytest.raises(
            ValueError, match=r"encoder\.block\.0, encoder\.block\.1.* share their heads, so they leave"
        ):
            shrink(model, both, leave=Heads(heads))
    assert sum(each.numel() for each in model.parameters()) == whole
    shrink(model, both, leave=Heads({0: [1], 1: [1]}))
    assert {block.layer[0].SelfAttention.q.out_features for block in model.encoder.block} == {40}


def outputs(model, inputs):
    with torch.no_grad():
        out = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return out if isinstance(out, torch.Tensor) else out.last_hidden_state


@pytest.mark.parametrize("name", CASES)
def test_what_is_left_is_the_model_in_which_these_heads_give_zero(name):
    make, inputs, heads, place = CASES[name]
    model, masked = make(), make()
    modules = dict(masked.named_modules())
    for layer, numbers in heads.items():
        pattern = place.format(layer if isinstance(layer, int) else 1)
        path = next(each for each in modules if re.fullmatch(pattern, each))
        for head in numbers:
            modules[path].weight.data[:, 8 * head : 8 * (head + 1)] = 0
    assert not torch.allclose(outputs(make(), inputs), outputs(masked, inputs), atol=1e-2)
    before = sum(each.numel() for each in model.parameters())
    done = shrink(model, inputs, leave=Heads(heads))
    torch.testing.assert_close(outputs(model, inputs), outputs(masked, inputs), rtol=1e-5, atol=1e-5)
    assert 1 - done.got == pytest.approx(sum(each.numel() for each in model.parameters()) / before)


@pytest.mark.parametrize(
    ("heads", "said"),
    [
        ({9: [0]}, "there is no layer 9: the model has 2 blocks"),
        ({"encoder.nothing": [0]}, "there is no module 'encoder.nothing'"),
        ({0: [6]}, "layer 0 has heads 0 to 5, and no 6"),
        ({0: [*range(6)]}, "layer 0: all of its heads are to leave, and one stays at least"),
        ({"encoder": [0]}, "layer 'encoder' has several attentions; name the module of one"),
        ({"pooler": [0]}, "layer 'pooler' has no heads that can leave: an output of the model"),
    ],
)
def test_what_is_no_head_is_told_and_nothing_changes(heads, said):
    model = bert()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=said):
        shrink(model, TOKENS, leave=Heads(heads))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_heads_that_share_keys_leave_together():
    with pytest.raises(ValueError, match=r"leave together, \[1, 4\] or \[0, 1, 2\]; not \[1\]"):
        shrink(llama(), PADDED, leave=Heads({0: [1]}))


def test_a_configuration_that_holds_one_number_of_heads_is_asked():
    with pytest.raises(ValueError, match=r"no heads that can leave: the configuration cannot express another size"):
        shrink(bert(), TOKENS, leave=Heads({0: [1]}), uniform=True)


def test_units_leave_after_heads_and_both_are_saved(tmp_path):
    model = bert()
    done = shrink(model, TOKENS, 0.2, leave=Heads({0: [0, 1, 2]}), round_to=1)
    assert [bool(plan.tensors) for plan in done.plans] == [True, True]
    assert done.got == pytest.approx(0.2, abs=0.01)
    save_shrunken(model, tmp_path)
    torch.testing.assert_close(outputs(load_shrunken(bert(), tmp_path), TOKENS), outputs(model, TOKENS))


def test_pruned_heads_of_an_old_configuration_are_read(tmp_path):
    from safetensors.torch import save_file

    model = bert()
    done = shrink(model, TOKENS, leave=Heads({0: [1, 4], 1: [0]}))
    assert "Gone, of what leave= names:" in str(done)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    config = {**model.config.to_dict(), "pruned_heads": {"0": [1, 4], "1": [0]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    fresh = load_shrunken(BertModel(BertConfig.from_pretrained(tmp_path)), tmp_path).eval()
    torch.testing.assert_close(outputs(fresh, TOKENS), outputs(model, TOKENS), rtol=0, atol=0)
    (tmp_path / "config.json").write_text(json.dumps({**config, "pruned_heads": {}}))
    with pytest.raises(FileNotFoundError, match=r"plan\.json"):
        load_shrunken(bert(), tmp_path)


def test_queries_of_a_key_leave_for_every_way_that_a_model_goes() -> None:
    """Without a mask transformers asks torch for grouped queries; with one, and in a cache, it repeats keys by a number
    of its own."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 16, "num_attention_heads": 12, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, head_dim=4, num_hidden_layers=2, vocab_size=64)).eval()
    tokens = torch.randint(0, 64, (2, 7))
    with contextlib.suppress(ValueError):  # beside older transformers none leaves
        shrink(model, {"input_ids": tokens}, 0.1, include="*q_proj.weight:*")
    for each in model.model.layers:
        its = each.self_attn
        assert its.q_proj.out_features == its.k_proj.out_features * its.num_key_value_groups

    padded = {"input_ids": tokens, "attention_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3])}
    whole, masked = model(input_ids=tokens).logits, model(**padded).logits
    torch.testing.assert_close(masked[0], whole[0])
    torch.testing.assert_close(masked[1, :4], whole[1, :4])
    takes = inspect.signature(type(model).forward).parameters
    told = {"cache" if "cache" in takes else "past_key_values": model(input_ids=tokens[:, :6]).past_key_values}
    torch.testing.assert_close(model(input_ids=tokens[:, 6:], **told).logits[:, 0], whole[:, 6])
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(input_ids=tokens).logits, whole)
