"""A directory whose head is its embedding: what each verb writes loads, is tied still, and holds."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from secateur import verify_checkpoint
from secateur.kinds import Blocks
from secateur.models import oneshot
from secateur.recovery import recover
from secateur.search import fit, sensitivity
from secateur.shrinking import shrink
from secateur.storage import expand_checkpoint, save_compressed
from support.families import batches, make

TIED = {"tie_word_embeddings": True, "num_hidden_layers": 3}


def pruned(dense, out):
    oneshot(dense, batches("llama"), 0.5, out=out)


def shrunk(dense, out, **options):
    shrink(dense, batches=batches("llama"), out=out, **options)


def fitted(dense, out, **options):
    fit(dense, batches("llama"), out=out, shares=(0.25, 0.5), finals=1, **options)


def recovered(dense, out, **options):
    pruned(dense, out.with_name("sparse"))
    recover(out.with_name("sparse"), dense, batches("llama"), out=out, steps=3, rate=1e-3, **options)
    return out.with_name("sparse")


def there_and_back(dense, out):
    save_compressed(dense, out.with_name("small"))
    expand_checkpoint(out.with_name("small"), out)


VERBS = {
    "oneshot": pruned,
    "shrink": lambda dense, out: shrunk(dense, out, sparsity=0.3),
    "shrink in one size": lambda dense, out: shrunk(dense, out, sparsity=0.3, uniform=True),
    "shrink blocks": lambda dense, out: shrunk(dense, out, leave=Blocks(1)),
    "fit": lambda dense, out: fitted(dense, out, budget={"params": 0.8}),
    "fit both": lambda dense, out: fitted(dense, out, budget={"params": 0.7}, over=("shrink", "oneshot")),
    "recover": recovered,
    "recover the outputs": lambda dense, out: recovered(dense, out, local=0),
    "recover block by block": lambda dense, out: recovered(dense, out, teacher_on_disk=True),
    "recover by adapters": lambda dense, out: recovered(dense, out, local=0, adapters=2),
    "compress and expand": there_and_back,
}


@pytest.fixture
def tied(tmp_path):
    make("llama", **TIED).save_pretrained(tmp_path / "dense")
    assert "lm_head.weight" not in load_file(tmp_path / "dense/model.safetensors")
    return tmp_path / "dense"


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.long
def test_a_tied_head_stays_tied(verb, tied, tmp_path):
    source = VERBS[verb](tied, tmp_path / "out") or tied
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()), told
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model(torch.arange(3, 9)[None]).logits.isfinite().all()
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"]
    assert "lm_head.weight" not in load_file(tmp_path / "out/model.safetensors")
    if verb != "compress and expand":  # whose bytes are the source's
        found = verify_checkpoint(tmp_path / "out", source)
        assert found.ok, found.problems


def test_levels_of_a_tied_directory_are_those_of_its_model(tied):
    given = {"shares": (0.5,), "score": "kl"}
    model = AutoModelForCausalLM.from_pretrained(tied).eval()
    of = [sensitivity(each, batches("llama"), **given).scores for each in (tied, model)]
    assert of[0].keys() == of[1].keys()
    for name, scores in of[0].items():
        assert scores == pytest.approx(of[1][name], rel=1e-4, abs=1e-7)
    assert model.lm_head.weight is model.model.embed_tokens.weight
