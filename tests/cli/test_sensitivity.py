"""``secateur sensitivity``: from a directory and a text to a table, a page, a folder; or one line for what is wrong."""

import json
import sys

import pytest

from secateur.search import Sensitivity
from support.commands import fails, run
from support.families import make
from support.tokenizers_of_words import WORDS, write_tokenizer


@pytest.fixture
def folder(tmp_path):
    """A small Llama with a tokenizer, and a text."""
    make("llama").save_pretrained(tmp_path / "dense")
    write_tokenizer(tmp_path / "dense")
    (tmp_path / "text.txt").write_text(" ".join(WORDS[(7 * n + n // 5) % len(WORDS)] for n in range(600)))
    return tmp_path


def call(folder, *words, data="text.txt"):
    return run(
        "sensitivity", folder / "dense", "--data", folder / data, "--samples", 4, "--sequence-length", 16, *words
    )


@pytest.mark.long
def test_a_table_a_page_and_a_folder(folder):
    ended = call(
        folder, "--report", folder / "page.html", "--store", folder / "levels", "--share", 0.25, "--share", 0.5
    )
    assert ended.exit_code == 0, ended.output
    lines = ended.stdout.splitlines()
    assert lines[0].split()[:3] == ["Group", "Kind", "Of"]
    assert "kl 50%" in lines[0]
    assert any(line.startswith("model.layers.1.mlp.gate_proj.weight") for line in lines)
    found = Sensitivity.load(folder / "levels")
    assert str(found).splitlines()[0].split() == lines[0].split()
    page = (folder / "page.html").read_text()
    assert "Group by group" in page
    assert "What each group costs" in page
    assert "secateur sensitivity" in page
    assert call(folder, "--store", folder / "levels", "--share", 0.25, "--share", 0.5).stdout == ended.stdout


@pytest.mark.long
def test_layers_as_json(folder):
    ended = call(folder, "--over", "oneshot", "--over", "shrink", "--share", 0.5, "--json", "--score", "change")
    assert ended.exit_code == 0, ended.output
    said = json.loads(ended.stdout)
    assert said["score"] == "change"
    assert {each["kind"] for each in said["groups"]} == {"layer", "heads", "width"}
    assert [each["share"] for each in said["levels"]] == [0.0, 0.5] * len(said["groups"])
    assert all(each["score"] > 0 and each["params"] > 0 for each in said["levels"][1::2])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--over", "both"), "over says which kinds of levels"),
        (("--share", "1.5"), "shares must be fractions"),
        (("--score", "accuracy"), "--score must be one of kl, cosine, change, not accuracy"),
        (("--include", "nothing*"), "no tensor or group matches"),
        (("--solver", "nothing"), "nothing"),
    ],
)
def test_what_is_wrong_is_one_line(folder, words, message):
    fails(call(folder, *words), message)


def test_no_model_and_no_text(folder):
    fails(call(folder, data="missing.txt"), "missing.txt")
    (folder / "empty").mkdir()
    fails(run("sensitivity", folder / "empty", "--data", folder / "text.txt"), "empty")


def test_an_interrupted_run_goes_on_where_there_is_a_store(folder, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["secateur.cli.calibrated"], "read_data", interrupted)
    for words, message in [((), "nothing was written"), (("--store", folder / "levels"), "run the same command again")]:
        ended = call(folder, *words)
        assert ended.exit_code == 130
        assert message in ended.stderr
