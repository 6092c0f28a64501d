"""A directory that is being made: killed at any step it goes on to the same bytes, or says in a line why not."""

import hashlib
import json
import os
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from secateur.checkpoints import CheckpointError, open_checkpoint, sha256_of
from secateur.checkpoints import run as resumable
from secateur.checkpoints.run import JOURNAL, LOCK, RESULT
from support.forks import forked

REQUEST = {"sparsity": 0.5, "solver": "admm"}
BLOCKS = ("first", "second")


@dataclass(frozen=True)
class Block:
    name: str


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "dense"
    (folder / "below").mkdir(parents=True)
    save_file({name: torch.ones(2) for name in BLOCKS}, folder / "model.safetensors")
    for name in ("tokenizer.json", "generation_config.json", "secateur.json", "below/merges.txt"):
        (folder / name).write_text("{}")
    return folder


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def make(source, out, stop_after=None, meanwhile=lambda: None, request=REQUEST):
    """What `oneshot` does with a directory, without a model."""
    with resumable.begun(out, request, open_checkpoint(source)) as run:
        done = [block.name for block in run.done(Block, BLOCKS)]
        run.stage("count", int, lambda: len(BLOCKS))
        for block in BLOCKS:
            if block not in done:
                with open(run.folder / "model.safetensors", "r+b") as file:
                    file.seek(8 * BLOCKS.index(block) - 12, os.SEEK_END)
                    file.write(bytes(4))
                run.written[block] = sha256_of(open_checkpoint(run.folder), block)
                meanwhile()
                run.note(Block(block))
            if block == stop_after:
                raise KeyboardInterrupt
        run.add("secateur.json", json.dumps({"blocks": BLOCKS}))
        run.publish()


def begun(source, out):
    with pytest.raises(KeyboardInterrupt):
        make(source, out, stop_after="first")
    return out.with_name(f"{out.name}.unfinished")


def killed_at(number, source, out):
    """`make` in a process that ends at the n-th time that it does something with a file."""
    count = 0

    def watch(event, arguments):
        nonlocal count
        if event in ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.chmod", "shutil.rmtree"):
            name = arguments[0]
            if isinstance(name, str | os.PathLike) and str(out.parent) in str(name):
                count += 1
                if count == number:
                    os._exit(9)

    def body():
        sys.addaudithook(watch)
        make(source, out)

    return os.waitstatus_to_exitcode(forked(body))


@pytest.mark.long
def test_killed_at_any_step_it_goes_on_to_the_same_bytes(source, tmp_path):
    for name in ("tokenizer.json", "generation_config.json"):  # two more are copied, which is enough
        (source / name).unlink()
    make(source, tmp_path / "whole")
    whole = contents(tmp_path / "whole")
    number, found = 0, 9
    while found == 9:
        number += 1
        out = tmp_path / f"out{number}"
        found = killed_at(number, source, out)
        if not out.exists():
            make(source, out)
            assert sorted(each.name for each in tmp_path.iterdir()) == ["dense", out.name, "whole"], number
        assert contents(out) == whole, number
        shutil.rmtree(out)
        shutil.rmtree(tmp_path / f"{out.name}.unfinished", ignore_errors=True)
    assert found == 0
    assert number > 40, "there are so many steps"


@pytest.mark.parametrize("change", [lambda path: path.write_text("{ }"), os.remove, lambda path: os.truncate(path, 0)])
@pytest.mark.parametrize("name", ["tokenizer.json", "below/merges.txt"])
def test_a_copied_file_that_is_damaged_is_copied_again_by_a_run_that_goes_on(source, tmp_path, name, change):
    make(source, tmp_path / "whole")
    place = begun(source, tmp_path / "out")
    change(place / RESULT / name)
    make(source, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("at", [0, -12, -8])
def test_a_copied_tensor_that_is_damaged_is_copied_again_and_a_written_one_is_named(source, tmp_path, at):
    """The header, the tensor that is not yet written, and the one that is."""
    make(source, tmp_path / "whole")
    place = begun(source, tmp_path / "out")
    path = place / RESULT / "model.safetensors"
    text = bytearray(path.read_bytes())
    text[at] ^= 1
    path.write_bytes(text)
    if at == -12:
        with pytest.raises(
            CheckpointError, match=r"result: first is not what was written there\. Remove .* to start o"
        ):
            make(source, tmp_path / "out")
        shutil.rmtree(place)
    make(source, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_folder_that_is_left_of_a_published_run_is_begun_anew(source, tmp_path):
    out = tmp_path / "out"
    place = begun(source, out)
    (place / RESULT).rename(out)  # as a kill after the last rename leaves it
    with pytest.raises(CheckpointError, match="out: already exists"):
        make(source, out)
    shutil.rmtree(out)
    make(source, out)
    make(source, tmp_path / "whole")
    assert contents(out) == contents(tmp_path / "whole")
    assert not place.exists()


def test_half_a_file_that_a_killed_run_was_writing_is_not_published(source, tmp_path):
    place = begun(source, tmp_path / "out")
    for name in (".journal.json.abc.tmp", ".added.abc.tmp", "added"):
        (place / name).write_text("{")
    make(source, tmp_path / "out")
    assert contents(tmp_path / "out").keys() == contents(source).keys()
    assert not place.exists()


def rewritten(path):
    """Other bytes, as many."""
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")


def with_its_old_times(path):
    before = path.stat()
    rewritten(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(path):
    other = path.with_name("other")
    shutil.copy2(path, other)
    with_its_old_times(other)
    other.replace(path)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "generation_config.json", "below/merges.txt"])
@pytest.mark.parametrize("change", [rewritten, with_its_old_times, replaced])
def test_a_source_that_changed_is_refused_by_name(source, tmp_path, name, change):
    place = begun(source, tmp_path / "out")
    kept = (source / name).read_bytes()
    change(source / name)
    before = contents(place)
    with pytest.raises(CheckpointError, match=rf"dense/{name}: changed since .*out\.unfinished was begun; put it back"):
        make(source, tmp_path / "out")
    assert contents(place) == before
    assert not (tmp_path / "out").exists()
    (source / name).write_bytes(kept)
    make(source, tmp_path / "out")
    make(source, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_files_that_came_or_went_are_refused_by_name(source, tmp_path):
    begun(source, tmp_path / "out")
    (source / "below/added.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"dense/below/added.json: is new since"):
        make(source, tmp_path / "out")
    (source / "below/added.json").unlink()
    (source / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"dense/tokenizer.json: is gone since"):
        make(source, tmp_path / "out")


def test_a_source_that_looks_as_it_did_is_not_read_and_a_moved_one_is_compared(source, tmp_path, monkeypatch):
    begun(source, tmp_path / "out")
    read = []
    original = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, kind: read.append(file.name) or original(file, kind))
    begun(source, tmp_path / "out")
    copied = tmp_path / "out.unfinished"  # whose small files are looked at each time
    assert not [each for each in read if not Path(each).is_relative_to(copied)]
    moved = tmp_path / "moved"
    shutil.copytree(source, moved)
    begun(moved, tmp_path / "out")
    assert len([each for each in read if Path(each).is_relative_to(moved)]) == len(contents(source))
    read.clear()
    make(moved, tmp_path / "out")
    assert not [each for each in read if not Path(each).is_relative_to(copied)], "the moved files are known now"


def test_a_source_that_changes_during_the_run_does_not_count(source, tmp_path):
    out, weights = tmp_path / "out", source / "model.safetensors"
    kept = weights.read_bytes()
    with pytest.raises(CheckpointError, match=r"model.safetensors: changed since"):
        make(source, out, meanwhile=lambda: rewritten(weights))
    weights.write_bytes(kept)
    assert json.loads((tmp_path / "out.unfinished" / JOURNAL).read_text())["blocks"] == []
    make(source, out)
    make(source, tmp_path / "whole")
    assert contents(out) == contents(tmp_path / "whole")


def test_a_source_that_changes_while_it_is_copied_is_refused(source, tmp_path, monkeypatch):
    original = resumable.copy_tree

    def copied(*arguments):
        yield from original(*arguments)
        rewritten(source / "tokenizer.json")

    monkeypatch.setattr(resumable, "copy_tree", copied)
    with pytest.raises(CheckpointError, match=r"tokenizer.json: changed while it was copied"):
        make(source, tmp_path / "out")
    assert not (tmp_path / "out.unfinished").exists()


def folder_of(tmp_path, *names):
    place = tmp_path / "out.unfinished"
    place.mkdir()
    for name in names:
        (place / name).write_text("precious")
    return place


def linked(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/note.txt").write_text("precious")
    (tmp_path / "out.unfinished").symlink_to(tmp_path / "elsewhere")


def linked_within(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (folder_of(tmp_path, JOURNAL) / RESULT).symlink_to(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (lambda folder: folder_of(folder, "note.txt"), "holds note.txt, which no unfinished run has put there"),
        (lambda folder: folder_of(folder, "note.txt", LOCK), "holds note.txt"),
        (lambda folder: folder_of(folder, "note.txt", LOCK, JOURNAL), "holds note.txt"),
        (lambda folder: folder_of(folder, RESULT), "holds result"),
        (lambda folder: folder_of(folder, JOURNAL), "journal.json: damaged: not valid JSON"),
        (lambda folder: (folder_of(folder) / RESULT).mkdir(), "holds result"),
        (lambda folder: (folder_of(folder) / "below").mkdir(), "holds below"),
        (lambda folder: (folder / "out.unfinished").write_text("precious"), "no folder of an unfinished run"),
        (lambda folder: (folder / "out.unfinished").symlink_to(folder / "nowhere"), "no folder of an unfinished run"),
        (linked, "no folder of an unfinished run"),
        (linked_within, "holds result"),
    ],
)
def test_what_is_not_its_own_is_not_touched(source, tmp_path, put, message):
    put(tmp_path)

    def state():
        return sorted(
            (str(path), path.is_symlink(), path.read_bytes() if path.is_file() else b"")
            for path in tmp_path.rglob("*")
            if path.name != LOCK
        )

    before = state()
    with pytest.raises(CheckpointError, match=rf"out\.unfinished.*{message}") as caught:
        make(source, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert state() == before


def test_a_source_with_folders_of_our_names(source, tmp_path):
    for name in (".secateur", RESULT, ".git/below"):
        (source / name).mkdir(parents=True)
        (source / name / JOURNAL).write_text("theirs")
    make(source, tmp_path / "out")
    assert (tmp_path / "out/.secateur" / JOURNAL).read_text() == "theirs"
    assert (tmp_path / "out" / RESULT / JOURNAL).read_text() == "theirs"
    assert not (tmp_path / "out/.git").exists()


def test_another_process_ends_while_this_one_begins(source, tmp_path, monkeypatch):
    original = resumable.locked

    def late(run):
        (tmp_path / "out").mkdir()
        return original(run)

    monkeypatch.setattr(resumable, "locked", late)
    with pytest.raises(CheckpointError, match="out: already exists"):
        make(source, tmp_path / "out")
    assert not (tmp_path / "out.unfinished").exists()


# ---- damaged journals ---------------------------------------------------------------------------------------------


def resealed(journal):
    journal["sha256"] = resumable._digest(journal)
    return json.dumps(journal).encode()


def with_field(*place, value=None, drop=False):
    """The journal with one field changed, and its sum put right."""

    def damage(text):
        journal = json.loads(text)
        holder = journal
        for key in place[:-1]:
            holder = holder[key]
        if drop:
            del holder[place[-1]]
        else:
            holder[place[-1]] = value
        return resealed(journal)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: b"", "not valid JSON"),
        (lambda text: text[: len(text) // 2], "not valid JSON"),
        (lambda text: text.replace(b"sparsity", b"\xff\xfe"), "not valid JSON"),
        (lambda text: b"[]", "not a JSON object"),
        (lambda text: b"null", "not a JSON object"),
        (lambda text: b"{}", "format is not 3"),
        (lambda text: b'{"a":' * 50_000 + b"1" + b"}" * 50_000, r"not valid JSON \(nested too deeply\)"),
        (lambda text: text.replace(b'"blocks"', b'"facts"'), "facts is there twice"),
        (lambda text: text.replace(b'"first"', b'"other"'), "sha256 is not that of the rest"),
        (lambda text: text.replace(b'"count": 2', b'"count": 3'), "sha256 is not that of the rest"),
        (with_field("format", value=1), "format is not 3"),
        (with_field("more", value=1), "more is not known"),
        (with_field("request", value=[]), "request must be an object"),
        (with_field("request", drop=True), "request is missing"),
        (with_field("copied", value="yes"), "copied must be true or false"),
        (with_field("blocks", value={}), "blocks must be a list"),
        (with_field("blocks", value=["first"]), r"blocks\[0\] must be an object"),
        (with_field("facts", value=None), "facts must be an object, not null"),
        (with_field("source", value=3), "source must be an object"),
        (with_field("source", "tokenizer.json", "inode", value=-1), "source.tokenizer.json.inode must be .* not -1"),
        (with_field("source", "tokenizer.json", "sha256", value=7), "source.tokenizer.json.sha256 must be a string"),
        (with_field("source", "tokenizer.json", drop=True), None),
    ],
)
def test_a_damaged_journal_is_refused_in_one_line(source, tmp_path, damage, message):
    place = begun(source, tmp_path / "out")
    journal = place / JOURNAL
    journal.write_bytes(damage(journal.read_bytes()))
    before = contents(place)
    expected = "tokenizer.json: is new since" if message is None else rf"journal\.json: damaged: {message}"
    with pytest.raises(CheckpointError, match=expected) as caught:
        make(source, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert "emove" in str(caught.value)
    assert "to start over" in str(caught.value)
    assert contents(place) == before


def json_or_none(text):
    try:
        return json.loads(text)
    except ValueError:
        return None


def test_a_journal_with_any_other_byte_is_refused_or_says_the_same(source, tmp_path):
    place = begun(source, tmp_path / "out")
    whole = (place / JOURNAL).read_bytes()
    chance = random.Random(0)
    refused = 0
    for _ in range(300):
        text = bytearray(whole)
        at = chance.randrange(len(text))
        change = chance.randrange(4)
        if change == 0:
            text[at] = chance.randrange(256)
        elif change == 1:
            del text[at : at + chance.randrange(1, 20)]
        elif change == 2:
            text[at:at] = bytes(chance.choices(b'0123456789"{}[],:ae-', k=chance.randrange(1, 5)))
        else:
            text[at] ^= 1 << chance.randrange(8)
        (place / JOURNAL).write_bytes(text)
        if json_or_none(text) == json.loads(whole):
            begun(source, tmp_path / "out")
            continue
        with pytest.raises(CheckpointError) as caught:
            begun(source, tmp_path / "out")
        assert "\n" not in str(caught.value)
        refused += 1
    assert refused > 200
