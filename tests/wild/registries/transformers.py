"""transformers: what sees, hears, speaks and reads, in miniature.

Most have the configurations of `tests/zoo`; its decoders and mixtures are tried there.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..models import Wild
from ..operators import provide
from .torchaudio import without_extension

FROM_ZOO = [
    "vit", "deit", "beit", "dinov2", "swin", "swinv2", "convnext", "convnextv2", "segformer", "regnet", "mobilevit",
    "poolformer", "cvt", "pvt_v2", "yolos", "bit", "wav2vec2", "hubert", "wavlm", "sew", "wav2vec2_conformer",
    "audio_spectrogram_transformer", "whisper", "speech_to_text", "clip", "siglip", "blip", "llava", "bert",
    "deberta_v2", "t5", "bart",
]  # fmt: skip

_TEXT = {
    "vocab_size": 53, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 32,
}  # fmt: skip
_DETR = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_queries": 6, "num_labels": 5,
}  # fmt: skip
_RESNET = {
    "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 24, 32, 40], "depths": [1, 1, 1, 1],
    "layer_type": "basic", "out_features": ["stage4"],
}  # fmt: skip
_BACKBONE = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
_SPEECH = {
    "vocab_size": 30, "hidden_size": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "num_mel_bins": 10,
    "reduction_factor": 2, "speech_decoder_prenet_units": 24, "speech_decoder_postnet_units": 20,
    "speech_decoder_postnet_layers": 2, "speaker_embedding_dim": 12, "use_cache": False,
}  # fmt: skip
_VITS = {
    "vocab_size": 20, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 40,
    "flow_size": 16, "spectrogram_bins": 9, "prior_encoder_num_flows": 2, "prior_encoder_num_wavenet_layers": 2,
    "posterior_encoder_num_wavenet_layers": 2, "upsample_initial_channel": 32, "upsample_rates": [4, 4],
    "upsample_kernel_sizes": [8, 8], "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]],
    "duration_predictor_num_flows": 2, "duration_predictor_filter_channels": 24, "depth_separable_num_layers": 2,
    "use_stochastic_duration_prediction": False,
}  # fmt: skip


def _pictures(size: int = 32) -> Callable[[], Any]:
    return lambda: {"pixel_values": torch.randn(2, 3, size, size)}


def _ids(length: int = 7, vocabulary: int = 53) -> torch.Tensor:
    return torch.randint(3, vocabulary, (2, length))


# the class, changes of its configuration, its example
OWN: list[tuple[str, dict[str, Any], Callable[[], Any]]] = [
    ("DetrForObjectDetection", {**_DETR, **_BACKBONE, "backbone_config": _RESNET}, _pictures(64)),
    ("ConditionalDetrForObjectDetection", {**_DETR, **_BACKBONE, "backbone_config": _RESNET}, _pictures(64)),
    (
        "DeformableDetrForObjectDetection",
        {
            **_DETR,
            **_BACKBONE,
            "backbone_config": {**_RESNET, "out_features": ["stage3", "stage4"]},
            "num_feature_levels": 2,
        },
        _pictures(64),
    ),
    (
        "RTDetrForObjectDetection",
        {
            "backbone_config": {
                "model_type": "rt_detr_resnet",
                "embedding_size": 16,
                "hidden_sizes": [16, 24, 32, 40],
                "depths": [1, 1, 1, 1],
                "layer_type": "basic",
                "out_features": ["stage2", "stage3", "stage4"],
            },
            "encoder_in_channels": [24, 32, 40],
            "feat_strides": [8, 16, 32],
            "encoder_hidden_dim": 32,
            "encoder_ffn_dim": 48,
            "encoder_attention_heads": 4,
            "d_model": 32,
            "decoder_in_channels": [32, 32, 32],
            "decoder_ffn_dim": 48,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "num_queries": 6,
            "num_denoising": 0,
            "num_labels": 5,
            "use_pretrained_backbone": False,
        },
        _pictures(64),
    ),
    (
        "MaskFormerForInstanceSegmentation",
        {
            "backbone_config": {
                "model_type": "swin",
                "image_size": 32,
                "patch_size": 2,
                "embed_dim": 16,
                "depths": [1, 1, 1, 1],
                "num_heads": [2, 2, 4, 4],
                "window_size": 4,
                "out_features": ["stage1", "stage2", "stage3", "stage4"],
            },
            "decoder_config": {"model_type": "detr", **_DETR},
            "fpn_feature_size": 32,
            "mask_feature_size": 32,
            "num_labels": 5,
        },
        _pictures(32),
    ),
    (
        "DPTForSemanticSegmentation",
        {
            **_TEXT, "image_size": 32, "patch_size": 8, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 12, 16, 20], "fusion_hidden_size": 16, "use_auxiliary_head": False,
            "num_labels": 5,
        },
        _pictures(32),
    ),
    (
        "GLPNForDepthEstimation",
        {
            "num_encoder_blocks": 4, "depths": [1, 1, 1, 1], "hidden_sizes": [8, 12, 16, 20],
            "num_attention_heads": [1, 2, 2, 4], "mlp_ratios": [2, 2, 2, 2], "decoder_hidden_size": 16,
        },
        _pictures(64),
    ),
    (
        "SpeechT5ForTextToSpeech",
        _SPEECH,
        lambda: {
            "input_ids": torch.randint(3, 30, (2, 7)),
            "decoder_input_values": torch.randn(2, 6, 10),
            "speaker_embeddings": torch.randn(2, 12),
        },
    ),
    (
        "SpeechT5HifiGan",
        {
            "model_in_dim": 10, "upsample_initial_channel": 32, "upsample_rates": [4, 4],
            "upsample_kernel_sizes": [8, 8], "resblock_kernel_sizes": [3, 5],
            "resblock_dilation_sizes": [[1, 3], [1, 3]],
        },
        lambda: {"spectrogram": torch.randn(2, 12, 10)},
    ),
    ("VitsModel", _VITS, lambda: {"input_ids": torch.randint(1, 20, (2, 9))}),
    (
        "EncodecModel",
        {
            "num_filters": 8, "upsampling_ratios": [4, 2], "hidden_size": 16, "codebook_size": 16, "codebook_dim": 16,
            "num_lstm_layers": 1, "target_bandwidths": [24.0], "sampling_rate": 16000,
        },
        lambda: {"input_values": torch.randn(2, 1, 64)},
    ),
    (
        "ViltModel",
        {**_TEXT, "image_size": 32, "patch_size": 8},
        lambda: {"input_ids": _ids(), **_pictures()()},
    ),
    (
        "CLIPSegForImageSegmentation",
        {
            "text_config": {**_TEXT, "bos_token_id": 1, "eos_token_id": 2},
            "vision_config": {**_TEXT, "num_hidden_layers": 3, "image_size": 32, "patch_size": 8},
            "projection_dim": 20,
            "reduce_dim": 16,
            "extract_layers": [0, 1, 2],
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 24,
        },
        lambda: {"input_ids": _ids(), **_pictures()()},
    ),
    (
        "Blip2ForConditionalGeneration",
        {
            "vision_config": {**_TEXT, "image_size": 32, "patch_size": 8},
            "qformer_config": {**_TEXT, "encoder_hidden_size": 32, "use_cache": False},
            "text_config": {
                "model_type": "opt", "vocab_size": 53, "hidden_size": 32, "word_embed_proj_dim": 32,
                "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "max_position_embeddings": 32,
                "use_cache": False,
            },
            "num_query_tokens": 4,
            "image_text_hidden_size": 16,
            "image_token_id": 52,
        },
        lambda: {"input_ids": torch.cat([torch.full((2, 4), 52), torch.randint(3, 52, (2, 5))], 1), **_pictures()()},
    ),
    (
        "SamModel",
        {
            "vision_config": {
                "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_dim": 48,
                "output_channels": 16, "num_pos_feats": 8, "image_size": 64, "patch_size": 16, "window_size": 2,
                "global_attn_indexes": [1],
            },
            "prompt_encoder_config": {"hidden_size": 16, "image_size": 64, "patch_size": 16, "mask_input_channels": 4},
            "mask_decoder_config": {
                "hidden_size": 16, "mlp_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
                "iou_head_hidden_dim": 16,
            },
        },
        lambda: {**_pictures(64)(), "input_points": 64 * torch.rand(2, 1, 3, 2)},
    ),
    (
        "VideoMAEForVideoClassification",
        {**_TEXT, "image_size": 32, "patch_size": 8, "num_frames": 4, "num_labels": 5},
        lambda: {"pixel_values": torch.randn(2, 4, 3, 32, 32)},
    ),
    (
        "LevitForImageClassification",
        {
            "image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 3, 4], "depths": [1, 1, 1],
            "key_dim": [4, 4, 4], "num_labels": 5,
        },
        _pictures(64),
    ),
    (
        "LayoutLMv3ForTokenClassification",
        {
            **_TEXT, "input_size": 32, "patch_size": 8, "coordinate_size": 5, "shape_size": 6, "num_labels": 5,
            "max_2d_position_embeddings": 64,
        },
        lambda: {"input_ids": _ids(), "bbox": torch.randint(0, 20, (2, 7, 4)).sort().values, **_pictures()()},
    ),
]  # fmt: skip


def models() -> list[Wild]:
    zoo = _zoo()
    found = [
        Wild("transformers", name, functools.partial(_of_zoo, name, 0), functools.partial(_of_zoo, name, 1))
        for name in FROM_ZOO
        if name in zoo
    ]
    found += [
        Wild("transformers", name, functools.partial(_built, name, config), example) for name, config, example in OWN
    ]
    return found


def _zoo() -> dict[str, Callable[[], tuple[nn.Module, Any]]]:
    tests = str(Path(__file__).parents[2])
    if tests not in sys.path:
        sys.path.insert(0, tests)
    provide()
    without_extension()
    from zoo import ZOO

    return ZOO


def _of_zoo(name: str, part: int) -> Any:
    return _zoo()[name]()[part]


def _built(name: str, config: dict[str, Any]) -> nn.Module:
    provide()
    without_extension()
    import transformers

    transformers.logging.set_verbosity_error()
    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(**config))
    for path, buffer in model.named_buffers():
        if path.endswith("codebook.embed"):  # zeros, of which rounding alone would choose
            buffer.normal_()
    return model
