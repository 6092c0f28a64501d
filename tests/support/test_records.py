"""Records that other programs wrote: what is wrong is one line that names the file, the field and what to do."""

import errno
import json
import os
import stat
import types
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from secateur.checkpoints import CheckpointError
from secateur.support import Fields, documents, naming, whole_file, write_whole
from secateur.support.documents import read_documents
from secateur.support.records import MAX_DEPTH, parse_json, read_json


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"a": 1, "a": 2}', "a is there twice"),
        (b'{"a": {"b": 1, "b": 2}}', "b is there twice"),
        (b'{"a": NaN}', "NaN is not a finite number"),
        (b'{"a": -Infinity}', "-Infinity is not a finite number"),
        (b'{"a": 1e999}', "1e999 is not a finite number"),
        (b'{"a": "\\ud800"}', "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "nested too deeply"),
        (b'{"a": ' * 50_000 + b"1" + b"}" * 50_000, "nested too deeply"),
        (b'{"a": ' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), "nested too deeply"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_is_no_record_is_refused(tmp_path, text, message):
    path = tmp_path / "record.json"
    path.write_bytes(text)
    for kind in (ValueError, CheckpointError):
        with pytest.raises(kind, match=message) as caught:
            read_json(path, error=kind, hint=" Delete it.")
        assert type(caught.value) is kind
        assert str(caught.value).startswith(f"{path}: damaged: ")
        assert str(caught.value).endswith(" Delete it.")
        assert "\n" not in str(caught.value)


def test_what_is_read_can_be_written_again(tmp_path):
    text = b'{"a": ' * MAX_DEPTH + b"1" + b"}" * MAX_DEPTH
    assert json.loads(json.dumps(parse_json(text, tmp_path), indent=2)) == json.loads(text)
    assert parse_json(b'{"a": Infinity}', tmp_path, finite=False) == {"a": float("inf")}


def test_no_file_and_no_regular_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "record.json")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe: not a regular file"):
        read_json(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda r: r.take("no", str), "no is missing"),
        (lambda r: r.maybe("no", str), "no is missing"),
        (lambda r: r.take("name", int), 'name must be a whole number, not "fc"'),
        (lambda r: r.take("true", int), "true must be a whole number, not true"),
        (lambda r: r.take("true", float), "true must be a number, not true"),
        (lambda r: r.take("large", float), "large must be a number, not 1000"),
        (lambda r: r.take("share", int), "share must be a whole number, not 0.5"),
        (
            lambda r: r.take("share", float, least=1, most=2),
            "share must be a number of at least 1 and at most 2, not 0.5",
        ),
        (lambda r: r.take("nothing", str), "nothing must be a string, not null"),
        (lambda r: r.take("list", dict), "list must be an object, not a list of 3"),
        (lambda r: r.each("list", int), r"list\[1\] must be a whole number, not an object of 1"),
        (lambda r: list(r.inners("list")), r"list\[0\] must be an object, not 1"),
        (lambda r: r.inner("inner").inner("one").take("size", int, least=0), "inner.one.size must be .* not -1"),
        (lambda r: r.optional("name", int), 'name must be a whole number, not "fc"'),
        (lambda r: r.wrong("", "is odd"), "is odd"),
        (lambda r: r.each("list", float, most=0), r"list\[0\] must be a number of at most 0, not 1"),
        (lambda r: [one.take("size", str) for _, one in r.inners_named("inner")], "inner.one.size must be a string"),
        (lambda r: list(r.inners_named("share")), "share must be an object, not 0.5"),
        (lambda r: r.inner("inner").each_named("one", int, least=0), "inner.one.size must be .* not -1"),
        (lambda r: r.inner("inner").wrong("", "is odd"), "inner is odd"),
        (lambda r: r.only("name"), "true is not known"),
    ],
)
def test_fields_are_held_to_their_types(tmp_path, ask, message):
    values = {
        "name": "fc", "true": True, "share": 0.5, "large": 10**400, "nothing": None, "list": [1, {"a": 2}, 3],
        "inner": {"one": {"size": -1}},
    }  # fmt: skip
    record = Fields(values, tmp_path / "r.json", error=CheckpointError, hint=" Delete it.")
    with pytest.raises(CheckpointError, match=rf"r\.json: damaged: {message}.* Delete it\.$"):
        if isinstance(error := ask(record), ValueError):
            raise error
    assert record.take("share", float, most=1) == 0.5
    assert record.maybe("nothing", str) is None
    assert record.optional("no", str) is record.optional("nothing", str) is None
    assert record.optional("name", str) == "fc"


def test_what_is_right_is_read_whole(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"sizes": [1, 2], "counts": {"a": 1}, "inner": {"one": {"size": 3}}}))
    record = Fields.read(path)
    assert record.each("sizes", int, least=1) == [1, 2]
    assert record.each_named("counts", int) == {"a": 1}
    assert {name: one.take("size", int) for name, one in record.inners_named("inner")} == {"one": 3}


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "r.json"
    path.write_text('{"a": 1}')
    assert Fields.read(path, largest=8).values == {"a": 1}
    with pytest.raises(ValueError, match=r"r\.json: more than 7 bytes of JSON"):
        Fields.read(path, largest=7)


# Documents of a file are what was written, in the order of the file, whole to the character.


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r\ufeff"), max_size=30)


@given(st.lists(TEXT, max_size=5), st.sampled_from([".jsonl", ".ndjson", ".json"]), st.booleans())
def test_records_are_read_as_they_were_written(tmp_path_factory, texts, kind, named):
    path = tmp_path_factory.mktemp("read") / f"some{kind}"
    records = [{"text": each} if named else each for each in texts]
    as_lines = "".join(json.dumps(each) + "\n" for each in records)
    path.write_text(json.dumps(records) if kind == ".json" else as_lines, "utf-8")
    assert list(read_documents(path)) == texts


@given(TEXT, st.integers(4, 20))
def test_pieces_of_a_text_are_the_text(tmp_path_factory, text, piece):
    path = tmp_path_factory.mktemp("read") / "some.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE", piece)
        assert "".join(read_documents(path)) == text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.txt", None, "no such file"),
        ("some.pdf", b"", "not from .pdf"),
        ("some.jsonl", b"{", "the line at byte 0: not a JSON record"),
        ("some.jsonl", b'{"a": 1}', "no text in the field 'text'.*There are: a"),
        ("some.json", b'["a"', "not valid JSON"),
        ("some.txt", b"\xff\xfea", "UTF-16"),
        ("some.txt", b"a\xff", "not UTF-8 text near byte 1"),
    ],
)
def test_what_is_no_text_is_said(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_documents(tmp_path / name))


# Files are there whole or not at all.


def test_a_failure_leaves_what_was_there_before(tmp_path):
    path = write_whole(tmp_path / "note.txt", "before")
    for failure in (OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()):
        with pytest.raises(type(failure)), whole_file(path) as file:
            file.write(b"half")
            raise failure
    assert path.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["note.txt"]


def test_the_error_of_a_full_disk_names_the_file(tmp_path):
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        with pytest.raises(OSError, match="full") as caught, whole_file(tmp_path / "note.txt"):
            raise OSError(number, "full")
        assert caught.value.filename == str(tmp_path / "note.txt")
    with pytest.raises(OSError, match="gone") as caught, naming("out"):
        raise OSError(errno.EIO, "gone")
    assert caught.value.filename is None


def test_a_link_stays_a_link_and_the_mode_is_that_of_a_new_file(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "note.txt")
    mask = os.umask(0o027)
    try:
        write_whole(tmp_path / "link", "kept")
    finally:
        os.umask(mask)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "note.txt").read_text() == "kept"
    assert stat.S_IMODE((tmp_path / "there" / "note.txt").stat().st_mode) == 0o640


def test_a_folder_that_is_not_there_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"note\.txt cannot be written: there is no folder .*none; create it"):
        write_whole(tmp_path / "none" / "note.txt", "x")


def test_a_name_for_a_type_is_that_type():
    """As numpy 2.5 has one for its arrays, where Python knows such names."""
    kind = types.SimpleNamespace(__value__=npt.NDArray[np.float64])
    found = Fields({"losses": [1.5, 2]}, Path("record.json")).value("losses", kind)
    assert found.dtype == np.float64
    assert found.tolist() == [1.5, 2.0]
