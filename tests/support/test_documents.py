"""Documents of a file are what was written, in the order of the file, whole to the character."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secateur.support import documents
from secateur.support.documents import read_documents

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
        ("some.json", b"[1", "not valid JSON"),
        ("some.txt", b"\xff\xfea", "UTF-16"),
        ("some.txt", b"a\xff", "not UTF-8 text near byte 1"),
    ],
)
def test_what_is_no_text_is_said(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_documents(tmp_path / name))
