"""A directory: the model and the tokenizer that from_pretrained loads keep the law, or there is no directory at all."""

import errno
import json
import os
import shutil
import signal
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file

from secateur import shrink_vocabulary
from secateur.checkpoints import CheckpointError, slicing
from secateur.vocabulary import directory
from support.damaged import changed
from support.forks import forked
from support.vocabularies import KINDS, TEXT, model_of, renamed_alike, same_inside, wrapped

pytestmark = pytest.mark.usefixtures("few_random_texts")

FAMILIES = ("gpt2", "gptj", "neox", "llama", "tied", "bert", "encoder", "roberta", "t5", "bart")


def written(folder, family="tied", kind="byte level", more=7, **how):
    tokenizer = wrapped(kind)
    tokenizer.save_pretrained(folder)
    model_of(family, len(tokenizer) + more).save_pretrained(folder, **how)
    return folder


def loaded(folder):
    import transformers

    kind = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    return kind.from_pretrained(folder).eval(), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_the_same_bit_for_bit(family, tmp_path, monkeypatch):
    dense = written(tmp_path / "dense", family)
    monkeypatch.setattr(slicing, "PIECE", 1000)
    done = shrink_vocabulary(dense, texts=[TEXT[:200]], out=tmp_path / "small", exact=True)
    old, before = loaded(dense)
    new, after = loaded(tmp_path / "small")
    same_inside(old, new, done.order)
    assert renamed_alike(before.backend_tokenizer, after.backend_tokenizer, done.order, [TEXT[:200]])
    assert new.config.vocab_size == done.rows[1] == len(after) < done.rows[0]
    assert done.parameters[1] == sum(each.numel() for each in load_file(tmp_path / "small/model.safetensors").values())
    assert "as transformers loads both" in done.proof
    # as in memory
    model, tokenizer = loaded(dense)
    assert shrink_vocabulary(model, tokenizer, [TEXT[:200]], exact=True) == done
    assert {name: each.shape for name, each in model.state_dict().items()} == {
        name: each.shape for name, each in new.state_dict().items()
    }
    for name, tensor in new.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tokenizer(kind, tmp_path):
    dense = written(tmp_path / "dense", kind=kind)
    done = shrink_vocabulary(dense, texts=[TEXT], out=tmp_path / "small", cover=0.9)
    old, before = loaded(dense)
    new, after = loaded(tmp_path / "small")
    same_inside(old, new, done.order)
    assert renamed_alike(
        before.backend_tokenizer, after.backend_tokenizer, done.order, ["", "The", "<|rose|>", "a (1)"]
    )
    assert done.kind in ("BPE", "Unigram", "WordPiece", "WordLevel")
    assert done.gone


def test_shards_names_and_metadata_stay(tmp_path):
    dense = written(tmp_path / "dense", max_shard_size=20_000)
    shards = sorted(path.name for path in dense.glob("*.safetensors"))
    assert len(shards) > 1
    done = shrink_vocabulary(dense, texts=[TEXT[:99]], out=tmp_path / "small", multiple=8, exact=True)
    assert sorted(path.name for path in (tmp_path / "small").glob("*.safetensors")) == shards
    assert done.rows[1] % 8 == 0
    index = json.loads((tmp_path / "small/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == done.nbytes[1]
    assert index["weight_map"] == json.loads((dense / "model.safetensors.index.json").read_text())["weight_map"]
    same_inside(loaded(dense)[0], loaded(tmp_path / "small")[0], done.order)


def test_a_dry_run_says_the_same_and_writes_nothing(tmp_path):
    dense = written(tmp_path / "dense")
    said = shrink_vocabulary(dense, texts=[TEXT[:99]], exact=True)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]
    done = shrink_vocabulary(dense, texts=[TEXT[:99]], out=tmp_path / "small", exact=True)
    assert said == done
    assert (said.rows, said.nbytes, said.fields, said.tensors) == (done.rows, done.nbytes, done.fields, done.tensors)


def test_tensors_that_are_no_part_of_the_model_stay_whole_and_are_said(tmp_path):
    dense = written(tmp_path / "dense")
    tensors = load_file(dense / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"].shape[0]
    save_file(tensors | {"other.weight": torch.ones(rows, 3)}, dense / "model.safetensors", {"format": "pt"})
    done = shrink_vocabulary(dense, texts=[TEXT[:99]], out=tmp_path / "small", exact=True)
    assert done.left_whole == ("other.weight",)
    assert load_file(tmp_path / "small/model.safetensors")["other.weight"].shape == (rows, 3)
    assert "other.weight" not in done.tensors


def test_names_in_files_that_transformers_renames(tmp_path):
    dense = written(tmp_path / "dense")
    tensors = load_file(dense / "model.safetensors")
    tensors = {name.replace("model.", "old.inner.", 1): tensor for name, tensor in tensors.items()}
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    done = shrink_vocabulary(dense, texts=[TEXT[:99]], out=tmp_path / "small", exact=True)
    assert done.tensors == {"old.inner.embed_tokens.weight": 0}
    del tensors["old.inner.embed_tokens.weight"]
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="which has a row for each token, is not in the files"):
        shrink_vocabulary(dense, texts=[TEXT[:99]], exact=True)


def test_a_folder_of_sentence_transformers(tmp_path):
    root = tmp_path / "dense"
    written(root / "0_Transformer", "encoder", "WordPiece")
    modules = [
        {"idx": 0, "name": "0", "path": "0_Transformer", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (root / "modules.json").write_text(json.dumps(modules))
    (root / "1_Pooling").mkdir()
    (root / "1_Pooling/config.json").write_text("{}")
    done = shrink_vocabulary(root, texts=[TEXT[:99]], out=tmp_path / "small", exact=True)
    assert (tmp_path / "small/1_Pooling/config.json").read_text() == "{}"
    same_inside(loaded(root / "0_Transformer")[0], loaded(tmp_path / "small/0_Transformer")[0], done.order)
    for modules[1]["type"], message in [
        ("a.BoW", "BoW numbers tokens in a way"),
        ("a.WordEmbeddings", "numbers tokens"),
        ("a.StaticEmbedding", "StaticEmbedding numbers tokens"),
    ]:
        (root / "modules.json").write_text(json.dumps(modules))
        with pytest.raises(CheckpointError, match=message):
            shrink_vocabulary(root, texts=[TEXT[:99]], exact=True)
    modules[0]["path"] = "../dense/.."
    modules[1]["type"] = "a.Pooling"
    for text, message in [(json.dumps(modules), "is no folder in it"), ("[1]", "damaged"), ("{", "damaged")]:
        (root / "modules.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            shrink_vocabulary(root, texts=[TEXT[:99]], exact=True)


# ---- nothing, or all of it ----


@pytest.mark.parametrize(
    "failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), SystemExit(143)]
)
@pytest.mark.parametrize("where", ["write_sliced", "_by_transformers", "record_text"])
def test_a_failure_in_the_middle_leaves_nothing(tmp_path, monkeypatch, failure, where):
    dense = written(tmp_path / "dense")
    before = {path.name: path.read_bytes() for path in dense.iterdir()}

    def fails(*_, **__):
        raise failure

    monkeypatch.setattr(directory, where, fails)
    with pytest.raises(type(failure)):
        shrink_vocabulary(dense, texts=[TEXT[:99]], out=tmp_path / "small", exact=True)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]
    assert {path.name: path.read_bytes() for path in dense.iterdir()} == before


def test_a_process_that_is_killed_leaves_no_directory_of_the_name(tmp_path):
    """What it had begun has another name; the next run does not see it."""
    dense = written(tmp_path / "dense")

    def dying():
        directory.write_sliced = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        shrink_vocabulary(dense, texts=["a rose"], out=tmp_path / "small", exact=True)

    assert os.WTERMSIG(forked(dying)) == signal.SIGKILL
    assert not (tmp_path / "small").exists()
    (left,) = (path for path in tmp_path.iterdir() if path.name != "dense")
    assert left.name.startswith("small.unfinished-")
    assert shrink_vocabulary(dense, texts=["a rose"], out=tmp_path / "small", exact=True).out == tmp_path / "small"


def test_a_source_that_is_read_only(tmp_path):
    dense = written(tmp_path / "dense")
    for path in dense.iterdir():
        path.chmod(stat.S_IRUSR)
    shrink_vocabulary(dense, texts=[TEXT[:99]], out=tmp_path / "small", exact=True)
    shrink_vocabulary(tmp_path / "small", texts=[TEXT[:30]], out=tmp_path / "smaller", exact=True)
    record = json.loads((tmp_path / "smaller/secateur.json").read_text())
    assert record["previous"]["method"] == record["method"] == "vocabulary"


def test_wrong_places(tmp_path):
    dense = written(tmp_path / "dense")
    (tmp_path / "there").mkdir()
    for out, message in [
        (dense, "replace the input"),
        (dense / "in", "inside the input"),
        (tmp_path / "there", "exists"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            shrink_vocabulary(dense, texts=[TEXT[:99]], out=out, exact=True)
    with pytest.raises(CheckpointError, match="no such directory"):
        shrink_vocabulary(tmp_path / "gone", texts=[TEXT[:99]], out=tmp_path / "out", exact=True)


def without(name):
    return lambda folder: (folder / name).unlink()


def only_sentencepiece(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"proto")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("config.json"), "has no config.json"),
        (without("tokenizer.json"), "has no tokenizer.json"),
        (only_sentencepiece, r"has no tokenizer.json.*AutoTokenizer.from_pretrained"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "tokenizer.json").write_text('{"model": 1}'), "no tokenizer that"),
        (lambda folder: (folder / "tokenizer.json").write_text("[1]"), "not a JSON object"),
        (changed("config.json", vocab_size=90), "has shape"),
        (changed("config.json", vocab_size=-1), "no model can be made of it"),
        (changed("config.json", architectures=["Mine"]), "no model of that name"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x09"), "not a safetensors file"),
        (lambda folder: (folder / "generation_config.json").write_text("1"), "not a JSON object"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("}"), "not valid JSON"),
        (lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff"), "not UTF-8"),
        (lambda folder: (folder / "added_tokens.json").write_text('{"a": [1]}'), "not a number for each token"),
    ],
)
def test_hostile_directories_are_one_line(tmp_path, change, message):
    dense = written(tmp_path / "dense", more=0)
    change(dense)
    with pytest.raises(ValueError, match=message) as told:
        shrink_vocabulary(dense, texts=[TEXT[:99]], out=tmp_path / "small", exact=True)
    assert "\n" not in str(told.value)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_a_tokenizer_that_transformers_loads_otherwise_is_refused(tmp_path, monkeypatch):
    dense = written(tmp_path / "dense")
    whole = directory.by_transformers

    def fails(folder):
        if folder != dense:
            raise CheckpointError("no")
        return whole(folder)

    monkeypatch.setattr(directory, "by_transformers", fails)
    with pytest.raises(ValueError, match="loads the source's tokenizer, and not the smaller one: no"):
        shrink_vocabulary(dense, texts=[TEXT[:99]], out=tmp_path / "small", exact=True)
    shutil.rmtree(dense)
    assert not list(tmp_path.iterdir())
