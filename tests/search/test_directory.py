"""A directory fitted: whole or not there, a run that was killed goes on to the same bytes, hostile files are named."""

import errno
import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from secateur.search import directory, fit_checkpoint
from secateur.search.directory import FILE
from secateur.search.held_back import HeldBack, split
from support.families import make
from support.stacks import contents


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A directory that no test changes."""
    folder = tmp_path_factory.mktemp("fitted") / "dense"
    make("llama").save_pretrained(folder)
    return folder


def model_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def before(dense):
    """What a run came to, and the store it left: to be read, and copied."""
    store = dense.with_name("levels")
    return fitted(dense, dense.with_name("one"), store=store), store


def text(count=4):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 30, (1, 12), generator=generator) for _ in range(count)]


def fitted(dense, out, **given):
    given = {"budget": {"params": 0.8}, "shares": (0.25, 0.5), "evaluations": 5, "finals": 1} | given
    return fit_checkpoint(dense, out, text(), model=model_of(dense), **given)


BOTH = {"over": ("shrink", "oneshot"), "budget": {"params": 0.6}}


KEEP = {"budget": None, "keep": 0.9, "evaluations": 10}


@pytest.mark.parametrize("given", [{}, BOTH, KEEP], ids=["one", "both", "keep"])
def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(dense, tmp_path, monkeypatch, given):
    """Twice: by a full disk, and where it went on, by hand."""
    fitted(dense, tmp_path / "once", **given)
    verb = "oneshot" if "over" in given else "shrink_checkpoint"

    def not_again(*_args, **_named):
        raise AssertionError("it was chosen already")

    for failure in (OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()):

        def stops(*_args, failure=failure, **_named):
            raise failure

        with monkeypatch.context() as patch:
            patch.setattr(directory, verb, stops)
            with pytest.raises(type(failure)):
                fitted(dense, tmp_path / "again", **given)
        assert not (tmp_path / "again").exists()
        assert (tmp_path / "again.levels" / FILE).exists()
        monkeypatch.setattr(directory.Choosing, "within", not_again)
        monkeypatch.setattr(directory.Choosing, "kept", not_again)
    fitted(dense, tmp_path / "again", **given)
    first, second = contents(tmp_path / "once"), contents(tmp_path / "again")
    assert first.keys() == second.keys()
    assert all(first[name] == second[name] for name in first if name.endswith((".safetensors", "config.json")))
    assert {path.name for path in tmp_path.iterdir()} == {"once", "again"}


def test_another_budget_is_chosen_anew(dense, before, tmp_path):
    one, store = before
    two = fitted(dense, tmp_path / "two", store=shutil.copytree(store, tmp_path / "levels"), budget={"params": 0.9})
    assert one.got["params"] < two.got["params"]
    assert one.got["params"] == model_of(one.out).num_parameters()


def test_what_was_chosen_is_read_as_it_was_written(dense, before, tmp_path):
    one, store = before
    two = fitted(dense, tmp_path / "two", store=shutil.copytree(store, tmp_path / "levels"))
    assert one.chosen == two.chosen


def test_a_share_of_the_outputs_is_kept_by_what_is_written(dense, tmp_path):
    done = fitted(dense, tmp_path / "out", **KEEP, over=("shrink", "oneshot"))
    held = HeldBack(model_of(dense), split(text(), None)[1])
    written = held.of(model_of(tmp_path / "out"))
    assert written == done.finished
    assert written <= held.most(0.9)
    assert done.got["params"] < done.dense["params"]


def test_what_keeps_too_little_is_not_there(dense, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(directory.Carrying, "lost_of", lambda *_: 1.0)
        with pytest.raises(ValueError, match=r"keeps 90\.0% of the dense model's outputs: at .* it is less"):
            fitted(dense, tmp_path / "out", **KEEP)
        patch.setattr(directory.Carrying, "lost_of", lambda *_: 0.0)
        patch.setattr(directory.HeldBack, "finished_by", lambda *_: (1.0, None))
        with pytest.raises(ValueError, match=r"what was written keeps less than 90\.0%.* and was deleted"):
            fitted(dense, tmp_path / "out", **KEEP)
    assert not (tmp_path / "out").exists()


def test_something_in_the_way_is_said_before_the_work(dense, tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "make_levels", None)
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="already exists; nothing is overwritten"):
        fitted(dense, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda said: said.update(format="other"), "format is not 'secateur choice' of version 1"),
        (lambda said: said.update(more=1), "more is not known"),
        (lambda said: said["chosen"].pop("loss"), "chosen.loss is missing"),
        (lambda said: said["chosen"].update(choice={"nothing": 1}), "chosen.choice.nothing is no level that there is"),
        (lambda said: said["chosen"]["choice"].update(dict.fromkeys(said["chosen"]["choice"], 99)), "is no level that"),
        (lambda said: said["chosen"].update(limits={}), "chosen.limits is not of params"),
        (lambda said: said["chosen"].update(compared="taste"), "chosen.compared is none of kl, cosine, change"),
        (lambda said: said["chosen"].update(curve=[{"share": "all"}]), r"chosen.curve\[0\].share must be a number"),
        (lambda said: said["chosen"].update(other=1), "chosen.other is not known"),
        (lambda said: said["chosen"].update(taken="luck"), "chosen.taken is none of the finals"),
        (lambda said: said["chosen"].update(loss=10**400), "chosen.loss must be a number, not 1000"),
    ],
)
def test_a_damaged_choice_is_named(dense, before, tmp_path, change, message):
    store = shutil.copytree(before[1], tmp_path / "levels")
    said = json.loads((store / FILE).read_text())
    change(said)
    (store / FILE).write_text(json.dumps(said))
    with pytest.raises(ValueError, match=rf"chosen\.json: damaged: .*{message}.*Delete it: it is chosen anew"):
        fitted(dense, tmp_path / "two", store=store)
    assert not (tmp_path / "two").exists()


def test_branches_and_experts_are_for_other_verbs(dense, tmp_path):
    with pytest.raises(ValueError, match="take branches out first, with secateur shrink"):
        fitted(dense, tmp_path / "out", over=("shrink", "branches"))
    assert not [*tmp_path.glob("out*")]
