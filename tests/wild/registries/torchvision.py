"""torchvision: classification, segmentation, detection, video and flow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ..models import Wild, pictures
from ..operators import provide

_CLASSIFICATION = {
    "alexnet": 224, "convnext_tiny": 96, "densenet121": 96, "efficientnet_b0": 96, "efficientnet_v2_s": 96,
    "googlenet": 96, "inception_v3": 128, "maxvit_t": 224, "mnasnet0_5": 96, "mobilenet_v2": 96,
    "mobilenet_v3_small": 96, "regnet_x_400mf": 96, "regnet_y_400mf": 96, "resnet18": 96, "resnext50_32x4d": 96,
    "shufflenet_v2_x0_5": 96, "squeezenet1_0": 96, "squeezenet1_1": 96, "swin_t": 96, "swin_v2_t": 96, "vgg11": 96,
    "vgg11_bn": 96, "vit_b_32": 224, "wide_resnet50_2": 96,
}  # fmt: skip
_SEGMENTATION = ("deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large")
# random weights are sure of nothing: what they find counts, too, but not much of it is looked at
_FEW = {"score_thresh": -1.0, "detections_per_img": 5, "topk_candidates": 50}
_PROPOSED = {
    "box_score_thresh": -1.0, "box_detections_per_img": 5, "rpn_pre_nms_top_n_test": 50, "rpn_post_nms_top_n_test": 20,
}  # fmt: skip
_DETECTION: dict[str, dict[str, Any]] = {
    "fasterrcnn_mobilenet_v3_large_320_fpn": _PROPOSED,
    "fasterrcnn_resnet50_fpn": _PROPOSED,
    "fcos_resnet50_fpn": _FEW,
    "keypointrcnn_resnet50_fpn": _PROPOSED,
    "maskrcnn_resnet50_fpn": _PROPOSED,
    "retinanet_resnet50_fpn": _FEW,
    "ssd300_vgg16": _FEW,
    "ssdlite320_mobilenet_v3_large": _FEW,
}
_VIDEO = {"mc3_18": 56, "mvit_v1_b": 64, "r2plus1d_18": 56, "r3d_18": 56, "s3d": 224, "swin3d_t": 64}
_FRAMES = {"s3d": 16}


def models() -> list[Wild]:
    """Every builder's smallest."""
    provide()
    found = [_wild(name, pictures(size), images=True) for name, size in _CLASSIFICATION.items()]
    found += [_wild(name, pictures(96), images=True, weights_backbone=None) for name in _SEGMENTATION]
    for name, options in _DETECTION.items():
        sized = {} if "320" in name or "300" in name else {"min_size": 96, "max_size": 128}
        found.append(_wild(name, _list_of_pictures, images=True, weights_backbone=None, **options, **sized))
    for name, size in _VIDEO.items():
        found.append(_wild(name, functools.partial(torch.randn, 2, 3, _FRAMES.get(name, 8), size, size)))
    found += [_wild(name, _two_pictures, images=True) for name in ("raft_small", "raft_large")]
    return found


def _wild(name: str, example: Callable[[], Any], *, images: bool = False, **options: Any) -> Wild:
    return Wild("torchvision", name, functools.partial(_build, name, **options), example, images=images)


def _build(name: str, **options: Any) -> nn.Module:
    import torchvision

    if name in ("googlenet", "inception_v3"):
        options |= {"init_weights": True}
    if name == "mvit_v1_b":  # its builder leaves no choice of a size, and its own takes more than ten gigabytes
        from torchvision.models.video import mvit

        plain, size = mvit._mvit, {"spatial_size": (64, 64), "temporal_size": 8}
        with mock.patch.object(mvit, "_mvit", lambda **given: plain(**given | size)):
            return mvit.mvit_v1_b(**options)
    model: nn.Module = torchvision.models.get_model(name, weights=None, **options)
    return model


def _list_of_pictures() -> tuple[list[Tensor]]:
    """The only argument of a detector is a list, so the example is a tuple of one list."""
    return ([torch.rand(3, 96, 128), torch.rand(3, 96, 96)],)


def _two_pictures() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, 128, 128), torch.randn(2, 3, 128, 128)
