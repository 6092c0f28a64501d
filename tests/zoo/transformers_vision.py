"""Models of transformers that see."""

from __future__ import annotations

import torch

from zoo.registry import pixels, transformer
from zoo.transformers_decoders import EAGER, SDPA

VIT = {
    "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 52, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
transformer("vit", "ViTForImageClassification", pixels(), **VIT, num_labels=5, **EAGER)
transformer("vit_sdpa", "ViTForImageClassification", pixels(), **VIT, num_labels=5, qkv_bias=False, **SDPA)
transformer("deit", "DeiTForImageClassificationWithTeacher", pixels(), **VIT, num_labels=5, **EAGER)
transformer(
    "beit", "BeitForImageClassification", pixels(), **VIT, num_labels=5, use_relative_position_bias=True,
    layer_scale_init_value=0.1,
)  # fmt: skip
transformer(
    "dinov2", "Dinov2ForImageClassification", pixels(), **{**VIT, "mlp_ratio": 2}, num_labels=5, use_swiglu_ffn=True,
    **SDPA,
)  # fmt: skip
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 18, "depths": [2, 1], "num_heads": [3, 6], "window_size": 4}
transformer("swin", "SwinForImageClassification", pixels(), **SWIN, mlp_ratio=2.0, num_labels=5)
transformer("swinv2", "Swinv2ForImageClassification", pixels(), **SWIN, mlp_ratio=2.0, num_labels=5)
CONVNEXT = {"hidden_sizes": [14, 22, 30], "depths": [1, 2, 1], "num_stages": 3, "patch_size": 2, "num_labels": 5}
transformer("convnext", "ConvNextForImageClassification", pixels(), **CONVNEXT, layer_scale_init_value=0.5)
transformer("convnextv2", "ConvNextV2ForImageClassification", pixels(), **CONVNEXT)
SEGFORMER = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [14, 24], "patch_sizes": [7, 3],
    "strides": [4, 2], "num_attention_heads": [1, 3], "mlp_ratios": [2, 2], "decoder_hidden_size": 20, "num_labels": 5,
}  # fmt: skip
transformer("segformer", "SegformerForSemanticSegmentation", pixels(), **SEGFORMER)
RESNET = {"embedding_size": 14, "depths": [1, 2], "num_labels": 5}
transformer(
    "resnet", "ResNetForImageClassification", pixels(), **RESNET, hidden_sizes=[28, 44], layer_type="bottleneck"
)
transformer(
    "resnet_plain", "ResNetForImageClassification", pixels(), **RESNET, hidden_sizes=[18, 26], layer_type="basic"
)
transformer(
    "regnet", "RegNetForImageClassification", pixels(), **RESNET, hidden_sizes=[24, 36], groups_width=6, layer_type="y"
)
transformer(
    "mobilenet_v1_hf", "MobileNetV1ForImageClassification", pixels(64), depth_multiplier=0.25, min_depth=4, num_labels=5
)
transformer("mobilenet_v2_hf", "MobileNetV2ForImageClassification", pixels(64), depth_multiplier=0.25, num_labels=5)
transformer(
    "mobilevit", "MobileViTForImageClassification", pixels(64), image_size=64, hidden_sizes=[12, 20, 28],
    neck_hidden_sizes=[8, 10, 12, 14, 18, 22, 26], num_attention_heads=4, expand_ratio=2.0, num_labels=5,
)  # fmt: skip
transformer(
    "poolformer", "PoolFormerForImageClassification", pixels(), hidden_sizes=[12, 20, 28], depths=[1, 1, 1],
    num_encoder_blocks=3, patch_sizes=[7, 3, 3], strides=[2, 2, 2], padding=[3, 1, 1], mlp_ratio=2.0,
    layer_scale_init_value=0.5, num_labels=5,
)  # fmt: skip
transformer(
    "cvt",
    "CvtForImageClassification",
    pixels(),
    embed_dim=[12, 20, 24],
    num_heads=[1, 2, 3],
    depth=[1, 2, 3],  # not less: stage i reads the i-th of its rates of stochastic depth
    mlp_ratio=[2.0, 2.0, 2.0],
    num_labels=5,
)
transformer(
    "pvt_v2", "PvtV2ForImageClassification", pixels(), image_size=32, num_encoder_blocks=2, depths=[1, 1],
    sr_ratios=[2, 1], hidden_sizes=[14, 24], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 3],
    mlp_ratios=[2, 2], num_labels=5,
)  # fmt: skip
transformer(
    "efficientnet_hf", "EfficientNetForImageClassification", pixels(), image_size=32, width_coefficient=0.4,
    depth_coefficient=0.3, depth_divisor=2, hidden_dim=512, kernel_sizes=[3, 5], in_channels=[32, 20],
    out_channels=[20, 36], depthwise_padding=[], strides=[1, 2], num_block_repeats=[1, 2], expand_ratios=[1, 3],
    num_hidden_layers=12, num_labels=5,
)  # fmt: skip
transformer(
    "yolos", "YolosForObjectDetection", pixels(), **{**VIT, "image_size": [32, 32]}, num_detection_tokens=4,
    num_labels=5, **EAGER,
)  # fmt: skip
transformer("vit_mae_encoder", "ViTMAEModel", pixels(noise=lambda: torch.rand(2, 16)), **VIT, **SDPA)
transformer(
    "bit", "BitForImageClassification", pixels(), embedding_size=16, hidden_sizes=[32, 48], depths=[1, 1],
    num_groups=4, num_labels=5,
)  # fmt: skip
