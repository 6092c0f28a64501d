"""A directory: zeros stay on the bytes, sources do not change, and a run that was killed goes on to the same bytes."""

import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from secateur import sparsify, verify_checkpoint
from secateur.checkpoints import CheckpointError, inspect_checkpoint, open_checkpoint
from secateur.checkpoints import run as resumable
from secateur.models import files as block_files
from secateur.recovery import directory as recovery
from secateur.recovery import recover, recovering
from secateur.shrinking import shrink
from secateur.storage import save_compressed
from support.families import batches, make
from support.forks import forked, killing
from support.stacks import contents

FAST = {"rate": 1e-3}


@pytest.mark.parametrize(
    "options",
    [{"steps": 0}, {"steps": 5, "local": 0}, {"steps": 5}, {"steps": 5, "adapters": 2}],
    ids=str,
)
def test_zeros_stay_on_the_bytes(directories, options):
    sparse, dense, out = (directories / name for name in ("sparse", "dense", "out"))
    before = contents(sparse), contents(dense)
    done = recover(sparse, dense, batches("llama"), out=out, **FAST, **options)
    assert (contents(sparse), contents(dense)) == before
    found = verify_checkpoint(out, sparse)
    assert found.ok
    assert not found.problems
    assert not found.unchecked
    was, now = ({each.name: each.zeros for each in inspect_checkpoint(each).tensors} for each in (sparse, out))
    assert was == now
    assert done.zeros == {name: (count, count) for name, count in was.items() if count and "embed" not in name}
    assert len(done.zeros) == 14
    record = json.loads((out / "secateur.json").read_text())
    assert record["method"] == "recover"
    assert record["previous"]["method"] == "oneshot"
    assert len(record["losses"]) == done.steps == options["steps"]
    assert len(record["blocks"]) == len(done.parts) == (0 if options.get("local") == 0 else 4)
    everything = [*record["pruned"], *record["left_alone"]["not trained"]]
    assert sorted(everything) == sorted(make("llama").state_dict())
    moved = set(record["pruned"])
    expected = set(done.zeros)
    if options["steps"] and "adapters" not in options:
        expected = set(make("llama").state_dict()) - {"model.embed_tokens.weight"}
    elif options.get("local") != 0:
        expected |= {name for name in was if ".layers." in name}
    assert moved == expected
    assert LlamaForCausalLM.from_pretrained(out)(torch.arange(5)[None]).logits.isfinite().all()


@pytest.mark.parametrize("options", [{"steps": 4, "local": 0}, {"steps": 3, "local": 1, "adapters": 2}], ids=str)
def test_a_directory_becomes_what_the_model_becomes_in_memory(directories, options):
    sparse, dense, out = (directories / name for name in ("sparse", "dense", "out"))
    recover(sparse, dense, batches("llama"), out=out, **FAST, **options)
    model, teacher = (LlamaForCausalLM.from_pretrained(each) for each in (sparse, dense))
    recover(model, teacher, batches("llama"), **FAST, **options)
    other = LlamaForCausalLM.from_pretrained(out).state_dict()
    for name, each in model.state_dict().items():
        assert torch.allclose(each, other[name], atol=1e-6), name


def test_activations_may_lie_in_files(directories):
    sparse, dense = directories / "sparse", directories / "dense"
    (directories / "scratch").mkdir()
    for out, folder in (("one", None), ("other", directories / "scratch")):
        recover(sparse, dense, batches("llama"), out=directories / out, steps=0, activations=folder)
    assert contents(directories / "one") == contents(directories / "other")
    assert list((directories / "scratch").iterdir()) == []


@pytest.mark.parametrize("options", [{"local": 0}, {"local": 1, "adapters": 2}, {"local": 0, "share": 0.5}], ids=str)
def test_a_teacher_on_the_disk_teaches_the_same_bytes(directories, options, monkeypatch):
    sparse, dense = directories / "sparse", directories / "dense"
    asked = {"steps": 3, **FAST, **options}
    recover(sparse, dense, batches("llama"), out=directories / "one", **asked)
    kind, loaded, load = type(make("llama")), [], block_files.BlockFiles.load

    def counted(self, block, **keywords):
        load(self, block, **keywords)
        loaded.append(sum(not each.is_meta for its in self.blocks.values() for each in its.parameters()))

    monkeypatch.setattr(block_files.BlockFiles, "load", counted)
    real = kind.from_pretrained
    read = []
    monkeypatch.setattr(
        kind, "from_pretrained", lambda folder, **keywords: (read.append(folder), real(folder, **keywords))[1]
    )
    done = recover(sparse, dense, batches("llama"), out=directories / "other", teacher_on_disk=True, **asked)
    assert contents(directories / "one") == contents(directories / "other")
    assert dense not in read  # it was never whole in memory
    assert max(loaded) == min(loaded) == len([*make("llama").model.layers[0].parameters()])  # one block at a time
    assert done.steps == 3


def test_a_teacher_on_the_disk_that_fails_lets_go_of_its_blocks(directories):
    from secateur.checkpoints import open_checkpoint
    from secateur.models import InFiles

    walk = InFiles(open_checkpoint(directories / "dense"), directories / "dense", batches("llama"))
    with pytest.raises(IndexError), torch.no_grad(), walk.files.in_turn():
        walk.model(input_ids=torch.full((1, 4), 10**6))
    with pytest.raises(RuntimeError, match="shape"), torch.no_grad(), walk.files.in_turn():
        walk.blocks["model.layers.1"].mlp.register_forward_pre_hook(lambda _, args: (args[0][..., :3],))
        walk.model(**batches("llama")[0])
    assert all(each.is_meta for each in walk.model.parameters())
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in walk.blocks.values())


STEPS = {
    "write": (block_files, "write_tensor"),
    "copy": (resumable, "copy_tree"),
    "journal": (resumable.Run, "_write"),
    "state": (recovery, "save_state"),
    "publish": (resumable.Run, "publish"),
}


def dying(moment, directories, out, **options):
    """`recover` in a process that is killed at the n-th call of a function."""
    recovery.EVERY = 0.0  # a state after each step
    recovery._Clock.is_due = lambda self: True
    recovery._Clock.rewind = lambda self: None
    killing(moment, **STEPS)
    sparse, dense = directories / "sparse", directories / "dense"
    recover(sparse, dense, batches("llama"), out=out, steps=5, **FAST, **options)


@pytest.mark.long
def test_a_run_that_was_killed_at_any_moment_goes_on_to_the_same_bytes(directories):
    out, whole = directories / "out", directories / "whole"
    assert forked(lambda: dying("never", directories, whole)) == 0
    # copying; in the first block; before the journal says so; in the second; at the first and the second state; writing
    # what became of all; at the end
    for moment in ("copy:1", "write:3", "journal:1", "journal:2", "state:1", "state:2", "write:20", "publish:1"):
        assert os.WTERMSIG(forked(lambda: dying(moment, directories, out))) == signal.SIGKILL, moment  # noqa: B023
        assert not out.exists()
    assert (directories / "out.unfinished" / "state.safetensors").is_file()
    assert forked(lambda: dying("never", directories, out)) == 0
    assert contents(out) == contents(whole)
    assert not (directories / "out.unfinished").exists()


def test_a_run_goes_on_only_with_the_same_request_and_a_state_that_is_whole(directories):
    sparse, dense, out = (directories / name for name in ("sparse", "dense", "out"))
    assert os.WTERMSIG(forked(lambda: dying("publish:1", directories, out))) == signal.SIGKILL
    for keywords, difference in (
        ({"steps": 6}, "steps 5, not 6"),
        ({"seed": 1}, "seed 0, not 1"),
        ({"adapters": 2}, "adapters null, not 2"),
        ({"loss": "mse"}, 'loss null, not "mse"'),
        ({"autocast": "bfloat16"}, 'autocast null, not "bfloat16"'),
    ):
        with pytest.raises(CheckpointError, match=difference):
            recover(sparse, dense, batches("llama"), out=out, **{"steps": 5, **FAST, **keywords})
    config = (dense / "config.json").read_text()
    (dense / "config.json").write_text(config + " ")
    with pytest.raises(CheckpointError, match=r"teacher\.config\.json"):
        recover(sparse, dense, batches("llama"), out=out, steps=5, **FAST)
    (dense / "config.json").write_text(config)
    state = directories / "out.unfinished" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match=r"damaged .* Remove .*out.unfinished to start over"):
        recover(sparse, dense, batches("llama"), out=out, steps=5, **FAST)
    shutil.rmtree(directories / "out.unfinished")
    recover(sparse, dense, batches("llama"), out=out, steps=5, **FAST)
    assert verify_checkpoint(out, sparse).ok


def test_what_the_journal_does_not_call_written_is_the_sources_and_is_not_said_to_be_trained(directories):
    sparse, dense, out = (directories / name for name in ("sparse", "dense", "out"))

    def stopped():
        killing("publish:1", **STEPS)
        recover(sparse, dense, batches("llama"), out=out, steps=0, **FAST)

    assert os.WTERMSIG(forked(stopped)) == signal.SIGKILL
    path = directories / "out.unfinished" / resumable.JOURNAL
    journal = json.loads(path.read_text())
    name = next(iter(journal["written"]))
    del journal["written"][name]
    journal["sha256"] = resumable._digest(journal)
    path.write_text(json.dumps(journal))
    recover(sparse, dense, batches("llama"), out=out, steps=0, **FAST)
    assert verify_checkpoint(out, sparse).ok
    assert name in json.loads((out / "secateur.json").read_text())["left_alone"]["not trained"]


def test_a_file_that_may_not_grow_is_told_as_a_full_disk_is(directories):
    """What safetensors says of a real one is no OSError."""
    import resource

    def limited():
        recovery._Clock.is_due = lambda self: True
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        keep = recovery.save_state

        def save(path, steps):
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            keep(path, steps)

        recovery.save_state = save
        with pytest.raises(CheckpointError, match=r"state.new: File too large, a limit or a quota; raise it and run"):
            recover(
                directories / "sparse", directories / "dense", batches("llama"), out=directories / "out", steps=5,
                **FAST,
            )  # fmt: skip

    assert forked(limited) == 0
    assert not (directories / "out").exists()


def test_zeros_that_one_run_does_not_move_are_kept_by_the_next(directories):
    dense, first, second, third = (directories / name for name in ("dense", "first", "second", "third"))
    sparsify(dense, 0.5, out=first, include="*embed*")
    name, options = "model.embed_tokens.weight", {"steps": 2, "local": 0, "include": "*", **FAST}

    def zeros(of):
        return {each.name: each.zeros for each in inspect_checkpoint(of).tensors}[name]

    count = zeros(first)
    done = recover(first, dense, batches("llama"), out=second, **{**options, "exclude": "*embed*"})
    assert done.zeros == {name: (count, count)}
    record = json.loads((second / "secateur.json").read_text())
    assert record["zeros"] == {name: count}
    assert name in record["left_alone"]["not trained"]
    assert verify_checkpoint(second, first).ok
    done = recover(second, dense, batches("llama"), out=third, **options)
    assert done.zeros == {name: (count, count)}
    assert zeros(third) == count > 0
    assert verify_checkpoint(third).ok
    shard = open_checkpoint(second).entries[name].path
    filled = load_file(shard)
    filled[name].add_(1.0)
    save_file(filled, shard, metadata={"format": "pt"})
    (problem, *_) = verify_checkpoint(second).problems
    assert problem == f"{name}: 0 of {filled[name].numel():,} values are zero; secateur.json claims {count:,}."


@pytest.mark.parametrize("whose", ["sparse", "dense"])
def test_a_weight_that_is_nan_is_named(directories, whose):
    broken = LlamaForCausalLM.from_pretrained(directories / whose)
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    shutil.rmtree(directories / whose)
    broken.save_pretrained(directories / whose)
    with pytest.raises(CheckpointError, match=rf"{whose}/model.safetensors: model.layers.1.mlp.up_proj.weight has ent"):
        recover(directories / "sparse", directories / "dense", batches("llama"), out=directories / "out")
    assert not (directories / "out.unfinished").exists()


@pytest.mark.parametrize("whose", ["sparse", "dense"])
def test_a_weight_that_no_file_holds_is_named(directories, whose):
    shard = open_checkpoint(directories / whose).entries["model.norm.weight"].path
    save_file({name.replace("model.norm", "model.else"): each for name, each in load_file(shard).items()}, shard)
    for index in (directories / whose).glob("*.index.json"):
        index.write_text(index.read_text().replace("model.norm.", "model.else."))
    with pytest.raises(CheckpointError, match=rf"{whose}: model.norm.weight, of shape \(\d+,\), is in no shard"):
        recover(directories / "sparse", directories / "dense", batches("llama"), out=directories / "out", steps=1)
    assert not (directories / "out.unfinished").exists()


def test_a_run_that_can_not_be_leaves_nothing_or_says_what(directories):
    paths, out = [directories / "sparse", directories / "dense"], directories / "out"
    with pytest.raises(ValueError, match=r"not finite|is nan|grew beyond"):
        recover(*paths, batches("llama"), out=out, steps=3, local=0, rate=1e30)
    assert not (directories / "out.unfinished").exists()
    with pytest.raises(ValueError, match=r"lower rate=\. Remove .*out\.unfinished to start over\."):
        recover(*paths, batches("llama"), out=out, steps=3, local=1, rate=1e30)
    assert (directories / "out.unfinished").exists()
    shutil.rmtree(directories / "out.unfinished")
    recover(*paths, batches("llama"), out=out, steps=3, local=1, **FAST)


def test_a_compressed_directory_is_to_be_expanded_first(directories):
    save_compressed(directories / "sparse", directories / "small")
    with pytest.raises(CheckpointError, match="small: compressed; write its weights with secateur expand"):
        recover(directories / "small", directories / "dense", batches("llama"), out=directories / "out")


def test_a_device_that_is_not_there_is_one_line(directories):
    with pytest.raises(ValueError, match="device 'nowhere' can't be used here: "):
        recover(
            directories / "sparse", directories / "dense", batches("llama"), out=directories / "out", device="nowhere"
        )


def test_a_narrower_directory_recovers_and_fewer_blocks_by_the_outputs(directories):
    dense = directories / "dense"
    shrink(dense, sparsity=0.3, out=directories / "narrow", batches=batches("llama"))
    done = recover(directories / "narrow", dense, batches("llama"), out=directories / "out", steps=3)
    assert len(done.parts) == 4
    assert not done.left_out
    assert verify_checkpoint(directories / "out", directories / "narrow").ok
    config = make("llama").config
    config.num_hidden_layers, config.layer_types = 1, None
    LlamaForCausalLM(config).save_pretrained(directories / "fewer")
    done = recover(directories / "fewer", dense, batches("llama"), out=directories / "less", steps=2)
    assert done.left_out
    assert done.steps == 2


def test_half_precision_on_the_disk(directories):
    model = LlamaForCausalLM.from_pretrained(directories / "sparse").bfloat16()
    model.save_pretrained(directories / "half")
    done = recover(
        directories / "half", directories / "dense", batches("llama"), out=directories / "out", steps=3, **FAST
    )
    assert all(was == now for was, now in done.zeros.values())
    assert {each.dtype for each in inspect_checkpoint(directories / "out").tensors} == {"BF16"}
    assert verify_checkpoint(directories / "out", directories / "half").ok


def test_what_is_wrong_is_said(directories, monkeypatch):
    sparse, dense, out = (directories / name for name in ("sparse", "dense", "out"))
    with pytest.raises(CheckpointError, match="already exists"):
        recover(sparse, dense, batches("llama"), out=dense)
    with pytest.raises(CheckpointError, match="no such directory"):
        recover(sparse, directories / "none", batches("llama"), out=out)
    with pytest.raises(CheckpointError, match="lies inside the input"):
        recover(sparse, dense, batches("llama"), out=dense / "out")
    monkeypatch.setattr(recovering, "rank_and_world", lambda: (0, 2))
    with pytest.raises(ValueError, match="2 processes train by the outputs alone: pass local=0"):
        recover(sparse, dense, batches("llama"), out=out)
    assert not out.exists()
    assert not (directories / "out.unfinished").exists()


def test_an_encoder_has_no_text_of_its_own(tmp_path):
    make("bert").save_pretrained(tmp_path / "dense")
    make("bert").save_pretrained(tmp_path / "sparse")
    with pytest.raises(ValueError, match="share= below 1 asks for the text's own loss"):
        recover(tmp_path / "sparse", tmp_path / "dense", batches("bert"), out=tmp_path / "out", share=0.5)
    assert {each.name for each in tmp_path.iterdir()} == {"dense", "sparse"}


def test_a_directory_of_fewer_tokens_is_refused_before_anything_is_copied(directories):
    make("llama", vocab_size=60).save_pretrained(directories / "small")
    with pytest.raises(ValueError, match="the model knows 60 tokens and the teacher 64"):
        recover(directories / "small", directories / "dense", batches("llama"), out=directories / "out")
    assert not (directories / "out.unfinished").exists()


def test_steps_that_end_worse_are_not_written(directories):
    sparse, dense, out = (directories / name for name in ("sparse", "dense", "out"))
    with pytest.warns(UserWarning, match=r"Over 1 batch the loss \(kl\) was .*: they are not kept"):
        done = recover(sparse, dense, batches("llama"), out=out, steps=6, local=0, rate=3.0)
    assert not done.judged.is_kept
    was, now = (LlamaForCausalLM.from_pretrained(each).state_dict() for each in (sparse, out))
    assert all(torch.equal(each, now[name]) for name, each in was.items())
    assert verify_checkpoint(out, sparse).ok
    record = json.loads((out / "secateur.json").read_text())
    assert record["judged"]["after"] > record["judged"]["before"]
    assert record["pruned"] == {}
    with pytest.warns(UserWarning, match="they are not kept"):
        recover(sparse, dense, batches("llama"), out=directories / "other", steps=6, local=1, rate=3.0)
    recover(sparse, dense, batches("llama"), out=directories / "local", steps=0, local=1)
    one, other = (LlamaForCausalLM.from_pretrained(directories / each).state_dict() for each in ("other", "local"))
    assert all(torch.equal(each, other[name]) for name, each in one.items())
