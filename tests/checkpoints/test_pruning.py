"""Pruning a directory: what changes, what does not, who is chosen, and that a failure leaves nothing."""

import functools
import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file

from secateur import allocation, criteria, patterns, sparsify
from secateur.checkpoints import called_as, open_checkpoint, read_header
from secateur.checkpoints.sparsify_directory import choose_targets
from secateur.pipeline import make_masks

UNSTRUCTURED = patterns.parse("unstructured")


def bert(layers=2, hidden=16, dtype=torch.float32):
    torch.manual_seed(0)

    def matrix(out, inputs):
        return torch.randn(out, inputs).to(dtype)

    tensors = {
        "embeddings.word_embeddings.weight": matrix(40, hidden),
        "embeddings.LayerNorm.weight": torch.ones(hidden, dtype=dtype),
        "embeddings.position_ids": torch.arange(40).reshape(1, 40),
        "pooler.dense.weight": matrix(hidden, hidden),
        "classifier.weight": matrix(3, hidden),
        "logit_scale": torch.tensor(4.6, dtype=dtype),
        "nothing": torch.zeros(0, hidden, dtype=dtype),
    }
    for n in range(layers):
        for name, (out, inputs) in {
            "attention.self.query": (hidden, hidden),
            "intermediate.dense": (4 * hidden, hidden),
            "output.dense": (hidden, 4 * hidden),
        }.items():
            tensors[f"encoder.layer.{n}.{name}.weight"] = matrix(out, inputs)
            tensors[f"encoder.layer.{n}.{name}.bias"] = torch.randn(out).to(dtype)
    return tensors


@pytest.fixture
def source(tmp_path):
    """A sharded Hugging Face directory with side files and links, as in the cache."""
    folder = tmp_path / "dense"
    (folder / "1_Pooling").mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    tensors = bert()
    names = list(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, own in shards.items():
        save_file(
            {name: tensors[name] for name in own}, tmp_path / "blobs" / shard, metadata={"format": "pt", "é": "x"}
        )
        (folder / shard).symlink_to(f"../blobs/{shard}")
    weight_map = {name: shard for shard, own in shards.items() for name in own}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type":  "bert"}\n')
    (folder / "tokenizer.json").write_bytes(b"\xff\0tokens")
    (folder / "1_Pooling/config.json").write_text("{}")
    return folder


def weights(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


TARGETS = sorted(
    ["pooler.dense.weight"]
    + [
        f"encoder.layer.{n}.{name}.weight"
        for n in (0, 1)
        for name in ("attention.self.query", "intermediate.dense", "output.dense")
    ]
)


# ---- what changes and what does not ------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["unstructured", "rows", "2:4", "4x4", "16x1", "channels"])
@pytest.mark.parametrize("allocate", ["everywhere", "uniform", "erk"])
def test_the_masks_are_those_of_the_pipeline(source, tmp_path, word, allocate):
    pattern = patterns.parse(word)
    sparsity = None if pattern.density is not None else 0.6
    allocate = getattr(allocation, allocate)
    done = sparsify(source, sparsity, out=tmp_path / "out", pattern=pattern, allocate=allocate)
    before, after = weights(source), weights(tmp_path / "out")
    assert sorted(done.targets) == TARGETS
    assert before.keys() == after.keys()
    masks = make_masks({name: before[name] for name in done.targets}, sparsity, pattern=pattern, allocate=allocate)
    for name, tensor in before.items():
        expected = tensor * masks[name] if name in masks else tensor
        assert torch.equal(after[name], expected), name
        assert after[name].dtype == tensor.dtype
    kept = sum(int(mask.sum()) for mask in masks.values())
    assert done.target_sparsity == pytest.approx(1 - kept / sum(mask.numel() for mask in masks.values()))


def test_everything_else_stays_byte_for_byte(source, tmp_path):
    out = tmp_path / "out"
    sparsify(source, 0.5, out=out)
    for path in source.rglob("*"):
        copy = out / path.relative_to(source)
        assert not copy.is_symlink()
        if path.is_file() and path.suffix != ".safetensors":
            assert copy.read_bytes() == path.read_bytes()
        elif path.is_file():
            old, new = path.read_bytes(), copy.read_bytes()
            assert len(old) == len(new)
            entries, metadata = read_header(path)
            assert metadata == {"format": "pt", "é": "x"}
            start = min(entry.start for entry in entries.values())
            assert new[:start] == old[:start]
            for entry in entries.values():
                if entry.name not in TARGETS:
                    assert new[entry.start : entry.stop] == old[entry.start : entry.stop]
    extra = {path.name for path in out.iterdir()} - {path.name for path in source.iterdir()}
    assert extra == {"secateur.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"dense", "blobs", "out"}


def test_the_record(source, tmp_path):
    with called_as({"sparsity": 0.5}):
        done = sparsify(source, 0.5, out=tmp_path / "out")
    record = json.loads((tmp_path / "out/secateur.json").read_text())
    assert record["arguments"] == {"sparsity": 0.5}
    assert (record["criterion"], record["allocate"]) == ("magnitude", "everywhere")
    assert record["sparsity"]["targets"] == done.target_sparsity == pytest.approx(0.5, abs=1e-3)
    assert sorted(record["pruned"]) == TARGETS
    assert record["torch"] == torch.__version__
    sparsify(tmp_path / "out", 0.75, out=tmp_path / "again")
    again = json.loads((tmp_path / "again/secateur.json").read_text())
    assert again["previous"] == record
    how = {"criterion": functools.partial(criteria.ln_norm, n=1), "pattern": "1:2"}
    sparsify(source, out=tmp_path / "other", **how)
    other = json.loads((tmp_path / "other/secateur.json").read_text())
    assert (other["criterion"], other["allocate"]) == ("ln_norm(n=1)", None)  # the pattern says how many


def test_the_result_prints_as_a_table(source, tmp_path):
    (source / "pytorch_model.bin").write_bytes(b"weights")
    done = sparsify(source, 0.5, out=tmp_path / "out")
    lines = str(done).splitlines()
    assert lines[0].split() == ["Tensors", "Parameters", "Zeros"]
    assert lines[1].split()[:2] == ["pruned", str(len(TARGETS))]
    assert lines[1].endswith("50.0%")
    left = {reason: str(len(names)) for reason, names in done.left_alone.items()}
    for reason, count in left.items():
        assert any(line.startswith(reason) and count in line.split() for line in lines[4:])
    assert any(line.startswith("Copied as") and "pytorch_model.bin" in line for line in lines)
    assert lines[-1].startswith(f"Wrote {tmp_path / 'out'} (")


def test_the_same_call_writes_the_same_bytes(source, tmp_path):
    def run(name, seed):
        state = torch.get_rng_state()
        sparsify(source, 0.5, out=tmp_path / name, criterion=criteria.random, seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir() if path.is_file()}

    first, second, other = run("a", 1), run("b", 1), run("c", 2)
    assert first == second
    assert first != other


def test_gpt2_is_pruned_along_its_inputs(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/config.json").write_text('{"model_type": "gpt2"}')
    torch.manual_seed(0)
    stored = torch.randn(16, 24)
    save_file({"h.0.mlp.c_fc.weight": stored, "h.0.x.weight": torch.randn(8, 8)}, tmp_path / "in/model.safetensors")
    sparsify(tmp_path / "in", out=tmp_path / "out", pattern=patterns.parse("2:4"))
    after = weights(tmp_path / "out")["h.0.mlp.c_fc.weight"]
    assert ((after != 0).reshape(4, 4, 24).sum(1) == 2).all()
    assert ((after != 0).reshape(16, 6, 4).sum(2) != 2).any()
    inspected = {tensor.name: tensor.pattern for tensor in done_inspection(tmp_path / "out").tensors}
    assert set(inspected.values()) == {"2:4"}


def done_inspection(path):
    from secateur.checkpoints import inspect_checkpoint

    return inspect_checkpoint(path)


def test_fused_experts_are_pruned_as_matrices(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/config.json").write_text('{"model_type": "llama4_text", "hidden_size": 8}')
    tensors = {
        "l.0.experts.gate_up_proj": torch.randn(2, 8, 24),
        "l.0.experts.gate_up_proj_bias": torch.randn(2, 24),
        "l.0.experts.down_proj": torch.randn(2, 12, 8),
        "l.0.router.weight": torch.randn(2, 8),
    }
    save_file(tensors, tmp_path / "in/model.safetensors")
    done = sparsify(tmp_path / "in", out=tmp_path / "out", pattern=patterns.parse("1:4"))
    assert sorted(done.targets) == ["l.0.experts.down_proj", "l.0.experts.gate_up_proj"]
    after = weights(tmp_path / "out")
    assert ((after["l.0.experts.gate_up_proj"] != 0).reshape(2, 2, 4, 24).sum(2) == 1).all()
    assert ((after["l.0.experts.down_proj"] != 0).reshape(2, 3, 4, 8).sum(2) == 1).all()


def test_8_bit_floats_only_when_asked(tmp_path):
    (tmp_path / "in").mkdir()
    tensors = {"a.weight": torch.randn(8, 8), "b.weight": torch.randn(8, 8).to(torch.float8_e4m3fn)}
    save_file(tensors, tmp_path / "in/model.safetensors")
    done = sparsify(tmp_path / "in", 0.5, out=tmp_path / "out")
    assert done.targets == ("a.weight",)
    assert "8-bit floats, which need their scales to be ranked" in done.left_alone
    done = sparsify(tmp_path / "in", out=tmp_path / "asked", pattern=patterns.parse("2:4"), include=["b.*"])
    assert done.targets == ("b.weight",)
    assert {tensor.name: tensor.pattern for tensor in done.inspection.tensors} == {"a.weight": "", "b.weight": "2:4"}


# ---- who is chosen -----------------------------------------------------------------------------------------------

NAMES = {
    "embeddings": [
        "transformer.wte.weight", "wpe.weight", "model.embed_tokens.weight", "shared.weight",
        "gpt_neox.embed_in.weight", "vit.embeddings.patch_embeddings.projection.weight",
        "model.decoder.embed_positions.weight", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "bert.embeddings.token_type_embeddings.weight",
    ],
    "output heads": [
        "lm_head.weight", "embed_out.weight", "classifier.weight", "classifier.dense.weight", "score.weight",
        "qa_outputs.weight", "cls.predictions.transform.dense.weight", "lm_head.dense.weight", "fc.weight",
        "output.weight", "vocab_projector.weight", "head.weight", "heads.head.weight",
    ],
    "normalizations": [
        "a.norm1.linear.weight", "x.LayerNorm.weight", "h.0.ln_1.weight", "layer1.bn2.weight", "a.q_norm.weight",
    ],
    "routers": ["mlp.gate.weight", "m.router.weight", "mlp.shared_expert_gate.weight"],
    "adapters": ["h.0.attn.lora_A.default.weight", "h.0.mlp.vera_lambda_b"],
    "state matrices": ["A_log", "backbone.layers.0.mixer.A_log"],
    "not named *.weight": [
        "mlp.gate_up_proj_bias", "class_token", "rnn.weight_mask", "attention.bias",
        "layer.0.attention.relative_position_bias_table",
    ],
    None: [
        "model.layers.0.self_attn.q_proj.weight", "h.0.attn.c_attn.weight", "mlp.gate_proj.weight",
        "mlp.gate_up_proj.weight", "mlp.experts.0.w1.weight", "mlp.shared_experts.up_proj.weight",
        "bert.encoder.layer.0.attention.output.dense.weight", "plain.gate.weight",
        "visual.resblocks.0.attn.in_proj_weight", "layer1.0.conv1.weight", "rnn.weight_ih_l0",
        "rnn.weight_hh_l1_reverse", "h.0.mlp.weight_orig", "blocks.0.sa.heads.0.key.weight",
        "layers.0.self_attn.output_projection.weight", "embedder.encoder.layer.0.attention.query.weight",
        "encoder.layer.0.fc.weight", "gpt_neox.layers.0.mlp.dense_h_to_4h.weight",
        "block.0.layer.1.DenseReluDense.wi.weight", "model.layers.0.mlp.shared_expert.up_proj.weight",
    ],
}  # fmt: skip


def test_who_is_left_alone_by_name(tmp_path):
    every = [name for names in NAMES.values() for name in names]
    save_file({name: torch.ones(4, 4) for name in every}, tmp_path / "model.safetensors")
    targets, left_alone = choose_targets(open_checkpoint(tmp_path), UNSTRUCTURED)
    assert sorted(targets) == sorted(NAMES[None])
    assert {reason: sorted(names) for reason, names in left_alone.items()} == {
        reason: sorted(names) for reason, names in NAMES.items() if reason
    }


def test_a_shape_that_does_not_fit_is_left_alone_and_said(tmp_path):
    save_file({"conv1.weight": torch.ones(8, 3, 3, 3), "a.weight": torch.ones(8, 8)}, tmp_path / "model.safetensors")
    targets, left_alone = choose_targets(open_checkpoint(tmp_path), patterns.parse("2:4"))
    assert (targets, left_alone) == (["a.weight"], {"of a shape that does not fit 2:4": ("conv1.weight",)})


def test_include_and_exclude(source):
    def chosen(**globs):
        return sorted(choose_targets(open_checkpoint(source), UNSTRUCTURED, **globs)[0])

    assert chosen(include=["classifier.*"]) == ["classifier.weight"]
    assert chosen(include=["*word_embeddings*", "pooler.dense.weight"]) == [
        "embeddings.word_embeddings.weight", "pooler.dense.weight"
    ]  # fmt: skip
    assert chosen(exclude=["encoder.layer.0.*"]) == [name for name in TARGETS if "layer.0" not in name]
    assert chosen(include=["pooler.*"], exclude=["*.bias"]) == ["pooler.dense.weight"]
    assert all(not name.endswith("bias") for name in chosen(include=["*"]))


@pytest.mark.parametrize(
    ("globs", "message"),
    [
        (
            {"include": ["poler.dense.*"]},
            r"no tensor matches 'poler\.dense\.\*'; the closest names are pooler\.dense\.weight",
        ),
        ({"exclude": ["nonsense"]}, "no tensor matches 'nonsense'; the closest names are"),
        ({"exclude": ["*.querry.weight"]}, r"the closest names are encoder\.layer\.\d\.attention\.self\.query\.weight"),
        ({"include": ["*.bias"]}, r"include '\*\.bias' matches nothing that can be pruned .*vectors"),
        ({"include": ["*position_ids"]}, "not floating-point"),
        ({"include": ["nothing"]}, "empty"),
        ({"exclude": ["*"]}, "nothing to prune .*excluded"),
        ({"include": ["pooler*"], "exclude": ["*"]}, "nothing to prune"),
    ],
)
def test_globs_that_match_nothing(source, tmp_path, globs, message):
    with pytest.raises(ValueError, match=message):
        sparsify(source, 0.5, out=tmp_path / "out", **globs)
    assert {path.name for path in tmp_path.iterdir()} == {"dense", "blobs"}


def test_an_opaque_tensor_cannot_be_included(tmp_path):
    text = json.dumps({"a.weight": {"dtype": "F4", "shape": [2, 8], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "in").mkdir()
    (tmp_path / "in/model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ValueError, match="of dtype F4, which cannot be read"):
        sparsify(tmp_path / "in", 0.5, out=tmp_path / "out", include=["a.weight"])


# ---- failures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sparsity", "word", "message"),
    [
        (None, "unstructured", "needs a sparsity"),
        (float("nan"), "unstructured", "got nan"),
        (50, "unstructured", "For 50 percent write 0.5"),
        (-0.1, "unstructured", "got -0.1"),
        (1.0, "unstructured", "every weight"),
        (0.6, "2:4", "2:4 removes 0.5 of the weights, not 0.6"),
        (None, "0:4", "every weight"),
    ],
)
def test_wrong_sparsities(source, tmp_path, sparsity, word, message):
    with pytest.raises(ValueError, match=message):
        sparsify(source, sparsity, out=tmp_path / "out", pattern=patterns.parse(word))


def test_nan_is_named_before_anything_is_copied(tmp_path):
    (tmp_path / "in").mkdir()
    save_file({"a.weight": torch.tensor([[1.0, float("nan")]])}, tmp_path / "in/model.safetensors")
    for allocate in (allocation.everywhere, allocation.uniform):
        with pytest.raises(ValueError, match=r"a\.weight.*NaN"):
            sparsify(tmp_path / "in", 0.5, out=tmp_path / "out", allocate=allocate)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.long
def test_memory_is_that_of_a_few_tensors(tmp_path):
    """16 tensors of 8 MB, global threshold: a few times one tensor, not the model."""
    (tmp_path / "in").mkdir()
    torch.manual_seed(0)
    weight = torch.randn(512, 4096)
    size = weight.numel() * 4
    names = [f"layers.{n}.weight" for n in range(16)]
    header = {
        name: {"dtype": "F32", "shape": [512, 4096], "data_offsets": [n * size, (n + 1) * size]}
        for n, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    with open(tmp_path / "in/model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(weight.numpy().data for _ in names)
    (tmp_path / "small").mkdir()
    save_file({"a.weight": torch.randn(8, 8)}, tmp_path / "small/model.safetensors")
    script = """
        import sys
        from secateur import sparsify

        def peak():  # of this program; ru_maxrss begins at the parent's
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

        sparsify(sys.argv[3], 0.5, out=sys.argv[3] + "-out")  # what is imported for it is no tensor
        before = peak()
        sparsify(sys.argv[1], 0.5, out=sys.argv[2])
        print(peak() - before)
    """
    arguments = [sys.executable, "-c", textwrap.dedent(script), *(tmp_path / each for each in ("in", "out", "small"))]
    # glibc keeps freed blocks below 32 MB for later: give them back at once, so that only living memory is measured
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment)
    grown = int(done.stdout)
    shutil.rmtree(tmp_path / "in")
    shutil.rmtree(tmp_path / "out")
    print(f"{grown / size:.1f} tensors of {size / 1e6:.0f} MB")
    assert size < grown < 6 * size  # of 16; threads hold the tensors that they are at work on
