"""segmentation-models-pytorch: each decoder with a small encoder."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ..models import Wild
from ..operators import provide

# the decoder, its encoder, the size of the image
MODELS = [
    ("Unet", "resnet18", 64), ("Unet", "mobilenet_v2", 64), ("Unet", "efficientnet-b0", 64), ("Unet", "mit_b0", 64),
    ("Unet", "vgg11_bn", 64), ("Unet", "densenet121", 64), ("Unet", "tu-mobilenetv3_small_100", 64),
    ("UnetPlusPlus", "resnet18", 64), ("FPN", "resnet18", 64), ("PSPNet", "resnet18", 64), ("PAN", "resnet18", 128),
    ("Linknet", "resnet18", 64), ("MAnet", "resnet18", 64), ("DeepLabV3", "resnet18", 64),
    ("DeepLabV3Plus", "resnet18", 64), ("UPerNet", "resnet18", 64), ("Segformer", "resnet18", 64),
    ("DPT", "tu-vit_tiny_patch16_224", 224),
]  # fmt: skip


def models() -> list[Wild]:
    return [
        Wild(
            "segmentation_models_pytorch", f"{decoder}-{encoder}", functools.partial(_built, decoder, encoder),
            functools.partial(_image, size), images=True,
        )
        for decoder, encoder, size in MODELS
    ]  # fmt: skip


def _built(decoder: str, encoder: str) -> nn.Module:
    provide()
    import segmentation_models_pytorch

    model: nn.Module = getattr(segmentation_models_pytorch, decoder)(encoder, encoder_weights=None, classes=5)
    return model


def _image(size: int) -> Any:
    return torch.randn(2, 3, size, size)
