"""Tensors with zeros, compressed files that somebody changed, and what is in a directory, for tests of storage."""

import json
from pathlib import Path

import torch
from safetensors.torch import save, save_file

from secateur import make_masks
from secateur.checkpoints import TensorEntry, dtype_word, open_checkpoint

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


def storable(dtype):
    """Whether the installed safetensors knows it: some are newer than the oldest version that is declared."""
    try:
        save({"x": torch.empty(0, dtype=dtype)})
    except KeyError:
        return False
    return True


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same(first, second):
    return (first.dtype, first.shape) == (second.dtype, second.shape) and torch.equal(bits(first), bits(second))


def drawn(dtype, shape, density, seed=0, negative_zeros=0.0):
    """Any bits at all, NaN among them, and zeros."""
    generator = torch.Generator().manual_seed(seed)
    width = torch.empty(0, dtype=dtype).element_size()
    count = torch.Size(shape).numel()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count, width), dtype=torch.uint8, generator=generator)
    raw[torch.rand(count, generator=generator) >= density] = 0
    if negative_zeros:
        raw[(raw == 0).all(1) & (torch.rand(count, generator=generator) < negative_zeros), -1] = 128
    return raw.reshape(-1).view(dtype).reshape(shape)


def sparse(*shape, sparsity=0.9, seed=0):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return weight.where(make_masks({"weight": weight}, sparsity)["weight"], 0.0)  # a product would leave -0.0


def entry_of(tensor, name="weight"):
    return TensorEntry(name, dtype_word(tensor.dtype), tuple(tensor.shape), Path("file"), 0, tensor.nbytes)


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rewritten(path, change=None, parts=None):
    """The file with its records, or its parts, changed."""
    checkpoint = open_checkpoint(path)
    metadata = dict(checkpoint.metadata[path])
    about = json.loads(metadata["secateur"])
    tensors = dict(checkpoint)
    about = change(about) or about if change else about
    save_file({**tensors, **(parts or {})}, path, metadata={**metadata, "secateur": json.dumps(about)})
    return path
