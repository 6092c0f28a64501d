"""Laws of tables of tokens alone: a text whose tokens all stay has the same vector bit for bit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

from secateur import shrink_vocabulary
from secateur.checkpoints import CheckpointError, verify_checkpoint
from support.damaged import tensor
from support.vocabularies import TEXT, wrapped

pytestmark = pytest.mark.usefixtures("few_random_texts")


def written(root, kind="WordPiece", place="0_StaticEmbedding", name="embedding.weight", more=0):
    """As sentence-transformers writes one: no configuration, a tokenizer, a table."""
    modules = [
        {"idx": 0, "name": "0", "path": place, "type": "sentence_transformers.models.StaticEmbedding"},
        {"idx": 1, "name": "1", "path": "1_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (root / place).mkdir(parents=True)
    (root / "modules.json").write_text(json.dumps(modules))
    backend = wrapped(kind).backend_tokenizer
    backend.save(str(root / place / "tokenizer.json"))
    table = torch.randn(backend.get_vocab_size() + more, 6)
    save_file({name: table}, root / place / "model.safetensors")
    return root


def vector(folder, text, name="embedding.weight"):
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    bag = nn.EmbeddingBag.from_pretrained(load_file(folder / "model.safetensors")[name])
    return bag(torch.tensor(ids), torch.tensor([0]))


@pytest.mark.parametrize("kind", ["byte level", "Unigram", "WordPiece"])  # test_directory.py has all
def test_vectors_are_the_same_bit_for_bit(kind, tmp_path):
    root = written(tmp_path / "dense", kind, more=3)
    text = TEXT[:200]
    done = shrink_vocabulary(root, texts=[text], out=tmp_path / "small", exact=True)
    assert done.rows[1] < done.rows[0]
    inside = [each / "0_StaticEmbedding" for each in (root, tmp_path / "small")]
    assert torch.equal(*(vector(folder, text) for folder in inside))
    assert load_file(inside[1] / "model.safetensors")["embedding.weight"].shape == (done.rows[1], 6)
    found = verify_checkpoint(tmp_path / "small", root)
    assert found.ok, found.problems


def test_one_in_the_folder_itself_as_model2vec_writes_it(tmp_path):
    root = written(tmp_path / "dense", place="", name="embeddings")
    (root / "config.json").write_text('{"model_type": "model2vec", "hidden_dim": 6}')
    shrink_vocabulary(root, texts=[TEXT[:99]], out=tmp_path / "small", rank="distance", exact=True)
    assert torch.equal(*(vector(each, TEXT[:99], "embeddings") for each in (root, tmp_path / "small")))
    assert (tmp_path / "small/config.json").read_bytes() == (root / "config.json").read_bytes()
    tensor("embeddings", lambda table: table.flip(0))(tmp_path / "small")
    found = verify_checkpoint(tmp_path / "small", root)
    assert "embeddings: its bytes are not what stays of the source's." in found.problems


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"embeddings": torch.ones(999, 6), "mapping": torch.ones(999)}, "holds embeddings, mapping, and not one"),
        ({"embeddings": torch.ones(999)}, "holds embeddings, and not one table"),
        ({"table": torch.ones(999, 6)}, "holds table, and not one table"),
        ({"embeddings": torch.ones(9, 6)}, "has 9 rows; the tokenizer has numbers up to"),
    ],
)
def test_what_is_no_table_is_refused(tensors, message, tmp_path):
    root = written(tmp_path / "dense", place="")
    save_file(tensors, root / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        shrink_vocabulary(root, texts=[TEXT[:99]], out=tmp_path / "small", exact=True)
    assert [each.name for each in tmp_path.iterdir()] == ["dense"]
