"""A small Llama on the disk, dense and pruned, and what it is trained on."""

import pytest
import torch

from secateur.blockwise import oneshot
from support.families import batches, make


@pytest.fixture
def pair():
    """A teacher and what magnitude pruning left of it, and batches."""
    import copy

    from secateur import sparsify

    teacher = make("llama")
    model = copy.deepcopy(teacher)
    sparsify(model, 0.5)
    return model, teacher, [{"input_ids": torch.randint(3, 64, (4, 12))} for _ in range(3)]


@pytest.fixture
def directories(tmp_path):
    """``dense`` and ``sparse``, pruned by `oneshot`."""
    make("llama").save_pretrained(tmp_path / "dense", max_shard_size="8KB")
    oneshot(tmp_path / "dense", batches("llama"), 0.5, out=tmp_path / "sparse")
    return tmp_path
