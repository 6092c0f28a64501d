"""Laws of shrinking a directory: what `shrink` makes of the loaded model, and all of it or nothing."""

import errno
import json
import re
import shutil
import weakref

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from secateur import oneshot, shrink
from secateur.checkpoints import (
    Checkpoint,
    CheckpointError,
    called_as,
    open_checkpoint,
    sha256_of,
    slicing,
    verify_checkpoint,
    write_sliced,
)
from secateur.criteria import wanda
from secateur.kinds import Heads, Outputs
from secateur.models import Stored, build_on_meta
from secateur.models.files import Group
from secateur.shrinking import directory as checkpoint_shrinking
from secateur.shrinking import request as subject
from secateur.shrinking.directory import of_zeros, write_scaled
from support.families import batches, make
from zoo import ZOO

LLAMA = {
    "vocab_size": 53,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
}
TOKENS = torch.tensor([[7, 6, 5, 4, 1], [1, 2, 3, 5, 4]])
EXAMPLE = {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS), "use_cache": False}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A Llama in bfloat16 with a head that is its embedding, in several files, with others beside."""
    folder = tmp_path_factory.mktemp("llama") / "dense"
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="20KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"stale")
    return folder


@pytest.fixture(scope="module")
def smaller(dense):
    with called_as({"sparsity": 0.4}):
        return shrink(dense, sparsity=0.4, out=dense.parent / "small")


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("by_data", [False, True])
def test_files_may_have_other_names_than_the_model_and_pictures_choose(tmp_path, by_data):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(0)
    ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=5)).save_pretrained(
        tmp_path / "a"
    )
    pictures = [{"pixel_values": torch.randn(2, 3, 8, 8)} for _ in range(4)]
    model = ViTForImageClassification.from_pretrained(tmp_path / "a")
    how = {"batches": pictures} if by_data else {}
    done = shrink(tmp_path / "a", sparsity=0.3, out=tmp_path / "b", **how)
    shrink(model, pictures[0], 0.3, uniform=True, **how)
    assert {*done.plan.tensors} <= {name for name, _ in model.named_parameters()}
    loaded, said = ViTForImageClassification.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not {*said["missing_keys"], *said["unexpected_keys"]}
    for batch in pictures:
        torch.testing.assert_close(loaded(**batch).logits, model.eval()(**batch).logits)
    assert open_checkpoint(tmp_path / "b").keys() == open_checkpoint(tmp_path / "a").keys()
    assert verify_checkpoint(tmp_path / "b", tmp_path / "a").problems == ()


def test_a_network_of_convolutions_that_says_no_size_shrinks_by_its_weights(tmp_path):
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3)
    dense = ResNetForImageClassification(config)
    dense.save_pretrained(tmp_path / "a")
    pictures = [{"pixel_values": torch.randn(2, 3, 32, 32)}]
    for call in (
        lambda: shrink(tmp_path / "a", sparsity=0.2, out=tmp_path / "b", batches=pictures),
        lambda: oneshot(tmp_path / "a", pictures, 0.5, out=tmp_path / "c"),
    ):
        with pytest.raises(
            ValueError, match="what convolutions multiply is not measured: load the model, and pass it in"
        ):
            call()
    shrink(tmp_path / "a", sparsity=0.2, out=tmp_path / "b")
    loaded = ResNetForImageClassification.from_pretrained(tmp_path / "b")
    assert loaded.num_parameters() < 0.85 * dense.num_parameters()
    assert loaded(**pictures[0]).logits.shape == (2, 3)


def test_it_is_what_shrink_makes_of_the_loaded_model(dense, smaller):
    model = LlamaForCausalLM.from_pretrained(dense, dtype="auto")
    assert model.dtype == torch.bfloat16
    shrink(model, EXAMPLE, 0.4, uniform=True)
    loaded = LlamaForCausalLM.from_pretrained(smaller.out, dtype="auto")
    expected, found = model.state_dict(), loaded.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    assert loaded.num_parameters() == smaller.parameters[1] == model.num_parameters()
    with torch.no_grad():
        assert torch.equal(model(**EXAMPLE).logits, loaded(**EXAMPLE).logits)


def test_what_else_is_in_the_directory(dense, smaller):
    before, after = files_of(dense), files_of(smaller.out)
    assert before.keys() - after.keys() == {"pytorch_model.bin"}
    assert [str(path) for path in smaller.left_out] == ["pytorch_model.bin"]
    assert after.keys() - before.keys() == {"plan.json", "secateur.json"}
    assert after["tokenizer.json"] == before["tokenizer.json"]
    old, new = json.loads(before["config.json"]), json.loads(after["config.json"])
    assert {key: (old[key], new[key]) for key in new if old[key] != new[key]} == smaller.fields
    assert list(new) == list(old)
    index = json.loads(after["model.safetensors.index.json"])
    assert index["weight_map"] == json.loads(before["model.safetensors.index.json"])["weight_map"]
    assert index["metadata"]["total_size"] == smaller.nbytes[1] == open_checkpoint(smaller.out).nbytes
    record = json.loads(after["secateur.json"])
    assert (record["criterion"], record["allocate"]) == ("magnitude", None)
    assert record["arguments"] == {"sparsity": 0.4}
    assert record["proof"] == smaller.proof == "on LlamaForCausalLM with random weights"
    assert str(dense) not in after["secateur.json"].decode()
    assert 1 - smaller.parameters[1] / smaller.parameters[0] == pytest.approx(0.4, abs=0.01)


def test_a_large_model_is_proved_on_a_small_one_of_its_class(dense, smaller, monkeypatch):
    monkeypatch.setattr(checkpoint_shrinking, "PROVED", 10_000)
    proved_on = []

    def spy(model, *arguments):
        proved_on.append(sum(each.numel() for each in model.parameters()))
        return right(model, *arguments)

    right = subject.wrong_groups
    monkeypatch.setattr(subject, "wrong_groups", spy)
    done = shrink(dense, sparsity=0.4)
    assert proved_on
    assert max(proved_on) <= 10_000
    assert done.proof.startswith("on LlamaForCausalLM with random weights and num_hidden_layers")
    assert done.fields == smaller.fields
    assert done.out is None


def test_what_is_wrong_in_the_small_one_stays_whole_in_the_large(dense, monkeypatch):
    monkeypatch.setattr(checkpoint_shrinking, "PROVED", 10_000)

    def wrong(_model, _coupling, groups, _kept, _inputs):
        return [group for group in groups if "gate_proj" in group.name]

    monkeypatch.setattr(subject, "wrong_groups", wrong)
    done = shrink(dense, sparsity=0.2, allocate="uniform")
    assert done.frozen["model.layers.2.mlp.gate_proj.weight", 0] == "the smaller model computed something else"
    assert "intermediate_size" not in done.fields
    assert {"num_attention_heads", "hidden_size"} & {*done.fields}  # what leaves instead


def test_one_tensor_at_a_time(dense, monkeypatch):
    alive = weakref.WeakSet()
    most = []

    def read(self, name):
        tensor = whole(self, name)
        alive.add(tensor)
        most.append(len(alive))
        return tensor

    whole = Checkpoint.__getitem__
    monkeypatch.setattr(Checkpoint, "__getitem__", read)
    shrink(dense, sparsity=0.4, verify=False, criterion=lambda weight: weight.abs())
    assert len(most) > 20
    assert max(most) <= 2  # the one before is let go of when the next is there


def test_scores_in_blocks_are_the_scores_of_the_whole(dense, smaller, monkeypatch):
    """To the last bit, however large the blocks are; a whole weight is not read."""
    blocks = []

    def read(self, name, *where):
        blocks.append(where)
        return raw(self, name, *where)

    raw = Checkpoint.raw
    monkeypatch.setattr(Checkpoint, "raw", read)
    monkeypatch.setattr(slicing, "PIECE", 1000)
    monkeypatch.setattr("secateur.shrinking.select._PIECE", 500)
    done = shrink(dense, sparsity=0.4, verify=False)
    assert done.plan.to_json() == smaller.plan.to_json()
    assert max(stop - start for start, stop in blocks) <= 1000


@pytest.mark.parametrize("piece", [1, 7, 40])
def test_what_stays_is_written_scaled(tmp_path, monkeypatch, piece):
    """In pieces of any size, each place by its factor; the cuts are those of tests/checkpoints/test_slicing.py."""
    tensor = torch.arange(24).reshape(4, 2, 3).to(torch.bfloat16)
    save_file({"first": torch.ones(3), "it": tensor}, tmp_path / "model.safetensors", {"format": "pt"})
    factors = [(0, np.array([0.5, 2.0])), (2, np.array([1.0, 0.5, 2.0]))]
    monkeypatch.setattr(slicing, "PIECE", piece)
    written = write_sliced(
        open_checkpoint(tmp_path),
        tmp_path / "out",
        {"it": ("it", {0: np.array([1, 3])}), "first": ("first", {})},
        lambda *its: write_scaled(*its, factors if its[2].name == "it" else []),
        nbytes=0,
        parameters=0,
    )
    made = open_checkpoint(tmp_path / "out")
    expected = tensor[[1, 3]] * torch.tensor([0.5, 2.0]).reshape(-1, 1, 1) * torch.tensor([1.0, 0.5, 2.0])
    assert torch.equal(made["it"], expected.to(torch.bfloat16))
    assert torch.equal(made["first"], torch.ones(3))
    assert written == {name: sha256_of(made, name) for name in ("it", "first")}


def test_files_without_the_prefix_of_the_model(tmp_path):
    sizes = {"vocab_size": 53, "n_positions": 16, "n_embd": 36, "n_layer": 1, "n_head": 3}
    model = GPT2LMHeadModel(GPT2Config(**sizes))
    model.save_pretrained(tmp_path / "dense")
    tensors = load_file(tmp_path / "dense" / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(bare, tmp_path / "dense" / "model.safetensors", {"format": "pt"})
    done = shrink(tmp_path / "dense", sparsity=0.4, out=tmp_path / "small", allocate="uniform", verify=False)
    assert load_file(tmp_path / "small" / "model.safetensors").keys() == bare.keys()
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "small")
    assert (loaded.config.n_embd, loaded.config.n_head, loaded.config.n_inner) == (24, 2, done.fields["n_inner"][1])


# ---- errors ---------------------------------------------------------------------------------------------------------


def changed(dense, folder, **config):
    shutil.copytree(dense, folder)
    values = json.loads((folder / "config.json").read_text())
    values |= config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return folder


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"num_attention_heads": 7}, r"config\.json: no model can be made of it \("),
        (
            {"intermediate_size": 60},
            r"gate_proj\.weight has shape \(52, 36\), in LlamaForCausalLM as config\.json says",
        ),
        ({"num_hidden_layers": 4}, r"model\.layers\.3\..* of LlamaForCausalLM is not in the files"),
    ],
)
def test_a_configuration_that_does_not_fit(dense, tmp_path, config, error):
    source = changed(dense, tmp_path / "odd", **config)
    with pytest.raises(CheckpointError, match=error):
        shrink(source, sparsity=0.4, out=tmp_path / "small")
    assert [path.name for path in tmp_path.iterdir()] == ["odd"]


def test_integers_rank_nothing(dense, tmp_path):
    source = changed(dense, tmp_path / "odd")
    (shard, *_) = open_checkpoint(source).files
    tensors = load_file(shard)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name].to(torch.int8)}, shard, {"format": "pt"})
    with pytest.raises(CheckpointError, match="is of dtype I8, which ranks nothing by itself"):
        shrink(source, sparsity=0.4, out=tmp_path / "small")


def test_a_missing_configuration(dense, tmp_path):
    source = changed(dense, tmp_path / "odd")
    (source / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json, .*; add it, or in Python give the model"):
        shrink(source, sparsity=0.4, out=tmp_path / "small")


def test_what_cannot_be_asked_for(dense, tmp_path):
    with pytest.raises(ValueError, match="'units' for a checkpoint, not 'latency'"):
        shrink(dense, sparsity=0.4, out=tmp_path / "small", target="latency")
    with pytest.raises(ValueError, match="in \\[0, 1\\]; got 40"):
        shrink(dense, sparsity=40, out=tmp_path / "small")
    with pytest.raises(CheckpointError, match="lies inside the input"):
        shrink(dense, sparsity=0.4, out=dense / "small")
    with pytest.raises(TypeError, match=r"what the model is called with; pass sparsity=0\.4"):
        shrink(dense, 0.4)
    with pytest.raises(ValueError, match="say how much leaves, by sparsity= or by leave="):
        shrink(dense, out=tmp_path / "small")
    for wrong in ({"sparsity": 0.2, "leave": "experts:2"}, {"leave": ["experts:2", "blocks:1"]}):
        with pytest.raises(ValueError, match=r"of a directory one kind leaves a run.* with OUT as the directory"):
            shrink(dense, out=tmp_path / "small", **wrong)
    with pytest.raises(ValueError, match=r"leave out uniform, or Branches; of a directory .* leave=Blocks\(\.\.\.\)"):
        shrink(dense, leave="branches:1", out=tmp_path / "small")
    with pytest.raises(ValueError, match="Heads leave a module; load the model"):
        shrink(dense, leave=Heads({0: [1]}), out=tmp_path / "small")
    with pytest.raises(ValueError, match=r"outputs of lm_head cannot leave; .* or they share a table"):
        shrink(dense, leave=Outputs("lm_head", keep=[0]), out=tmp_path / "small")
    with pytest.raises(ValueError, match="report= is for modules: a directory is called as its configuration says"):
        shrink(dense, sparsity=0.4, out=tmp_path / "small", report=print)
    with pytest.raises(ValueError, match="cannot be watched on the meta device"):
        shrink(dense, sparsity=0.4, out=tmp_path / "small", example_inputs={"input_ids": "nothing"})
    with pytest.raises(TypeError, match="input_norm"):
        shrink(dense, sparsity=0.4, out=tmp_path / "small", criterion=wanda, verify=False)
    assert not list(tmp_path.iterdir())


def test_an_output_that_is_there_and_a_full_disk(dense, tmp_path, monkeypatch):
    (tmp_path / "small").mkdir()
    with pytest.raises(CheckpointError, match="already exists"):
        shrink(dense, sparsity=0.4, out=tmp_path / "small", verify=False)
    (tmp_path / "small").rmdir()
    written = []

    def full(file, data):
        if len(written) == 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(data)
        write(file, data)

    write = checkpoint_shrinking.write_bytes
    monkeypatch.setattr(checkpoint_shrinking, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        shrink(dense, sparsity=0.4, out=tmp_path / "small", verify=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["mamba", "modernbert"])
def test_a_model_that_asks_for_values_is_what_it_is_in_memory(tmp_path, name, monkeypatch):
    model, inputs = ZOO[name]()
    model.save_pretrained(tmp_path / "dense")
    asked = []
    monkeypatch.setattr(checkpoint_shrinking, "of_zeros", lambda each: asked.append(each) or of_zeros(each))
    shrink(tmp_path / "dense", sparsity=0.3, out=tmp_path / "small", verify=False)
    assert len(asked) == 1  # it does not run on the meta device
    shrink(model, inputs, 0.3, uniform=True, verify=False)
    mine, found = model.state_dict(), type(model).from_pretrained(tmp_path / "small").state_dict()
    assert {key: each.shape for key, each in mine.items()} == {key: each.shape for key, each in found.items()}
    assert all(torch.equal(mine[key], found[key]) for key in mine)
    assert verify_checkpoint(tmp_path / "small", tmp_path / "dense").ok


@pytest.mark.parametrize("name", ["dbrx", "deepseek_v3", "gpt_oss", "inkling2", "jamba", "lfm2", "qwen3", "qwen3_next"])
@pytest.mark.long
def test_a_mixture_is_what_it_is_in_memory(tmp_path, name):
    """Experts of one tensor, of several, side by side and between each other; and such as ask for values."""
    model, inputs = ZOO[f"mixture_{name}"]()
    model.save_pretrained(tmp_path / "dense")
    how = {"target": "units", "round_to": 1, "allocate": "uniform"}
    shrink(tmp_path / "dense", sparsity=0.2, out=tmp_path / "small", **how)
    shrink(model, inputs, 0.2, uniform=True, **how)
    mine, found = model.state_dict(), type(model).from_pretrained(tmp_path / "small").state_dict()
    assert mine.keys() == found.keys()
    assert all(torch.equal(mine[key], found[key]) for key in mine)
    seen = verify_checkpoint(tmp_path / "small", tmp_path / "dense")
    assert seen.ok, seen.problems


def test_zeros_are_one_where_weights_are_one():
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)).to(torch.bfloat16).train()
    zeros = of_zeros(model)
    assert zeros.training
    assert zeros.lm_head.weight is zeros.model.embed_tokens.weight
    assert all(not each.any() and not each.is_meta for each in zeros.parameters())
    assert {name: each.shape for name, each in zeros.named_parameters()} == {
        name: each.shape for name, each in model.named_parameters()
    }


# ---- experts, which are tensors of their own in files and one tensor in the model ------------------------------------

MOE = {"round_to": 1, "include": "*.experts.gate_up_proj"}
EXPERT = "model.layers.0.mlp.experts.{}.{}.weight"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Experts in files of their own, in several shards; and what is left of their widths, with data and without."""
    folder = tmp_path_factory.mktemp("mixture")
    make("qwen2_moe").save_pretrained(folder / "dense", max_shard_size="20KB")
    shrink(folder / "dense", sparsity=0.1, out=folder / "small", batches=batches("qwen2_moe"), verify=False, **MOE)
    shrink(folder / "dense", sparsity=0.1, out=folder / "plain", **MOE)
    return folder


@pytest.mark.parametrize("data", [False, True])
def test_experts_in_files_narrow_as_in_memory(mixture, data):
    out, given = mixture / ("small" if data else "plain"), {"batches": batches("qwen2_moe")} if data else {}
    model = read(mixture / "dense")
    shrink(model, {"input_ids": TOKENS, "use_cache": False}, 0.1, uniform=True, **MOE, **given)
    small = read(out)
    assert model.config.moe_intermediate_size == small.config.moe_intermediate_size
    assert small.config.moe_intermediate_size < read(mixture / "dense").config.moe_intermediate_size
    mine, found = model.state_dict(), small.state_dict()
    assert mine.keys() == found.keys()
    for name, each in mine.items():
        torch.testing.assert_close(found[name], each, msg=lambda m, name=name: f"{name} {m}")
    checkpoint, width = open_checkpoint(out), small.config.moe_intermediate_size
    names = [EXPERT.format(at, name) for at in range(small.config.num_experts) for name in ("gate_proj", "up_proj")]
    assert {checkpoint.entries[name].shape[0] for name in names} == {width}
    seen = verify_checkpoint(out, mixture / "dense")
    assert seen.ok, seen.problems
    errors = json.loads((out / "secateur.json").read_text()).get("calibration", {}).get("errors", {})
    assert {EXPERT.format(at, "down_proj") in errors for at in range(small.config.num_experts)} == {data}


def read(folder):
    return type(make("qwen2_moe")).from_pretrained(folder, dtype="auto").eval()


@pytest.mark.parametrize(
    ("name", "kept", "problem"),
    [
        ("experts.gate_up_proj", {"1": [0, 99]}, "plan.json does not fit the source's shape"),
        ("experts.gate_up_proj", {"3": [0]}, "plan.json does not fit the source's shape"),
        ("experts.down_proj", {"2": [0]}, "its bytes are not what stays|of the source stay"),
        ("experts.gate_up_proj", {"1": [0, 1, 2]}, "of which this cannot leave"),
        ("experts.gate_up_proj", {"0": [0, 1]}, "of which this cannot leave"),
    ],
)
def test_a_plan_of_experts_that_is_not_what_was_done_is_named(mixture, tmp_path, name, kept, problem):
    small = shutil.copytree(mixture / "plain", tmp_path / "small")
    plan = json.loads((small / "plan.json").read_text())
    plan["plans"][0]["tensors"][f"model.layers.0.mlp.{name}"]["kept"] = kept
    del plan["fingerprint"]
    (small / "plan.json").write_text(json.dumps(plan))
    seen = verify_checkpoint(small, mixture / "dense")
    assert any(re.search(problem, each) for each in seen.problems), seen.problems


def test_other_bytes_of_an_expert_are_named(mixture, tmp_path):
    small = shutil.copytree(mixture / "plain", tmp_path / "small")
    name = EXPERT.format(1, "up_proj")
    shard = open_checkpoint(small).entries[name].path
    tensors = load_file(shard)
    save_file({**tensors, name: tensors[name] + 1}, shard, {"format": "pt"})
    (problem,) = verify_checkpoint(small, mixture / "dense").problems
    assert problem.startswith(f"{name}: its bytes are not what stays")


def joined(read, write):
    return Group(("a", "b"), ("t",), read, write)


def test_where_numbers_of_tensors_in_files_go_says_what_stays_of_them(tmp_path):
    """One below the other, and side by side and turned."""
    save_file({"a": torch.zeros(3, 2), "b": torch.zeros(3, 2)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    below = joined(
        lambda its: {"t": torch.cat(list(its))}, lambda made: dict(zip("ab", made["t"].chunk(2), strict=True))
    )
    turned = joined(
        lambda its: {"t": torch.cat([each.T for each in its], 1)},
        lambda made: dict(zip("ab", [each.T for each in made["t"].chunk(2, 1)], strict=True)),
    )
    one = np.array([1])
    assert spelled(below.cuts(checkpoint, {0: np.array([0, 2, 4, 5]), 1: one})) == {
        "a": {0: [0, 2], 1: [1]},
        "b": {0: [1, 2], 1: [1]},
    }
    assert spelled(turned.cuts(checkpoint, {0: one, 1: np.array([0, 3])})) == {
        "a": {0: [0], 1: [1]},
        "b": {0: [0], 1: [1]},
    }
    assert spelled(below.cuts(checkpoint, {})) == {"a": {}, "b": {}}
    for rows in ([0, 1, 2, 3], [3, 4, 5]):  # more of the one than of the other
        with pytest.raises(
            CheckpointError, match="t is made of a and others, of which this cannot leave; load the model"
        ):
            below.cuts(checkpoint, {0: np.array(rows)})


def spelled(cuts):
    return {name: {at: rows.tolist() for at, rows in its.items()} for name, its in cuts.items()}


def test_rows_of_experts_come_some_at_a_time(mixture):
    checkpoint, name = open_checkpoint(mixture / "dense"), "model.layers.0.mlp.experts.down_proj"
    stored = Stored(build_on_meta(checkpoint), checkpoint)
    pieces = list(stored.rows(name, 3))
    assert [len(each) for each in pieces][:-1] == [3] * (len(pieces) - 1)
    assert torch.equal(torch.cat(pieces), stored[name])
    assert torch.equal(stored[name][1], checkpoint[EXPERT.format(1, "down_proj")])


def test_what_code_remembers_of_a_model_without_values_is_of_no_other(tmp_path):
    """BEiT's class remembers places, which of a model on meta are none."""
    model, inputs = ZOO["beit"]()
    model.save_pretrained(tmp_path / "dense")
    assert shrink(tmp_path / "dense", sparsity=0.15, out=tmp_path / "small").got > 0.14
    with torch.no_grad():
        assert torch.isfinite(model(**inputs).logits).all()


@pytest.mark.parametrize("data", [False, True])
def test_tables_that_no_file_holds_are_computed(data, tmp_path):
    """Positions of Marian, which transformers makes as it loads a model."""
    model, inputs = ZOO["marian"]()
    model.eval().save_pretrained(tmp_path / "dense")
    assert not any("embed_positions" in name for name in load_file(tmp_path / "dense" / "model.safetensors"))
    more = {"target": "units", **({"batches": [inputs] * 2} if data else {})}
    done = shrink(tmp_path / "dense", inputs, 0.1, out=tmp_path / "small", **more)
    assert done.got > 0.09
    assert verify_checkpoint(tmp_path / "small", tmp_path / "dense").ok
    shrink(model, inputs, 0.1, uniform=True, **more)
    with torch.no_grad():
        found = type(model).from_pretrained(tmp_path / "small").eval()(**inputs).logits
        torch.testing.assert_close(found, model(**inputs).logits, rtol=1e-4, atol=1e-5)
