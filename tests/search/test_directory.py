"""A directory fitted: whole or not there, a run that was killed goes on to the same bytes, hostile files are named."""

import copy
import errno
import functools
import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from secateur.checkpoints import CheckpointError, begun, open_checkpoint, verify_checkpoint
from secateur.search import Levels, choosing, directory, fit, sensitivity
from secateur.search.directory import FILE, LEVELS, _remove_stages, check_outside
from secateur.search.fitting import Units
from secateur.search.score import ModelLoss, split
from support.families import batches, make
from support.forks import interrupted
from support.stacks import contents
from support.unchanged import is_unchanged, state_of


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


def fitted(dense, out, batches=None, **given):
    given = {"budget": {"params": 0.8}, "shares": (0.25, 0.5), "finals": 1} | given
    return fit(dense, batches or text(), out=out, **given)


MLPS = {"include": "model.layers.*.mlp.*", "budget": {"params": 0.9}}
BOTH = {**MLPS, "over": ("shrink", "oneshot"), "budget": {"params": 0.75}}
KEEP = {**MLPS, "budget": None, "keep": 0.9}


@pytest.mark.parametrize("given", [BOTH, KEEP], ids=["both", "keep"])
@pytest.mark.long
def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(dense, tmp_path, monkeypatch, given):
    """Twice: by a full disk, and where it went on, by hand."""
    fitted(dense, tmp_path / "once", **given)
    verb = "oneshot" if "over" in given else "shrink"

    def not_again(*_args, **_named):
        raise AssertionError("it was chosen already")

    full = OSError(errno.ENOSPC, "No space left on device")
    for failure, said in ((full, directory.CheckpointError), (KeyboardInterrupt(), KeyboardInterrupt)):

        def stops(*_args, failure=failure, **_named):
            raise failure

        with monkeypatch.context() as patch:
            patch.setattr(directory, verb, stops)
            with pytest.raises(said):
                fitted(dense, tmp_path / "again", **given)
        assert not (tmp_path / "again").exists()
        assert (tmp_path / "again.unfinished" / "result" / "levels" / FILE).exists()
        monkeypatch.setattr(choosing.LevelSearch, "within", not_again)
        monkeypatch.setattr(choosing.LevelSearch, "kept", not_again)
    fitted(dense, tmp_path / "again", **given)
    first, second = contents(tmp_path / "once"), contents(tmp_path / "again")
    assert first.keys() == second.keys()
    assert all(first[name] == second[name] for name in first if name.endswith((".safetensors", "config.json")))
    assert {path.name for path in tmp_path.iterdir()} == {"once", "again"}


@pytest.mark.long
def test_another_budget_is_chosen_anew(dense, before, tmp_path):
    one, store = before
    two = fitted(dense, tmp_path / "two", store=shutil.copytree(store, tmp_path / "levels"), budget={"params": 0.9})
    assert one.got["params"] < two.got["params"]
    assert one.got["params"] == model_of(one.out).num_parameters()


@pytest.mark.long
def test_what_was_chosen_is_read_as_it_was_written(dense, before, tmp_path):
    one, store = before
    two = fitted(dense, tmp_path / "two", store=shutil.copytree(store, tmp_path / "levels"))
    assert one.chosen == two.chosen


@pytest.mark.parametrize("copied", [lambda made: pickle.loads(pickle.dumps(made)), copy.deepcopy])
@pytest.mark.long
def test_a_pickle_stands_alone(dense, before, tmp_path, copied):
    """Its levels are of files that may be gone."""
    _, store = before
    done = fitted(dense, tmp_path / "two", store=shutil.copytree(store, tmp_path / "levels"))
    again, model = copied(done), model_of(dense)
    shutil.rmtree(tmp_path / "levels")
    assert str(again) == str(done)
    with again.levels.assembled(model, again.choice):
        assert not is_unchanged(model, state_of(model_of(dense)))


@pytest.mark.long
def test_a_share_of_the_outputs_is_kept_by_what_is_written(dense, tmp_path):
    done = fitted(dense, tmp_path / "out", **KEEP, over=("shrink", "oneshot"))
    held = ModelLoss(model_of(dense), split(text())[1])
    written = held.of(model_of(tmp_path / "out"))
    assert written == done.finished
    assert written <= held.most(0.9)
    assert done.got["params"] < done.dense["params"]


@pytest.mark.long
def test_what_keeps_too_little_is_not_there(dense, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(directory.Executor, "lost_of", lambda *_: 1.0)
        with pytest.raises(ValueError, match=r"keeps 90\.0% of the dense model's outputs: at .* it is less"):
            fitted(dense, tmp_path / "out", **KEEP)
        patch.setattr(directory.Executor, "lost_of", lambda *_: 0.0)
        patch.setattr(ModelLoss, "finished", lambda *_: (1.0, None))
        with pytest.raises(ValueError, match=r"the written model keeps less than 90\.0%.* and was deleted"):
            fitted(dense, tmp_path / "out", **KEEP)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda said: said.update(format="other"), "format is not 'secateur choice', version 2"),
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
    with pytest.raises(
        ValueError, match=rf"chosen\.json: damaged: .*{message}.*Delete it: the choice is then made again"
    ):
        fitted(dense, tmp_path / "two", store=store)
    assert not (tmp_path / "two").exists()


# ---- what lies beside it --------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def measured(dense):
    """What `sensitivity` wrote, for both verbs; to be copied."""
    store = dense.with_name("measured")
    sensitivity(model_of(dense), split(text())[0], shares=(0.25, 0.5), over=("shrink", "oneshot"), store=store)
    return store


@pytest.mark.parametrize("name", ["out.levels", "out.unfinished", "out"])
@pytest.mark.long
def test_what_sensitivity_wrote_stays_whatever_its_name(dense, measured, tmp_path, monkeypatch, name):
    """Named by the way there, or as a link to it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    kept = shutil.copytree(measured, tmp_path / "elsewhere" / "kept")
    shutil.copytree(measured, tmp_path / name)
    (tmp_path / "link").symlink_to(name)
    before = contents(kept)
    for levels in ("link", f"elsewhere/../{name}"):
        if name == "out.levels":
            shutil.rmtree(fitted(dense, "out", shares=None, levels=levels).out)
        else:
            with pytest.raises(ValueError, match=r"[Cc]hoose another"):
                fitted(dense, "out", shares=None, levels=levels)
    assert contents(tmp_path / name) == contents(kept) == before
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "link", name}


@pytest.mark.parametrize("given", ["levels", "store", "as they are"])
@pytest.mark.long
def test_levels_in_the_folder_of_a_run_are_not_what_it_begins_with(dense, tmp_path, monkeypatch, given):
    """Which is removed in the end."""
    with interrupted(directory, "shrink"):
        fitted(dense, tmp_path / "out")
    lie = tmp_path / "out.unfinished" / "result" / "levels"
    named = {"store": lie} if given == "store" else {"levels": Levels.load(lie) if given == "as they are" else lie}
    before = contents(lie)
    message = "was begun with levels " if given == "as they are" else "lies in .*out.unfinished, which this run"
    with pytest.raises(ValueError, match=message):
        fitted(dense, tmp_path / "out", **({"shares": None} if given == "as they are" else {}), **named)
    assert contents(lie) == before


@pytest.mark.long
def test_a_choice_is_of_what_was_asked_and_of_these_batches(dense, measured, tmp_path, monkeypatch):
    """Of levels that are given the digest says nothing of it."""
    given = {"shares": None, "levels": measured, "store": tmp_path / "store"}
    fitted(dense, tmp_path / "units", over="shrink", **given)
    fitted(dense, tmp_path / "zeros", over="oneshot", **given)
    zeros = load_file(tmp_path / "zeros" / "model.safetensors")
    whole = load_file(dense / "model.safetensors")
    assert {name: each.shape for name, each in zeros.items()} == {name: each.shape for name, each in whole.items()}
    left = sum(int(each.count_nonzero()) for each in zeros.values())
    assert left <= 0.81 * sum(each.numel() for each in whole.values())

    monkeypatch.setattr(choosing.LevelSearch, "within", None)
    given |= {"over": "oneshot"}
    fitted(dense, tmp_path / "again", **given)
    others = [
        {"batches": text(5)[1:]},
        {"include": "model.layers.0.*"},
        {"exclude": "model.layers.1.*"},
        {"seed": 1},
        {"score": "change"},
    ]
    for number, other in enumerate(others):
        with interrupted(choosing.LevelSearch, "within"):
            fitted(dense, tmp_path / str(number), **{**given, **other})


@pytest.mark.long
def test_a_choice_by_a_function_is_not_that_of_no_score(dense, tmp_path):
    given = {**MLPS, "store": tmp_path / "store"}
    fitted(dense, tmp_path / "one", score=lambda model: 1.0, **given)
    with interrupted(choosing.LevelSearch, "within"):
        fitted(dense, tmp_path / "two", **given)


@pytest.mark.long
def test_of_another_choice_what_one_verb_made_is_removed(dense, tmp_path):
    with interrupted(directory, "oneshot"):
        fitted(dense, tmp_path / "out", **BOTH)
    (before,) = (tmp_path / "out.unfinished" / "result").glob("shrunk-*")
    with interrupted(directory, "oneshot"):
        fitted(dense, tmp_path / "out", **BOTH | {"budget": {"params": 0.85}})
    (after,) = (tmp_path / "out.unfinished" / "result").glob("shrunk-*")
    assert before != after


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.long
def test_what_one_verb_made_is_made_again_where_it_is_damaged(dense, tmp_path, name):
    with interrupted(directory, "oneshot"):
        fitted(dense, tmp_path / "out", **BOTH)
    (smaller,) = (tmp_path / "out.unfinished" / "result").glob("shrunk-*")
    text = bytearray((smaller / name).read_bytes())
    text[-2] ^= 1
    (smaller / name).write_bytes(text)
    fitted(dense, tmp_path / "out", **BOTH)
    assert verify_checkpoint(tmp_path / "out", dense).ok


def unlike_the_choice(monkeypatch):
    """Of the verb that takes units out: fewer stay than were chosen, so that the budget holds all the same."""
    original = directory.shrink

    def other(*args, allocate, **named):
        counts = {name: count - 2 for name, count in allocate.counts.items()}
        return original(*args, allocate=Units(counts), **named)

    monkeypatch.setattr(directory, "shrink", other)


@pytest.mark.long
def test_what_keeps_other_units_than_were_chosen_is_not_there(dense, tmp_path, monkeypatch):
    """And nothing else: the same choice would fail again."""
    with monkeypatch.context() as patch:
        unlike_the_choice(patch)
        with pytest.raises(
            ValueError, match=r"gate_proj.* the search chose .* but shrink can keep only .*.*Nothing was"
        ):
            fitted(dense, tmp_path / "out", **BOTH)
        assert [path.name for path in (tmp_path / "out.unfinished" / "result").iterdir()] == ["levels"]
        assert not (tmp_path / "out.unfinished" / "result" / "levels" / FILE).exists()
        shutil.rmtree(tmp_path / "out.unfinished")
        with pytest.raises(ValueError, match="the search chose"):
            fitted(dense, tmp_path / "out", **BOTH, store=tmp_path / "store")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert (tmp_path / "store" / "levels.json").exists()
    assert not (tmp_path / "store" / FILE).exists()


@pytest.mark.long
def test_what_shrink_reaches_is_reached(dense, tmp_path):
    """The stream's width has no levels."""
    done = fitted(dense, tmp_path / "out", budget={"params": 0.5}, shares=(0.1,))
    assert done.taken == "shrink, by itself"
    assert verify_checkpoint(tmp_path / "out", dense).ok
    written = model_of(tmp_path / "out")
    assert sum(each.numel() for each in written.parameters()) == done.got["params"] <= 0.5 * done.dense["params"]
    assert written.config.hidden_size < model_of(dense).config.hidden_size


@pytest.mark.long
def test_an_impossible_budget_leaves_levels(dense, tmp_path):
    with pytest.raises(
        ValueError, match=r"cannot come to 60 .* pass shares= with larger ones(.|\n)* is kept in .*remove it"
    ):
        fitted(dense, tmp_path / "out", budget={"params": 0.01})
    shutil.rmtree(tmp_path / "out.unfinished")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        fitted(dense, tmp_path / "out", store=tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "file").unlink()
    with interrupted(directory, "shrink"):
        fitted(dense, tmp_path / "out")
    before = contents(tmp_path / "out.unfinished" / "result" / "levels")
    with pytest.raises(ValueError, match="cannot come to 60"):
        fitted(dense, tmp_path / "out", budget={"params": 0.01})
    with pytest.raises(ValueError, match=r"was begun with shares .*\. Run the same command again to finish it, or re"):
        fitted(dense, tmp_path / "out", shares=(0.3, 0.6))
    assert contents(tmp_path / "out.unfinished" / "result" / "levels") == before


@pytest.mark.long
def test_a_result_that_nobody_looked_at_yet_is_made_anew(dense, tmp_path):
    """Killed between the last verb and the look at what it wrote."""
    with interrupted(directory, "_check_counts"):
        fitted(dense, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (result,) = (tmp_path / "out.unfinished" / "result").glob("result-*")
    (result / "config.json").write_text("damaged")
    fitted(dense, tmp_path / "out")
    assert model_of(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.long
def test_a_model_that_cannot_be_watched_without_weights_is_an_error_of_its_own(tmp_path, monkeypatch):
    model = make("llama")
    model.save_pretrained(tmp_path / "llama")
    forward = type(model).forward

    @functools.wraps(forward)
    def asking(self, *args, **kwargs):
        if self.lm_head.weight.is_meta or not self.lm_head.weight.any():  # or of zeros
            raise NotImplementedError("a kernel")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", asking)
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot be watched on the meta device"):
        fitted(tmp_path / "llama", tmp_path / "out", batches("llama"), budget={"params": 0.9}, shares=(0.5,))


# What `fit` has in the directory beside the one that it writes: what took long stays, what it made is removed.


ASKED = {"batches": "a", "shares": [0.5]}


@pytest.fixture
def source(tmp_path):
    make("llama").save_pretrained(tmp_path / "dense")
    return open_checkpoint(tmp_path / "dense")


def working(out, source, error, levels=True):
    """A run that fails when it has levels, or before."""
    with begun(out, ASKED, source, copied=False) as run:
        run.kept, run.hint = run.folder, " Levels are kept."
        (run.folder / LEVELS).mkdir(exist_ok=True)
        if levels:
            (run.folder / LEVELS / "levels.json").write_text("{}")
        raise error


@pytest.mark.parametrize("error", [CheckpointError("full"), OSError("away"), KeyboardInterrupt(), TypeError("none")])
def test_after_any_error_levels_stay_and_without_them_nothing(source, tmp_path, error):
    out = tmp_path / "out"
    with pytest.raises(type(error)):
        working(out, source, error, levels=False)
    assert not out.with_name("out.unfinished").exists()
    with pytest.raises(type(error)):
        working(out, source, error)
    with begun(out, ASKED, source, copied=False) as run:
        assert (run.folder / LEVELS / "levels.json").exists()
        (run.folder / "result").mkdir()
        run.publish(run.folder / "result")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out")) == ["out"]


def test_an_error_of_what_was_asked_says_that_levels_stay(source, tmp_path):
    with pytest.raises(ValueError, match=r"^impossible\. Levels are kept\.$"):
        working(tmp_path / "out", source, ValueError("impossible."))
    other = begun(tmp_path / "out", {**ASKED, "shares": [0.6]}, source, copied=False)
    with pytest.raises(CheckpointError, match=r"shares \[0\.5\], not \[0\.6\]\. Run the same command again"), other:
        pass


def test_directories_of_other_choices_are_removed(tmp_path):
    for name in ("levels", "shrunk-0123", "shrunk-0123.unfinished", "result-4567"):
        (tmp_path / name).mkdir()
    _remove_stages(tmp_path, but="0123")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["levels", "shrunk-0123", "shrunk-0123.unfinished"]
    _remove_stages(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["levels"]


def test_folders_that_this_run_moves_are_not_named_for_anything_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out, folder = tmp_path / "out", tmp_path / "out.unfinished"
    (folder / "levels").mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder / "levels")
    for path in (folder, folder / "levels", tmp_path / "link", tmp_path / "x" / ".." / "out"):
        with pytest.raises(CheckpointError, match=r"store lies in .*, which this run makes and moves; choose another"):
            check_outside(out, store=path)
    check_outside(out, store=tmp_path / "out.levels", levels=None)
    shutil.rmtree(folder)
