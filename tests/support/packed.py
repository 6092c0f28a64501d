"""Weights with zeros, and models of them, for tests of packed layers."""

import json

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from secateur import apply_
from secateur.pipeline import make_masks
from secateur.targets import find_targets


def weight_of(rows, columns, pattern, sparsity=0.75, seed=0):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return weight * make_masks({"weight": weight}, sparsity, pattern=pattern)["weight"]


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def model_of(pattern, sparsity=0.8):
    torch.manual_seed(0)
    model = three_layers()
    apply_(model, make_masks(find_targets(model), sparsity, pattern=pattern))
    return model


def three_layers():
    return nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 6)).eval()


def rewritten(path, change_tensors=None, change_header=None):
    """A packed file with other tensors or another header."""
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["secateur"])
    if change_tensors:
        change_tensors(tensors)
    if change_header:
        change_header(header)
    save_file(tensors, path, metadata={"secateur": json.dumps(header)})
