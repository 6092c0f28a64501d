"""Torch-Pruning on a YOLO, by the steps of its own example (examples/yolov8 of its repository).

Elsewhere: `pip install --no-deps torch-pruning==1.6.1`. The example rewrites each C2f block, so that nothing is split,
lets the head alone, and takes the channels of the least L2 norm of their groups, the same share everywhere. The share
that leaves so many multiply-adds is found by halving.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.detectors.training import multiply_adds


class TwoConvolutions(nn.Module):
    """A C2f whose first convolution, of which it splits the result, is two."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.first, self.second = (self._half(block.cv1, part) for part in (0, 1))
        self.m, self.cv2 = block.m, block.cv2
        self.i, self.f, self.type = getattr(block, "i", None), getattr(block, "f", None), getattr(block, "type", None)

    @staticmethod
    def _half(whole: Any, part: int) -> Any:
        half = copy.deepcopy(whole)
        count = whole.conv.out_channels // 2
        rows = slice(part * count, (part + 1) * count)
        half.conv.out_channels = half.bn.num_features = count
        half.conv.weight = nn.Parameter(whole.conv.weight.detach()[rows].clone())
        for name in ("weight", "bias"):
            setattr(half.bn, name, nn.Parameter(getattr(whole.bn, name).detach()[rows].clone()))
        for name in ("running_mean", "running_var"):
            setattr(half.bn, name, getattr(whole.bn, name)[rows].clone())
        return half

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.first(x), self.second(x)]
        for each in self.m:
            parts.append(each(parts[-1]))
        made: Tensor = self.cv2(torch.cat(parts, 1))
        return made


def rewritten(module: nn.Module) -> None:
    """Each C2f in it becomes what Torch-Pruning can follow."""
    from ultralytics.nn.modules import C2f  # type: ignore[import-not-found, unused-ignore]

    for name, child in module.named_children():
        if isinstance(child, C2f):
            setattr(module, name, TwoConvolutions(child))
        else:
            rewritten(child)


def pruned(model: nn.Module, share: float, size: int) -> nn.Module:
    """A copy without this share of the channels."""
    import torch_pruning as tp  # type: ignore[import-not-found, unused-ignore]
    from ultralytics.nn.modules import Detect

    made = copy.deepcopy(model).train()
    rewritten(made)
    for parameter in made.parameters():
        parameter.requires_grad_(True)
    pruner = tp.pruner.GroupNormPruner(
        made,
        torch.zeros(1, 3, size, size),
        importance=tp.importance.GroupMagnitudeImportance(),
        iterative_steps=1,
        pruning_ratio=share,
        ignored_layers=[each for each in made.modules() if isinstance(each, Detect)],
        unwrapped_parameters=[],
    )
    pruner.step()
    return made.eval()


def pruned_to(model: nn.Module, sparsity: float, size: int, tries: int = 7) -> nn.Module:
    """The copy whose multiply-adds are the nearest that halving finds."""
    goal = (1 - sparsity) * multiply_adds(model, size)
    low, high, best = 0.0, 0.95, None
    for _ in range(tries):
        share = (low + high) / 2
        made = pruned(model, share, size)
        count = multiply_adds(made, size)
        if best is None or abs(count - goal) < abs(best[0] - goal):
            best = count, made
        low, high = (share, high) if count > goal else (low, share)
    assert best is not None
    return best[1]
