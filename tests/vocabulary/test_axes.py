"""What counts tokens is found by what grows with them, and nothing that is as long by chance."""

import pytest
import torch
from torch import nn

from secateur.vocabulary.axes import axes_of, builder, embedding_of, parts_in
from support.vocabularies import model_of

FOUND = {
    "gpt2": {"transformer.wte.weight", "lm_head.weight"},
    "gptj": {"transformer.wte.weight", "lm_head.weight", "lm_head.bias"},
    "llama": {"model.embed_tokens.weight", "lm_head.weight"},
    "tied": {"model.embed_tokens.weight", "lm_head.weight"},
    "encoder": {"embeddings.word_embeddings.weight"},
    "bert": {
        "bert.embeddings.word_embeddings.weight", "cls.predictions.bias", "cls.predictions.decoder.weight",
        "cls.predictions.decoder.bias",
    },
    "t5": {"shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"},
    "bart": {
        "final_logits_bias", "model.shared.weight", "model.encoder.embed_tokens.weight",
        "model.decoder.embed_tokens.weight", "lm_head.weight",
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FOUND)
def test_what_counts_tokens_is_found(family):
    """Where the model is as wide as it has tokens."""
    size = 16
    model = model_of(family, size)
    found = axes_of(model, builder(type(model)))
    assert set(found.tensors) == FOUND[family]
    assert found.places == (("vocab_size",),)
    assert found.rows == size
    assert {name: at for name, at in found.tensors.items() if at} == (
        {"final_logits_bias": 1} if family == "bart" else {}
    )


def test_a_vocabulary_of_a_part():
    from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
    from transformers.models.clip import CLIPVisionConfig

    text = LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    sizes = {"hidden_size": 40, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=39)
    build = builder(LlavaForConditionalGeneration)
    found = axes_of(build(config), build)
    assert found.places == (("text_config", "vocab_size"),)
    assert all("vision" not in name for name in found.tensors)
    assert {place for place, _ in parts_in(config)} == {(), ("text_config",), ("vision_config",)}


def test_what_has_no_vocabulary_is_said():
    with pytest.raises(ValueError, match="says of no embedding that tokens enter by it"):
        embedding_of(nn.Linear(2, 2))
    model = model_of("llama", 48)
    model.resize_token_embeddings(50)
    model.config.vocab_size = 48
    with pytest.raises(ValueError, match="no field of LlamaForCausalLM's configuration says that it knows 50 tokens"):
        axes_of(model, builder(type(model)))

    def fails(config):
        raise RuntimeError("no")

    with pytest.raises(ValueError, match="no field of"):
        axes_of(model_of("llama", 48), fails)


def test_a_second_table_of_tokens_is_refused():
    """As of Gemma 3n, which adds to each layer what another table has of a token."""
    kind = type(model_of("gpt2", 48))

    class Twice(kind):
        def __init__(self, config):
            super().__init__(config)
            self.per_layer = nn.Embedding(config.vocab_size_per_layer_input, 3)

    config = model_of("gpt2", 48).config
    config.vocab_size_per_layer_input = 40
    config.other_vocab_size = 60  # of no table
    with pytest.raises(ValueError, match="a second table of tokens, per_layer, of which vocab_size_per"):
        axes_of(Twice(config), builder(Twice))
    config.vocab_size_per_layer_input = 2
    assert axes_of(Twice(config), builder(Twice)).rows == 48


def test_a_model_that_mixes_tokens_with_something_else_is_refused():
    class Mixed(type(model_of("gpt2", 48))):
        def __init__(self, config):
            super().__init__(config)
            self.twice = nn.Linear(2 * config.vocab_size, 3)

    model = Mixed(model_of("gpt2", 48).config)
    with pytest.raises(ValueError, match=r"twice.weight .* has shape \(3, 96\)"):
        axes_of(model, builder(Mixed))
    assert torch.is_tensor(embedding_of(model))
