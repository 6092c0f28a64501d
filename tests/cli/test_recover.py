"""``secateur recover``: from a pruned directory, its teacher and a text to a directory that is better, and verifies."""

import json
import shutil

import pytest
import torch
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from secateur.cli.commands import app
from secateur.models import oneshot as prune_blocks
from secateur.recovery import recovering
from support.families import batches, make
from support.tokenizers_of_words import WORDS, write_tokenizer


@pytest.fixture
def folder(tmp_path):
    """A small Llama with a tokenizer, what oneshot left of it, and a text."""
    make("llama").save_pretrained(tmp_path / "dense", max_shard_size="8KB")
    write_tokenizer(tmp_path / "dense")
    (tmp_path / "text.txt").write_text(" ".join(WORDS[(7 * n + n // 5) % len(WORDS)] for n in range(600)))
    prune_blocks(tmp_path / "dense", batches("llama"), 0.5, out=tmp_path / "sparse")
    return tmp_path


def call(folder, *words, data="text.txt", teacher="dense"):
    places = ["recover", str(folder / "sparse"), "--teacher", str(folder / teacher)]
    places += [] if data is None else ["--data", str(folder / data)]
    sizes = ["--out", str(folder / "out"), "--samples", "8", "--sequence-length", "16", "--batch", "4"]
    return CliRunner().invoke(app, [*places, *sizes, *words])


def test_the_local_part_of_several_processes_is_refused(folder, monkeypatch):
    monkeypatch.setattr(recovering, "rank_and_world", lambda: (0, 2))
    ended = call(folder)
    assert ended.exit_code == 2
    assert ended.stderr.startswith("secateur: 2 processes train by the outputs alone: pass local=0;")


@pytest.mark.long
def test_without_a_text_the_teacher_writes_one(folder):
    ended = call(folder, "--steps", "2", data=None)
    assert ended.exit_code == 0, ended.stderr
    record = json.loads((folder / "out/secateur.json").read_text())
    assert "--data" not in record["arguments"]["command"]
    assert len(record["losses"]) == 2
    make("bert").save_pretrained(folder / "bert")
    shutil.rmtree(folder / "out")
    ended = call(folder, data=None, teacher="bert")
    assert ended.exit_code == 2
    assert ended.stderr.strip().endswith("pass batches=, of a directory --data FILE.")
    assert len(ended.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        ("--steps", "4", "--autocast", "bfloat16"),
        ("--steps", "0", "--local", "1"),
        ("--steps", "4", "--local", "0", "--adapters", "2"),
        ("--steps", "2", "--exclude", "*embed*", "--rate", "0.01"),
    ],
    ids=" ".join,
)
@pytest.mark.long
def test_a_recovered_directory_loads_and_verifies(folder, words):
    ended = call(folder, *words)
    assert ended.exit_code == 0, ended.stderr
    assert "Zeros in 14 weights: 1,920 before, 1,920 after." in ended.stdout
    assert ended.stdout.rstrip().endswith("secateur.json in it says what was done.")
    local = words[words.index("--local") + 1] if "--local" in words else "2"
    assert ended.stderr.count("to the teacher, before") == (0 if local == "0" else 4)
    steps = words[words.index("--steps") + 1]
    assert (f"step {steps} of {steps}: loss " in ended.stderr) == (steps != "0")
    record = json.loads((folder / "out/secateur.json").read_text())
    assert record["arguments"]["command"].startswith("secateur recover ")
    assert f"--steps {steps}" in record["arguments"]["command"]
    for option, value in zip(words[::2], words[1::2], strict=True):
        asked = record["asked"][option.removeprefix("--").replace("-", "_")]
        assert str(asked[0] if isinstance(asked, list) else asked) == value, option
    found = CliRunner().invoke(app, ["verify", str(folder / "out"), "--source", str(folder / "sparse")])
    assert found.exit_code == 0, found.stdout
    assert LlamaForCausalLM.from_pretrained(folder / "out")(torch.arange(5)[None]).logits.isfinite().all()


def test_what_is_wrong_is_one_line(folder):
    for words, options, message in (
        (("--steps", "0", "--local", "0"), {}, "steps=0 and local=0: nothing is asked for."),
        (("--autocast", "float16"), {}, "autocast is bfloat16, or left out; got 'float16'."),
        (
            ("--adapters", "2", "--steps", "0"),
            {},
            "adapters= move weights by the outputs; steps=0 leaves that out.",
        ),
        (("--rate", "-1"), {}, "rate is a number above 0; got -1.0."),
        ((), {"data": "none.txt"}, "none.txt"),
        ((), {"teacher": "none"}, "none: no such directory."),
    ):
        ended = call(folder, *words, **options)
        assert ended.exit_code == 2, ended.stdout
        assert message in ended.stderr
        assert ended.stderr.startswith("secateur: ")
        assert len(ended.stderr.splitlines()) == 1
        assert not (folder / "out").exists()


def test_steps_that_end_worse_are_one_line_of_warning(folder):
    ended = call(folder, "--steps", "6", "--local", "0", "--rate", "3")
    assert ended.exit_code == 0, ended.stderr
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("Warning: ")]
    assert line.startswith("Warning: Over 1 batch the loss (kl) was ")
    assert line.endswith(" steps and after them: they are not kept. Lower rate= (3; try 1), or take more text.") or (
        "they are not kept. Lower rate= (3; try 1), or take more text." in line
    )
    assert "they are not kept." in ended.stdout
