"""A directory of fewer blocks: from_pretrained loads it, verify sees it again, and a kill leads to the same bytes."""

import json
import shutil

import pytest
import torch
from transformers import Dinov2Config, Dinov2ForImageClassification, ViTConfig, ViTForImageClassification

from secateur.checkpoints import CheckpointError, open_checkpoint, verify_checkpoint
from secateur.checkpoints.run import JOURNAL
from secateur.kinds import Blocks
from secateur.shrinking import shrink
from secateur.shrinking.kinds import blocks_directory as depth_directory
from secateur.shrinking.kinds.blocks import DepthCosts, passing
from secateur.shrinking.kinds.blocks_directory import BLOCKS
from support.commands import run
from support.damaged import resealed
from support.families import batches, saved_deep
from support.forks import STEPS, assert_killed, forked, interrupted, killing
from support.stacks import contents
from support.tokenizers_of_words import write_tokenizer


def saved(folder, family="llama", dtype=torch.float32):
    model = saved_deep(family, folder, dtype=dtype)
    model.save_pretrained(folder, max_shard_size="12KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"stale")
    (folder / "model.safetensors").unlink(missing_ok=True)
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A directory, and what is left of it without half of its blocks."""
    folder = tmp_path_factory.mktemp("made")
    saved(folder / "dense")
    done = shrink(folder / "dense", leave=Blocks(0.5), out=folder / "small", batches=batches("llama", count=16))
    return folder, done


def test_blocks_whose_tensors_have_other_names_in_the_files_move_up(tmp_path):
    """transformers renames what older releases wrote as it loads it, and saves it under the older names."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 4}
    dense = ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=5))
    for parameter in dense.vit.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    dense.save_pretrained(tmp_path / "dense")
    pictures = [{"pixel_values": torch.randn(4, 3, 8, 8)} for _ in range(4)]
    how = {"leave": Blocks(1), "exclude": ["*.3", "*.3.*"], "batches": pictures}  # the last one has to move
    done = shrink(tmp_path / "dense", out=tmp_path / "out", repair=False, **how)
    small, said = ViTForImageClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not {*said["missing_keys"], *said["unexpected_keys"]}
    with torch.no_grad(), passing(dense.eval(), done.gone):
        torch.testing.assert_close(small(**pictures[0]).logits, dense(**pictures[0]).logits)
    patched = shrink(tmp_path / "dense", out=tmp_path / "patched", **how).patched
    assert patched.keys() <= open_checkpoint(tmp_path / "patched").keys()
    for out in ("out", "patched"):
        assert verify_checkpoint(tmp_path / out, tmp_path / "dense").problems == ()


def test_a_model_with_more_blocks_than_the_files_have_does_not_hold(made, tmp_path):
    folder = shutil.copytree(made[0] / "small", tmp_path / "small")
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    problems = verify_checkpoint(folder).problems
    assert any(each.endswith("of the model that config.json describes is in no file.") for each in problems), problems


def test_what_the_configuration_makes_of_the_count_follows_it(tmp_path):
    """DINOv2's names a stage for each block, and which of them it returns."""
    torch.manual_seed(0)
    config = Dinov2Config(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, image_size=8, patch_size=4)
    dense = Dinov2ForImageClassification(config)
    dense.save_pretrained(tmp_path / "dense")
    pictures = [{"pixel_values": torch.randn(4, 3, 8, 8)} for _ in range(4)]
    done = shrink(tmp_path / "dense", leave=Blocks(1), out=tmp_path / "out", batches=pictures, repair=False)
    small = Dinov2ForImageClassification.from_pretrained(tmp_path / "out")
    assert small.config.stage_names == ["stem", "stage1", "stage2"]
    with torch.no_grad(), passing(dense.eval(), done.gone):
        torch.testing.assert_close(small(**pictures[0]).logits, dense(**pictures[0]).logits)
    assert verify_checkpoint(tmp_path / "out", tmp_path / "dense").problems == ()


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((each, torch.float32) for each in ("llama", "qwen3", "bert", "t5", "mixtral")), ("llama", torch.bfloat16)],
)
def test_it_computes_what_the_model_does_whose_blocks_pass_on(tmp_path, family, dtype):
    dense = saved(tmp_path / "dense", family, dtype)
    before = contents(tmp_path / "dense")
    done = shrink(tmp_path / "dense", leave=Blocks(0.5), out=tmp_path / "out", batches=batches(family), repair=False)
    assert contents(tmp_path / "dense") == before
    dense, small = (type(dense).from_pretrained(tmp_path / name, dtype="auto").eval() for name in ("dense", "out"))
    assert small.dtype == dtype
    for batch in batches(family):
        with torch.no_grad(), passing(dense, done.gone):
            expected = dense(**batch).logits
        torch.testing.assert_close(small(**batch).logits, expected)
    assert sum(each.numel() for each in small.parameters()) <= done.parameters[1]
    assert len(done.gone) == sum(was - now for was, now in done.counts.values())
    assert done.proof.startswith("on ")
    assert verify_checkpoint(tmp_path / "out", tmp_path / "dense").problems == ()
    assert verify_checkpoint(tmp_path / "out").ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "out"]


def test_the_record_says_what_left_and_what_took_over(made):
    folder, done = made
    record = json.loads((folder / "small/secateur.json").read_text())
    assert record["method"] == "shrink"
    assert record["blocks"] == {"model.layers": {"from": 4, "to": 2}}
    assert record["gone"] == list(done.gone)
    assert record["config"] == {"num_hidden_layers": {"from": 4, "to": 2}}
    assert record["calibration"]["patched"] == dict(done.patched) != {}
    assert record["sha256"].keys() == {*open_checkpoint(folder / "small")}
    assert str(folder) not in json.dumps(record)
    dense, small = open_checkpoint(folder / "dense"), open_checkpoint(folder / "small")
    stay = [number for number in range(4) if f"model.layers.{number}" not in done.gone]
    for name in small:
        old = name
        for now, was in enumerate(stay):
            if name.startswith(f"model.layers.{now}."):
                old = name.replace(f"layers.{now}.", f"layers.{was}.", 1)
        assert torch.equal(small[name], dense[old]) == (name not in done.patched), name
    assert "4 -> 2" in str(done)
    assert "The outputs lose" in str(done)
    left = contents(folder / "small").keys() - contents(folder / "dense").keys()
    assert left == {"secateur.json", BLOCKS}


def test_without_out_it_says_what_would_leave(made, tmp_path):
    folder, done = made
    asked = {"batches": batches("llama", count=16)}
    planned = shrink(folder / "dense", leave=Blocks(0.5), **asked)
    assert (planned.gone, planned.parameters, planned.lost) == (done.gone, done.parameters, done.lost)
    assert planned.patched == {}
    unproved = shrink(folder / "dense", leave=Blocks(0.5), verify=False, **asked)
    assert unproved.gone == done.gone
    assert unproved.proof == "not proved, as asked"


# ---- killed ---------------------------------------------------------------------------------------------------------

EVERY = STEPS | {
    "costs": (DepthCosts, "__call__"),
    "slice": (depth_directory, "write_sliced"),
}


def dying(moment, source, out):
    calls = killing(moment, **EVERY)
    shrink(source, leave=Blocks(0.5), out=out, batches=batches("llama", count=16))
    out.with_name("counts.json").write_text(json.dumps(calls))


@pytest.mark.long
def test_a_run_that_was_killed_at_any_moment_goes_on_to_the_same_bytes(made, tmp_path):
    source, out, whole = made[0] / "dense", tmp_path / "out", tmp_path / "whole"
    assert forked(lambda: dying("never", source, whole)) == 0
    moments = ("copy:1", "costs:1", "costs:2", "journal:1", "write:1", "journal:1", "slice:1", "publish:1")
    assert_killed(dying, moments, source, out)
    assert forked(lambda: dying("never", source, out)) == 0
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert not counts.keys() & {"costs", "write", "copy"}, "what is done is not done again"
    assert contents(out) == contents(whole) == contents(made[0] / "small")
    assert not (tmp_path / "out.unfinished").exists()


@pytest.fixture(scope="module")
def stopped(made):
    """What a run left that was stopped before the end: to be copied."""
    asked = {"batches": batches("llama", count=16)}
    with interrupted(depth_directory, "_publish"):
        shrink(made[0] / "dense", leave=Blocks(0.5), out=made[0] / "stopped", **asked)
    return made[0] / "stopped.unfinished"


CHOSEN = {"gone": [], "stayed": {}, "lost": 0.5, "proof": "none"}


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"chosen": {**CHOSEN, "gone": ["model.layers.1"]}}, "chosen is not so many blocks as leave"),
        ({"chosen": {**CHOSEN, "gone": ["model.layers.1", "model.layers.9"]}}, "chosen is not so many blocks as leave"),
        ({"chosen": {**CHOSEN, "lost": "much"}}, "chosen.lost must be a number"),
        ({"patched": {"fc.weight": 0.5}}, "patched names fc.weight, which the model has not"),
        ({"patched": {}}, "written is not what blocks and facts say of model.layers"),
    ],
)
def test_a_journal_of_what_the_model_has_not_is_refused(made, stopped, tmp_path, facts, message):
    asked = {"batches": batches("llama", count=16)}
    journal = shutil.copytree(stopped, tmp_path / "out.unfinished") / JOURNAL
    resealed(journal, lambda found: found["facts"].update(facts))
    with pytest.raises(CheckpointError, match=rf"journal\.json: damaged: .*{message}"):
        shrink(made[0] / "dense", leave=Blocks(0.5), out=tmp_path / "out", **asked)
    with pytest.raises(CheckpointError, match=r"leave .*Blocks"):
        shrink(made[0] / "dense", leave=Blocks(0.25), out=tmp_path / "out", **asked)


# ---- refused --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_before_anything_is_written(made, tmp_path):
    source = made[0] / "dense"

    def refused(message, source=source, out=tmp_path / "out", share=0.5, **keywords):
        with pytest.raises(ValueError, match=message):
            shrink(source, leave=Blocks(share), out=out, **{"batches": batches("llama"), **keywords})
        assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "taken"]

    (tmp_path / "taken").mkdir()
    shutil.copytree(source, tmp_path / "bare")
    (tmp_path / "bare/config.json").unlink()
    refused("no block leaves: say how many", share=0.0)
    refused("1.5", share=1.5)
    refused("already exists", out=tmp_path / "taken")
    refused("there are no batches", batches=[])
    refused("matches 'nothing'", include="nothing")
    refused("config.json", source=tmp_path / "bare")
    refused("does not run on batch 0 of 1", batches=[{"words": torch.ones(2, 3)}])
    refused("of the 4 blocks can leave, not 2", out=None, include="model.layers.1")


@pytest.mark.long
def test_a_block_that_the_proof_refuses_stays_and_is_named(tmp_path):
    """T5's first blocks hold the biases of all others."""
    saved(tmp_path / "dense", "t5")
    everything = 6 / 8
    done = shrink(tmp_path / "dense", leave=Blocks(everything), batches=batches("t5"))
    assert {"encoder.block.0", "decoder.block.0"}.isdisjoint(done.gone)
    assert len(done.gone) == 6
    for name, why in done.stayed.items():
        assert name in ("encoder.block.0", "decoder.block.0")
        assert "relative_attention_bias" in why


# ---- seen again -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_command_takes_blocks_out_and_sees_it_again(made, tmp_path):
    source, out = shutil.copytree(made[0] / "dense", tmp_path / "dense"), tmp_path / "out"
    (source / "tokenizer.json").unlink()
    write_tokenizer(source)
    asked = ("--data", "random", "--samples", "4", "--sequence-length", "16", "--report", tmp_path / "page.html")
    ended = run("shrink", source, "--leave", "blocks:50%", *asked, "--out", out)
    assert ended.exit_code == 0, ended.output
    assert "model.layers  4 -> 2" in ended.stdout
    assert "from_pretrained loads it" in ended.stdout
    assert (tmp_path / "page.html").is_file()
    ended = run("verify", out, "--source", source)
    assert ended.exit_code == 0, ended.output
    assert "out: what secateur.json claims holds" in ended.stdout
    flipped(out, "lm_head.weight")
    assert run("verify", out).exit_code == 1
    ended = run("shrink", source, "--leave", "blocks:25%", "--no-repair", *asked[:6], "--dry-run")
    assert "Nothing was written" in ended.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--leave", "blocks:50%"), "its blocks leave by what a text shows; pass --data FILE"),
        (("-s", "0.2", "--leave", "blocks:50%", "--data", "random"), "nothing else leaves it"),
        (("--leave", "blocks:50%", "--data", "random", "--round-to", "8"), "say how units leave"),
    ],
)
def test_the_command_says_what_cannot_be_asked_of_a_directory(made, tmp_path, words, message):
    ended = run("shrink", made[0] / "dense", *words, "--out", tmp_path / "out")
    assert ended.exit_code == 2
    assert message in " ".join(ended.stderr.split())
    assert not (tmp_path / "out").exists()


def changed(name, change):
    def made_other(folder):
        path = folder / name
        values = json.loads(path.read_text())
        change(values)
        path.write_text(json.dumps(values))

    return made_other


def flipped(folder, name):
    """The last bit of a tensor."""
    entry = open_checkpoint(folder).entries[name]
    data = bytearray(entry.path.read_bytes())
    data[entry.start + entry.nbytes - 1] ^= 1
    entry.path.write_bytes(data)


NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda folder: flipped(folder, NORM), f"{NORM}: its bytes are not what stays"),
        (
            lambda folder: flipped(folder, "lm_head.weight"),
            "lm_head.weight: its bytes are not what stays",
        ),
        (changed(BLOCKS, lambda each: each["gone"].pop()), "does not say that it left"),
        (changed("config.json", lambda each: each.update(num_hidden_layers=3)), "config.json: num_hidden_layers is 3"),
        (changed("config.json", lambda each: each.update(rms_norm_eps=1.0)), "config.json: rms_norm_eps is 1.0"),
        (changed("secateur.json", lambda each: each["parameters"].update(to=1)), "claims 1"),
        (changed("secateur.json", lambda each: each["sha256"].pop(NORM)), f"{NORM}: secateur.json does not say"),
        (changed("secateur.json", lambda each: each["calibration"]["patched"].update(fc=0.1)), "fc: was written"),
        (lambda folder: (folder / "tokenizer.json").write_text("{ }"), "tokenizer.json: its bytes are not"),
    ],
)
def test_what_does_not_hold_is_named(made, tmp_path, change, problem):
    folder = shutil.copytree(made[0] / "small", tmp_path / "small")
    change(folder)
    found = verify_checkpoint(folder, made[0] / "dense")
    assert any(problem in each for each in found.problems), found.problems


def test_a_patched_tensor_is_seen_again_by_its_digest(made, tmp_path):
    folder = shutil.copytree(made[0] / "small", tmp_path / "small")
    name = next(iter(made[1].patched))
    flipped(folder, name)
    for source in (None, made[0] / "dense"):
        (problem,) = verify_checkpoint(folder, source).problems
        assert problem == f"{name}: its bytes are not those that were written: their SHA-256 is another."


def test_a_missing_list_of_blocks_is_an_error(made, tmp_path):
    folder = shutil.copytree(made[0] / "small", tmp_path / "small")
    (folder / BLOCKS).unlink()
    with pytest.raises(CheckpointError, match="is missing; it says which blocks stayed"):
        verify_checkpoint(folder)
