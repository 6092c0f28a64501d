"""``secateur oneshot``: from a directory and a text to a pruned directory, and one line for what is wrong."""

import json

import pytest
import torch
import typer
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from families import make
from secateur.oneshot_command import oneshot
from secateur.verification import verify_checkpoint

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(oneshot)

WORDS = """the secateur is a small shear a gardener prunes roses with and the hedge is cut by another tool""".split()  # noqa: SIM905


@pytest.fixture
def folder(tmp_path):
    """A small Llama with a tokenizer of one token a word, and a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    make("llama").save_pretrained(tmp_path / "dense", max_shard_size="8KB")
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *dict.fromkeys(WORDS)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(tmp_path / "dense")
    (tmp_path / "text.txt").write_text(" ".join(WORDS[(7 * n + n // 5) % len(WORDS)] for n in range(600)))
    return tmp_path


def call(folder, *words, data="text.txt", out="sparse"):
    arguments = [str(folder / "dense"), "--data", str(folder / data), "--out", str(folder / out)]
    return CliRunner().invoke(app, [*arguments, "--samples", "8", "--sequence-length", "16", *words])


@pytest.mark.parametrize(
    "words",
    [
        ("--sparsity", "0.5"),
        ("--pattern", "2:4", "--solver", "sparsegpt"),
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
    masks_only = "wanda" in words or "magnitude" in words
    assert record["kept_weights"] == ("unchanged" if masks_only else "updated")
    verification = verify_checkpoint(folder / "sparse", folder / "dense")
    assert not verification.problems
    assert not verification.unchecked
    model = LlamaForCausalLM.from_pretrained(folder / "sparse")
    assert model(torch.arange(5)[None]).logits.isfinite().all()


def test_what_is_wrong_is_one_line(folder):
    for words, line in (
        (("-s", "1.5"), "sparsity is the fraction that is removed"),
        ((), "needs a sparsity"),
        (("-s", "0.6", "--pattern", "2:4"), "removes 0.5"),
        (("--pattern", "2:4", "--allocate", "owl"), "leave --allocate out"),
        (("-s", "0.5", "--include", "nothing*"), "no parameter matches"),
        (("-s", "0.5", "--samples", "999"), "tokens"),
    ):
        ended = call(folder, *words)
        assert ended.exit_code == 2, ended.output
        assert line in ended.stderr
        assert len(ended.stderr.splitlines()) == 1
        assert not (folder / "sparse").exists()
    (folder / "sparse").mkdir()
    assert "already exists" in call(folder, "-s", "0.5").stderr


def test_an_interrupted_run_goes_on(folder, monkeypatch):
    from secateur import oneshot_command

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
