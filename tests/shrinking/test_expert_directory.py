"""Experts leave a directory: what is written is what `shrink` makes in memory, and any change of it is named."""

import copy
import json
import os
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from secateur import shrink
from secateur.checkpoints import CheckpointError, open_checkpoint, verify_checkpoint
from secateur.checkpoints.run import Run
from secateur.kinds import Experts
from secateur.models import divergence, mixture_of
from secateur.shrinking.kinds.mixtures import mixtures_of, read_profile
from secateur.shrinking.request import Request
from support.commands import run
from support.damaged import changed
from support.mixtures import SMALL, batches, mixtral
from support.reports import Page
from zoo import ZOO


def made(folder, kind="mixtral", **how):
    import transformers

    model = mixtral(8)
    if kind == "gpt_oss":
        config = transformers.GptOssConfig(intermediate_size=48, num_local_experts=8, head_dim=8, **SMALL)
        model = transformers.GptOssForCausalLM(config)
    model.save_pretrained(folder, **how)
    (folder / "README.md").write_text("roses")
    return model


def shrunk(source, out, remove, verify=False, **how):
    """`shrink` of which some options are those of `Experts`."""
    its = {name: how.pop(name) for name in ("rank", "profile", "plan") if name in how}
    return shrink(source, leave=Experts(remove, **its), out=out, verify=verify, **how)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "dense"
    made(folder)
    return folder


@pytest.fixture(scope="module")
def small(dense):
    shrink(dense, leave=Experts(0.25), out=dense.parent / "small", batches=batches(), verify=False, repair=False)
    return dense.parent / "small"


@pytest.fixture(scope="module")
def mended(dense):
    return shrink(dense, leave=Experts(0.25), out=dense.parent / "mended", batches=batches(), verify=False)


@pytest.fixture(scope="module", params=[("mixtral", {"max_shard_size": "90KB"}), ("gpt_oss", {})], ids=lambda it: it[0])
def without_repair(request, tmp_path_factory):
    """A model, its directory, and what that becomes without repair: none of them is changed by a test."""
    folder = tmp_path_factory.mktemp("without") / "dense"
    model = made(folder, request.param[0], **request.param[1])
    done = shrink(folder, leave=Experts(0.25), out=folder.parent / "small", batches=batches(), repair=False)
    return model, folder, done


def test_it_is_what_shrink_makes_in_memory(without_repair):
    model, dense, done = without_repair
    model = copy.deepcopy(model)
    assert done.proof.startswith("on ")
    assert set(done.counts.values()) == {(8, 6)}
    assert done.fields["num_local_experts"] == (8, 6)
    loaded = type(model).from_pretrained(done.out)
    shrink(model, batches()[0], leave=Experts(0.25), batches=batches(), uniform=True, repair=False)
    assert loaded.config.num_local_experts == 6
    mine, its = model.state_dict(), loaded.state_dict()
    assert mine.keys() == its.keys()
    assert all(torch.equal(mine[name], its[name]) for name in mine)
    assert done.parameters[1] == sum(each.numel() for each in loaded.parameters())
    found = verify_checkpoint(done.out, dense)
    assert found.ok, found.problems
    assert {tensor.unchanged for tensor in found.tensors} == {True}


@pytest.mark.long
def test_what_stays_is_repaired_as_in_memory(without_repair, tmp_path):
    model, dense, plain = without_repair
    model = copy.deepcopy(model)
    done = shrink(dense, leave=Experts(0.25), out=tmp_path / "small", batches=batches(), verify=False)
    assert plain.kept == done.kept
    assert (plain.mended, plain.repaired) == ({}, ())
    assert "recover" in str(done)
    assert set(done.mended) == set(done.counts)
    before, after = (open_checkpoint(each.out) for each in (plain, done))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {*done.repaired}
    assert all(".w2." in name or "down_proj" in name for name in changed)
    shrink(model, batches()[0], leave=Experts(0.25), batches=batches(), uniform=True)
    loaded = type(model).from_pretrained(tmp_path / "small")
    for name, each in loaded.state_dict().items():
        torch.testing.assert_close(each, model.state_dict()[name], rtol=1e-3, atol=1e-5)


@pytest.mark.long
def test_a_configuration_that_asks_for_the_routers_scores_changes_nothing(dense, mended, tmp_path):
    """Scores that are an output would stay whole, and a loss takes them from all blocks at once."""
    asks = tmp_path / "asks"
    shutil.copytree(dense, asks)
    changed("config.json", output_router_logits=True)(asks)
    how = {"batches": batches(), "verify": False}
    done = shrink(asks, leave=Experts(profile=tmp_path / "profile.json"), **how)
    assert sorted(done.profile.beyond) == [0.125, 0.25, 0.5]
    assert done.counts == {}
    done = shrink(asks, leave=Experts(0.25), out=tmp_path / "small", **how)
    assert done.kept == mended.kept
    its, mine = (open_checkpoint(each.out) for each in (mended, done))
    assert all(torch.equal(its[name], mine[name]) for name in its)
    assert json.loads((done.out / "config.json").read_text())["output_router_logits"] is True


def test_what_was_repaired_is_told_apart(dense, mended):
    found = verify_checkpoint(mended.out, dense)
    assert found.ok, found.problems
    assert {tensor.name for tensor in found.tensors if tensor.unchanged is None} == {*mended.repaired}
    assert f"{len(mended.repaired)} tensors have new values" in found.unchecked[0]
    record = json.loads((mended.out / "secateur.json").read_text())
    assert record["repair"]["made_up_for"] == dict(mended.mended)


@pytest.fixture(scope="module")
def profiled(dense):
    """What a run without OUT says, and its file: to be read, and copied."""
    path = dense.parent / "profile.json"
    return shrink(dense, leave=Experts(0.0, profile=path), batches=batches(), verify=False), path


@pytest.mark.long
def test_a_profile_plans_without_running(dense, profiled, tmp_path):
    first, path = profiled
    assert (first.profile.text.tokens, first.profile.text.held_out) == (96, 32)
    said = str(first.profile)
    assert said.startswith("Ranked by reap on 96 tokens of batches, 32 held out.\nMixture")
    assert "when all mixtures lose a share" in said
    page = Page(first.profile.report(tmp_path / "profile.html").read_text(encoding="utf-8"))
    assert "Expert by expert" in page.text
    assert "<table" in first.profile._repr_html_()
    with pytest.raises(CheckpointError, match="is there already; give plan= to use it"):
        shrink(dense, leave=Experts(0.0, profile=path), batches=batches(), verify=False)
    known = read_profile(path)
    done = shrink(dense, leave=Experts(2, plan=path), out=tmp_path / "small", verify=False)
    for name, stays in done.kept.items():
        scores = known.routed[name].scores("reap")
        assert {*range(8)} - {*stays} == {*np.argsort(scores)[:2].tolist()}


def test_a_profile_is_not_there_where_the_result_could_not_be_published(dense, tmp_path, monkeypatch):
    """So that the same call goes on."""
    out, path = tmp_path / "out", tmp_path / "profile.json"

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="the disk is full"):
        patch.setattr(Run, "publish", full)
        shrunk(dense, out, 2, batches=batches(), profile=path, repair=False)
    assert not path.exists()
    shrunk(dense, out, 2, batches=batches(), profile=path, repair=False)
    assert path.exists()


def test_what_is_behind_the_mixtures_is_what_the_smaller_model_gives(dense, profiled):
    """Of a quarter of the experts: the model's outputs, seen in memory on the batch held out."""
    done, path = profiled
    from transformers import MixtralForCausalLM

    model = MixtralForCausalLM.from_pretrained(dense).eval()
    small = MixtralForCausalLM.from_pretrained(dense).eval()
    shrink(small, batches()[0], leave=Experts(2), batches=batches()[:3], repair=False)
    with torch.no_grad():
        one, two = (each(**batches()[3]) for each in (model, small))
    found = read_profile(path).beyond
    assert list(found) == [0.125, 0.25, 0.5]
    lost, tokens = divergence(one, two)
    # so small a divergence is a difference of logarithms that nearly cancel, which float32 rounds
    assert (found[0.25].lost, found[0.25].tokens) == (pytest.approx(lost, rel=1e-2), tokens)
    assert 0 < found[0.125].lost < found[0.5].lost
    assert "Model output" in str(done)


def test_the_mixtures_of_a_directory_are_found_and_named(dense):
    found = mixtures_of(open_checkpoint(dense), Request(verify=False))
    assert found.sizes == {f"model.layers.{at}.mlp.gate.weight": 8 for at in range(2)}
    assert mixture_of(found.walk.model, found.groups[0])[0] == "model.layers.0.mlp"
    with pytest.raises(ValueError, match="no experts of the model can leave"):  # all keep as many, or none does
        mixtures_of(open_checkpoint(dense), Request(verify=False, exclude=("*.layers.0.*",)))


def test_without_data_magnitude_says_it_if_that_is_asked(dense, tmp_path):
    done = shrink(dense, leave=Experts(1, rank="criterion"), out=tmp_path / "small", verify=False)
    assert "Ranked by criterion, without data" in str(done)
    assert not list((tmp_path / "small").glob("*.tmp"))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"rank": "reap"}, "needs data"),
        ({"rank": "luck", "batches": batches()}, "the rank of experts is one of"),
        ({"batches": batches(), "plan": "p.json"}, "pass either batches= or plan="),
        ({"profile": "p.json"}, "profile= is written from batches"),
        ({"remove": 0, "batches": batches()}, "no expert leaves: say how many"),
        ({"remove": 7, "batches": batches()}, "at most 75.00% of the experts can leave"),
        ({"plan": "gone.json"}, "no such file"),
        ({"batches": batches()[:2], "profile": "p.json"}, "give 4 at least, not 2"),
        ({"batches": batches(), "include": "nothing"}, "no experts of the model can leave"),
    ],
)
@pytest.mark.usefixtures("known")
def test_what_cannot_be_asked_for_leaves_nothing_behind(dense, tmp_path, how, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        shrunk(dense, tmp_path / "small", **{"remove": 0.25, **how})
    assert not list(tmp_path.iterdir())


# ---- profiles -------------------------------------------------------------------------------------------------------


def mixture(**fields):
    def change(values):
        next(iter(values["profile"]["routed"].values())).update(fields)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.update(version=1), "version 2"),
        (lambda values: values["profile"].pop("text"), "text is missing"),
        (lambda values: values["profile"].pop("source"), "source is missing"),
        (lambda values: values["profile"]["source"].update({"config.json": "0"}), "another model: config.json of the"),
        (
            lambda values: values["profile"]["source"].pop("model.safetensors"),
            "another model: model.safetensors of the",
        ),
        (lambda values: values["profile"]["routed"].clear(), "says nothing of"),
        (mixture(tokens=[1.0]), "has not of as many experts"),
        (mixture(tokens=[-1.0] * 8), "of at least 0"),
        (mixture(weighted="many"), "weighted"),
        (lambda values: values["profile"].update(beyond=3), "beyond"),
        (lambda values: values["profile"].update(beyond={"2.0": {}}), "2.0 is not a number that may be here"),
        (lambda values: values["profile"].update(rank=3), "rank"),
        (lambda values: values["profile"].update(rank="luck"), "has a rank that is none of reap"),
    ],
)
@pytest.mark.usefixtures("known")
def test_a_profile_that_says_something_else_is_refused(dense, profiled, tmp_path, change, message):
    values = json.loads(profiled[1].read_text())
    change(values)
    (tmp_path / "p.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=message):
        shrink(dense, leave=Experts(2, plan=tmp_path / "p.json"), out=tmp_path / "small", verify=False)
    assert not (tmp_path / "small").exists()


def test_a_profile_of_other_weights_is_refused(dense, profiled, tmp_path):
    other = shutil.copytree(dense, tmp_path / "other")
    tensor("gate", lambda each: each + 1)(other)
    with pytest.raises(CheckpointError, match=r"is of another model: model\.safetensors of the") as caught:
        shrink(other, leave=Experts(2, plan=profiled[1]), out=tmp_path / "small", verify=False)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]


# ---- verification ---------------------------------------------------------------------------------------------------


def test_what_was_written_holds(dense, small):
    alone = verify_checkpoint(small)
    assert alone.ok
    assert "no source was given" in alone.unchecked[0]
    ended = run("verify", small, "--source", dense)
    assert ended.exit_code == 0, ended.output


def tensor(part, change):
    def changed(folder):
        tensors = load_file(folder / "model.safetensors")
        name = next((each for each in tensors if part in each), part)
        made = change(tensors.pop(name, None))
        save_file(tensors | ({} if made is None else {name: made.contiguous()}), folder / "model.safetensors")

    return changed


def other_experts(folder):
    values = json.loads((folder / "experts.json").read_text())
    for its in values["tensors"].values():
        if "0" in its["kept"]:
            its["kept"]["0"] = [*its["kept"]["0"][:-1], 99]
    (folder / "experts.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (tensor("experts.1.w1", lambda each: each + 1), "its bytes are not what stays of the source's"),
        (tensor("experts.1.w1", lambda each: each[1:]), "of the source stay F32"),
        (tensor("experts.5.w1", lambda _: None), "it is not here"),
        (tensor("gate", lambda each: each.flip(0)), "its bytes are not what stays of the source's"),
        (tensor("input_layernorm", lambda _: None), "does not say that it left"),
        (tensor("more", lambda _: torch.zeros(1)), "more: not in the source"),
        (changed("config.json", num_local_experts=5), "config.json: num_local_experts is 5, not 6"),
        (changed("config.json", num_experts_per_tok=1), "config.json: num_experts_per_tok is 1, not 2"),
        (changed("secateur.json", parameters={"from": 1, "to": 1}), "claims 1"),
        (changed("secateur.json", experts={"a": {"from": 8, "to": 6}}, kept={"a": [1]}), "keeps 1 experts, and says 6"),
        (changed("experts.json", gone=["lm_head.weight"]), "left, experts.json says; it is here"),
        (other_experts, "does not fit the source's shape"),
        (lambda folder: (folder / "README.md").write_text("thorns"), "README.md: its bytes are not the source's"),
        (lambda folder: (folder / "more.txt").write_text(""), "more.txt: not in the source"),
    ],
)
def test_what_does_not_hold_is_named(dense, small, tmp_path, change, problem):
    shutil.copytree(small, tmp_path / "small")
    change(tmp_path / "small")
    found = verify_checkpoint(tmp_path / "small", dense)
    assert any(problem in each for each in found.problems), found.problems


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: os.unlink(folder / "experts.json"), "experts.json: is missing"),
        (changed("experts.json", version=9), "is not 'secateur experts', version 1"),
        (changed("experts.json", tensors={"a": {"from": "a", "kept": {"9": [1]}}}), "is not a number that may be here"),
        (changed("experts.json", tensors={"a": {"from": 1, "kept": {}}}), "from must be"),
        (changed("experts.json", gone=3), "gone"),
        (changed("secateur.json", kept=[]), "kept must be an object"),
    ],
)
def test_what_is_no_record_is_refused(dense, small, tmp_path, change, message):
    shutil.copytree(small, tmp_path / "small")
    change(tmp_path / "small")
    with pytest.raises(CheckpointError, match=message):
        verify_checkpoint(tmp_path / "small", dense)


def test_experts_that_data_says_nothing_of_are_an_error_that_says_so(tmp_path):
    """Of a model that asks for values, whose weights are in files."""
    model, inputs = ZOO["mixture_jetmoe"]()
    model.save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match="data cannot rank them; say Experts"):
        shrink(tmp_path / "dense", leave=Experts(0.25), batches=[inputs] * 2, out=tmp_path / "small")
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("name", ["dbrx", "jamba", "lfm2", "longcat"])
@pytest.mark.long
def test_experts_leave_a_directory_whose_model_asks_for_values_as_in_memory(tmp_path, name):
    model, inputs = ZOO[f"mixture_{name}"]()
    model.save_pretrained(tmp_path / "dense")
    shrink(tmp_path / "dense", leave=Experts(0.25), batches=[inputs] * 2, out=tmp_path / "small")
    shrink(model, inputs, leave=Experts(0.25), batches=[inputs] * 2, uniform=True)
    mine, found = model.state_dict(), type(model).from_pretrained(tmp_path / "small").state_dict()
    assert mine.keys() == found.keys()
    for key, each in mine.items():
        torch.testing.assert_close(found[key], each, msg=lambda m, key=key: f"{key} {m}")
    assert verify_checkpoint(tmp_path / "small", tmp_path / "dense").ok
