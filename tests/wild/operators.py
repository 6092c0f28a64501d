"""torchvision beside a torch for processors: its wheel is linked to CUDA, so that its operators are not there.

Law: `provide` comes before the first import of torchvision, and does nothing where the operators are there.
"""

from __future__ import annotations

import importlib
import sys

import torch
from torch import Tensor

__all__ = ["provide"]

_DEFINED = torch.library.Library("torchvision", "FRAGMENT")
_ROI_ALIGN = (
    "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor"
)


def provide() -> None:
    """Define ``nms``, ``qnms`` and ``roi_align`` in Python, and import torchvision."""
    if "torchvision" in sys.modules:
        return
    for name in ("nms", "qnms"):
        _DEFINED.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DEFINED.impl(name, _nms, "CPU")
    ops = importlib.import_module("torchvision.ops")
    pools, boxes = (importlib.import_module(f"torchvision.ops.{name}") for name in ("roi_align", "boxes"))
    if importlib.import_module("torchvision.extension")._has_ops():
        return
    _DEFINED.define(_ROI_ALIGN)
    inside = pools._roi_align
    while hasattr(inside, "__wrapped__"):  # it would be compiled at its first call
        inside = inside.__wrapped__
    _DEFINED.impl("roi_align", inside, "CompositeImplicitAutograd")
    pools._has_ops = lambda: True
    assert ops.nms is boxes.nms
    pools._assert_has_ops = boxes._assert_has_ops = lambda: None


def _nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """The boxes of the greatest scores, of which none covers another by more than ``threshold``."""
    order = scores.argsort(descending=True, stable=True)
    low, high = boxes[:, :2], boxes[:, 2:]
    area = (high - low).prod(1)
    kept = []
    while len(order):
        first, order = order[0], order[1:]
        kept.append(first)
        shared = (torch.minimum(high[first], high[order]) - torch.maximum(low[first], low[order])).clamp(min=0).prod(1)
        order = order[shared <= threshold * (area[first] + area[order] - shared)]
    return torch.stack(kept) if kept else scores.new_zeros(0, dtype=torch.long)
