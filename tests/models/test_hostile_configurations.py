"""Configurations that nobody wrote by accident: what no model can be made of is one line that names config.json."""

import contextlib
import functools
import json
import random
import re
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
import transformers
from transformers.utils import logging as their_logging
from typer.testing import CliRunner

from secateur.checkpoints import CheckpointError, meta_model_of, open_checkpoint
from secateur.cli.commands import app
from secateur.criteria import magnitude
from secateur.models import build_on_meta, oneshot
from secateur.shrinking import shrink
from secateur.solvers import from_criterion
from support.families import EVERY_FAMILY, batches, make
from support.tokenizers_of_words import write_tokenizer

HOSTILE = [
    *(None, True, "x", "", "__class__", "code/elsewhere", [], [1], {}, {"a": 1}),
    *(-1, 0, 1, 3, 10**9, 2**63, -(2**70), 1.5, float("nan"), float("inf"), -1e300, 1e-300),
]
MORE = ["architectures", "attn_implementation", "auto_map", "dtype", "head_dim", "model_type", "text_config"]
WRONG_ARCHITECTURES = [
    *("pipeline", "AutoModel", "LlamaConfig", "PreTrainedModel", "Trainer", "models", "__class__", "__dict__", ""),
    *("BertForMaskedLM", "GPT2LMHeadModel", "LlamaForCausalLM.generate", 5, None, ["LlamaForCausalLM"], True),
]


@contextlib.contextmanager
def quiet():
    before = their_logging.get_verbosity()
    their_logging.set_verbosity(60)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        their_logging.set_verbosity(before)


def configured(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def changed(values, chance):
    """The configuration with one field of any depth that has another value."""
    key = chance.choice([*sorted(values), *MORE])
    inner, value = values.get(key), chance.choice(HOSTILE)
    if isinstance(inner, dict) and inner and chance.random() < 0.7:
        value = {**inner, chance.choice(sorted(inner)): value}
    return {**values, key: value}


def strict(text):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def broken(llama, tmp_path):
    return shutil.copytree(llama, tmp_path / "broken")


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_a_hostile_field_is_one_line_or_does_no_harm(family, tmp_path):
    chance = random.Random(f"configurations of {family}")
    folder, out = tmp_path / "dense", tmp_path / "out"
    make(family).save_pretrained(folder)
    text = (folder / "config.json").read_text()
    for _ in range(8):
        values = changed(json.loads(text), chance)
        (folder / "config.json").write_text(json.dumps(values))
        error = None
        with quiet():
            try:
                oneshot(folder, batches(family, count=1), 0.5, solver=from_criterion(magnitude), out=out)
            except ValueError as found:
                error = str(found)
        if error is None:
            strict((out / "secateur.json").read_text())
            shutil.rmtree(out)
        else:
            assert "config.json" in error
            assert "\n" not in error
            assert not out.exists()
        shutil.rmtree(tmp_path / "out.unfinished", ignore_errors=True)


@pytest.mark.parametrize("name", WRONG_ARCHITECTURES, ids=repr)
def test_an_architecture_is_the_class_of_a_model_of_the_family(name, broken):
    configured(broken, architectures=name if name is None else [name])
    for build in (lambda: build_on_meta(open_checkpoint(broken)), lambda: shrink(broken, sparsity=0.5)):
        with pytest.raises(CheckpointError, match=r"config\.json: names (no architectures|the architecture )"):
            build()


def test_a_buffer_of_gigabytes_is_not_made(tmp_path):
    make("gpt_neox").save_pretrained(tmp_path)
    configured(tmp_path, head_dim=10**13)  # of which its rotary embedding makes a buffer
    with pytest.raises(CheckpointError, match=r"config\.json: describes a model whose buffers alone take 1e\+04 GB"):
        build_on_meta(open_checkpoint(tmp_path))


def test_sizes_are_compared_before_buffers_are_made(tmp_path):
    make("bert").save_pretrained(tmp_path)
    configured(tmp_path, max_position_embeddings=10**13)  # of which BERT makes two buffers
    with pytest.raises(CheckpointError, match=r"has shape \(64, 16\), and its config\.json asks for \(10000000000000"):
        build_on_meta(open_checkpoint(tmp_path))


UNBUILDABLE = [
    {"architectures": ["pipeline"]}, {"architectures": ["BertForMaskedLM"]}, {"head_dim": 0}, {"text_config": 5},
    {"pad_token_id": 10**9},
]  # fmt: skip
UNRUNNABLE = [
    {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}},
    {"rms_norm_eps": float("nan")},
]
CALLS = [*(("oneshot", changes) for changes in UNBUILDABLE + UNRUNNABLE), *(("shrink", each) for each in UNBUILDABLE)]


@pytest.mark.parametrize(("verb", "changes"), CALLS, ids=str)
def test_a_command_ends_in_one_line(verb, changes, broken, tmp_path):
    configured(broken, **changes)
    write_tokenizer(broken)
    (tmp_path / "text.txt").write_text("the secateur is a small shear " * 100)
    words = {
        "oneshot": ["--data", str(tmp_path / "text.txt"), "--samples", "2", "--sequence-length", "8"],
        "shrink": [],
    }[verb]
    called = [verb, str(broken), "--out", str(tmp_path / "out"), "--sparsity", "0.5", *words]
    with quiet():
        ended = CliRunner().invoke(app, called)
    assert ended.exit_code == 2, ended.output
    assert len(ended.stderr.splitlines()) == 1
    assert re.match(r"secateur: .*config\.json", ended.stderr)
    assert not (tmp_path / "out").exists()


# transformers logs of each, before anything else does: of one no model is made, the other's runs into NaN
ROPE = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 0.5}}
LOGGED = [
    ("oneshot", ROPE | {"rms_norm_eps": float("nan")}, "NaN"),
    ("shrink", {"rope_parameters": {"rope_type": "own", "rope_theta": 1e4}}, r"config\.json"),
    ("oneshot", ROPE, None),
]


# commands of one process that has imported torch, and whose logging nobody has touched: each in a copy of it
COPIES = """
import json, os, runpy, sys
import torch
for number, words in enumerate(json.loads(sys.argv[1])):
    if not os.fork():
        os.dup2(os.open(f"{number}.txt", os.O_CREAT | os.O_WRONLY), 2)
        sys.argv[1:] = words
        code = 1
        try:
            runpy.run_module("secateur", run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = ended.code or 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.wait()[1]), file=open("codes.txt", "a"))
"""


@pytest.fixture(scope="module")
def logged(llama, tmp_path_factory):
    """The exit code and what stands on stderr, of each of `LOGGED`."""
    place = tmp_path_factory.mktemp("logged")
    (place / "text.txt").write_text("the secateur is a small shear " * 100)
    calls = []
    for number, (verb, changes, _) in enumerate(LOGGED):
        folder = shutil.copytree(llama, place / f"dense{number}")
        configured(folder, **changes)
        write_tokenizer(folder)
        words = ["--sparsity", "0.3", "--data", "text.txt", "--samples", "2", "--sequence-length", "8"]
        calls.append([verb, str(folder), "--out", str(place / f"out{number}"), *words])
    subprocess.run([sys.executable, "-c", COPIES, json.dumps(calls)], cwd=place, capture_output=True, check=True)
    codes = [int(code) for code in (place / "codes.txt").read_text().split()]
    return [(code, (place / f"{number}.txt").read_text()) for number, code in enumerate(codes)]


@pytest.mark.parametrize("number", range(len(LOGGED)))
@pytest.mark.long
def test_what_transformers_logs_is_not_beside_an_error(number, logged):
    """Where all is well it is there, in the end."""
    (code, stderr), wrong = logged[number], LOGGED[number][2]
    lines = stderr.splitlines()
    if wrong is None:
        assert code == 0, stderr
        assert [at for at, line in enumerate(lines) if "[transformers]" in line] == [len(lines) - 1]
        return
    assert code == 2
    assert len(lines) == 1, stderr
    assert re.match(rf"secateur: .*{wrong}", stderr)


def test_sizes_that_are_none_are_one_line(tmp_path):
    """torch warns of each tensor without an entry that is initialized."""
    make("gpt_neox").save_pretrained(tmp_path)
    configured(tmp_path, vocab_size=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        meta_model_of(open_checkpoint(tmp_path))
        with pytest.raises(CheckpointError, match=r"and its config\.json asks for \(0, 16\)"):
            build_on_meta(open_checkpoint(tmp_path))


def test_a_text_does_not_say_what_a_decoder_reads(tmp_path):
    sizes = {"vocab_size": 64, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2}
    made = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    made.save_pretrained(tmp_path / "dense")
    text, out = torch.arange(8)[None] + 2, tmp_path / "out"
    for verb in (oneshot, functools.partial(shrink, verify=False)):
        with pytest.raises(ValueError, match="T5ForConditionalGeneration has a decoder, and a text does not say"):
            verb(tmp_path / "dense", batches=[text], sparsity=0.5, out=out)
        assert [*tmp_path.iterdir()] == [tmp_path / "dense"]
    oneshot(tmp_path / "dense", [{"input_ids": text, "labels": text}], 0.5, out=out)


def test_bench_ends_in_one_line(broken):
    configured(broken, architectures=["pipeline"])
    ended = CliRunner().invoke(app, ["bench", str(broken)])
    assert ended.exit_code == 2
    assert re.match(r"secateur: .*config\.json: names the architecture pipeline.*\n$", ended.stderr)


def test_what_does_not_run_is_found_before_the_copy(tmp_path):
    make("mixtral").save_pretrained(tmp_path / "dense")
    configured(tmp_path / "dense", num_experts_per_tok=10**6)
    with pytest.raises(CheckpointError, match=r"config\.json: the model that it describes does not run"):
        oneshot(tmp_path / "dense", batches("mixtral"), 0.5, out=tmp_path / "out")
    assert not (tmp_path / "out.unfinished").exists()
