"""Compressing, loading and expanding take the memory of one tensor at most: what numpy allocates, at its peak."""

import tracemalloc

import pytest
import torch
from safetensors.torch import save_file

from secateur.storage import expand_checkpoint, load_compressed, save_compressed

TENSOR = 2048 * 4096 * 4
LITTLE = 24e6  # pieces, and what waits in memory before it goes to a temporary file


def peak(work):
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("zstd", [False, True])
def test_the_memory_of_one_tensor(tmp_path, zstd):
    weight = torch.empty(2048, 4096).uniform_(1, 2)
    weight[:, ::2] = 0
    weight[:, 1::64] *= -0.0
    save_file({"weight": weight}, tmp_path / "dense")
    model = {"weight": weight}
    assert peak(lambda: save_compressed(model, tmp_path / "small", zstd=zstd)) < LITTLE
    assert peak(lambda: save_compressed(tmp_path / "dense", tmp_path / "small", zstd=zstd)) < TENSOR + LITTLE
    assert peak(lambda: load_compressed(tmp_path / "small")["weight"]) < TENSOR + LITTLE
    # values in zstd come by planes of bytes, so that all of them have to be there; half of them are kept
    spared = peak(lambda: expand_checkpoint(tmp_path / "small", tmp_path / "expanded"))
    assert spared < (TENSOR / 2 if zstd else 0) + LITTLE
    assert (tmp_path / "expanded").read_bytes() == (tmp_path / "dense").read_bytes()
