"""``secateur oneshot``: from a directory and a text to a pruned directory, and one line for what is wrong."""

import itertools
import json
import os
import random
import signal

import pytest
import torch
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from secateur.checkpoints import verify_checkpoint
from secateur.cli.commands import app
from secateur.models import files as block_files
from secateur.models import solving
from support.families import make
from support.forks import forked
from support.tokenizers_of_words import VOCABULARY, WORDS, write_tokenizer


@pytest.fixture
def folder(tmp_path):
    """A small Llama with a tokenizer, and a text."""
    make("llama").save_pretrained(tmp_path / "dense", max_shard_size="8KB")
    write_tokenizer(tmp_path / "dense")
    (tmp_path / "text.txt").write_text(" ".join(WORDS[(7 * n + n // 5) % len(WORDS)] for n in range(600)))
    return tmp_path


def call(folder, *words, data="text.txt", out="sparse"):
    arguments = [
        "oneshot", str(folder / "dense"), "--data", data if "=" in data else str(folder / data), "--out",
        str(folder / out),
    ]  # fmt: skip
    return CliRunner().invoke(app, [*arguments, "--samples", "8", "--sequence-length", "16", *words])


@pytest.mark.parametrize(
    "words",
    [
        ("--sparsity", "0.5"),
        ("--pattern", "2:4", "--solver", "sparsegpt"),
        ("-s", "0.5", "--solver", "sparsegpt", "--values", "int8"),
        ("-s", "0.5", "--solver", "sparsegpt", "--pattern", "rows", "--values", "int8"),
        ("-s", "0.5", "--solver", "magnitude", "--pattern", "2x1", "--values", "int8"),
        ("-s", "0.6", "--pattern", "rows", "--solver", "wanda", "--allocate", "owl"),
        ("-s", "0.5", "--solver", "magnitude", "--exclude", "*q_proj*", "--allocate", "progression"),
    ],
    ids=" ".join,
)
def test_a_pruned_directory_loads_and_verifies(folder, words):
    ended = call(folder, *words)
    assert ended.exit_code == 0, ended.stderr
    assert "Pruned 1" in ended.stdout
    assert "Left alone, outside the blocks: 2, such as" in ended.stdout
    assert len([line for line in ended.stderr.splitlines() if "removed, error" in line]) in (12, 14)
    record = json.loads((folder / "sparse/secateur.json").read_text())
    assert record["arguments"]["command"].startswith("secateur oneshot ")
    assert record["arguments"]["samples"] == 8
    masks_only = "--values" not in words and ("wanda" in words or "magnitude" in words)
    assert record["kept_weights"] == ("unchanged" if masks_only else "updated")
    aim = 0.0 if masks_only else 0.5
    assert (record["stages"], record["aim"]) == (aim == 0.5, aim)
    verification = verify_checkpoint(folder / "sparse", folder / "dense")
    assert not verification.problems
    assert not verification.unchecked
    model = LlamaForCausalLM.from_pretrained(folder / "sparse")
    assert model(torch.arange(5)[None]).logits.isfinite().all()


def test_masks_learn_where_gates_choose(folder, monkeypatch):
    monkeypatch.setattr(solving, "STEPS", 20)
    ended = call(folder, "--pattern", "2:4", "--solver", "wanda", "--choose", "gates", "--json")
    assert ended.exit_code == 0, ended.stderr
    (gates,) = json.loads(ended.stdout)["gates"]
    assert gates["steps"] == 20
    assert gates["lost"] <= gates["before"]
    assert ended.stderr.count("removed, error") == 14, "each layer is told once"
    assert json.loads((folder / "sparse/secateur.json").read_text())["choose"] == "gates"
    assert not verify_checkpoint(folder / "sparse", folder / "dense").problems
    refused = call(folder, "-s", "0.5", "--choose", "luck", out="other")
    assert refused.exit_code == 2
    assert "choose must be \"gates\", or left out, not 'luck'" in refused.stderr


def language(count, seed):
    """Numbers of words of which each mostly follows from the two before it."""
    chance = random.Random(seed)
    first = len(VOCABULARY) - len(set(WORDS))
    found = [chance.randrange(len(set(WORDS))) for _ in range(2)]
    while len(found) < count:
        found.append((3 * found[-2] + 5 * found[-1] + (chance.random() < 0.15) * chance.randrange(9)) % len(set(WORDS)))
    return [first + number for number in found]


def trained(numbers):
    torch.manual_seed(0)
    config = make("llama").config
    config.update({"hidden_size": 32, "intermediate_size": 64, "vocab_size": len(VOCABULARY)})
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    sequences = torch.tensor(numbers).reshape(-1, 16)
    for _ in range(80):
        batch = sequences[torch.randint(len(sequences), (32,))]
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def loss_of(directory, numbers):
    batch = torch.tensor(numbers).reshape(-1, 16)
    return float(LlamaForCausalLM.from_pretrained(directory)(batch, labels=batch).loss)


@pytest.mark.long
def test_killed_resumed_verified_loaded_and_better_than_sparsegpt(tmp_path):
    trained(language(16 * 256, seed=1)).save_pretrained(tmp_path / "dense", max_shard_size="20KB")
    write_tokenizer(tmp_path / "dense")
    (tmp_path / "text.txt").write_text(" ".join(VOCABULARY[number] for number in language(1000, seed=2)))

    def killed():
        function, calls = block_files.write_tensor, itertools.count(1)

        def write(*arguments, **keywords):
            if next(calls) == 9:  # the second tensor of the second block
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)

        block_files.write_tensor = write
        call(tmp_path, "-s", "0.6")

    assert os.WTERMSIG(forked(killed)) == signal.SIGKILL
    assert not (tmp_path / "sparse").exists()
    ended = call(tmp_path, "-s", "0.6")
    assert ended.exit_code == 0, ended.stderr
    assert sum("removed, error" in line for line in ended.stderr.splitlines()) == 7, "the first block is not redone"
    assert call(tmp_path, "-s", "0.6", "--solver", "sparsegpt", out="sparsegpt").exit_code == 0
    for out in ("sparse", "sparsegpt"):
        found = verify_checkpoint(tmp_path / out, tmp_path / "dense")
        assert not found.problems
        assert found.target_sparsity == pytest.approx(0.6, abs=1e-3)
    unseen = language(16 * 64, seed=3)
    dense, ours, theirs = (loss_of(tmp_path / out, unseen) for out in ("dense", "sparse", "sparsegpt"))
    assert dense < theirs
    assert ours - dense < (theirs - dense) / 2


@pytest.mark.long
def test_a_short_text_is_used_and_one_line_says_so(folder):
    ended = call(folder, "-s", "0.5", "--samples", "999")
    assert ended.exit_code == 0, ended.stderr
    said = [line for line in ended.stderr.splitlines() if "short" in line]
    assert said == [
        f"Warning: {folder / 'text.txt'} is short: calibrating with 37 sequences of 16 tokens, not 999 of 16."
    ]
    assert len(ended.stderr.splitlines()) == 14 + 1, "and a line a layer"
    (folder / "empty.txt").write_text("")
    ended = call(folder, "-s", "0.5", data="empty.txt", out="other")
    assert ended.exit_code == 2
    assert "empty.txt has no tokens" in ended.stderr


@pytest.mark.long
def test_of_texts_with_names_the_result_says_what_each_never_reaches(folder):
    (folder / "one.txt").write_text(" ".join([WORDS[0]] * 300))
    data = f"all:3={folder / 'text.txt'},one={folder / 'one.txt'}"
    ended = call(folder, "-s", "0.5", data=data, out="sparse")
    assert ended.exit_code == 0, ended.stderr
    head, every, one = ended.stdout[ended.stdout.index("Never reached by") :].splitlines()[:3]
    assert head.split() == ["Never", "reached", "by", "Sequences", "Tokens", "Experts", "Units"]
    assert every.split()[:2] == ["all", "6"]
    assert one.split()[:2] == ["one", "2"]
    assert int(one.split()[2]) > int(every.split()[2])
    told = json.loads(call(folder, "-s", "0.5", "--json", data=data, out="again").stdout)["reached"]
    assert [row["text"] for row in told] == ["all", "one"]
    assert sum(map(len, told[1]["which_units"].values())) == told[1]["units"][0]


def test_what_is_wrong_is_one_line(folder):
    for words, line in (
        (("-s", "1.5"), "sparsity is the fraction that is removed"),
        ((), "needs a sparsity"),
        (("-s", "0.6", "--pattern", "2:4"), "removes 0.5"),
        (("--pattern", "2:4", "--allocate", "owl"), "leave --allocate out"),
        (("-s", "0.5", "--include", "nothing*"), "no parameter matches"),
    ):
        ended = call(folder, *words)
        assert ended.exit_code == 2, ended.output
        assert line in ended.stderr
        assert len(ended.stderr.splitlines()) == 1
        assert not (folder / "sparse").exists()
    (folder / "dense/config.json").rename(folder / "config.json")
    assert "has no config.json, which says what model this is" in call(folder, "-s", "0.5").stderr
    (folder / "config.json").rename(folder / "dense/config.json")
    (folder / "sparse.unfinished").mkdir()
    (folder / "sparse.unfinished/note.txt").write_text("precious")
    (folder / "dense/secateur.json").write_text('{"a":' * 50_000 + "1" + "}" * 50_000)
    for line in ("secateur.json: damaged: ", "sparse.unfinished: holds note.txt"):
        ended = call(folder, "-s", "0.5")
        assert ended.exit_code == 2, ended.output
        assert line in ended.stderr
        assert len(ended.stderr.splitlines()) == 1
        assert (folder / "sparse.unfinished/note.txt").read_text() == "precious"
        (folder / "dense/secateur.json").unlink(missing_ok=True)
    assert ".: already exists; nothing is overwritten" in call(folder, "-s", "0.5", "--out", ".").stderr
    (folder / "sparse").mkdir()
    assert "already exists" in call(folder, "-s", "0.5").stderr


@pytest.mark.long
def test_an_interrupted_run_goes_on(folder, monkeypatch):
    from secateur.cli import calibrated as oneshot_command

    def interrupt(layer, started):
        if layer.block.endswith("1"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(oneshot_command, "_print_layer", interrupt)
        ended = call(folder, "-s", "0.5")
    assert ended.exit_code == 130
    assert ended.stderr == "secateur: interrupted; run the same command again to go on.\n"
    assert (folder / "sparse.unfinished").is_dir()
    ended = call(folder, "-s", "0.5")
    assert ended.exit_code == 0, ended.stderr
    assert sum("removed, error" in line for line in ended.stderr.splitlines()) == 7
    assert not verify_checkpoint(folder / "sparse", folder / "dense").problems
