"""llama.cpp as a runtime: files that it computes the model from, of any counts of heads and hidden units.

By a stand-in; with SECATEUR_LLAMACPP=1 in the environment by the real one, whose cache is in half precision.
"""

import contextlib
import os
import re
import sys

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from secateur import deploy, fit, shrink
from secateur.kinds import Branches
from secateur.llamacpp import FILE, LlamaCpp
from secateur.runtimes import Timer, parse, timed_by
from secateur.search import deploying
from tests.support.llama_cpp import Library

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 300,
}  # fmt: skip
TOKENS = torch.arange(28).reshape(2, 14) * 7 % 300


REAL = "SECATEUR_LLAMACPP" in os.environ
NEAR = 3e-3 if REAL else 1e-5


@pytest.fixture(autouse=True)
def library(monkeypatch):
    library = Library()
    if not REAL:
        monkeypatch.setitem(sys.modules, "llama_cpp", library)
    return library


def llama(**more):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | {"initializer_range": 0.2} | more)).eval()


def biased():
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, initializer_range=0.2)).eval()
    for name, each in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(each)
    return model


def branches():
    model = llama(tie_word_embeddings=True)
    leave = Branches(
        ["model.layers.0.self_attn", "model.layers.1.mlp", "model.layers.2.self_attn", "model.layers.2.mlp"]
    )
    shrink(model, {"input_ids": TOKENS}, leave=leave)
    return model


def ragged():
    model = llama()
    fit(model, [{"input_ids": TOKENS}, {"input_ids": TOKENS + 1}], budget={"params": 0.6}, finals=1)
    return model


def narrower():
    """Heads without some dimensions, and so without some frequencies of positions."""
    model, calls = llama(head_dim=12), [{"input_ids": TOKENS}, {"input_ids": TOKENS + 1}]
    how = {"include": ["*self_attn.q_proj.weight", "*self_attn.v_proj.weight"], "exclude": ["model.embed*"]}
    shrink(model, calls[0], 0.08, batches=calls, rotate=True, uniform=True, round_to=1, **how)
    assert model.config.head_dim < 12
    return model


STRETCHED = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
MODELS = {
    "Llama": (llama, "llama"),
    "a tied head": (lambda: llama(tie_word_embeddings=True), "llama"),
    "biases": (lambda: llama(attention_bias=True, mlp_bias=True), "llama"),
    "Qwen2": (biased, "llama"),
    "positions of Llama 3": (lambda: llama(rope_parameters=STRETCHED), "llama"),
    "wide heads": (lambda: llama(head_dim=12), "llama"),
    "heads without dimensions": (narrower, "llama"),
    "layers of several widths": (ragged, "deci"),
    "without branches": (branches, "deci"),
}


def told(folder):
    return {name: each.contents() for name, each in gguf.GGUFReader(folder / FILE).fields.items()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.long
def test_the_file_computes_the_model(name, library, tmp_path):
    model, kind = MODELS[name][0](), MODELS[name][1]
    LlamaCpp().write(model, {"input_ids": TOKENS}, tmp_path)
    loaded = LlamaCpp().load(tmp_path)
    assert told(tmp_path)["general.architecture"] == kind
    with torch.no_grad():
        logits = model(input_ids=TOKENS).logits.numpy()
    [found] = loaded.run(loaded.feeds({"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}))
    assert np.linalg.norm(found - logits) < NEAR * np.linalg.norm(logits)
    del loaded
    assert not library.open


def test_rounded_files_are_smaller_and_near(tmp_path):
    model = llama()
    LlamaCpp().write(model, {"input_ids": TOKENS}, tmp_path)
    [exact], sizes, errors = LlamaCpp().load(tmp_path).run({"input_ids": TOKENS.numpy()}), [], []
    for bits in (8, 4):
        LlamaCpp(bits).rounded(tmp_path, tmp_path / str(bits))
        [near] = LlamaCpp(bits).load(tmp_path / str(bits)).run({"input_ids": TOKENS.numpy()})
        sizes.append((tmp_path / str(bits) / FILE).stat().st_size)
        errors.append(np.linalg.norm(near - exact) / np.linalg.norm(exact))
    assert 0 < errors[0] < 0.08 < errors[1] < 0.7
    assert sizes[1] < sizes[0] < 0.4 * (tmp_path / FILE).stat().st_size
    assert Timer(model, {"input_ids": TOKENS}, LlamaCpp(8), seconds=0.01)(model)[0] > 0


def types_of(folder):
    return {each.name: each.tensor_type.name for each in gguf.GGUFReader(folder / FILE).tensors}


def test_what_reads_more_is_rounded_nearer(tmp_path):
    model, four = llama(), LlamaCpp(4)
    LlamaCpp().write(model, {"input_ids": TOKENS}, tmp_path)
    four.rounded(tmp_path, tmp_path / "alike")
    four.weigh(model, [{"input_ids": TOKENS[:1]}, {"input_ids": TOKENS[1:]}], tmp_path)
    weights = {each.name: each.data for each in gguf.GGUFReader(tmp_path / "imatrix.gguf").tensors}
    with torch.no_grad():
        x = model.model.layers[0].input_layernorm(model.model.embed_tokens(TOKENS)).flatten(0, 1)
    for name in ("attn_q", "attn_k", "attn_v"):
        np.testing.assert_allclose(weights[f"blk.0.{name}.weight.in_sum2"][0], x.square().sum(0), rtol=1e-5)
        assert weights[f"blk.0.{name}.weight.counts"].item() == 28

    exact, alike = (
        {each.name: each for each in gguf.GGUFReader(folder / FILE).tensors}
        for folder in (tmp_path, tmp_path / "alike")
    )
    errors, found = four.errors(tmp_path, {}), {}
    for name in errors:
        before, of = exact[name].data, weights[f"{name}.in_sum2"][0]
        apart = gguf.dequantize(alike[name].data, alike[name].tensor_type) - before
        found[name] = np.sqrt((apart**2 @ of).sum() / (before**2 @ of).sum())
    named = {name.removesuffix(".counts") for name in weights if name.endswith(".counts")}
    assert set(errors) == set(four.matrices(tmp_path)) == named
    assert len(errors) == 7 * 3
    assert not LlamaCpp(8).matrices(tmp_path)
    assert all(errors[name] <= found[name] * (1 + 1e-6) for name in found)
    assert sum(errors.values()) < 0.99 * sum(found.values())


def test_matrices_that_are_kept_have_eight_bits(tmp_path):
    model = llama()
    LlamaCpp().write(model, {"input_ids": TOKENS}, tmp_path)
    [exact] = LlamaCpp().load(tmp_path).run({"input_ids": TOKENS.numpy()})
    keep, errors = ["blk.1.ffn_down.weight", "blk.0.attn_v.weight"], {}
    for names in (keep, ()):
        LlamaCpp(4).rounded(tmp_path, tmp_path / "near", keep=names)
        [near] = LlamaCpp(4).load(tmp_path / "near").run({"input_ids": TOKENS.numpy()})
        errors[bool(names)] = np.linalg.norm(near - exact)
        eight = {name for name, kind in types_of(tmp_path / "near").items() if kind == "Q8_0"}
        assert eight == {*names, "output.weight"}
    assert errors[True] < errors[False]


def directory(folder, *, model=None, cut=True):
    """With a tokenizer of bytes and three pairs."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("e", "s"), ("Ġ", "i"), ("o", "'")]
    vocabulary = {text: at for at, text in enumerate([*alphabet, *map("".join, merges)])}
    its = Tokenizer(models.BPE(vocabulary, merges))
    its.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut)
    its.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=its, eos_token="<end>").save_pretrained(folder)
    (model or llama()).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("cut", "name"), [(True, "gpt-2"), (False, "default")])
def test_the_file_cuts_texts_as_the_tokenizer_does(cut, name, tmp_path):
    folder = directory(tmp_path / "dense", cut=cut)
    LlamaCpp(tokenizer=folder).write(llama(), {"input_ids": TOKENS}, tmp_path)
    found = told(tmp_path)
    assert found["tokenizer.ggml.pre"] == name or REAL  # where several ways cut these texts alike
    tokens, kinds = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert (len(tokens), tokens[259], kinds[259], tokens[-1], kinds[-1]) == (300, "<end>", 3, "[PAD299]", 5)
    assert found["tokenizer.ggml.eos_token_id"] == 259


@pytest.mark.long
def test_deploy_delivers_a_file_of_llama_cpp(tmp_path):
    source = directory(tmp_path / "dense", model=llama(tie_word_embeddings=True))
    torch.manual_seed(1)
    batches = [{"input_ids": torch.randint(0, 300, (4, 12))} for _ in range(4)]
    done = deploy(source, batches, budget={"bytes": 0.3}, out=tmp_path / "out", runtime="llamacpp:int4", finals=1)
    assert {each.form for each in done.candidates} == {"float32", "int8", "int4"}
    assert done.delivered.nbytes <= 0.3 * done.candidates[0].nbytes
    folder = tmp_path / "out"
    assert (folder / FILE).stat().st_size == done.delivered.nbytes
    assert {"tokenizer.json", "check.npz", "secateur.json"} < {each.name for each in folder.iterdir()}
    with np.load(folder / "check.npz") as check:
        [found] = LlamaCpp().load(folder).run({"input_ids": check["inputs/input_ids"]})
        np.testing.assert_allclose(found.reshape(-1)[:1000], check["outputs/logits"], rtol=1e-4, atol=1e-4)
    assert '"runtime": "llama.cpp of llama-cpp-python' in (folder / "secateur.json").read_text()


@pytest.mark.long
def test_where_there_is_room_some_matrices_have_eight_bits(tmp_path, monkeypatch):
    """Those that 4 bits move most, as the file of importance says: no text is run for it."""
    ran, one = [], deploying._one
    monkeypatch.setattr(deploying, "_one", lambda *given: ran.append(None) or one(*given))
    monkeypatch.setattr(deploying, "_UNITS", 8)
    source, out = directory(tmp_path / "dense", model=llama(tie_word_embeddings=True)), tmp_path / "out"
    torch.manual_seed(1)
    batches = [{"input_ids": torch.randint(0, 300, (4, 12))} for _ in range(4)]
    done = deploy(source, batches, budget={"bytes": 0.22}, out=out, runtime="llamacpp:int4", finals=1)
    plain = next(each for each in done.candidates if each.form == "int4")
    its = done.delivered
    assert plain.kept < its.kept
    assert (its.made, its.form, its.loss < plain.loss) == ("dense", "int4", True)
    assert its.nbytes <= done.limits["bytes"]
    assert sum(kind == "Q8_0" for kind in types_of(out).values()) == its.kept + 1  # and the table
    assert f"dense model, int4, {its.kept} matrices in more bits" in str(done)
    assert f'"matrices_in_more_bits": {its.kept}' in (out / "secateur.json").read_text()
    assert len(ran) == 1  # for the outputs beside it


@pytest.mark.parametrize("budget", [{"bytes": 0.2}, {"latency": 0.5}])
@pytest.mark.long
def test_what_is_pruned_is_pruned_by_parameters(budget, tmp_path):
    """Also for a time: no part of a model runs in llama.cpp alone, whose time a level could be."""
    batches = [{"input_ids": TOKENS + at} for at in range(4)]
    with contextlib.suppress(ValueError):  # here one takes as long as the other
        deploy(
            llama(tie_word_embeddings=True),
            batches,
            budget=budget,
            out=tmp_path / "out",
            runtime="llamacpp:int8",
            finals=1,
        )
    told = [path.read_text() for path in tmp_path.rglob("*.json")]
    made = re.findall(r"fit-[a-z]+", "".join(told))
    assert {*made} == {"fit-params"}


def write(model):
    return lambda folder: LlamaCpp().write(model, {"input_ids": TOKENS}, folder)


def padded(folder):
    write(llama())(folder)
    mask = torch.tensor([[1] * 14, [1] * 9 + [0] * 5]).numpy()
    LlamaCpp().load(folder).run({"input_ids": TOKENS.numpy(), "attention_mask": mask})


def damaged(folder):
    (folder / FILE).write_bytes(b"GGUF, but for its end")
    LlamaCpp().load(folder)


def no_pairs(folder):
    LlamaCpp(tokenizer=folder).write(llama(), {"input_ids": TOKENS}, folder)


def other(folder):
    model = llama()
    model.lm_head.register_forward_hook(lambda _, __, out: 2 * out)
    write(model)(folder)


REFUSED = {
    "GGUF is written of language models of llama, mistral, qwen2; this is of gpt2": write(
        GPT2LMHeadModel(GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=300))
    ),
    "this is of Linear": write(torch.nn.Linear(2, 2)),
    "its activation is silu": write(llama(hidden_act="gelu")),
    "takes texts without padding": padded,
    "it is damaged, or of a kind": damaged,
    "GGUF is written with a tokenizer.json of pairs of bytes": no_pairs,
    r"its logits are 0\.5[0-9e.-]* apart": other,
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_it_does_not_take(said, tmp_path):
    with pytest.raises(ValueError, match=said):
        REFUSED[said](tmp_path)


def test_a_word_for_it(monkeypatch):
    assert parse("llamacpp") == LlamaCpp()
    assert parse("llamacpp:int4") == LlamaCpp(4)
    with pytest.raises(ValueError, match=r"^bits is 32, 8 or 4; got 16\.$"):
        LlamaCpp(16)
    said = r"^'llamacpp' runs no part of a model alone, whose time a level could be; deploy takes it\.$"
    with pytest.raises(ValueError, match=said):
        fit(llama(), [{"input_ids": TOKENS}], budget={"latency": 0.5}, runtime="llamacpp")
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ImportError, match=r'^llama\.cpp is not installed: pip install "secateur\[llamacpp\]"$'):
        timed_by("llamacpp", True, whole=True)
