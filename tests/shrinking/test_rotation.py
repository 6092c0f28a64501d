"""Laws of dimensions inside heads that are rotated before they leave: the function stays, and less is lost."""

import copy
import inspect
import itertools
import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from secateur import shrink
from secateur.checkpoints import CheckpointError, verify_checkpoint
from secateur.checkpoints.run import JOURNAL
from secateur.coupling import Coupling, Scope, find_coupling
from secateur.kinds import Heads
from secateur.models import InMemory, example_for
from secateur.shrinking import (
    Memory,
    calibrated,
    directory,
    load_shrunken,
    oracle,
    remembering,
    save_shrunken,
    verify_shrunken,
)
from secateur.shrinking.calibrated import maps_of, rotate_heads
from secateur.shrinking.configuration import Configured
from secateur.shrinking.request import pruning_target, request
from secateur.support import Undo
from support.damaged import resealed
from support.measured import Words, answers, apart, text, words
from support.unchanged import is_unchanged, state_of

HEADS = ["*.up.bias", "*.first.weight"]  # left whole, so that nothing but attentions loses units


class Fused(nn.Module):
    """Attention whose queries, keys and values are of one matrix, as in timm; with a normalization of queries."""

    def __init__(self, width=24, heads=3, normed=False):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width // heads) if normed else nn.Identity()

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(self.norm(q), k, v)
        return x + self.proj(y.transpose(1, 2).flatten(2))


def tokens(**more):
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 32, (3, 9), generator=generator) for _ in range(4)]
    names = ("input_ids", "decoder_input_ids")[: 1 + more.pop("decoder", False)]
    return [{**dict.fromkeys(names, each), **more} for each in ids]


def vectors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 7, 24, generator=generator) for _ in range(4)]


def bert():
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 3}
    return BertModel(BertConfig(vocab_size=32, **sizes)), tokens()


def gpt2():
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(
        vocab_size=32, n_embd=24, n_layer=2, n_head=3, n_positions=16, bos_token_id=None, eos_token_id=None
    )
    return GPT2Model(config), tokens(use_cache=False)


def t5():
    from transformers import T5Config, T5Model

    config = T5Config(vocab_size=32, d_model=24, d_kv=8, d_ff=32, num_layers=1, num_heads=3)
    return T5Model(config), tokens(use_cache=False, decoder=True)


def llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 6}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, head_dim=8, **sizes, **more)), tokens(use_cache=False)


def fused(normed=False):
    return nn.Sequential(Fused(normed=normed), Fused(normed=normed)), vectors()


# what is made, and of each rotation whether it is of values, and (heads, heads that share one, width)
VALUES, BOTH = (True, 3, 1, 8), {(True, 3, 1, 8), (False, 3, 1, 8)}
MODELS = {
    "bert": (bert, 4, BOTH),
    "gpt2": (gpt2, 4, BOTH),
    "t5": (t5, 6, BOTH),
    "fused": (fused, 4, BOTH),
    "normed queries": (lambda: fused(normed=True), 2, {VALUES}),
    "rotary and grouped": (lambda: llama(num_key_value_heads=2), 2, {(True, 2, 3, 8)}),
    "rotary, one key": (lambda: llama(num_key_value_heads=1), 2, {(True, 1, 6, 8)}),
}


def outputs(model, batch):
    with torch.no_grad():
        found = model(**batch) if isinstance(batch, dict) else model(batch)
    return found if isinstance(found, torch.Tensor) else found[0]


def rotated(model, batches, undo=None):
    """What is rotated of a model, in place."""
    coupling = find_coupling(model, batches[0])
    subject = pruning_target(model, Scope.of(coupling), [batches[0]])
    return rotate_heads(subject, request(sparsity=0.5, rotate=True), InMemory(model, batches), undo or Undo())


@pytest.mark.parametrize("name", MODELS)
def test_a_rotation_alone_changes_nothing(name):
    """But numbers of weights: of values, and of queries and keys between which no position or norm stands."""
    make, count, shapes = MODELS[name]
    torch.manual_seed(0)
    model, batches = make()
    model = model.eval()
    with torch.no_grad():
        for name, each in model.named_parameters():
            if name.endswith("bias") and each.dim() == 1:  # many begin as zeros
                each.normal_(0, 0.1)
    before = outputs(model, batches[0])
    wide = copy.deepcopy(model).double()
    inputs = [each.double() if isinstance(each, torch.Tensor) else each for each in batches]
    exact = outputs(wide, inputs[0])
    found = rotated(wide, inputs)
    assert len(found.rotations) == count
    assert {(each.reads, *each.second[0].places.shape) for each in found.rotations} == shapes
    moved = outputs(wide, inputs[0])
    limit = 1e-10 if "rotary" not in name else 1e-6  # whose normalizations are in float32
    assert (moved - exact).abs().max() <= limit * exact.abs().max()
    for name, value in found.before.items():
        assert not torch.allclose(wide.get_parameter(name), value)
    rotated(model, batches)
    assert (outputs(model, batches[0]) - before).abs().max() <= 1e-5 * before.abs().max()


def moment(width, seed):
    draw = torch.randn(3 * width, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return draw.T @ (draw * torch.linspace(1, 9, 3 * width, dtype=torch.float64)[:, None])


@pytest.mark.parametrize("seed", range(3))
def test_the_first_dimensions_lose_no_more_than_any_others(seed):
    """Not even than those of the old ones whose matrix is repaired for them."""
    first, second = moment(5, seed), moment(5, seed + 10)
    one, two = (each[0] for each in maps_of(first[None], second[None]))
    assert torch.allclose(one @ two.T, torch.eye(5, dtype=torch.float64), atol=1e-9)
    assert torch.isclose((one @ first @ one.T).trace(), first.trace(), rtol=1e-3)  # as large as it was, in all
    assert (two @ second @ two.T).trace() <= second.trace() * 1.001  # and the other side is no larger
    for count in range(1, 5):
        gone = two[count:].T @ one[count:]
        lost = (second @ gone @ first @ gone.T).trace()
        for kept in itertools.combinations(range(5), count):
            its = list(kept)
            left = first - first[:, its] @ torch.linalg.solve(first[its][:, its], first[its])
            assert lost <= (second @ left).trace() * 1.001


def test_maps_of_what_is_nothing_are_finite():
    """Of a head that is dead, of one token, and of numbers that are far from 1."""
    zero, one = torch.zeros(1, 4, 4).double(), torch.ones(1, 4, 4).double()
    for first, second in ((zero, zero), (zero, one), (one, zero), (1e-30 * one, 1e20 * one)):
        for each in maps_of(first, second):
            assert each.isfinite().all()
        assert torch.linalg.cond(maps_of(first, second)[0]).max() <= (4 / 1e-4 + 1) ** 0.5 * 1.001


def redundant(seed=0):
    """A model of words in whose heads a half of the dimensions is made of the other half, mixed with it."""
    model = words(seed=seed, width=16, heads=2, hidden=12)
    with torch.no_grad():
        for block in model.blocks:
            for each in (block.q, block.k, block.v):
                heads = each.weight.view(2, 8, 16)
                heads.copy_(3 * torch.linalg.qr(torch.randn(2, 8, 8)).Q[:, :, :4] @ heads[:, :4])
    return model


def without_dimensions(model, batches, **how):
    return shrink(model, batches[0], 0.28, batches=batches, exclude=HEADS, round_to=1, **how)


def test_dimensions_that_are_mixed_with_others_leave_without_loss():
    model, batches = redundant(), text()
    wanted = answers(model, batches)
    plain, turned = copy.deepcopy(model), copy.deepcopy(model)
    done = without_dimensions(plain, batches)
    assert not done.rotated
    assert "Rotated" not in str(done)
    done = without_dimensions(turned, batches, rotate=True)
    assert sorted(done.rotated) == [f"blocks.{at}.{name}" for at in (0, 1) for name in ("q.weight:2", "v.weight")]
    assert "Rotated before some left: dimensions of blocks.*.q.weight:2 (x2), blocks.*.v.weight (x2)." in str(done)
    assert [block.v.weight.shape[0] for block in turned.blocks] == [8, 8]
    assert apart(turned, batches, wanted) < 1e-3
    assert apart(turned, batches, wanted) < apart(plain, batches, wanted) / 10
    assert done.multiply_adds[1] < done.multiply_adds[0]


def test_what_loses_no_dimension_is_not_rotated_bit_for_bit():
    model, batches = redundant(), text()
    state = state_of(model)
    done = shrink(model, batches[0], 0.0, batches=batches, rotate=True)
    assert not done.rotated
    assert is_unchanged(model, state)


def test_the_same_call_gives_the_same_model():
    models, batches = [redundant(), redundant()], text()
    for model in models:
        without_dimensions(model, batches, rotate=True)
    one, two = (model.state_dict() for model in models)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_measurements_of_what_is_rotated_and_what_is_not_are_kept_apart():
    batches = text()
    alone = redundant()
    without_dimensions(alone, batches, rotate=True)
    with remembering(Memory()):
        for rotate in (False, True):
            model = redundant()
            without_dimensions(model, batches, rotate=rotate)
    assert apart(model, batches, answers(alone, batches)) < 1e-6


@pytest.mark.parametrize("where", ["measured", "repaired", "reported"])
def test_a_call_that_fails_changes_nothing(where, monkeypatch):
    model, batches = redundant(), text()
    state, before = state_of(model), model.blocks[0].v.weight.detach().clone()
    how = {}

    def fail(*_, **__):
        assert not torch.equal(model.blocks[0].v.weight, before)  # it is rotated by then
        raise RuntimeError("on purpose")

    if where == "reported":
        how["report"] = fail
    else:
        monkeypatch.setattr(calibrated, {"measured": "Measuring", "repaired": "Repairing"}[where], fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        without_dimensions(model, batches, rotate=True, **how)
    assert is_unchanged(model, state)


def test_weights_that_layers_share_are_not_rotated():
    model, batches = redundant(), text()
    model.blocks[1].v.weight = model.blocks[0].v.weight
    model.blocks[1].q.weight = model.blocks[0].q.weight
    with pytest.warns(RuntimeWarning, match="nothing is rotated: no dimensions inside heads may leave"):
        assert not rotated(model, batches).rotations


def test_a_half_is_solved_in_float64_and_rounded_once():
    model, batches = words(width=16, heads=2, dtype=torch.bfloat16), text()
    wanted = answers(model, batches)
    found = rotated(model, batches)
    first = found.rotations[0]
    exact = first.moved(found.before, *found.maps[0])
    assert exact
    for name, value in exact.items():
        assert value.dtype == torch.float64
        assert torch.equal(model.get_parameter(name), value.bfloat16())
    assert apart(model, batches, wanted) < 0.02


def test_what_is_left_is_saved_loaded_and_proved(tmp_path):
    model, batches = redundant(), text()
    dense = copy.deepcopy(model)
    without_dimensions(model, batches, rotate=True)
    verify_shrunken(dense, model, batches[0])
    save_shrunken(model, tmp_path / "small")
    loaded = load_shrunken(redundant(seed=1), tmp_path / "small")
    assert torch.equal(answers(loaded, batches), answers(model, batches))


def test_what_heads_left_is_rotated():
    model, batches = redundant(), text()
    done = without_dimensions(model, batches, rotate=True, leave=Heads({0: [1]}))
    assert [*done.heads.values()] == [(2, 1)]
    assert "blocks.1.v.weight" in done.rotated
    assert model.blocks[1].v.weight.shape[0] < 16


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({}, r"rotate moves weights by real inputs; pass batches= \(--data\), with repair"),
        ({"batches": text(), "repair": False}, "rotate moves weights by real inputs"),
        ({"batches": text(), "sparsity": None}, "rotate is about dimensions that leave; say by sparsity="),
    ],
)
def test_what_rotation_needs_is_asked_for(how, words):
    with pytest.raises(ValueError, match=words):
        shrink(Words(), text()[0], **{"sparsity": 0.3, **how}, rotate=True)


@pytest.mark.parametrize("name", ["blocks.0.v", "blocks.1.o", "blocks.1.q"])
def test_weights_that_are_not_finite_are_named(name):
    model, batches = redundant(), text()
    model.get_submodule(name).weight.data[0, 0] = float("nan")
    before = copy.deepcopy(model)
    with warnings.catch_warnings(), pytest.raises(ValueError, match="NaN"):
        warnings.simplefilter("ignore")
        without_dimensions(model, batches, rotate=True)
    for one, other in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


# ---- of a directory, whose configuration says how wide heads are ----------------------------------------------------

D_KV = {"include": ["*SelfAttention.q.weight", "*SelfAttention.v.weight"], "sparsity": 0.25, "round_to": 1}


def encoder(dtype=torch.float32, layers=2):
    """In whose heads a half of the dimensions is made of the other half, mixed with it."""
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    model = T5EncoderModel(T5Config(vocab_size=32, d_model=24, d_kv=8, d_ff=32, num_layers=layers, num_heads=3))
    with torch.no_grad():
        for block in model.encoder.block:
            attention = block.layer[0].SelfAttention
            for each in (attention.q, attention.k, attention.v):
                heads = torch.randn(3, 4, 24) / 5
                each.weight.view(3, 8, 24).copy_(torch.linalg.qr(torch.randn(3, 8, 8)).Q[:, :, :4] @ heads)
            attention.o.weight.normal_(0, 0.2)
    return model.to(dtype).eval()


def read(folder):
    return type(encoder()).from_pretrained(folder, dtype="auto").eval()


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder") / "dense"
    encoder().save_pretrained(folder)
    return folder


def lost(folder, model):
    wanted, found = (outputs(each, tokens()[0]) for each in (model, read(folder)))
    return float((wanted - found).square().sum() / wanted.square().sum())


def test_dimensions_leave_a_directory_without_loss(dense, tmp_path):
    model, bytes_before = read(dense), {path.name: path.read_bytes() for path in dense.iterdir()}
    plain = shrink(dense, out=tmp_path / "plain", batches=tokens(), **D_KV)
    done = shrink(dense, out=tmp_path / "small", batches=tokens(), rotate=True, **D_KV)
    assert {path.name: path.read_bytes() for path in dense.iterdir()} == bytes_before
    assert not plain.rotated
    assert done.counts == plain.counts
    assert set(done.rotated) == set(done.counts)
    assert read(tmp_path / "small").config.d_kv == 4
    assert "Rotated before some left: dimensions of encoder.block.0.layer.0.SelfAttention.q.weight:2, " in str(done)
    assert lost(tmp_path / "small", model) < 1e-4 < lost(tmp_path / "plain", model)
    record = json.loads((tmp_path / "small" / "secateur.json").read_text())
    names = [f"encoder.block.{at}.layer.0.SelfAttention.{name}.weight" for at in (0, 1) for name in "koqv"]
    assert record["calibration"]["rotated"] == names
    seen = verify_checkpoint(tmp_path / "small", dense)
    assert seen.ok
    assert {each.name for each in seen.tensors if each.unchanged is None} >= set(names)


def test_of_a_directory_it_is_what_it_is_of_the_loaded_model(dense, tmp_path):
    model = read(dense)
    mine = shrink(model, tokens()[0], batches=tokens(), rotate=True, uniform=True, **D_KV)
    done = shrink(dense, out=tmp_path / "small", batches=tokens(), rotate=True, **D_KV)
    assert sorted(mine.rotated) == sorted(done.rotated)
    assert done.got == pytest.approx(mine.got)
    assert (outputs(model, tokens()[0]) - outputs(read(tmp_path / "small"), tokens()[0])).abs().max() < 1e-3


def test_in_bfloat16_what_leaves_is_said_by_the_same_configuration(tmp_path):
    encoder(torch.bfloat16).save_pretrained(tmp_path / "dense")
    shrink(tmp_path / "dense", out=tmp_path / "small", batches=tokens(), rotate=True, **D_KV)
    small = read(tmp_path / "small")
    assert {each.dtype for each in small.parameters()} == {torch.bfloat16}
    assert lost(tmp_path / "small", read(tmp_path / "dense")) < 0.01
    assert verify_checkpoint(tmp_path / "small", tmp_path / "dense").ok


def test_a_small_model_of_the_class_says_where_a_large_one_can_be_rotated(tmp_path, monkeypatch):
    encoder(layers=3).save_pretrained(tmp_path / "dense")
    sizes = []
    looked = calibrated._right_ways
    monkeypatch.setattr(calibrated, "PROVED", 7000)
    monkeypatch.setattr(
        calibrated, "_right_ways", lambda model, *its: sizes.append(count(model)) or looked(model, *its)
    )
    done = shrink(tmp_path / "dense", out=tmp_path / "small", batches=tokens(), rotate=True, **D_KV)
    assert sizes[0] <= 7000 < count(read(tmp_path / "dense"))
    assert len(done.rotated) == 6
    assert lost(tmp_path / "small", read(tmp_path / "dense")) < 1e-4


def count(model):
    return sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("why", ["no model of this class was small enough", "no dimensions inside heads may leave"])
def test_where_no_small_model_says_so_nothing_is_rotated(dense, monkeypatch, why):
    if why.startswith("no model"):
        monkeypatch.setattr(Configured, "reduced", lambda *_: None)
    else:  # roles of which the small model has none
        monkeypatch.setattr(calibrated, "_right_roles", lambda *_: {})
    with pytest.warns(RuntimeWarning, match=f"nothing is rotated: {why}"):
        done = shrink(dense, batches=tokens(), rotate=True, **D_KV)
    assert not done.rotated


def test_layers_of_one_role_that_differ_are_not_rotated(dense, monkeypatch):
    """Such as where some layers rotate positions and others do not."""
    looked = calibrated._right_ways

    def differing(*its):
        right = looked(*its)
        return {name: at for name, at in right.items() if "block.0" not in name}

    monkeypatch.setattr(calibrated, "_right_ways", differing)
    with pytest.warns(RuntimeWarning, match="nothing is rotated"):
        done = shrink(dense, batches=tokens(), rotate=True, **D_KV)
    assert not done.rotated


def test_a_directory_that_loses_no_dimension_is_what_it_is_without(dense, tmp_path):
    for rotate in (False, True):
        done = shrink(dense, out=tmp_path / str(rotate), sparsity=0.05, batches=tokens(), rotate=rotate)
        assert done.counts
        assert not done.rotated
    for each in ("model.safetensors", "config.json", "plan.json"):
        assert (tmp_path / "True" / each).read_bytes() == (tmp_path / "False" / each).read_bytes()


@pytest.mark.parametrize("stops", ["Measuring", "Repairing", "rescaled"])
def test_a_run_that_is_stopped_goes_on_with_the_same_rotations(dense, tmp_path, monkeypatch, stops):
    how = {"batches": tokens(), "rotate": True, "verify": False, **D_KV}
    shrink(dense, out=tmp_path / "whole", **how)

    def stopped(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(calibrated, stops, stopped)
        shrink(dense, out=tmp_path / "again", **how)
    monkeypatch.setattr(calibrated, "Rotating", stopped)  # it is in the journal
    shrink(dense, out=tmp_path / "again", **how)
    for each in ("model.safetensors", "config.json", "plan.json", "secateur.json"):
        assert (tmp_path / "again" / each).read_bytes() == (tmp_path / "whole" / each).read_bytes()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda j: j["facts"]["rotated"][0].update(number=9), "names rotation 9 of 4"),
        (lambda j: j["facts"]["rotated"][0]["first"].pop(), "has of rotation 0 not 3 maps of 8 dimensions"),
        (lambda j: j["facts"]["rotated"][0]["second"].append("1"), "must be a number"),
        (lambda j: j["facts"].update(rotated=[]), "written is not what blocks and facts say of"),
    ],
)
def test_a_journal_of_other_rotations_is_refused(dense, tmp_path, monkeypatch, damage, message):
    how = {"batches": tokens(), "rotate": True, "verify": False, **D_KV}

    def stopped(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(calibrated, "Repairing", stopped)
        shrink(dense, out=tmp_path / "out", **how)
    resealed(tmp_path / "out.unfinished" / JOURNAL, damage)
    with pytest.raises(CheckpointError, match=rf"journal\.json: damaged: .*{message}"):
        shrink(dense, out=tmp_path / "out", **how)
    assert not (tmp_path / "out").exists()


# ---- of attention that is scaled by the width of a head, and of rotary positions: both have the configuration's -----

WITHIN = {"include": ["*self_attn.q_proj.weight", "*self_attn.v_proj.weight"], "sparsity": 0.2, "round_to": 1}
WITHIN |= {"exclude": ["model.embed_tokens.weight"]}  # the stream
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
POSITIONS = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},  # which scales its logits
}
OTHERS = {
    "dynamic": {"factor": 4.0},
    "longrope": {"factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    | {"original_max_position_embeddings": 16},
}


def rotary(kind="default", **more):
    torch.manual_seed(0)
    positions = {"rope_theta": 10000.0, "rope_type": kind, **(POSITIONS | OTHERS)[kind]}
    more = {"num_key_value_heads": 2, "max_position_embeddings": 32, "rope_parameters": positions, **more}
    model, batches = llama(**more)
    with torch.no_grad():
        for each in model.parameters():
            if each.dim() > 1:  # logits that tell tokens apart
                each.mul_(8)
    return model.eval(), batches


def far():
    """Tokens beyond the positions that the configuration names."""
    return {"input_ids": torch.arange(45)[None] % 32, "use_cache": False}


def frequencies(model):
    return model.model.rotary_emb.inv_freq.double()


@pytest.mark.parametrize("kind", POSITIONS)
def test_a_configuration_says_which_frequencies_stay(kind, tmp_path):
    model, batches = rotary(kind)
    dense, before = copy.deepcopy(model), frequencies(model)
    done = shrink(model, batches[0], batches=batches, rotate=True, uniform=True, **WITHIN)
    width = model.config.head_dim
    assert width < 8
    assert len(done.rotated) == 2
    assert {each.self_attn.v_proj.weight.shape[0] for each in model.model.layers} == {2 * width}
    assert {each.self_attn.scaling for each in model.model.layers} == {width**-0.5}
    model.save_pretrained(tmp_path / "saved")
    loaded = type(model).from_pretrained(tmp_path / "saved").eval()
    found = frequencies(loaded)
    assert (found[:, None] / before - 1).abs().min(1).values.max() < 1e-6  # each is one of those that were
    save_shrunken(model, tmp_path / "small.safetensors")
    again = load_shrunken(copy.deepcopy(dense), tmp_path / "small.safetensors")
    for batch in (batches[0], far()):
        expected = outputs(model, batch)
        torch.testing.assert_close(outputs(loaded, batch), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        torch.testing.assert_close(outputs(again, batch), expected, rtol=0, atol=0)
    verify_shrunken(dense, model, batches[0])


@pytest.mark.parametrize("kind", OTHERS)
def test_frequencies_that_are_computed_again_stay(kind):
    """Of longer inputs the code makes others, of a width that it knows itself."""
    model, batches = rotary(kind)
    for uniform in (False, True):
        small = copy.deepcopy(model)
        with pytest.warns(RuntimeWarning, match="nothing is rotated"):
            shrink(small, batches[0], batches=batches, rotate=True, uniform=uniform, **WITHIN)
        assert len(frequencies(small)) == 4
        assert outputs(small, far()).isfinite().all()


def test_without_rotation_the_width_of_heads_stays():
    model, batches = rotary()
    done = shrink(model, batches[0], batches=batches, uniform=True, **WITHIN)
    assert model.config.head_dim == 8
    assert done.scope.frozen["model.rotary_emb.inv_freq", 0].startswith("the configuration cannot express another size")


def test_queries_make_up_for_the_scale(tmp_path):
    """What stays of a ViT has the same logits, scaled by another number."""
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = ViTConfig(image_size=8, patch_size=4, **sizes)
    model, batches = ViTModel(config).eval(), [{"pixel_values": torch.randn(2, 3, 8, 8)} for _ in range(4)]
    dense, shapes = copy.deepcopy(model), {name: each.shape for name, each in model.named_parameters()}
    how = {"include": ["*attention*q*weight", "*attention*v*weight"], "exclude": ["*embed*"], "sparsity": 0.15}
    how |= {"batches": batches, "rotate": True, "uniform": True, "round_to": 1}
    if "head_dim" not in Path(inspect.getfile(ViTModel)).read_text():  # an older one, with no such field
        with pytest.raises(ValueError, match="nothing of the model can leave"):
            shrink(model, batches[0], **how)
        return
    done = shrink(model, batches[0], **how)
    width = model.config.head_dim
    assert width < 8
    assert all("attention" in name for name, each in model.named_parameters() if each.shape != shapes[name])
    (plan,) = done.plans
    assert {factor for *_, factor in plan.scales} == {(width / 8) ** 0.5}
    model.save_pretrained(tmp_path)
    expected = outputs(model, batches[0])
    torch.testing.assert_close(outputs(ViTModel.from_pretrained(tmp_path).eval(), batches[0]), expected)
    verify_shrunken(dense, model, batches[0])


@pytest.mark.parametrize("proved", ["whole", "in parts", "on a smaller one"])
def test_a_directory_says_it_as_the_loaded_model_does(proved, tmp_path, monkeypatch):
    model, batches = rotary("llama3", num_key_value_heads=6)
    model.save_pretrained(tmp_path / "dense")
    if proved == "in parts":
        monkeypatch.setattr(oracle, "LARGE", 1)
    elif proved == "on a smaller one":
        monkeypatch.setattr(directory, "PROVED", 8000)
        monkeypatch.setattr(calibrated, "PROVED", 8000)
    how = {"batches": batches, "rotate": True, "allocate": "uniform", **WITHIN}  # heads leave, too
    done = shrink(tmp_path / "dense", out=tmp_path / "small", **how)
    assert ("num_hidden_layers 1" in done.proof) == (proved == "on a smaller one")
    assert done.fields["rope_parameters"][1]["rope_type"] == "longrope"
    assert re.search(r"rope_parameters\.rope_type +llama3 +longrope\n", str(done))
    assert re.search(r"rope_parameters\.low_freq_factor +1\.0 +not set\n", str(done))
    assert verify_checkpoint(tmp_path / "small", tmp_path / "dense").ok
    loaded = type(model).from_pretrained(tmp_path / "small").eval()
    shrink(model, example_for(model), uniform=True, **how)
    assert done.fields["head_dim"] == (8, model.config.head_dim)
    assert model.config.head_dim < 8
    for batch in (batches[0], far()):
        expected = outputs(model, batch)
        torch.testing.assert_close(outputs(loaded, batch), expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max()))


def test_where_the_scale_is_wrong_the_width_stays(monkeypatch):
    """The proof compares with what is cut and not scaled."""
    monkeypatch.setattr(Coupling, "scales", lambda *_: [])
    model, batches = rotary()
    done = shrink(model, batches[0], batches=batches, rotate=True, uniform=True, **WITHIN)
    assert model.config.head_dim == 8
    assert done.scope.reasons[done.rotated[0] if done.rotated else "model.layers.0.self_attn.v_proj.weight"]
