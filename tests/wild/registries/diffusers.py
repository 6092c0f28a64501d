"""diffusers: networks and autoencoders of pictures, sound and video, in miniature."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..models import Wild
from ..operators import provide
from .torchaudio import without_extension

STEPS = torch.tensor([3, 40])


def models() -> list[Wild]:
    return [
        Wild("diffusers", name, functools.partial(_built, kind, config), example)
        for name, kind, config, example in _LIST
    ]


def _built(kind: str, config: dict[str, Any]) -> nn.Module:
    provide()
    without_extension()
    import diffusers

    model: nn.Module = getattr(diffusers, kind)(**config)
    if kind == "AutoencoderOobleck":  # what the old weight_norm computed is no leaf, which nothing can copy
        with torch.no_grad():
            model(torch.randn(1, 2, 64))
    return model


def _picture(channels: int = 4, size: int = 16, **more: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: {
        "sample": torch.randn(2, channels, size, size),
        "timestep": STEPS,
        **{name: make() for name, make in more.items()},
    }


def _states(length: int, width: int) -> Callable[[], Any]:
    return lambda: torch.randn(2, length, width)


def _encoded(channels: int = 3, size: int = 32) -> Callable[[], Any]:
    return lambda: {"sample": torch.randn(2, channels, size, size)}


_UNET = {
    "sample_size": 16, "in_channels": 4, "out_channels": 4, "block_out_channels": (32, 64), "layers_per_block": 1,
    "norm_num_groups": 8,
}  # fmt: skip
_CONDITIONED = {
    **_UNET,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 24,
    "attention_head_dim": 8,
}
_VAE = {
    "block_out_channels": (16, 32),
    "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
    "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
    "latent_channels": 4,
    "norm_num_groups": 8,
}
_TEXT = _states(7, 24)

_LIST: list[tuple[str, str, dict[str, Any], Callable[[], Any]]] = [
    (
        "UNet2DModel",
        "UNet2DModel",
        {
            **_UNET,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        _picture(),
    ),
    (
        "UNet2DModel-scale_shift",
        "UNet2DModel",
        {
            **_UNET,
            "down_block_types": ("ResnetDownsampleBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "ResnetUpsampleBlock2D"),
            "resnet_time_scale_shift": "scale_shift",
        },
        _picture(),
    ),
    ("UNet2DConditionModel", "UNet2DConditionModel", _CONDITIONED, _picture(encoder_hidden_states=_TEXT)),
    (
        "UNet2DConditionModel-xl",
        "UNet2DConditionModel",
        {
            **_CONDITIONED, "use_linear_projection": True, "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 64,
            "transformer_layers_per_block": (1, 2),
        },
        _picture(
            encoder_hidden_states=_TEXT,
            added_cond_kwargs=lambda: {"text_embeds": torch.randn(2, 16), "time_ids": torch.rand(2, 6)},
        ),
    ),
    (
        "ControlNetModel",
        "ControlNetModel",
        {
            key: value
            for key, value in {**_CONDITIONED, "conditioning_embedding_out_channels": (8, 16)}.items()
            if key not in ("sample_size", "out_channels", "up_block_types")
        },
        _picture(encoder_hidden_states=_TEXT, controlnet_cond=lambda: torch.randn(2, 3, 32, 32)),
    ),
    (
        "UNet1DModel",
        "UNet1DModel",
        {
            "block_out_channels": (16, 32),
            "in_channels": 3,
            "out_channels": 3,
            "extra_in_channels": 32,
            "down_block_types": ("DownBlock1DNoSkip", "DownBlock1D"),
            "up_block_types": ("UpBlock1D", "UpBlock1DNoSkip"),
            "sample_size": 32,
        },
        lambda: {"sample": torch.randn(2, 3, 32), "timestep": STEPS},
    ),
    (
        "UNetSpatioTemporalConditionModel",
        "UNetSpatioTemporalConditionModel",
        {
            "sample_size": 16,
            "block_out_channels": (32, 64),
            "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            "num_attention_heads": (4, 8),
            "cross_attention_dim": 24,
            "layers_per_block": 1,
            "num_frames": 2,
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 24,
        },
        lambda: {
            "sample": torch.randn(2, 2, 8, 16, 16),
            "timestep": STEPS,
            "encoder_hidden_states": torch.randn(2, 1, 24),
            "added_time_ids": torch.rand(2, 3),
        },
    ),
    (
        "AutoencoderKL", "AutoencoderKL", {**_VAE, "sample_size": 32}, _encoded(),
    ),
    (
        "AsymmetricAutoencoderKL",
        "AsymmetricAutoencoderKL",
        {
            "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
            "down_block_out_channels": (16, 32),
            "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
            "up_block_out_channels": (16, 32),
            "norm_num_groups": 8,
        },
        _encoded(),
    ),
    ("VQModel", "VQModel", {**_VAE, "num_vq_embeddings": 32, "sample_size": 32}, _encoded()),
    (
        "AutoencoderDC",
        "AutoencoderDC",
        {
            "latent_channels": 4,
            "attention_head_dim": 8,
            "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (16, 32),
            "decoder_block_out_channels": (16, 32),
            "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
            "downsample_block_type": "conv",
            "upsample_block_type": "interpolate",
            "decoder_norm_types": "rms_norm",
            "decoder_act_fns": "silu",
        },
        _encoded(),
    ),
    (
        "AutoencoderKLTemporalDecoder",
        "AutoencoderKLTemporalDecoder",
        {
            "block_out_channels": (32, 64),
            "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
            "layers_per_block": 1,
            "latent_channels": 4,
        },
        lambda: {"sample": torch.randn(2, 3, 16, 16), "num_frames": 2},
    ),
    (
        "AutoencoderOobleck",
        "AutoencoderOobleck",
        {
            "encoder_hidden_size": 12, "decoder_channels": 12, "decoder_input_channels": 6,
            "downsampling_ratios": [2, 4], "channel_multiples": [1, 2], "audio_channels": 2,
        },
        lambda: {"sample": torch.randn(2, 2, 64)},
    ),
    (
        "DiTTransformer2DModel",
        "DiTTransformer2DModel",
        {
            "num_attention_heads": 3, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 16,
            "patch_size": 2, "num_embeds_ada_norm": 1000,
        },
        lambda: {
            "hidden_states": torch.randn(2, 4, 16, 16),
            "timestep": STEPS,
            "class_labels": torch.tensor([1, 5]),
        },
    ),
    (
        "PixArtTransformer2DModel",
        "PixArtTransformer2DModel",
        {
            "num_attention_heads": 3, "attention_head_dim": 8, "in_channels": 4, "out_channels": 8, "num_layers": 2,
            "sample_size": 16, "cross_attention_dim": 24, "caption_channels": 16,
        },
        lambda: {
            "hidden_states": torch.randn(2, 4, 16, 16),
            "encoder_hidden_states": torch.randn(2, 7, 16),
            "timestep": STEPS,
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    (
        "SD3Transformer2DModel",
        "SD3Transformer2DModel",
        {
            "sample_size": 16, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2,
            "attention_head_dim": 8, "num_attention_heads": 3, "caption_projection_dim": 24, "joint_attention_dim": 20,
            "pooled_projection_dim": 28, "pos_embed_max_size": 16, "dual_attention_layers": (0,),
            "qk_norm": "rms_norm",
        },
        lambda: {
            "hidden_states": torch.randn(2, 4, 16, 16),
            "encoder_hidden_states": torch.randn(2, 7, 20),
            "pooled_projections": torch.randn(2, 28),
            "timestep": STEPS,
        },
    ),
    (
        "FluxTransformer2DModel",
        "FluxTransformer2DModel",
        {
            "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16,
            "num_attention_heads": 3, "joint_attention_dim": 20, "pooled_projection_dim": 28,
            "axes_dims_rope": (4, 4, 8),
        },
        lambda: {
            "hidden_states": torch.randn(2, 16, 4),
            "encoder_hidden_states": torch.randn(2, 7, 20),
            "pooled_projections": torch.randn(2, 28),
            "timestep": torch.rand(2),
            "img_ids": torch.randint(0, 4, (16, 3)).float(),
            "txt_ids": torch.zeros(7, 3),
        },
    ),
    (
        "SanaTransformer2DModel",
        "SanaTransformer2DModel",
        {
            "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_attention_heads": 3, "attention_head_dim": 8,
            "num_cross_attention_heads": 3, "cross_attention_head_dim": 8, "cross_attention_dim": 24,
            "caption_channels": 16, "sample_size": 16,
        },
        lambda: {
            "hidden_states": torch.randn(2, 4, 16, 16),
            "encoder_hidden_states": torch.randn(2, 7, 16),
            "timestep": STEPS,
        },
    ),
    (
        "AuraFlowTransformer2DModel",
        "AuraFlowTransformer2DModel",
        {
            "sample_size": 16, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 1,
            "attention_head_dim": 8, "num_attention_heads": 3, "joint_attention_dim": 20, "caption_projection_dim": 24,
            "pos_embed_max_size": 64,
        },
        lambda: {
            "hidden_states": torch.randn(2, 4, 16, 16),
            "encoder_hidden_states": torch.randn(2, 7, 20),
            "timestep": torch.rand(2),
        },
    ),
    (
        "CogVideoXTransformer3DModel",
        "CogVideoXTransformer3DModel",
        {
            "num_attention_heads": 3, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4,
            "time_embed_dim": 12, "text_embed_dim": 20, "num_layers": 2, "sample_width": 8, "sample_height": 8,
            "sample_frames": 5, "max_text_seq_length": 7,
        },
        lambda: {
            "hidden_states": torch.randn(2, 2, 4, 8, 8),
            "encoder_hidden_states": torch.randn(2, 7, 20),
            "timestep": STEPS,
        },
    ),
    (
        "WanTransformer3DModel",
        "WanTransformer3DModel",
        {
            "patch_size": (1, 2, 2), "num_attention_heads": 3, "attention_head_dim": 12, "in_channels": 4,
            "out_channels": 4, "text_dim": 20, "freq_dim": 16, "ffn_dim": 52, "num_layers": 2,
        },
        lambda: {
            "hidden_states": torch.randn(2, 4, 2, 8, 8),
            "encoder_hidden_states": torch.randn(2, 7, 20),
            "timestep": STEPS,
        },
    ),
    (
        "PriorTransformer",
        "PriorTransformer",
        {
            "num_attention_heads": 3, "attention_head_dim": 8, "num_layers": 2, "embedding_dim": 20,
            "num_embeddings": 7, "additional_embeddings": 4,
        },
        lambda: {
            "hidden_states": torch.randn(2, 20),
            "timestep": STEPS,
            "proj_embedding": torch.randn(2, 20),
            "encoder_hidden_states": torch.randn(2, 7, 20),
        },
    ),
]  # fmt: skip
