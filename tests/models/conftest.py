"""A small Llama on the disk."""

import pytest

from support.families import make


@pytest.fixture
def llama(tmp_path):
    make("llama").save_pretrained(tmp_path / "dense", max_shard_size="8KB")
    (tmp_path / "dense/tokenizer.json").write_text("{}")
    return tmp_path / "dense"
