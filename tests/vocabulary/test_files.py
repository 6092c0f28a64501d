"""Each file that numbers tokens says the new numbers, in the form that it had; what cannot is left out."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from secateur import shrink_vocabulary
from secateur.checkpoints import CheckpointError
from secateur.vocabulary.files import by_transformers, model_folder, read_tokens
from support.vocabularies import TEXT, model_of, renamed_alike, wrapped


def written(folder, family, kind, **fields):
    tokenizer = wrapped(kind)
    tokenizer.save_pretrained(folder)
    model = model_of(family, len(tokenizer))
    for key, value in fields.items():
        setattr(model.config, key, value)
    model.save_pretrained(folder)
    return folder, Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_all_that_numbers_tokens(tmp_path):
    dense, tokenizer = written(tmp_path / "dense", "tied", "byte level", bos_token_id=400)
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    (dense / "vocab.json").write_text(json.dumps(vocabulary))
    (dense / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, merges)]) + "\n")
    (dense / "added_tokens.json").write_text(json.dumps({"<|rose|>": 400}))
    (dense / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 400], "max_new_tokens": 400}))
    (dense / "processor_config.json").write_text(json.dumps({"image_token_id": 400, "image_seq_length": 400}))
    (dense / "tokenizer.model").write_bytes(b"old numbers")
    (dense / "pytorch_model.bin").write_bytes(b"old weights")
    done = shrink_vocabulary(dense, texts=[TEXT[:99]], out=tmp_path / "small", exact=True)
    small, last = tmp_path / "small", len(done.order) - 1
    read = lambda name: json.loads((small / name).read_text())  # noqa: E731
    assert read("added_tokens.json") == {"<|rose|>": last}
    assert read("generation_config.json") == {"eos_token_id": [2, last], "max_new_tokens": 400}
    assert read("processor_config.json") == {"image_token_id": last, "image_seq_length": 400}
    assert read("config.json")["bos_token_id"] == last
    assert [str(path) for path in done.left_out] == ["pytorch_model.bin", "tokenizer.model"]
    assert not (small / "tokenizer.model").exists()
    assert read("vocab.json") == {token: at for token, at in vocabulary.items() if at in set(done.order)} | {
        token: list(done.order).index(at) for token, at in vocabulary.items() if at in set(done.order)
    }
    lines = (small / "merges.txt").read_text().splitlines()
    assert lines == ["#version: 0.2", *map(" ".join, read("tokenizer.json")["model"]["merges"])]
    # without tokenizer.json, transformers makes the same of these
    from tokenizers import models

    again = Tokenizer(models.BPE.from_file(str(small / "vocab.json"), str(small / "merges.txt")))
    again.pre_tokenizer, again.decoder = tokenizer.pre_tokenizer, tokenizer.decoder
    kept = [number for number in done.order if number != 400]
    assert renamed_alike(tokenizer, again, kept, [TEXT[:99], "a rose"], special=False)


def test_a_vocabulary_without_tokenizer_json(tmp_path):
    dense, tokenizer = written(tmp_path / "dense", "encoder", "WordPiece")
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    names = {"[UNK]": "<unk>", "[PAD]": "<pad>", "[CLS]": "<s>", "[SEP]": "</s>"}
    back = {value: key for key, value in names.items()}
    (dense / "vocab.txt").write_text("".join(f"{back.get(token, token)}\n" for token, _ in vocabulary), "utf-8")
    (dense / "tokenizer.json").unlink()
    (dense / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    before = by_transformers(dense)
    done = shrink_vocabulary(dense, texts=[TEXT[:99]], out=tmp_path / "small", exact=True)
    after = by_transformers(tmp_path / "small")
    assert not (tmp_path / "small/tokenizer.json").exists()
    assert len((tmp_path / "small/vocab.txt").read_text().splitlines()) == len(done.order[done.order < len(vocabulary)])
    assert renamed_alike(before.backend_tokenizer, after.backend_tokenizer, done.order, [TEXT[:99], "the rose"])


def test_a_list_of_another_vocabulary_is_left_out(tmp_path):
    dense, _ = written(tmp_path / "dense", "encoder", "WordPiece")
    (dense / "vocab.txt").write_text("other\nwords\n")
    (dense / "merges.txt").write_text("a b\n")
    (dense / "vocab.json").write_text('{"other": 1}')
    done = shrink_vocabulary(dense, texts=[TEXT[:99]], out=tmp_path / "small", exact=True)
    assert [str(path) for path in done.left_out] == ["merges.txt", "vocab.json", "vocab.txt"]


def test_numbers_that_the_class_adds_are_written_where_they_change(tmp_path):
    """LlamaConfig says that 1 and 2 begin and end a text, where config.json says nothing."""
    dense, _ = written(tmp_path / "dense", "tied", "WordLevel")
    config = json.loads((dense / "config.json").read_text())
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config.pop(key)
    (dense / "config.json").write_text(json.dumps(config | {"eos_token_id": 30}))
    done = shrink_vocabulary(dense, texts=["rose"], out=tmp_path / "small", exact=True)
    small = json.loads((tmp_path / "small/config.json").read_text())
    assert small["eos_token_id"] == list(done.order).index(30)
    assert "bos_token_id" not in small
    assert 1 in done.order


@pytest.mark.long
def test_a_row_that_no_token_has_stays_where_a_configuration_names_it(tmp_path):
    tokenizer = wrapped("WordLevel")
    dense = tmp_path / "dense"
    tokenizer.save_pretrained(dense)
    model = model_of("tied", len(tokenizer) + 5)
    model.config.pad_token_id = len(tokenizer) + 3
    model.save_pretrained(dense)
    done = shrink_vocabulary(dense, texts=["rose"], out=tmp_path / "small", exact=True)
    small = json.loads((tmp_path / "small/config.json").read_text())
    assert done.order[-1] == len(tokenizer) + 3
    assert small["pad_token_id"] == len(done.order) - 1
    assert small["vocab_size"] == len(done.order)
    assert len(by_transformers(tmp_path / "small")) == len(done.order) - 1


def test_templates_and_special_tokens_stay(tmp_path):
    dense, tokenizer = written(tmp_path / "dense", "tied", "byte level")
    (dense / "chat_template.jinja").write_text("{{ 'gardener' + ' prunes' }}")
    config = json.loads((dense / "tokenizer_config.json").read_text())
    config |= {"sep_token": None, "extra_special_tokens": {"image_token": "ro"}, "cls_token": 1}
    config |= {"mask_token": {"content": "hed", "special": True}, "additional_special_tokens": ["<|rose|>"]}
    (dense / "tokenizer_config.json").write_text(json.dumps(config))
    done = shrink_vocabulary(dense, texts=["It's"], out=tmp_path / "small", exact=True)
    wanted = {*tokenizer.encode("gardener", add_special_tokens=False).ids}
    wanted |= {tokenizer.token_to_id(token) for token in ("<|rose|>", "hed", "ro") if tokenizer.token_to_id(token)}
    assert wanted <= set(done.order)
    assert np.all(np.diff(done.order) > 0)


def test_tokens_that_a_class_takes_for_special_stay(tmp_path):
    """LlamaTokenizer begins texts with <s>, and adds it anew where it is no token: beyond the model's rows."""
    dense, _ = written(tmp_path / "dense", "tied", "byte fallback")
    values = json.loads((dense / "tokenizer.json").read_text())
    values["added_tokens"], values["post_processor"] = [], None
    (dense / "tokenizer.json").write_text(json.dumps(values))
    (dense / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    (dense / "config.json").write_text(
        json.dumps(json.loads((dense / "config.json").read_text()) | {"bos_token_id": None, "eos_token_id": None})
    )
    (dense / "generation_config.json").unlink()
    done = shrink_vocabulary(dense, texts=["roses"], out=tmp_path / "small", exact=True)
    after = by_transformers(tmp_path / "small")
    assert "LlamaTokenizer" in type(after).__name__
    assert {after.bos_token_id, after.eos_token_id} <= set(range(done.rows[1]))
    assert max(after("roses")["input_ids"]) < done.rows[1]


def test_what_has_no_tokenizer_is_said(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json, and no vocabulary"):
        read_tokens(tmp_path)
    (tmp_path / "vocab.txt").write_text("a\n")
    with pytest.raises(CheckpointError, match="no tokenizer that transformers loads"):
        read_tokens(tmp_path)
    assert model_folder(tmp_path) == tmp_path
