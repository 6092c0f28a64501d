"""The place beside a directory that is fitted: one process is in it, it says what it is of, it removes only its own."""

import json
import shutil

import pytest

from secateur.checkpoints import LOCK, CheckpointError, locked
from secateur.search.directory import NOTE, FitWorkspace, check_outside, working

ASKED = {"source": "a", "shares": [0.5]}


def begun(out, request=ASKED):
    with pytest.raises(KeyboardInterrupt), working(out, request) as place:
        place.levels.mkdir()
        (place.levels / "levels.json").write_text("{}")
        place.stage("shrunk", "0" * 64).mkdir()
        raise KeyboardInterrupt
    return out.with_name(f"{out.name}.unfinished")


def refused(out, message, request=ASKED):
    with pytest.raises(CheckpointError, match=message), working(out, request):
        pass


def test_one_process_at_a_time(tmp_path):
    folder = begun(tmp_path / "out")
    with locked(folder):
        refused(tmp_path / "out", r"out\.unfinished: another process is at work here; wait for it\.$")
        assert (folder / "levels" / "levels.json").exists()
    with working(tmp_path / "out", ASKED) as place:
        with pytest.raises(CheckpointError, match="another process"), working(tmp_path / "out", ASKED):
            pass
        place.stage("result", "1" * 64).mkdir()
        place.publish(place.stage("result", "1" * 64))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_run_that_fails_leaves_what_there_was(tmp_path):
    with pytest.raises(ValueError, match="impossible"), working(tmp_path / "out", ASKED) as place:
        place.levels.mkdir()
        raise ValueError("impossible")
    assert not [*tmp_path.iterdir()]
    folder = begun(tmp_path / "out")
    before = sorted(folder.rglob("*"))
    for error in (ValueError, CheckpointError, TypeError):
        with pytest.raises(error, match="impossible"), working(tmp_path / "out", ASKED):
            raise error("impossible")
    assert sorted(folder.rglob("*")) == before


def test_levels_stay_for_another_budget_and_the_error_says_so(tmp_path):
    message = (
        r"^impossible\. What was measured is kept in .*out\.unfinished, for the same command with another budget; "
    )
    message += "remove it to give other options"
    with pytest.raises(ValueError, match=message), working(tmp_path / "out", ASKED) as place:
        place.levels.mkdir()
        (place.levels / "one.safetensors").touch()
        raise ValueError("impossible.")
    with working(tmp_path / "out", ASKED) as place:
        assert place.has_levels


def test_after_a_full_disk_stays_what_a_run_can_go_on_with(tmp_path):
    for error in (CheckpointError, OSError, KeyboardInterrupt):
        with pytest.raises(error), working(tmp_path / "out", ASKED) as place:
            place.levels.mkdir()
            raise error
        assert not place.folder.exists()
    with pytest.raises(CheckpointError), working(tmp_path / "out", ASKED) as place:
        place.levels.mkdir()
        (place.levels / "one.safetensors").touch()
        raise CheckpointError("full")
    assert (place.levels / "one.safetensors").exists()


def test_another_request_is_named(tmp_path):
    begun(tmp_path / "out")
    asked = {**ASKED, "source": "b", "pattern": "2:4"}
    refused(tmp_path / "out", "a fit of another source, another pattern was stopped here", asked)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda said: said.update(format="other"), "format is not 'secateur fit' of version 1"),
        (lambda said: said.update(more=1), "more is not known"),
        (lambda said: said.update(asked=[]), "asked must be an object"),
    ],
)
def test_a_damaged_note_is_named(tmp_path, change, message):
    folder = begun(tmp_path / "out")
    said = json.loads((folder / NOTE).read_text())
    change(said)
    (folder / NOTE).write_text(json.dumps(said))
    refused(tmp_path / "out", rf"fit\.json: damaged: {message}.* Remove .* to start over")


@pytest.mark.parametrize("name", ["levels.json", "levels", "result-0123456789ab", "journal.json", ".secateur.fit"])
def test_what_no_fit_has_put_there_is_refused(tmp_path, name):
    """Without the note not even what is called like its own; a lock alone is of a run that was killed at once."""
    folder = tmp_path / "out.unfinished"
    folder.mkdir()
    (folder / LOCK).touch()
    (folder / name).mkdir()
    refused(tmp_path / "out", "which no unfinished fit has put there; move it, or choose another name")
    (folder / name).rmdir()
    with working(tmp_path / "out", ASKED) as place:
        place.remove()
    assert not folder.exists()


def test_what_came_meanwhile_stays(tmp_path):
    with working(tmp_path / "out", ASKED) as place:
        (place.folder / "mine.txt").write_text("mine")
        (tmp_path / "away").mkdir()
        (tmp_path / "away" / "mine.txt").write_text("mine")
        place.levels.symlink_to(tmp_path / "away")
        place.stage("result", "1" * 64).mkdir()
        (tmp_path / "out").mkdir()
        with pytest.raises(CheckpointError, match="was created by somebody else in the meantime"):
            place.publish(place.stage("result", "1" * 64))
        (tmp_path / "out").rmdir()
        place.publish(place.stage("result", "1" * 64))
    assert (tmp_path / "out.unfinished" / "mine.txt").read_text() == "mine"
    assert (tmp_path / "away" / "mine.txt").read_text() == "mine"
    shutil.rmtree(tmp_path / "out")
    with (
        pytest.raises(CheckpointError, match="holds levels, which no unfinished fit"),
        working(tmp_path / "out", ASKED),
    ):
        pass


def test_stages_of_another_choice_are_removed(tmp_path):
    begun(tmp_path / "out")
    with working(tmp_path / "out", ASKED) as place:
        assert place.stage("shrunk", "0" * 64).exists()
        assert not place.stage("shrunk", "1" * 64).exists()
        assert not place.stage("shrunk", "0" * 64).exists()


def test_folders_that_this_run_moves_are_not_named_for_anything_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = begun(tmp_path / "out")
    (tmp_path / "link").symlink_to(folder / "levels")
    out = FitWorkspace(tmp_path / "out").out
    for path in (folder, folder / "levels", tmp_path / "link", tmp_path / "x" / ".." / "out"):
        with pytest.raises(CheckpointError, match=r"store lies in .*, which this run makes and moves; choose another"):
            check_outside(out, store=path)
    check_outside(out, store=tmp_path / "out.levels", levels=None)
