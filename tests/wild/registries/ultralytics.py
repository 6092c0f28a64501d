"""Ultralytics: the smallest of each generation and task, built from its yaml file.

Of a model without a smallest scale in its file (RT-DETR) the one that there is.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ..models import Wild
from ..operators import provide

DETECTION = [
    "yolov3-tiny", "yolov5n", "yolov6n", "yolov8n", "yolov8n-ghost", "yolov8n-p2", "yolov9t", "yolov10n", "yolo11n",
    "yolo12n", "yolo26n",
]  # fmt: skip
TASKS = [
    f"{name}-{task}" for name in ("yolov8n", "yolo11n", "yolo12n", "yolo26n") for task in ("seg", "pose", "obb", "cls")
]
OTHERS = ["yolo26n-sem", "yolo26n-depth", "rtdetr-resnet50"]


def models() -> list[Wild]:
    return [
        Wild("ultralytics", name, functools.partial(_built, name), functools.partial(_image, _size(name)), images=True)
        for name in [*DETECTION, *TASKS, *OTHERS]
    ]


def _built(name: str) -> nn.Module:
    provide()
    import ultralytics

    kind = ultralytics.RTDETR if name.startswith("rtdetr") else ultralytics.YOLO
    model: nn.Module = kind(f"{name}.yaml").model
    return model.float()


def _size(name: str) -> int:
    return 160 if "rtdetr" in name else 64


def _image(size: int) -> Any:
    return torch.randn(2, 3, size, size)
