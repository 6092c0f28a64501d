"""In memory: tokens leave a model and its tokenizer, hidden states stay bit for bit, or nothing changes at all."""

import copy

import pytest
import torch
from torch import nn

from secateur import shrink_vocabulary
from secateur.vocabulary import module
from support.unchanged import is_unchanged, state_of
from support.vocabularies import TEXT, model_of, renamed_alike, same_inside, wrapped

FAMILIES = ("gpt2", "gptj", "llama", "tied", "bert", "encoder", "roberta", "t5", "bart")


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_the_same_bit_for_bit(family):
    tokenizer = wrapped("byte level")
    model = model_of(family, len(tokenizer) + 7)  # rows that no token has
    old, before = copy.deepcopy(model), copy.deepcopy(tokenizer)
    done = shrink_vocabulary(model, tokenizer, [TEXT[:200]], exact=True)
    assert done.rows == (len(before) + 7, len(tokenizer))
    assert len(tokenizer) == len(done.order) < len(before)
    same_inside(old, model, done.order)
    assert renamed_alike(before.backend_tokenizer, tokenizer.backend_tokenizer, done.order, [TEXT[:200]])
    assert model.config.vocab_size == done.rows[1]
    assert done.parameters == (old.num_parameters(), model.num_parameters())
    fresh = type(model)(model.config)
    fresh.load_state_dict(model.state_dict())
    tied = {name for name, tensor in old.named_parameters(remove_duplicate=False)} - dict(old.named_parameters()).keys()
    assert tied == dict(model.named_parameters(remove_duplicate=False)).keys() - dict(model.named_parameters()).keys()
    assert "proved on" in done.proof
    model(input_ids=torch.zeros(1, 3, dtype=torch.long), **(
        {"decoder_input_ids": torch.zeros(1, 2, dtype=torch.long)} if model.config.is_encoder_decoder else {}
    ))  # fmt: skip


def test_what_each_text_never_has_is_said_by_its_name():
    tokenizer = wrapped("byte level")
    model = model_of("llama", len(tokenizer))
    whole = len(tokenizer)
    texts = {"rose": "a rose", "some": TEXT[:200]}
    has = {name: len({*tokenizer(text, add_special_tokens=False)["input_ids"]}) for name, text in texts.items()}
    done = shrink_vocabulary(model, tokenizer, {name: [text] for name, text in texts.items()}, exact=True)
    assert {name: each.tokens for name, each in done.reach.texts.items()} == has
    assert [row["tokens"] for row in done.json()["reached"]] == [[whole - count, whole] for count in has.values()]
    assert "Never reached by" in str(done)


def test_numbers_of_configurations_follow():
    tokenizer = wrapped("WordLevel")
    model = model_of("tied", len(tokenizer))
    rose, dot = len(tokenizer) - 1, tokenizer.convert_tokens_to_ids(".")
    model.config.eos_token_id = [2, rose]
    model.generation_config.eos_token_id = [2, rose]
    model.generation_config.suppress_tokens = [dot]
    assert rose == tokenizer.convert_tokens_to_ids("<|rose|>")
    done = shrink_vocabulary(model, tokenizer, ["rose"], exact=True)
    new = tokenizer.convert_tokens_to_ids("<|rose|>")
    assert model.config.eos_token_id == [2, new]
    assert model.generation_config.eos_token_id == [2, new]
    assert model.generation_config.suppress_tokens == [tokenizer.convert_tokens_to_ids(".")]
    assert done.fields == {"vocab_size": (rose + 1, len(tokenizer)), "eos_token_id": ([2, rose], [2, new])}


def test_the_padding_of_an_embedding_follows_and_so_do_gradients():
    tokenizer = wrapped("WordLevel")
    model = model_of("llama", len(tokenizer))
    pad = tokenizer.convert_tokens_to_ids("rose")
    model.config.pad_token_id = pad
    model.model.embed_tokens.padding_idx = pad
    model(torch.tensor([[pad, 3]])).logits.sum().backward()
    gradient = model.lm_head.weight.grad.clone()
    done = shrink_vocabulary(model, tokenizer, ["hedges"], exact=True)
    assert model.config.pad_token_id == model.model.embed_tokens.padding_idx == list(done.order).index(pad)
    assert torch.equal(model.lm_head.weight.grad, gradient[torch.from_numpy(done.order)])
    assert model.model.embed_tokens.num_embeddings == model.lm_head.out_features == len(done.order)


def test_positions_that_are_counted_from_the_padding_stay():
    tokenizer = wrapped("WordLevel")
    config = model_of("roberta", len(tokenizer)).config
    config.pad_token_id = 20
    tokenizer.add_special_tokens({"pad_token": tokenizer.convert_ids_to_tokens(20)})
    model = type(model_of("roberta", len(tokenizer)))(config).eval()
    old = copy.deepcopy(model)
    done = shrink_vocabulary(model, tokenizer, ["hedges"], exact=True)
    assert list(done.order[:21]) == list(range(21))
    same_inside(old, model, done.order)


def test_tokens_of_chat_templates_stay():
    tokenizer = wrapped("byte level")
    tokenizer.chat_template = "{{ 'gardener prunes' }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    wanted = set(tokenizer("gardener prunes", add_special_tokens=False)["input_ids"])
    done = shrink_vocabulary(model_of("tied", len(tokenizer)), tokenizer, ["It's"], exact=True)
    assert wanted <= set(done.order)
    assert tokenizer.chat_template.startswith("{{ 'gardener")


@pytest.mark.parametrize("failure", [RuntimeError("no"), KeyboardInterrupt()])
def test_a_failure_leaves_both_as_they_were(monkeypatch, failure):
    tokenizer = wrapped("byte level")
    model = model_of("bert", len(tokenizer))
    state, config, inside = state_of(model), model.config.to_dict(), dict(vars(tokenizer))

    def fails(*_):
        raise failure

    monkeypatch.setattr(module, "_configure", fails)
    with pytest.raises(type(failure)):
        shrink_vocabulary(model, tokenizer, ["a rose"], exact=True)
    assert is_unchanged(model, state)
    assert model.config.to_dict() == config
    assert vars(tokenizer) == inside
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight


def test_what_cannot_be_is_said():
    tokenizer = wrapped("byte level")
    model = model_of("tied", len(tokenizer))
    with pytest.raises(TypeError, match="str is no tokenizer of transformers"):
        shrink_vocabulary(model, "it", [TEXT], exact=True)
    with pytest.raises(ValueError, match="says of no embedding"):
        shrink_vocabulary(nn.Linear(2, 2), tokenizer, [TEXT], exact=True)
    with pytest.raises(ValueError, match="nothing says which tokens may leave"):
        shrink_vocabulary(model, tokenizer)
    with pytest.raises(ValueError, match="all 401 tokens would stay"):
        shrink_vocabulary(model, tokenizer, keep=401)
