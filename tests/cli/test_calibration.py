"""``secateur shrink DIR`` with a text, and what it says where there is none."""

import importlib
import json

import pytest
import torch
from transformers import LlamaForCausalLM

from secateur.shrinking import gates
from secateur.shrinking.measure import Measuring
from secateur.shrinking.repair import Repairing
from support.commands import fails, run
from support.families import make
from support.tokenizers_of_words import WORDS, write_tokenizer


@pytest.fixture
def folder(tmp_path):
    """A small Llama with a tokenizer, and a text."""
    make("llama").save_pretrained(tmp_path / "dense", max_shard_size="8KB")
    write_tokenizer(tmp_path / "dense")
    (tmp_path / "text.txt").write_text(" ".join(WORDS[(7 * n + n // 5) % len(WORDS)] for n in range(600)))
    return tmp_path


def call(folder, *words, data="text.txt"):
    asked = ["--data", folder / data, "--samples", "8", "--sequence-length", "16"] if data else []
    return run("shrink", folder / "dense", "-s", "0.3", "--out", folder / "small", "--no-verify", *asked, *words)


def test_a_text_chooses_and_repairs_and_from_pretrained_loads_it(folder):
    ended = call(folder, "--seed", "3")
    assert ended.exit_code == 0, ended.output
    record = json.loads((folder / "small/secateur.json").read_text())
    words = ended.stdout.splitlines()
    assert any(line.startswith("Asked: 30.0% of the params. Gone: ") for line in words)
    (said,) = [line for line in words if line.startswith("Chosen by what 128 tokens show.")]
    errors = record["calibration"]["errors"]
    assert said.endswith(f"and {max(errors.values()):.2%} at most, of {max(errors, key=errors.get)}.")
    assert record["arguments"]["samples"] == 8
    assert "--sequence-length 16 --seed 3 --no-verify" in record["arguments"]["command"]
    loaded = LlamaForCausalLM.from_pretrained(folder / "small")
    assert loaded.num_parameters() == record["parameters"]["to"]


def test_gates_choose_where_that_is_asked(folder, monkeypatch):
    monkeypatch.setattr(gates, "STEPS", 3)
    ended = call(folder, "--choose", "gates", "--no-repair")
    assert ended.exit_code == 0, ended.output
    assert "Lost by gates, before repair" in ended.stdout
    record = json.loads((folder / "small/secateur.json").read_text())
    assert record["choose"] == "gates"
    assert "--choose gates" in record["arguments"]["command"]
    assert LlamaForCausalLM.from_pretrained(folder / "small").num_parameters() == record["parameters"]["to"]
    fails(
        call(folder, "--choose", "luck", "--out", folder / "other"),
        "choose must be .gates. or .swaps., or left out, not .luck.",
    )
    fails(call(folder, "--choose", "gates", "--without-data", data=None), "gates need real inputs")


def test_a_model_of_blocks_asks_for_data(folder):
    ended = call(folder, data=None)
    fails(ended, r"do not survive.*perplexity goes from 15 to 325 000.*to 15\.6.*--data FILE.*--without-data.*")
    assert not (folder / "small").exists()
    assert call(folder, "--without-data", data=None).exit_code == 0
    assert "calibration" not in json.loads((folder / "small/secateur.json").read_text())


def test_a_model_that_reads_no_text_is_told_another_way(tmp_path):
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = ViTConfig(**sizes, image_size=8, patch_size=4)
    ViTForImageClassification(config).save_pretrained(tmp_path / "dense")
    fails(run("shrink", tmp_path / "dense", "-s", "0.3", "--dry-run"), "pass --data FOLDER, some dozens of pictures")


def test_batches_of_a_module_choose_and_repair_what_a_function_makes(zoo):
    from secateur import load_shrunken, shrink

    ended = run("shrink", f"{zoo}:build", "-s", "0.3", "--data", f"{zoo}:batches", "--samples", 20, "--out", "small")
    assert ended.exit_code == 0, ended.output
    module = importlib.import_module(zoo)
    model = module.build()
    shrink(model, module.tokens, 0.3, batches=module.batches()[:10])
    loaded = load_shrunken(module.build(), "small")
    torch.testing.assert_close(loaded(module.tokens), model(module.tokens))


def test_what_is_wrong_is_one_line(folder, zoo):
    fails(call(folder, "--without-data"), "leave one of them out")
    both = ("--data", f"{zoo}:batches", "--without-data")
    fails(run("shrink", f"{zoo}:build", "-s", "0.3", *both, "--dry-run"), "leave one of them out")
    fails(call(folder, data="nothing.txt"), "nothing.txt: no such file")
    fails(
        run("shrink", f"{zoo}:build", "-s", "0.3", "--data", "text.txt", "--dry-run"),
        "text.txt: a text needs a tokenizer",
    )
    fails(run("shrink", f"{zoo}:build", "-s", "0.3", "--data", f"{zoo}:number", "--dry-run"), "not iterable")
    fails(run("shrink", f"{zoo}:build", "-s", "0.3", "--data", ".", "--dry-run"), "Tied does not say which pictures")
    fails(call(folder, "--out", folder / "dense"), "the output would replace the input")
    assert not list(folder.glob("small*"))


def test_a_dry_run_measures_and_writes_nothing(folder):
    ended = call(folder, "--dry-run")
    assert ended.exit_code == 0, ended.output
    assert "Chosen by what 128 tokens show.\n" in ended.stdout
    assert "\nNothing was written (" in ended.stdout
    assert not list(folder.glob("small*"))


def test_an_interrupted_run_goes_on(folder, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Repairing, "solve_stage", interrupt)
        ended = call(folder)
    assert ended.exit_code == 130
    assert ended.stderr.endswith("secateur: interrupted; run the same command again to go on.\n")
    monkeypatch.setattr(Measuring, "solve_stage", interrupt)
    ended = call(folder)
    assert ended.exit_code == 0, ended.output
    assert not list(folder.glob("small.unfinished"))
