"""Pruned modules that several tests look at, and pictures of them."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn

from secateur import prune


def linear(rows: int = 4, columns: int = 6) -> nn.Linear:
    layer = nn.Linear(columns, rows)
    order = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(0)) + 1
    layer.weight.data = (order / 8).view(rows, columns) * (1 - 2 * (order % 2)).view(rows, columns)
    return layer


def snapshot(module: nn.Module) -> Any:
    """Everything that a failing call could have touched, by identity."""
    state = []
    for name, child in module.named_modules():
        tables = {
            key: [(entry, id(value)) for entry, value in child.__dict__[key].items()]
            for key in ("_parameters", "_buffers", "_forward_pre_hooks", "_forward_hooks")
        }
        values = [(key, value.clone()) for key, value in child.state_dict(keep_vars=False).items()]
        hooks = [
            (id(each), {key: id(value) for key, value in each.__dict__.items()} if hasattr(each, "__dict__") else None)
            for hook in child._forward_pre_hooks.values()
            for each in (hook, *(hook if isinstance(hook, prune.PruningContainer) else ()))
        ]
        plain = [(key, id(value)) for key, value in child.__dict__.items()]
        state.append((name, type(child), plain, tables, set(child._non_persistent_buffers_set), hooks, values))
    return state


def assert_unchanged(before: Any, module: nn.Module) -> None:
    after = snapshot(module)
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        assert old[:-1] == new[:-1]
        for (key, value), (other_key, other) in zip(old[-1], new[-1], strict=True):
            assert key == other_key
            assert torch.equal(value, other)


def tied() -> tuple[nn.Linear, nn.Linear]:
    one, other = linear(), linear()
    other.weight = one.weight
    return one, other


def zeros(mask: Tensor) -> int:
    return int((mask == 0).sum())


PUBLIC = [
    "BasePruningMethod", "PruningContainer", "Identity", "RandomUnstructured", "L1Unstructured", "RandomStructured",
    "LnStructured", "CustomFromMask", "identity", "random_unstructured", "l1_unstructured", "random_structured",
    "ln_structured", "global_unstructured", "custom_from_mask", "remove", "is_pruned",
]  # fmt: skip


class Returns(prune.BasePruningMethod):
    PRUNING_TYPE = "global"

    def __init__(self, mask):
        self.mask = mask

    def compute_mask(self, t, default_mask):
        return self.mask


def through_file(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    prune.l1_unstructured(net[0], "weight", 0.5)
    prune.ln_structured(net[2], "weight", 1, 2, 1)
    prune.l1_unstructured(net[2], "weight", 2)
    return net
