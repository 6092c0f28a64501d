"""``secateur vocabulary``: what leaves is said, OUT is what the library writes, and what is wrong is one line."""

import json

import pytest

from secateur.vocabulary import shrink_vocabulary
from support.commands import fails, run
from support.vocabularies import TEXT, model_of, wrapped


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "dense"
    tokenizer = wrapped("byte level")
    tokenizer.save_pretrained(folder)
    model_of("tied", len(tokenizer)).save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT[:500], "utf-8")
    return tmp_path / "text.txt"


def test_it_writes_what_the_library_writes(dense, text, tmp_path):
    ended = run("vocabulary", dense, "--data", text, "--cover", "0.95", "--out", tmp_path / "out")
    assert (ended.exit_code, ended.stderr) == (0, ""), ended.output
    done = shrink_vocabulary(dense, texts=[TEXT[:500]], out=tmp_path / "same", cover=0.95)
    for path in (tmp_path / "same").iterdir():
        if path.name != "secateur.json":
            assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
    assert f"tokens  {done.rows[0]}" in " ".join(ended.stdout.split()).replace("tokens ", "tokens  ")
    assert "Proved on " in ended.stdout
    assert f"Wrote {tmp_path / 'out'}; from_pretrained loads it" in ended.stdout
    said = json.loads((tmp_path / "out/secateur.json").read_text())["arguments"]["command"]
    assert said.endswith(f"--data {text} --cover 0.95")


def test_trim_is_another_name(dense, text):
    options = (dense, "--data", text, "--cover", "0.95", "--dry-run")
    lines = [run(name, *options).stdout.splitlines() for name in ("trim", "vocabulary")]
    assert lines[0][:-1] == lines[1][:-1] != []  # the last line has seconds


def test_several_texts_and_all_options(dense, text, tmp_path):
    (tmp_path / "more.jsonl").write_text(json.dumps({"text": "hedges"}) + "\n")
    more = ["--keep", "330", "--script", "latin", "--script", "Han"]
    more += ["--rank", "distance"]
    ended = run("vocabulary", dense, "--data", tmp_path / "more.jsonl", "--data", text, *more, "--dry-run")
    assert ended.exit_code == 0, ended.output
    assert "Nothing was written" in ended.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["more.jsonl", "text.txt"]


def test_texts_with_names_are_told_apart(dense, text, tmp_path):
    (tmp_path / "more.txt").write_text("hedges")
    named = ["--data", f"some={text}", "--data", f"more={tmp_path / 'more.txt'}"]
    ended = run("trim", dense, *named, "--cover", "0.95", "--dry-run", "--json")
    assert ended.exit_code == 0, ended.output
    found = json.loads(ended.stdout)["reached"]
    assert [row["text"] for row in found] == ["some", "more"]
    assert found[0]["tokens"][0] < found[1]["tokens"][0]
    said = "has no name, other texts have"
    fails(run("trim", dense, "--data", text, "--data", f"some={text}", "--dry-run"), said)
    fails(run("trim", dense, "--data", f"some:2={text}", "--dry-run"), "all of a text is counted, so it has no weight")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give --out OUT"),
        (["--dry-run"], "nothing says which tokens may leave"),
        (["--dry-run", "--cover", "0.5"], "give the text as well"),
        (["--dry-run", "--data", "gone.txt"], "gone.txt: no such file"),
        (["--dry-run", "--keep", "3"], "have to stay, more than the 3 asked for"),
        (["--dry-run", "--script", "Elvish"], "is no script"),
        (["--out", "no/such", "--keep", "300"], "no such directory"),
    ],
)
def test_what_is_wrong_is_one_line(dense, options, message):
    fails(run("vocabulary", dense, *options), message)
