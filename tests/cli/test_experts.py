"""``secateur shrink --leave experts:25%``: what leaves is said, OUT is what the library writes; errors are one line."""

import json
import os
import signal

import pytest
import torch

from secateur.checkpoints import slicing
from secateur.kinds import Experts
from secateur.shrinking import shrink
from support.commands import fails, run
from support.forks import forked
from support.vocabularies import TEXT, wrapped


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    from transformers import MixtralConfig, MixtralForCausalLM

    folder = tmp_path_factory.mktemp("made") / "dense"
    tokenizer = wrapped("byte level")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(
        vocab_size=len(tokenizer), num_hidden_layers=2, num_local_experts=6, max_position_embeddings=64, **sizes
    )
    MixtralForCausalLM(config).save_pretrained(folder)
    (folder.parent / "text.txt").write_text(TEXT * 4, "utf-8")
    return folder


FEW = ["--samples", "8", "--sequence-length", "32", "--no-verify"]


def test_a_profile_says_what_it_would_cost_and_a_plan_does_it(dense, tmp_path):
    text, profile = dense.parent / "text.txt", tmp_path / "profile.json"
    ended = run("shrink", dense, "--data", text, "--profile", profile, *FEW)
    assert (ended.exit_code, ended.stderr) == (0, ""), ended.output
    assert "the model's outputs lose when all mixtures lose a share" in ended.stdout
    assert "Nothing was written" in ended.stdout
    more = ["--leave", "experts:34%", "--out", tmp_path / "small", "--no-verify", "--report", tmp_path / "page.html"]
    ended = run("shrink", dense, "--plan", profile, *more)
    assert ended.exit_code == 0, ended.output
    assert "6 -> 4" in ended.stdout
    assert f"Wrote {tmp_path / 'small'}; from_pretrained loads it" in ended.stdout
    record = json.loads((tmp_path / "small/secateur.json").read_text())
    assert "--plan" in record["arguments"]["command"]
    assert record["text"]["data"] == str(text)
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "What experts add" in page
    assert "Measured: 1 × 32 tokens took" in page.replace("\u200b", "")
    assert "What the model loses" in page
    assert page.count("model.layers.1.mlp.gate.weight") >= 6  # a row an expert
    assert run("verify", tmp_path / "small", "--source", dense).exit_code == 0


def test_it_goes_straight_from_a_text(dense, tmp_path):
    more = ["--leave", "experts:1", "--out", tmp_path / "small", *FEW]
    ended = run("shrink", dense, "--data", dense.parent / "text.txt", *more)
    assert ended.exit_code == 0, ended.output
    assert "Ranked by reap on 256 tokens" in ended.stdout
    from transformers import MixtralForCausalLM

    assert MixtralForCausalLM.from_pretrained(tmp_path / "small").config.num_local_experts == 5


def test_experts_take_over_or_stay_as_they_are(dense, tmp_path):
    left = ["--data", dense.parent / "text.txt", "--leave", "experts:1", *FEW]
    ended = run("shrink", dense, *left, "--out", tmp_path / "repaired")
    assert ended.exit_code == 0, ended.output
    assert "experts that stay recover" in ended.stdout or "Not repaired" in ended.stdout
    ended = run("shrink", dense, *left, "--no-repair", "--out", tmp_path / "plain")
    assert ended.exit_code == 0, ended.output
    assert "repaired" not in ended.stdout
    record = json.loads((tmp_path / "plain/secateur.json").read_text())
    assert (record["repaired"], record["rank"]) == ([], "reap")
    assert "--no-repair" in record["arguments"]["command"]


def test_a_dry_run_writes_nothing(dense, tmp_path):
    ended = run("shrink", dense, "--without-data", "--leave", "experts:50%", "--dry-run", "--no-verify")
    assert ended.exit_code == 0, ended.output
    assert "6 -> 3" in ended.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--leave", "experts:1"], "give --out DIR"),
        (["--out", "small", "--without-data"], "give --sparsity FRACTION, how much leaves, or --leave experts:25%"),
        (["--dry-run", "--leave", "experts:1"], "pass --data FILE"),
        (["--dry-run", "--leave", "experts"], "leave= is a kind and what of it"),
        (["--dry-run", "--leave", "heads:2"], "heads leave by their numbers: leave=Heads"),
        (["--dry-run", "--leave", "experts:1", "--plan", "gone.json"], "gone.json: no such file"),
        (["--dry-run", "--leave", "experts:1", "--data", "gone.txt"], "gone.txt"),
        (["--dry-run", "--leave", "experts:1", "-s", "0.5", "--data", "gone.txt"], "nothing else leaves it"),
        (["--out", "no/such", "--leave", "experts:1", "--without-data"], "no such directory"),
    ],
)
def test_what_is_wrong_is_one_line(dense, options, message):
    fails(run("shrink", dense, *options), message)


def test_a_directory_without_experts_is_told(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=9, **sizes)).save_pretrained(tmp_path / "dense")
    fails(
        run("shrink", tmp_path / "dense", "--without-data", "--leave", "experts:1", "--dry-run"),
        "no experts of the model can leave",
    )


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="a system without it")
def test_a_run_that_is_killed_leaves_no_directory_under_the_name(dense, tmp_path):
    def dying():
        slicing.write_cut = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        shrink(dense, leave=Experts(1, rank="criterion"), out=tmp_path / "small", verify=False)

    assert os.WTERMSIG(forked(dying)) == signal.SIGKILL
    assert not (tmp_path / "small").exists()
