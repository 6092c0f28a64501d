"""A directory with data: what `shrink` makes of the loaded model, block by block, and the same bytes after a kill."""

import json
import shutil

import pytest
import torch
import transformers

from secateur import shrink
from secateur.checkpoints import CheckpointError, open_checkpoint, slicing, verify_checkpoint
from secateur.checkpoints.run import JOURNAL, Run
from secateur.models import build_on_meta
from secateur.shrinking import directory
from secateur.shrinking.measure import Measuring
from secateur.shrinking.repair import Repairing
from support.damaged import resealed
from support.families import batches, make
from support.forks import STEPS, assert_killed, forked, interrupted, killing
from support.stacks import contents

TOKENS = torch.tensor([[7, 6, 5, 4, 1], [1, 2, 3, 5, 4]])
EXAMPLE = {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}


def unproved(source, out, sparsity, **how):
    return shrink(source, sparsity=sparsity, out=out, verify=False, **how)


def saved(folder, family="llama", dtype=torch.float32):
    make(family, dtype=dtype).save_pretrained(folder, max_shard_size="8KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"stale")
    return folder


@pytest.fixture
def llama(tmp_path):
    return saved(tmp_path / "dense")


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("bert", "float32"), ("llama", "bfloat16")])
@pytest.mark.long
def test_it_is_what_shrink_makes_of_the_loaded_model(tmp_path, family, dtype):
    source = saved(tmp_path / "dense", family, getattr(torch, dtype))
    kind = type(make(family))
    before = contents(source)
    done = shrink(source, sparsity=0.3, out=tmp_path / "small", batches=batches(family))
    assert contents(source) == before
    model = kind.from_pretrained(source, dtype="auto").eval()
    example = EXAMPLE | ({"use_cache": False} if family == "llama" else {})
    mine = shrink(model, example, 0.3, batches=batches(family), uniform=True)
    loaded = kind.from_pretrained(tmp_path / "small", dtype="auto").eval()
    assert loaded.dtype == getattr(torch, dtype)
    assert done.got == pytest.approx(mine.got)
    assert done.got > 0.2
    expected, found = model.state_dict(), loaded.state_dict()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=lambda m, name=name: f"{name} {m}")
    dense = kind.from_pretrained(source, dtype="auto").state_dict()
    (worst, loss), *_ = sorted(done.errors.items(), key=lambda item: -item[1])
    assert found[worst].shape != dense[worst].shape
    assert loss > 0
    assert f"Chosen by what {done.tokens} tokens show. Of {len(done.errors)} weights" in str(done)
    assert f"{loss:.2%} at most, of {worst}." in str(done)
    record = json.loads((tmp_path / "small/secateur.json").read_text())
    assert record["calibration"]["tokens"] == done.tokens == 60
    assert record["calibration"]["errors"] == done.errors
    assert str(tmp_path) not in json.dumps(record)
    after = contents(tmp_path / "small")
    assert before.keys() - after.keys() == {"pytorch_model.bin"}
    assert after.keys() - before.keys() == {"plan.json", "secateur.json"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "small"]


WIDTH = {"target": "units", "round_to": 1}
STREAM = {"llama": {"include": "model.embed_tokens.weight"}, "bert": {"allocate": "uniform"}}


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("bert", "float32")])
@pytest.mark.long
def test_normalizations_over_a_width_that_narrows_move_as_in_memory(tmp_path, family, dtype):
    """In blocks, before them, and behind."""
    source = saved(tmp_path / "dense", family, getattr(torch, dtype))
    kind = type(make(family))
    asked = {**WIDTH, **STREAM[family], "batches": batches(family)}
    done = shrink(source, sparsity=0.25, out=tmp_path / "small", **asked)
    model = kind.from_pretrained(source, dtype="auto").eval()
    example = EXAMPLE | ({"use_cache": False} if family == "llama" else {})
    shrink(model, example, 0.25, uniform=True, **asked)
    expected = model.state_dict()
    found = kind.from_pretrained(tmp_path / "small", dtype="auto").state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=lambda m, name=name: f"{name} {m}")
    dense = kind.from_pretrained(source, dtype="auto").state_dict()
    norms = {name for name, tensor in dense.items() if "norm" in name.lower() and "relative" not in name}
    assert {*done.normalizations} == {name for name in norms if expected[name].shape != dense[name].shape} != set()
    record = json.loads((tmp_path / "small/secateur.json").read_text())
    assert record["calibration"]["normalizations"] == list(done.normalizations)
    seen = verify_checkpoint(tmp_path / "small", source)
    assert seen.problems == ()
    plain = unproved(source, tmp_path / "plain", 0.25, **asked, repair=False)
    assert plain.normalizations == ()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A directory that no test changes, and all that is found of it without data."""
    source = saved(tmp_path_factory.mktemp("plain") / "dense")
    checkpoint = open_checkpoint(source)
    model = build_on_meta(checkpoint)
    return source, directory._dense(checkpoint, model, directory.example_for(model), verify=False)


@pytest.fixture
def known(plain, monkeypatch):
    """That is found once: for processes that are forked, and for calls that are refused."""
    monkeypatch.setattr(directory, "_dense", lambda *_, **__: plain[1])
    return plain[0]


def rescaling(moment, source, out):
    calls = killing(moment, **STEPS)
    unproved(source, out, 0.25, **WIDTH, **STREAM["llama"], batches=batches("llama"))
    out.with_name("counts.json").write_text(json.dumps(calls))


@pytest.mark.long
def test_a_run_that_was_killed_while_normalizations_were_written_goes_on_to_the_same_bytes(known, tmp_path):
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert forked(lambda: rescaling("never", known, whole)) == 0
    counts = json.loads((tmp_path / "counts.json").read_text())
    # half written; a little more; written, but not noted
    assert_killed(rescaling, (f"write:{counts['write'] - 3}", "write:1", "journal:1"), known, out)
    assert forked(lambda: rescaling("never", known, out)) == 0
    assert contents(out) == contents(whole)


@pytest.mark.long
def test_repair_moves_matrices_of_blocks_alone(llama, tmp_path):
    done = unproved(llama, tmp_path / "repaired", 0.3, batches=batches("llama"))
    plain = unproved(llama, tmp_path / "plain", 0.3, batches=batches("llama"), repair=False)
    assert plain.errors == {}
    assert plain.counts == done.counts
    dense, cut, repaired = (open_checkpoint(tmp_path / name) for name in ("dense", "plain", "repaired"))
    for name in dense:
        expected = dense[name]
        for at, units in plain.plan.tensors.get(name, ((), {}))[1].items():
            expected = expected.index_select(at, torch.from_numpy(units))
        assert torch.equal(cut[name], expected), name
    moved = {name for name in dense if not torch.equal(repaired[name], cut[name])}
    assert {name for name in done.errors if dense[name].shape[1] > repaired[name].shape[1]} <= moved
    assert moved <= set(done.errors)
    assert all(repaired[name].dim() == 2 and ".layers." in name for name in moved)


@pytest.mark.long
def test_without_out_it_says_what_would_leave(llama, tmp_path):
    planned = unproved(llama, None, 0.3, batches=batches("llama"))
    done = unproved(llama, tmp_path / "small", 0.3, batches=batches("llama"))
    assert (planned.counts, planned.got, planned.tokens) == (done.counts, done.got, done.tokens)
    assert planned.errors == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "small"]


# ---- killed ---------------------------------------------------------------------------------------------------------


EVERY = STEPS | {
    "slice": (slicing, "write_index"),
    "measure": (Measuring, "solve_stage"),
    "repair": (Repairing, "solve_stage"),
}


def dying(moment, source, out):
    """`shrink` in a process that is killed at the n-th call of a function; else writes down how often each
    ran."""
    calls = killing(moment, **EVERY)
    unproved(source, out, 0.3, batches=batches("llama"))
    out.with_name("counts.json").write_text(json.dumps(calls))


@pytest.mark.long
def test_a_run_that_was_killed_at_any_moment_goes_on_to_the_same_bytes(known, tmp_path):
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert forked(lambda: dying("never", known, whole)) == 0
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert counts["measure"] == 2
    # in the copy; half measured; measured, and chosen, but not yet in the journal; in the first block; written, but not
    # yet in the journal; the second; all done, but not yet in the journal; half sliced; before the last rename
    measuring, repairing = ("measure:2", "journal:1", "journal:2"), ("write:1", "journal:1", "journal:2", "journal:2")
    assert_killed(dying, ("copy:1", *measuring, *repairing, "slice:1", "publish:1"), known, out)
    assert forked(lambda: dying("never", known, out)) == 0
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert not counts.keys() & {"measure", "repair", "write", "copy"}, "what is done is not done again"
    assert contents(out) == contents(whole)
    assert not (tmp_path / "out.unfinished").exists()


@pytest.fixture(scope="module")
def stopped(plain):
    """What a run left that was stopped in the second block: to be read, and copied."""
    source = plain[0]
    with interrupted(Run, "note", 2):
        unproved(source, source.with_name("out"), 0.3, batches=batches("llama"))
    return source.with_name("out.unfinished")


@pytest.mark.long
def test_a_run_goes_on_only_with_the_same_request_and_source(stopped, known, tmp_path, monkeypatch):
    llama, out = shutil.copytree(known, tmp_path / "dense"), tmp_path / "out"
    unfinished = shutil.copytree(stopped, tmp_path / "out.unfinished")
    for keywords, difference in (
        ({"sparsity": 0.4}, "sparsity 0.3, not 0.4"),
        ({"batches": batches("llama", count=2)}, "data "),
        ({"repair": False}, "repair true, not false"),
        ({"include": "*mlp*"}, "include null, not "),
        ({"example_inputs": EXAMPLE}, "example "),
        ({"criterion": "random"}, "criterion "),
    ):
        with pytest.raises(CheckpointError, match=difference):
            unproved(llama, out, **{"batches": batches("llama"), "sparsity": 0.3, **keywords})
    shutil.copytree(llama, tmp_path / "kept")
    (llama / "tokenizer.json").write_text("{ }")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: changed since .* was begun"):
        unproved(llama, out, 0.3, batches=batches("llama"))
    (llama / "tokenizer.json").write_text("{}")
    monkeypatch.undo()
    unproved(llama, out, 0.3, batches=batches("llama"))
    unproved(tmp_path / "kept", tmp_path / "whole", 0.3, batches=batches("llama"))
    assert contents(out) == contents(tmp_path / "whole")
    assert not unfinished.exists()


GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda j: j["blocks"][0].update(name="model.layers.7"), r"blocks\[0\].name is model.layers.7, which is no"),
        (lambda j: j["blocks"][0].update(kept={"fc": [1]}), "kept.fc is no group of which units leave"),
        (lambda j: j["blocks"][0].update(kept={GATE: [1]}), "is not so many units as were chosen of 24"),
        (lambda j: j["blocks"][0].update(kept={GATE: [-1]}), "at least 0, not -1"),
        (lambda j: j["blocks"][0].update(errors={"lm_head.weight": 0.1}), "errors names lm_head.weight, which is not"),
        (lambda j: j["blocks"][0].update(biases=["lm_head.bias"]), "biases names lm_head.bias, which is not repaired"),
        (lambda j: j["facts"]["measured"]["slopes"][0]["squares"].append("1"), "must be a number, not"),
        (lambda j: j["facts"]["measured"]["slopes"][0]["squares"].pop(), "has of the slopes of .* not as many as"),
        (lambda j: j["facts"]["measured"]["groups"].update(fc=1), "measured.groups.fc must be an object"),
        (lambda j: j["facts"]["measured"]["groups"][GATE].update(scores=[1.0]), "is not measured of 24 units"),
        (lambda j: j["facts"]["measured"]["groups"][GATE]["counts"].reverse(), "is not measured of 24 units"),
        (lambda j: j["facts"]["measured"].update(tokens=0), "tokens must be a whole number of at least 1"),
        (lambda j: j["facts"]["chosen"].update({GATE: 1}), "chosen has other counts"),
        (lambda j: j["blocks"][0]["errors"].popitem(), "written is not what blocks and facts say of model.layers.0"),
        (lambda j: j["written"].popitem(), "written is not what blocks and facts say of model.layers.0"),
    ],
)
def test_a_journal_of_what_the_model_has_not_is_refused(stopped, known, tmp_path, damage, message):
    journal = shutil.copytree(stopped, tmp_path / "out.unfinished") / JOURNAL
    resealed(journal, damage)
    with pytest.raises(CheckpointError, match=rf"journal\.json: damaged: .*{message}.* Remove .* to start over"):
        unproved(known, tmp_path / "out", 0.3, batches=batches("llama"))
    assert not (tmp_path / "out").exists()


# ---- refused --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_before_anything_is_written(llama, tmp_path, monkeypatch):
    def refused(message, source=llama, out=tmp_path / "out", **keywords):
        with pytest.raises(ValueError, match=message) as caught:
            unproved(source, out, **{"sparsity": 0.3, "batches": batches("llama"), **keywords})
        assert "\n" not in str(caught.value)
        assert sorted(path.name for path in tmp_path.iterdir()) == names

    (tmp_path / "taken").mkdir()
    bare = tmp_path / "bare"
    none = transformers.GPT2Config(n_layer=0, n_embd=8, n_head=2, vocab_size=64, n_positions=64)
    transformers.GPT2LMHeadModel(none).save_pretrained(bare)
    broken = tmp_path / "broken"
    shutil.copytree(llama, broken)
    names = ["bare", "broken", "dense", "taken"]
    refused(r"has no repeated blocks.* load it and use shrink\(model, example_inputs, ..., batches", source=bare)
    refused("already exists", out=tmp_path / "taken")
    refused("there are no batches", batches=[])
    refused("no tensor or group matches 'nothing'", include="nothing", out=None)
    config = json.loads((llama / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    refused(r"model\.layers\.2\..* is (in no shard|not in the files)", source=broken)
    (broken / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    refused("is quantized", source=broken)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    refused("1e-09 GB are free")
