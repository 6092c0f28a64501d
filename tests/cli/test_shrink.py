"""``secateur shrink``: what leaves, what stays and why, and a directory that load_shrunken reads."""

import importlib
import json
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertForSequenceClassification, T5Config, T5EncoderModel

from secateur import shrink
from support.commands import fails, run
from support.shrunk import shrunk
from support.tokenizers_of_words import VOCABULARY, WORDS, write_tokenizer


def test_shrink_writes_what_load_shrunken_reads(zoo, tmp_path):
    result = shrunk(zoo, "--out", "out")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors", "plan.json"]
    lines = [line.strip() for line in result.stdout.splitlines()[-3:]]
    assert lines[1:] == [f"from {zoo} import build", "model = load_shrunken(build(), 'out')"]
    said = {}
    exec("\n".join(lines), said)
    model = said["model"]
    assert model(torch.arange(30)).shape == (30, 30)
    left = sum(parameter.numel() for parameter in model.parameters())
    dense = sum(parameter.numel() for parameter in said["build"]().parameters())
    assert re.search(rf"^parameters +{dense:,} +{left:,} +{left / dense:.1%}$", result.stdout, re.MULTILINE)
    assert 0.4 < left / dense <= 0.5


def test_shrink_says_what_leaves_together_and_what_stays(zoo):
    result = shrunk(zoo, "--dry-run", "--target", "units")
    text = result.stdout
    assert re.search(
        r"^blocks\.\*\.0\.weight \(x11\) +16 -> \d+  blocks\.\*\.0\.bias\[0\], blocks\.\*\.2\.weight\[1\]$",
        text,
        re.MULTILINE,
    )
    assert re.search(
        r"^blocks\.0\.2\.weight +8 -> \d  embed\.weight\[1\], blocks\.\*\.0\.weight\[1\], 2 more$", text, re.MULTILINE
    )
    assert re.search(r"^embed\.weight\[0\] +1  .*an output of the model.*$", text, re.MULTILINE)
    assert "Proved on random weights that nothing else changed" in text
    assert re.search(r"Nothing was written \([\d.]+ s\)\.\n$", text)
    assert all(line == line.rstrip() for line in text.splitlines())


def test_shrink_names_the_branches_that_leave(zoo, tmp_path):
    result = shrunk(zoo, "--leave", "branches:40%", "--out", "out", sparsity=0)
    assert result.exit_code == 0, result.output
    assert len(re.findall(r"^blocks\.\d+ +280$", result.stdout, re.MULTILINE)) == 5  # 4.4 of 11, rounded up
    assert "5 of 11 residual branches leave." in result.stdout
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert len(plan["plans"][0]["modules"]) == 5
    assert "stays" not in shrunk(zoo, "--leave", "branches:10%", "--exclude", "blocks.0", "--dry-run").stdout


def test_shrink_shows_everything_when_asked(zoo):
    text = shrunk(zoo, "--dry-run", "--verbose", "--no-verify").stdout
    assert re.search(
        r"^blocks\.10\.0\.weight +16 -> \d+  blocks\.10\.0\.bias\[0\], blocks\.10\.2\.weight\[1\]$", text, re.MULTILINE
    )
    assert re.search(r"^blocks\.0\.2\.weight .*, blocks\.10\.2\.bias\[0\]$", text, re.MULTILINE)
    assert re.search(r"^embed\.weight\[0\] .*an output of the model", text, re.MULTILINE)
    assert "Not proved, as asked" in text


@pytest.mark.long
def test_shrink_passes_its_options_on(zoo):
    def units(*more):
        text = shrunk(zoo, "--dry-run", *more).stdout
        return [line.split("  ")[0].split()[0] + " " + " ".join(re.findall(r"\d+ -> \d+", line))
                for line in text.splitlines() if re.search(r"blocks.* \d", line)][:2]  # fmt: skip

    assert units("--target", "units") == ["blocks.0.2.weight 8 -> 4", "blocks.*.0.weight 16 -> 8"]
    assert units("--target", "units", "--round-to", "3", "-s", "0.4") == [
        "blocks.0.2.weight 8 -> 6",
        "blocks.*.0.weight 16 -> 9",
    ]
    # of the parameters half, so that five of eleven blocks keep a unit more than the others
    assert units("--exclude", "embed.*")[0] == "blocks.0.2.weight "
    assert {each.split()[-1] for each in units("--exclude", "embed.*")[1:]} <= {"6", "7"}
    assert units("--exclude", "embed.*", "--target", "units") == ["blocks.0.2.weight ", "blocks.*.0.weight 16 -> 8"]
    assert units("--include", "*.2.bias", "--target", "units") == ["blocks.0.2.weight 8 -> 4", "blocks.*.0.weight "]


def test_shrink_refuses_what_it_cannot_do(zoo, tmp_path):
    fails(shrunk(zoo), "give --out DIR, the directory to write, or --dry-run")
    fails(shrunk(zoo, "--out", "."), "already exists; nothing is overwritten")
    fails(shrunk(zoo, "--out", "no/where"), "no: no such directory; create it first")
    fails(shrunk(zoo, "--out", "out", sparsity=1.5), "sparsity is the fraction that is removed")
    fails(shrunk(zoo, "--out", "out", "--include", "nothing"), "no tensor or group matches 'nothing'")
    fails(shrunk(zoo, "--out", "out", "--exclude", "*"), "nothing of the model can leave")
    assert not list(tmp_path.glob("out*"))


def test_an_example_without_values_is_one_line(zoo, tmp_path):
    """It can't go where the model is."""
    with open(f"{zoo}.py", "a") as file:
        file.write('linear, on_meta = nn.Linear(4, 64), torch.zeros(1, 4, device="meta")\n')
    fails(shrunk(zoo, "--out", "out", factory="linear", example="on_meta"), "an input on the meta device has no values")
    asked = "cost", f"{zoo}:linear", "--example", f"{zoo}:on_meta", "--emit", "out"
    fails(run(*asked), "an input on the meta device has no values")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{"criterion": "lamp"}, {"criterion": "ln_norm"}, {"allocate": "erk"}])
def test_units_are_chosen_as_the_library_chooses_them(zoo, tmp_path, options):
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    result = shrunk(zoo, *words, "--out", "out", "--include", "blocks.*.0.weight")
    assert result.exit_code == 0, result.output
    module = importlib.import_module(zoo)
    model = module.build()
    shrink(model, module.tokens, 0.5, include="blocks.*.0.weight", **options)
    written = load_file(tmp_path / "out" / "model.safetensors")
    state = model.state_dict()
    assert {*written} <= {*state}
    assert all(torch.equal(tensor, state[name]) for name, tensor in written.items())


def test_a_criterion_that_asks_for_data_is_refused(zoo):
    message = "wanda asks for input_norm, which this command does not collect; take magnitude, lamp, ln_norm or random"
    fails(shrunk(zoo, "--criterion", "wanda", "--dry-run"), message)
    fails(shrunk(zoo, "--criterion", "lampe", "--dry-run"), "no criterion is called 'lampe'; did you mean lamp")


def test_a_directory_loses_whole_blocks_and_by_data(tmp_path):
    (tmp_path / "folder").mkdir()
    told = run("shrink", str(tmp_path / "folder"), "-s", "0.2", "--leave", "blocks:10%", "--dry-run")
    fails(told, "its blocks leave by what a text shows; pass --data FILE")
    told = run("shrink", str(tmp_path / "folder"), "-s", "0.2", "--weights", "some.pt", "--dry-run")
    fails(told, "is a directory: leave out --weights")


def test_dimensions_of_heads_are_rotated_in_a_directory(tmp_path):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    torch.manual_seed(0)
    T5EncoderModel(T5Config(vocab_size=len(VOCABULARY), **sizes)).save_pretrained(tmp_path / "dense")
    write_tokenizer(tmp_path / "dense")
    (tmp_path / "text.txt").write_text(" ".join(WORDS * 8))
    asked = ["shrink", str(tmp_path / "dense"), "-s", "0.2", "--include", "*SelfAttention*", "--rotate", "--dry-run"]
    data = ["--data", str(tmp_path / "text.txt"), "--samples", "4", "--sequence-length", "16"]
    told = run(*asked, *data, "--no-verify", "--round-to", "1")
    assert told.exit_code == 0, told.output
    assert "Rotated before some left: dimensions of encoder.block." in " ".join(told.stdout.split())
    assert re.search(r"^d_kv +8 +\d$", told.stdout, re.MULTILINE)
    fails(run(*asked, *data, "--no-repair"), "rotate moves weights by real inputs")
    fails(run(*asked, "--without-data"), "rotate moves weights by real inputs; pass batches= .--data., with repair")
    fails(run(*asked[:2], "--leave", "blocks:1", *asked[-2:], *data), "rotate is about dimensions that leave")


def test_labels_leave_a_directory_by_their_names(tmp_path):
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    labels = {"id2label": {0: "ant", 1: "bee", 2: "cat"}, "label2id": {"ant": 0, "bee": 1, "cat": 2}}
    BertForSequenceClassification(BertConfig(vocab_size=9, **sizes, **labels)).save_pretrained(tmp_path / "dense")
    result = run("shrink", tmp_path / "dense", "--leave", "outputs:bee,cat", "--out", tmp_path / "small")
    assert result.exit_code == 0, result.output
    assert re.search(r"^classifier\.weight +3 -> 2 *$", result.stdout, re.MULTILINE), result.stdout
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert (config["id2label"], config["label2id"]) == ({"0": "bee", "1": "cat"}, {"bee": 0, "cat": 1})
    assert run("verify", tmp_path / "small", "--source", tmp_path / "dense").exit_code == 0
    more = ["--leave", "outputs:bea", "--out", tmp_path / "other"]
    fails(run("shrink", tmp_path / "dense", *more), "no output that is called 'bea'; near are 'bee'")
    assert not (tmp_path / "other").exists()
