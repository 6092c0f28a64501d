"""MONAI: networks of pictures and volumes, in miniature."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ..models import Wild
from ..operators import provide

_UNET = {"in_channels": 1, "out_channels": 3, "channels": (8, 16, 32), "strides": (2, 2)}
_VOLUME = {"spatial_dims": 3, "in_channels": 1, "out_channels": 3}

# a name, the class, its arguments, the shape of the example
MODELS: list[tuple[str, str, dict[str, Any], tuple[int, ...]]] = [
    ("UNet", "UNet", {"spatial_dims": 2, **_UNET, "num_res_units": 2}, (2, 1, 32, 32)),
    ("UNet-3d", "UNet", {"spatial_dims": 3, **_UNET}, (2, 1, 16, 16, 16)),
    ("BasicUNet", "BasicUNet", {**_VOLUME, "features": (8, 8, 16, 16, 32, 8)}, (2, 1, 32, 32, 32)),
    (
        "BasicUNetPlusPlus",
        "BasicUNetPlusPlus",
        {"spatial_dims": 2, "out_channels": 3, "in_channels": 1, "features": (8, 8, 16, 16, 32, 8)},
        (2, 1, 32, 32),
    ),
    ("AttentionUnet", "AttentionUnet", {"spatial_dims": 2, **_UNET}, (2, 1, 32, 32)),
    (
        "SegResNet",
        "SegResNet",
        {**_VOLUME, "init_filters": 8, "blocks_down": (1, 1), "blocks_up": (1,)},
        (2, 1, 16, 16, 16),
    ),
    (
        "SegResNetDS",
        "SegResNetDS",
        {**_VOLUME, "init_filters": 8, "blocks_down": (1, 1), "blocks_up": (1,)},
        (2, 1, 16, 16, 16),
    ),
    (
        "DynUNet",
        "DynUNet",
        {
            **_VOLUME, "kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2),
            "filters": (8, 16, 24),
        },
        (2, 1, 16, 16, 16),
    ),
    ("VNet", "VNet", {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}, (2, 1, 32, 32)),
    (
        "UNETR",
        "UNETR",
        {**_VOLUME, "img_size": 32, "feature_size": 4, "hidden_size": 48, "mlp_dim": 64, "num_heads": 4},
        (2, 1, 32, 32, 32),
    ),
    ("SwinUNETR", "SwinUNETR", {**_VOLUME, "feature_size": 12, "window_size": 4}, (1, 1, 64, 64, 64)),
    (
        "SwinUNETR-v2",
        "SwinUNETR",
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 3, "feature_size": 12, "use_v2": True},
        (2, 1, 64, 64),
    ),
    (
        "MedNeXt",
        "MedNeXt",
        {
            **_VOLUME, "init_filters": 8, "encoder_expansion_ratio": (2, 2), "decoder_expansion_ratio": (2, 2),
            "bottleneck_expansion_ratio": 2, "blocks_down": (1, 1), "blocks_up": (1, 1), "blocks_bottleneck": 1,
            "kernel_size": 3,
        },
        (2, 1, 16, 16, 16),
    ),
    ("HighResNet", "HighResNet", {"spatial_dims": 2, "in_channels": 1, "out_channels": 3}, (2, 1, 16, 16)),
    (
        "ViT",
        "ViT",
        {
            "in_channels": 1, "img_size": (32, 32), "patch_size": (8, 8), "hidden_size": 48, "mlp_dim": 64,
            "num_layers": 2, "num_heads": 4, "classification": True, "spatial_dims": 2,
        },
        (2, 1, 32, 32),
    ),
    (
        "ViTAutoEnc",
        "ViTAutoEnc",
        {
            "in_channels": 1, "img_size": (32, 32), "patch_size": (4, 4), "hidden_size": 48, "mlp_dim": 64,
            "num_layers": 2, "num_heads": 4, "spatial_dims": 2,
        },
        (2, 1, 32, 32),
    ),
    (
        "DenseNet",
        "DenseNet",
        {
            "spatial_dims": 3, "in_channels": 1, "out_channels": 3, "init_features": 16, "growth_rate": 8,
            "block_config": (2, 2),
        },
        (2, 1, 16, 16, 16),
    ),
    (
        "SEResNet50",
        "SEResNet50",
        {"spatial_dims": 2, "in_channels": 3, "num_classes": 5, "layers": (1, 1, 1, 1)},
        (2, 3, 32, 32),
    ),
    (
        "ResNet",
        "ResNet",
        {
            "block": "basic", "layers": (1, 1, 1, 1), "block_inplanes": (8, 16, 24, 32), "spatial_dims": 3,
            "n_input_channels": 1, "num_classes": 5,
        },
        (2, 1, 16, 16, 16),
    ),
    (
        "EfficientNetBN",
        "EfficientNetBN",
        {"model_name": "efficientnet-b0", "spatial_dims": 2, "in_channels": 3, "num_classes": 5, "pretrained": False},
        (2, 3, 32, 32),
    ),
    (
        "AutoEncoder",
        "AutoEncoder",
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 1, "channels": (8, 16), "strides": (2, 2)},
        (2, 1, 16, 16),
    ),
    (
        "VarAutoEncoder",
        "VarAutoEncoder",
        {
            "spatial_dims": 2, "in_shape": (1, 16, 16), "out_channels": 1, "latent_size": 6, "channels": (8, 16),
            "strides": (2, 2),
        },
        (2, 1, 16, 16),
    ),
    (
        "AutoencoderKL",
        "AutoencoderKL",
        {
            "spatial_dims": 2, "in_channels": 1, "out_channels": 1, "channels": (8, 16), "latent_channels": 4,
            "num_res_blocks": 1, "norm_num_groups": 4, "attention_levels": (False, True),
        },
        (2, 1, 16, 16),
    ),
]  # fmt: skip


def models() -> list[Wild]:
    return [
        Wild(
            "monai", name, functools.partial(_built, kind, config), functools.partial(torch.randn, shape),
            images=len(shape) == 4,
        )
        for name, kind, config, shape in MODELS
    ]  # fmt: skip


def _built(kind: str, config: dict[str, Any]) -> nn.Module:
    provide()
    import monai.networks.nets

    model: nn.Module = getattr(monai.networks.nets, kind)(**config)
    return model
