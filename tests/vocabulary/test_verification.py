"""What a directory claims is seen again on its bytes: any change of them, or of what it claims, is named."""

import json
import shutil

import pytest
import torch

from secateur import shrink_vocabulary
from secateur.checkpoints import CheckpointError, verify_checkpoint
from support.commands import run
from support.damaged import changed, tensor
from support.vocabularies import TEXT, model_of, wrapped

pytestmark = pytest.mark.usefixtures("few_random_texts")

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    tokenizer = wrapped("byte level")
    tokenizer.save_pretrained(folder / "dense")
    model_of("llama", len(tokenizer) + 7).save_pretrained(folder / "dense")
    (folder / "dense/README.md").write_text("roses")
    (folder / "dense/tokenizer.model").write_bytes(b"old numbers")
    shrink_vocabulary(folder / "dense", texts=[TEXT[:99]], out=folder / "small", exact=True)
    return folder


def test_what_was_written_holds(made):
    found = verify_checkpoint(made / "small", made / "dense")
    assert found.ok, found.problems
    assert not found.unchecked
    assert found.files >= 1
    assert {tensor.unchanged for tensor in found.tensors} == {True}
    alone = verify_checkpoint(made / "small")
    assert alone.ok
    assert "no source was given" in alone.unchecked[0]


def test_the_command_verifies_it(made):
    ended = run("verify", made / "small", "--source", made / "dense")
    assert ended.exit_code == 0, ended.output
    assert "small: what secateur.json claims holds" in ended.stdout


def other_numbers(folder):
    values = json.loads((folder / "vocabulary.json").read_text())
    kept = values["kept"]
    kept[10], kept[11] = kept[11], kept[10]
    (folder / "vocabulary.json").write_text(json.dumps(values))


def renamed(folder):
    values = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = values["model"]["vocab"]
    vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (tensor(EMBEDDING, lambda each: each.flip(0)), f"{EMBEDDING}: its bytes are not what stays"),
        (tensor(HEAD, lambda each: each + 1), f"{HEAD}: its bytes are not what stays"),
        (tensor(HEAD, lambda each: each[1:]), "claims"),
        (tensor(HEAD, lambda each: each.half()), f"{HEAD}: F16 of shape"),
        (tensor("model.norm.weight", lambda each: each * 2), "model.norm.weight: its bytes are not what stays"),
        (tensor("more", lambda _: torch.zeros(1)), "more: not in the source"),
        (changed("config.json", vocab_size=5), "config.json: vocab_size is 5, not"),
        (changed("config.json", eos_token_id=7), "config.json: eos_token_id is 7, not "),
        (changed("secateur.json", parameters={"from": 1, "to": 1}), "claims 1"),
        (changed("secateur.json", tokens={"from": 9, "to": 1}), "claims 1 tokens"),
        (changed("secateur.json", shorter={"fc": {"dimension": 0}}), "fc: became shorter"),
        (other_numbers, f"{EMBEDDING}: vocabulary.json does not fit the source's shape"),
        (changed("vocabulary.json", kept=[1, 2]), f"{EMBEDDING}: F32 of shape"),
        (changed("vocabulary.json", kept=[1, 2]), "leaves out what the source's tokenizer needs"),
        (changed("vocabulary.json", kept=[10**6]), "is beyond the source's tokens"),
        (renamed, "tokenizer.json: is not what the source's becomes"),
        (renamed, "though each of them stays"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json: not here"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "no tokenizer that"),
        (lambda folder: (folder / "tokenizer.model").write_bytes(b""), "tokenizer.model: says what the source says"),
        (lambda folder: (folder / "README.md").write_text("thorns"), "README.md: its bytes are not the source's"),
        (lambda folder: (folder / "README.md").unlink(), "README.md: in the source, but not here"),
        (lambda folder: (folder / "more.txt").write_text(""), "more.txt: not in the source"),
    ],
)
def test_what_does_not_hold_is_named(made, tmp_path, change, problem):
    shutil.copytree(made / "small", tmp_path / "small")
    change(tmp_path / "small")
    found = verify_checkpoint(tmp_path / "small", made / "dense")
    assert any(problem in each for each in found.problems), found.problems
    assert run("verify", tmp_path / "small", "--source", made / "dense").exit_code == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "vocabulary.json").unlink(), "vocabulary.json: is missing"),
        (lambda folder: (folder / "vocabulary.json").write_text("{}"), "format is missing"),
        (changed("vocabulary.json", version=9), "is not 'secateur vocabulary', version 1"),
        (changed("vocabulary.json", kept=[1, 1]), "kept has a number twice"),
        (changed("vocabulary.json", kept=[-1]), r"kept\[0\] must be a whole number of at least 0"),
        (changed("vocabulary.json", kept=[1 << 50]), "a number that no tokenizer has"),
        (changed("secateur.json", tokens=1), "tokens must be an object"),
        (changed("secateur.json", shorter={"a": {"dimension": 5}}), "dimension must be a whole number"),
    ],
)
def test_what_is_no_record_is_refused(made, tmp_path, change, message):
    shutil.copytree(made / "small", tmp_path / "small")
    change(tmp_path / "small")
    with pytest.raises(CheckpointError, match=message):
        verify_checkpoint(tmp_path / "small", made / "dense")
