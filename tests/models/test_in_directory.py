"""A directory: only the pruned bytes differ, and a run that was killed goes on to the same bytes."""

import functools
import json
import re
import shutil

import pytest
import torch

from secateur import Rows, shrink, sparsify
from secateur.checkpoints import CheckpointError, called_as, families, open_checkpoint
from secateur.checkpoints.run import JOURNAL
from secateur.models import build_on_meta, oneshot
from secateur.models import files as block_files
from secateur.models.files import groups_of
from secateur.models.solving import digest
from secateur.solvers import admm
from support.damaged import resealed, tensor
from support.families import batches, make
from support.forks import STEPS, assert_killed, forked, killing
from support.stacks import MAGNITUDE, WANDA, contents


def test_a_directory_keeps_everything_but_the_pruned_bytes(llama, tmp_path):
    before = contents(llama)
    with called_as({"command": "secateur oneshot"}):
        done = oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out")
    assert contents(llama) == before, "the source"
    after = contents(tmp_path / "out")
    assert after.keys() == before.keys() | {"secateur.json"}
    assert len([name for name in before if name.endswith(".safetensors")]) > 1
    for name, content in before.items():
        if name.endswith(".safetensors"):
            length = 8 + int.from_bytes(content[:8], "little")
            assert after[name][:length] == content[:length], "the header"
            assert len(after[name]) == len(content)
        else:
            assert after[name] == content, name
    record = json.loads(after["secateur.json"])
    assert record["method"] == "oneshot"
    assert record["arguments"] == {"command": "secateur oneshot"}
    assert record["solver"] == "admm"
    assert record["data"] == {"sha256": digest(batches("llama"))}
    assert record["sparsity"]["targets"] == done.sparsity == 0.5
    assert set(record["pruned"].values()) == {0.5}
    assert record["removed"]["model.layers.0.mlp.down_proj.weight"] == 16 * 24 // 2
    everything = [*record["pruned"], *(name for names in record["left_alone"].values() for name in names)]
    assert sorted(everything) == sorted(make("llama").state_dict())
    assert record["layers"]["model.layers.0.mlp.down_proj.weight"]["tokens"] == 60


def dying(moment, source, out):
    """`oneshot` in a process that is killed at the n-th call of a function; writes down how many tensors it wrote."""
    calls = killing(moment, **STEPS)
    done = oneshot(source, batches("llama"), 0.5, out=out)
    out.with_name("counts.json").write_text(json.dumps([calls["write"], len(done.layers)]))


@pytest.mark.long
def test_a_run_that_was_killed_at_any_moment_goes_on_to_the_same_bytes(llama, tmp_path):
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert forked(lambda: dying("never", llama, whole)) == 0
    # while copying, before the journal says so; in the first block; written, but not yet in the journal; in the second
    # block; before the record; at the end
    moments = ("copy:1", "journal:1", "write:3", "journal:2", "write:4", "publish:1")
    assert_killed(dying, moments, llama, out)
    assert forked(lambda: dying("never", llama, out)) == 0
    assert json.loads((tmp_path / "counts.json").read_text()) == [0, 14], "what is finished is not written again"
    assert contents(out) == contents(whole)
    assert not (tmp_path / "out.unfinished").exists()


def test_a_run_goes_on_only_with_the_same_request(llama, tmp_path, monkeypatch):
    unfinished = interrupted(llama, tmp_path / "out")
    for keywords, difference in (
        ({"sparsity": 0.6}, "sparsity 0.5, not 0.6"),
        ({"solver": functools.partial(admm, damping=0.1)}, r'solver "admm", not "admm\(damping=0.1\)"'),
        ({"pattern": Rows()}, r"pattern "),
        ({"batches": batches("llama", count=2)}, "data "),
        ({"aim": 0.25}, "aim 0.5, not 0.25"),
        ({"stages": False, "aim": 0.5}, "stages true, not false"),
        ({"exclude": "*q_proj*"}, r'exclude null, not \["\*q_proj\*"\]'),
    ):
        with pytest.raises(CheckpointError, match=difference) as caught:
            oneshot(llama, **{"batches": batches("llama"), "sparsity": 0.5, "out": tmp_path / "out", **keywords})
        assert "Run the same command again to finish it, or remove it" in str(caught.value)
    seen = []
    done = oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out", on_layer=seen.append)
    assert {layer.block for layer in seen} == {"model.layers.1"}, "the first block is not solved again"
    assert len(done.layers) == 14
    assert not unfinished.exists()
    oneshot(llama, batches("llama"), 0.5, out=tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def interrupted(source, out):
    """`oneshot`, stopped when the first block is done."""

    class Interruption(Exception):
        pass

    def interrupt(layer):
        if layer.block.endswith("1"):
            raise Interruption

    with pytest.raises(Interruption):
        oneshot(source, batches("llama"), 0.5, out=out, on_layer=interrupt)
    return out.with_name(f"{out.name}.unfinished")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A directory, and what a run left of it that was stopped when the first block was done: to be read, and copied."""
    folder = tmp_path_factory.mktemp("stopped")
    make("llama").save_pretrained(folder / "dense", max_shard_size="12KB")
    return folder / "dense", interrupted(folder / "dense", folder / "out")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda j: j["blocks"][0].update(name="model.layers.7"),
            r"blocks\[0\].name is model.layers.7, which is no block",
        ),
        (lambda j: j["blocks"].append(j["blocks"][0]), r"blocks\[1\].name is model.layers.0, .* or is there twice"),
        (
            lambda j: j["blocks"][0]["layers"][0].update(name="model.norm.weight"),
            r"layers\[0\].name is model.norm",
        ),
        (lambda j: j["blocks"][0]["layers"][1].update(shape=[2, -2]), r"layers\[1\].shape\[1\] must be a whole number"),
        (lambda j: j["blocks"][0]["layers"][0].update(error="none"), r"layers\[0\].error must be a number"),
        (lambda j: j["blocks"][0]["layers"][0].pop("tokens"), r"layers\[0\].tokens is missing"),
        (lambda j: j["blocks"][0].update(tensors=[]), r"blocks\[0\].tensors must be an object"),
        (
            lambda j: next(iter(j["blocks"][0]["tensors"].values())).update(removed=1.5),
            "removed must be a whole number",
        ),
        (lambda j: j["facts"]["sparsities"].popitem(), "facts.sparsities is of other weights"),
        (lambda j: j["facts"]["sparsities"].update({"model.layers.0.mlp.up_proj.weight": 2}), "at most 1, not 2"),
        (lambda j: j["blocks"][0].update(left_alone={"excluded": "all"}), "left_alone.excluded must be a list"),
        (lambda j: j["blocks"][0]["tensors"].popitem(), "written is not what blocks and facts say of model.layers.0"),
        (lambda j: j["written"].popitem(), "written is not what blocks and facts say of model.layers.0"),
        (lambda j: j["written"].update(more=""), "written is not what blocks and facts say of more"),
        (lambda j: next(iter(j["blocks"][0]["tensors"].values())).update(sparsity=0.25), "says of .* other zeros than"),
        (lambda j: next(iter(j["blocks"][0]["tensors"].values())).update(removed=10**9), "says of .* other zeros than"),
    ],
)
def test_a_journal_of_what_the_model_has_not_is_refused(stopped, tmp_path, damage, message):
    llama, unfinished = stopped
    journal = shutil.copytree(unfinished, tmp_path / "out.unfinished") / JOURNAL
    resealed(journal, damage)
    with pytest.raises(
        CheckpointError, match=rf"journal\.json: damaged: .*{message}.* Remove .* to start over"
    ) as caught:
        oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_errors_of_directories(llama, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def refused(message, source=llama, **keywords):
        with pytest.raises((CheckpointError, ValueError), match=message) as caught:
            oneshot(source, **{"batches": batches("llama"), "sparsity": 0.5, "out": out, **keywords})
        assert "\n" not in str(caught.value)
        assert not out.exists()
        assert not (tmp_path / "out.unfinished").exists()

    refused("name the one to write with out=", out=None)
    refused("no such directory", source=tmp_path / "nowhere")
    refused("lies inside the input", out=llama / "below")
    refused("no such directory; create it first", out=tmp_path / "a" / "b")
    monkeypatch.chdir(tmp_path)
    for name in (".", "..", "/", ""):
        refused("already exists; nothing is overwritten", out=name)
    (tmp_path / "taken").mkdir()
    refused("already exists", out=tmp_path / "taken")
    broken = tmp_path / "broken"
    shutil.copytree(llama, broken)
    config = json.loads((llama / "config.json").read_text())

    def configured(**changes):
        (broken / "config.json").write_text(json.dumps({**config, **changes}))

    configured(architectures=["NoSuchModel"])
    refused("names the architecture NoSuchModel", source=broken)
    configured(quantization_config={"quant_method": "gptq"})
    refused("is quantized; prune the original", source=broken)
    configured(intermediate_size=32)
    refused(r"mlp\.down_proj\.weight has shape \(16, 24\), and its config.json asks for \(16, 32\)", source=broken)
    configured(num_hidden_layers=3)
    refused(r"model\.layers\.2\.self_attn\.q_proj\.weight, of shape \(16, 16\), is in no shard", source=broken)
    (broken / "config.json").unlink()
    refused("has no config.json", source=broken)
    (broken / "adapter_config.json").write_text("{}")
    refused("holds an adapter and no model", source=broken)
    shard = sorted(broken.glob("*.safetensors"))[1]
    shard.unlink()
    refused(re.escape(shard.name), source=broken)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    refused("1e-09 GB are free")


def test_a_full_disk_keeps_the_finished_blocks(llama, tmp_path, monkeypatch):
    original, writes = block_files.write_tensor, []

    def full(path, entry, tensor):
        writes.append(entry.name)
        if len(writes) == 9:
            raise OSError(28, "No space left on device")
        original(path, entry, tensor)

    monkeypatch.setattr(block_files, "write_tensor", full)
    with pytest.raises(CheckpointError, match="the disk is full; free space and run the same command again, the 1"):
        oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out")
    oneshot(llama, batches("llama"), 0.5, out=tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_name_that_is_taken_in_the_meantime_costs_no_work(llama, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="was created by somebody else in the meantime; move it"):
        oneshot(llama, batches("llama"), 0.5, out=out, on_layer=lambda _: out.mkdir(exist_ok=True))
    out.rmdir()
    solved = []
    oneshot(llama, batches("llama"), 0.5, out=out, on_layer=solved.append)
    assert not solved
    assert (out / "secateur.json").exists()


def test_two_processes_do_not_work_on_one_directory(llama, tmp_path):
    def second(layer):
        with pytest.raises(CheckpointError, match="another process is at work here"):
            oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out")

    oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out", on_layer=second)


# A checkpoint's tensors as those of a model: what is not pruned keeps its bytes.


def test_a_wider_dtype_in_the_file_keeps_what_is_not_pruned(tmp_path):
    from safetensors.torch import load_file, save_file

    make("llama", dtype=torch.bfloat16).save_pretrained(tmp_path / "dense")
    tensors = load_file(tmp_path / "dense/model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = torch.randn(16, 24)  # float32 among bfloat16
    save_file(tensors, tmp_path / "dense/model.safetensors", metadata={"format": "pt"})
    oneshot(tmp_path / "dense", batches("llama"), 0.5, solver=WANDA, out=tmp_path / "out")
    found = load_file(tmp_path / "out/model.safetensors")[name]
    assert found.dtype == torch.float32
    kept = found.ne(0)
    assert int(kept.sum()) == 16 * 24 // 2
    assert torch.equal(found[kept], tensors[name][kept])


def test_experts_are_joined_row_by_row_to_the_same_bits(tmp_path):
    """Each from its own tensors in files, never all of them at once."""
    import transformers

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    config = transformers.Qwen3MoeConfig(
        vocab_size=19, moe_intermediate_size=24, num_experts=12, num_experts_per_tok=2, head_dim=8, **sizes
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "dense")
    checkpoint = open_checkpoint(tmp_path / "dense")
    fused = [group for group in groups_of(build_on_meta(checkpoint), checkpoint) if len(group.sources) > 1]
    assert len(fused) == 2
    for group in fused:
        assert len(group.parts) == 12
        whole = group.read([checkpoint[name] for name in group.sources])
        rows = group.read_from(checkpoint)
        assert whole.keys() == rows.keys()
        assert all(torch.equal(whole[name], rows[name]) for name in whole)
    tensor("model.layers.0.mlp.experts.3.gate_proj.weight", lambda weight: weight[1:])(tmp_path / "dense")
    cut = open_checkpoint(tmp_path / "dense")
    with pytest.raises(CheckpointError, match=r"is made of model\.layers\.0\..* whose shapes do not fit each other"):
        groups_of(build_on_meta(checkpoint), cut)


# ``secateur.json`` of a pruned directory.


def test_the_record_of_a_source_is_carried_on_or_refused(llama, tmp_path):
    (llama / "secateur.json").write_text('{"method": "shrink"}')
    oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out")
    assert json.loads((tmp_path / "out/secateur.json").read_text())["previous"]["method"] == "shrink"
    (llama / "secateur.json").write_text('{"a":' * 50_000 + "1" + "}" * 50_000)
    for call in (
        lambda out: oneshot(llama, batches("llama"), 0.5, out=out),
        lambda out: sparsify(llama, 0.5, out=out),
        lambda out: shrink(llama, sparsity=0.5, out=out),
    ):
        with pytest.raises(
            CheckpointError, match=r"secateur\.json: damaged: .*nested too deeply.*; remove it"
        ) as caught:
            call(tmp_path / "again")
        assert "\n" not in str(caught.value)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "out"]


def test_the_record_is_json(llama, tmp_path):
    def strict(word):
        raise AssertionError(f"{word} is no JSON")

    arguments = {"batches": batches("llama"), "sparsity": 0.5, "solver": MAGNITUDE, "out": tmp_path / "out"}
    source = shutil.copytree(llama, tmp_path / "source")
    (source / "secateur.json").write_text('{"method": "oneshot", "layers": {"error": NaN}}')
    oneshot(source, **arguments)
    record = json.loads((tmp_path / "out" / "secateur.json").read_text(), parse_constant=strict)
    assert record["previous"] == {"method": "oneshot", "layers": {"error": None}}


# A configuration as a model without weights: refused at once where it promises too much.


def test_files_and_configurations_that_promise_too_much_are_refused_at_once(llama, tmp_path, monkeypatch):
    from safetensors.torch import load_file, save_file
    from transformers import core_model_loading

    kept = json.loads((llama / "config.json").read_text())
    for config in ({"num_hidden_layers": 10**7}, {"num_hidden_layers": 2, "text_config": {"n_layers": 10**7}}):
        (llama / "config.json").write_text(json.dumps({**kept, **config}))
        with pytest.raises(CheckpointError, match="layers is 10000000, and the files hold 21 tensors"):
            oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out")
    (llama / "config.json").write_text(json.dumps({**kept, "num_hidden_layers": 40}))
    with monkeypatch.context() as patched:
        patched.setattr(families, "most_parameters", lambda names: 50)
        with pytest.raises(CheckpointError, match="asks for more than 50 parameters, and the files hold 21 tensors"):
            oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out")
    (llama / "config.json").write_text(json.dumps({**kept, "num_hidden_layers": 3}))
    shard = min(llama.glob("*.safetensors"))
    (llama / "model.safetensors.index.json").unlink()
    many = {f"model.layers.{number}.junk.weight": torch.zeros(0) for number in range(11_000)}
    save_file(load_file(shard) | many, shard, metadata={"format": "pt"})
    monkeypatch.setattr(core_model_loading, "rename_source_key", None)  # takes a second for so many
    with pytest.raises(CheckpointError, match="holds 11,000 tensors that LlamaForCausalLM has no place for"):
        oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out")
