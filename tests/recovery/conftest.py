"""A small Llama on the disk, dense and pruned, and what it is trained on."""

import shutil

import pytest
import torch

from secateur.models import oneshot
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


@pytest.fixture(scope="session")
def made_directories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("directories")
    make("llama").save_pretrained(folder / "dense", max_shard_size="8KB")
    oneshot(folder / "dense", batches("llama"), 0.5, out=folder / "sparse")
    return folder


@pytest.fixture
def directories(made_directories, tmp_path):
    """``dense`` and ``sparse``, pruned by `oneshot`."""
    return shutil.copytree(made_directories, tmp_path, dirs_exist_ok=True)
