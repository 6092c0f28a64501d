"""Fewer experts in a directory, killed at any moment: the same bytes; and what streams the repair aims at."""

import copy
import json
import shutil

import pytest
import torch

import zoo
from secateur.checkpoints import CheckpointError, slicing
from secateur.checkpoints import run as resumable
from secateur.checkpoints.run import JOURNAL
from secateur.coupling import find_coupling
from secateur.kinds import Experts
from secateur.models import InMemory
from secateur.shrinking import shrink
from secateur.shrinking.kinds import expert_repair
from secateur.shrinking.kinds import experts_directory as expert_directory
from secateur.shrinking.kinds.mixtures import Mixtures
from secateur.shrinking.kinds.routing import PairedBlocks
from support.damaged import resealed
from support.forks import STEPS, assert_killed, forked, interrupted, killing
from support.mixtures import batches, mixtral
from support.stacks import contents


def saved(folder):
    mixtral(6).save_pretrained(folder, max_shard_size="90KB")
    (folder / "README.md").write_text("roses")
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A directory that no test changes."""
    return saved(tmp_path_factory.mktemp("mixtral") / "dense")


def shrunk(source, out, **how):
    its = {name: how.pop(name) for name in ("rank", "unreached_first") if name in how}
    experts = Experts(how.pop("remove", 2), **its)
    return shrink(source, leave=experts, out=out, **{"batches": batches(), "verify": False, **how})


# ---- killed ---------------------------------------------------------------------------------------------------------

EVERY = STEPS | {
    "run": (Mixtures, "routed"),
    "slice": (expert_directory, "write_file"),
    "cut": (slicing, "write_cut"),
    "repair": (expert_repair, "_solved"),
    "note": (resumable.Run, "note"),
    "record": (expert_directory, "_add_records"),
}


def dying(moment, source, out):
    calls = killing(moment, **EVERY)
    shrunk(source, out)
    out.with_name("counts.json").write_text(json.dumps(calls))


@pytest.mark.usefixtures("known")
@pytest.mark.long
def test_a_run_that_was_killed_at_any_moment_goes_on_to_the_same_bytes(dense, tmp_path):
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert forked(lambda: dying("never", dense, whole)) == 0
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert (counts["run"], counts["repair"], counts["note"]) == (1, 2, 2)
    assert counts["slice"] == len([*dense.glob("*.safetensors")]) >= 3
    # not yet run; run, but not in the journal; half of a file; in the next; not solved; half of a block's tensors are
    # written; all, but not in the journal; the second; before the records, and before the last rename
    running, solving = "run:1 journal:2 cut:3 slice:2", "repair:1 write:2 note:1 repair:2 write:3"
    assert_killed(dying, f"{running} {solving} record:1 publish:1".split(), dense, out)
    (tmp_path / "out.unfinished/result/config.json").write_text("{}")
    assert forked(lambda: dying("never", dense, out)) == 0
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert not counts.keys() & {"run", "repair", "write", "slice"}, "what is done is not done again"
    assert contents(out) == contents(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["counts.json", "out", "whole"]


@pytest.fixture(scope="module")
def stopped(dense):
    """What a run left that was stopped in the second block: to be read, and copied."""
    with interrupted(expert_repair, "_solved", 2):
        shrunk(dense, dense.with_name("out"))
    return dense.with_name("out.unfinished")


@pytest.mark.usefixtures("known")
def test_a_run_goes_on_only_with_the_same_request_and_source(dense, stopped, tmp_path):
    out = tmp_path / "out"
    dense = shutil.copytree(dense, tmp_path / "dense")
    unfinished = shutil.copytree(stopped, tmp_path / "out.unfinished")
    for keywords, difference in (
        ({"remove": 1}, "leave .*Experts"),
        ({"batches": batches(3)}, "data"),
        ({"repair": False}, "repair true, not false"),
        ({"rank": "frequency"}, "leave .*Experts"),
        ({"include": "*gate*"}, "include null, not "),
        ({"unreached_first": True}, "leave .*Experts"),
    ):
        with pytest.raises(CheckpointError, match=difference):
            shrunk(dense, out, **keywords)
    with resumable.locked(unfinished), pytest.raises(CheckpointError, match="at work here"):
        shrunk(dense, out)
    assert unfinished.is_dir()
    (dense / "README.md").write_text("thorns")
    with pytest.raises(CheckpointError, match=r"README\.md: changed since .* was begun"):
        shrunk(dense, out)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda j: j["blocks"][0].update(name="model.layers.7"), r"name is model.layers.7, which is no block"),
        (lambda j: j["blocks"].append(j["blocks"][0]), r"or is there twice"),
        (lambda j: j["blocks"][0].update(shares={"gate": "much"}), "shares.gate must be a number"),
        (lambda j: j["facts"]["profile"]["routed"].popitem(), "is of other mixtures"),
        (lambda j: j["facts"]["profile"].update(rank="luck"), "has a rank that is none of"),
        (lambda j: j.update(written="all"), "written must be an object"),
        (lambda j: j["blocks"][0]["tensors"].popitem(), "written is not what blocks and facts say of model.layers.0"),
        (lambda j: j["written"].pop(next(iter(j["blocks"][0]["tensors"]))), "written is not what blocks and facts say"),
        (lambda j: j["facts"][next(key for key in j["facts"] if "sha" in key)].popitem(), "is of other tensors than"),
    ],
)
@pytest.mark.usefixtures("known")
def test_a_journal_of_what_the_model_has_not_is_refused(dense, stopped, tmp_path, damage, message):
    journal = shutil.copytree(stopped, tmp_path / "out.unfinished") / JOURNAL
    resealed(journal, damage)
    with pytest.raises(CheckpointError, match=message):
        shrunk(dense, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert journal.is_file()


@pytest.mark.parametrize("change", [(b"experts.2.w1", b"experts.9.w1"), (b"F32", b"I32")])
@pytest.mark.usefixtures("known")
def test_a_file_whose_header_changed_meanwhile_is_not_published(dense, stopped, tmp_path, change):
    unfinished = shutil.copytree(stopped, tmp_path / "out.unfinished")
    file = next(each for each in unfinished.rglob("*.safetensors") if change[0] in each.read_bytes())
    file.write_bytes(file.read_bytes().replace(*change))
    with pytest.raises(CheckpointError, match=rf"{file.name} is not what was written there\. Remove .* to start over"):
        shrunk(dense, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("known")
@pytest.mark.long
def test_no_room_is_told_before_anything_is_sliced(dense, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(CheckpointError, match="1e-09 GB are free"):
        shrunk(dense, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- streams --------------------------------------------------------------------------------------------------------


def test_of_a_model_beside_itself_nothing_is_lacking():
    model, _ = zoo.ZOO["mixtral"]()
    groups = [each for each in find_coupling(model, batches()[0]).groups if each.chosen]
    seen = []
    whole, less = InMemory(copy.deepcopy(model), batches()), InMemory(model, batches())
    with whole.replaying() as dense, less.replaying() as small, torch.no_grad():
        beside = PairedBlocks(dense, small, groups)

        def look(name, its):
            for group in its:
                residuals = [each.residual for each in beside.passes(name, group)]
                seen.append((name, len(residuals), float(torch.cat(residuals).abs().max())))

        assert list(beside.run(look)) == ["model.layers.0", "model.layers.1"]
    assert seen == [("model.layers.0", 4, 0.0), ("model.layers.1", 4, 0.0)]
    assert [beside._adds_up[group.name] for group in groups] == [True, True]


def test_a_normalization_behind_a_mixture_is_seen():
    model, inputs = zoo.ZOO["mixture_gemma4"]()
    groups = [each for each in find_coupling(model, inputs).groups if each.chosen]
    whole, less = InMemory(copy.deepcopy(model), [inputs]), InMemory(model, [inputs])
    with whole.replaying() as dense, less.replaying() as small, torch.no_grad():
        beside = PairedBlocks(dense, small, groups)
        for _ in beside.run(lambda *_: None):
            pass
    assert not any(beside._adds_up.values())


def test_what_runs_again_is_named():
    model, inputs = zoo.ZOO["mixtral"]()
    assert InMemory(model, [inputs]).repeated() is None
    model.model.layers[1] = model.model.layers[0]
    assert InMemory(model, [inputs]).repeated() == "model.layers.0"
