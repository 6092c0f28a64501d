"""What `fit` has in the directory beside the one that it writes: what took long stays, what it made is removed."""

import shutil

import pytest

from secateur.checkpoints import CheckpointError, begun, open_checkpoint
from secateur.search.directory import LEVELS, _remove_stages, check_outside
from support.families import make

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
