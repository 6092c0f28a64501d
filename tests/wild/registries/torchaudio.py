"""torchaudio: its models, in miniature where they have arguments."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..models import Wild

_WAVE = {
    "extractor_mode": "group_norm",
    "extractor_conv_layer_config": [(14, 10, 5), (18, 3, 2), (22, 2, 2)],
    "extractor_conv_bias": False,
    "encoder_embed_dim": 36,
    "encoder_projection_dropout": 0.1,
    "encoder_pos_conv_kernel": 6,
    "encoder_pos_conv_groups": 3,
    "encoder_num_layers": 2,
    "encoder_num_heads": 3,
    "encoder_attention_dropout": 0.1,
    "encoder_ff_interm_features": 52,
    "encoder_ff_interm_dropout": 0.1,
    "encoder_dropout": 0.1,
    "encoder_layer_norm_first": False,
    "encoder_layer_drop": 0.0,
    "aux_num_out": 9,
}
_TACOTRON = {
    "n_mels": 10, "n_symbol": 20, "symbol_embedding_dim": 24, "encoder_embedding_dim": 24, "encoder_n_convolution": 2,
    "decoder_rnn_dim": 32, "prenet_dim": 16, "attention_rnn_dim": 32, "attention_hidden_dim": 16,
    "attention_location_n_filter": 8, "postnet_n_convolution": 3, "postnet_embedding_dim": 20,
}  # fmt: skip
_WAVELM = {key: value for key, value in _WAVE.items() if key != "encoder_pos_conv_kernel"}
_LENGTHS = torch.tensor([12, 9])


def without_extension() -> None:
    """torchaudio's wheel is linked to CUDA, too; its models need nothing of what is compiled."""
    name = "torchaudio._extension"
    if name not in sys.modules:
        module = types.ModuleType(name)
        vars(module).update(_IS_TORCHAUDIO_EXT_AVAILABLE=False, fail_if_no_align=lambda function: function)
        sys.modules[name] = module


def _features(width: int, length: int = 12) -> Any:
    return torch.randn(2, length, width)


_LIST: list[tuple[str, dict[str, Any], Callable[[], Any]]] = [
    (
        "Conformer",
        {"input_dim": 24, "num_heads": 3, "ffn_dim": 40, "num_layers": 2, "depthwise_conv_kernel_size": 5},
        lambda: (_features(24), _LENGTHS),
    ),
    (
        "Conformer-convolution_first",
        {
            "input_dim": 24, "num_heads": 3, "ffn_dim": 40, "num_layers": 2, "depthwise_conv_kernel_size": 5,
            "use_group_norm": True, "convolution_first": True,
        },
        lambda: (_features(24), _LENGTHS),
    ),
    (
        "ConvTasNet",
        {
            "enc_num_feats": 24, "msk_num_feats": 20, "msk_num_hidden_feats": 28, "msk_num_layers": 2,
            "msk_num_stacks": 2,
        },
        lambda: torch.randn(2, 1, 160),
    ),
    ("DeepSpeech", {"n_feature": 20, "n_hidden": 48, "n_class": 9}, lambda: torch.randn(2, 1, 12, 20)),
    (
        "Emformer",
        {
            "input_dim": 24, "num_heads": 3, "ffn_dim": 40, "num_layers": 2, "segment_length": 4,
            "left_context_length": 4, "right_context_length": 1,
        },
        lambda: (_features(24, 13), torch.tensor([13, 9])),
    ),
    (
        "HDemucs",
        {"sources": ["drums", "vocals"], "audio_channels": 2, "channels": 8, "nfft": 1024, "depth": 5},
        lambda: torch.randn(2, 2, 4096),
    ),
    (
        "RNNT",
        {},
        lambda: (
            torch.randn(2, 16, 10), torch.tensor([16, 12]), torch.randint(0, 8, (2, 5)), torch.tensor([5, 4]),
        ),
    ),
    ("SquimObjective", {}, lambda: torch.randn(2, 1600)),
    (
        "Tacotron2",
        _TACOTRON,
        lambda: (
            torch.randint(0, 20, (2, 7)), torch.tensor([7, 5]), torch.randn(2, 10, 6), torch.tensor([6, 4]),
        ),
    ),
    ("Wav2Letter", {"num_classes": 9, "input_type": "mfcc", "num_features": 13}, lambda: torch.randn(2, 13, 80)),
    ("Wav2Vec2Model", _WAVE, lambda: torch.randn(2, 400)),
    (
        "Wav2Vec2Model-layer_norm",
        {
            **_WAVE, "extractor_mode": "layer_norm", "extractor_conv_bias": True, "encoder_layer_norm_first": True,
            "aux_num_out": None,
        },
        lambda: torch.randn(2, 400),
    ),
    (
        "WavLM",
        {**_WAVELM, "encoder_num_buckets": 8, "encoder_max_distance": 16},
        lambda: torch.randn(2, 400),
    ),
    (
        "WaveRNN",
        {
            "upsample_scales": [2, 2, 3], "n_classes": 16, "hop_length": 12, "n_res_block": 2, "n_rnn": 32, "n_fc": 32,
            "kernel_size": 5, "n_freq": 10, "n_hidden": 16, "n_output": 16,
        },
        lambda: (torch.randn(2, 1, 24), torch.randn(2, 1, 10, 6)),
    ),
]  # fmt: skip


def models() -> list[Wild]:
    return [
        Wild("torchaudio", name, functools.partial(_built, name, config), example) for name, config, example in _LIST
    ]


def _built(name: str, config: dict[str, Any]) -> nn.Module:
    without_extension()
    import torchaudio.models

    model: nn.Module
    if name.startswith("Wav2Vec2Model"):
        model = torchaudio.models.wav2vec2_model(**config)
    elif name == "WavLM":
        model = torchaudio.models.wavlm_model(encoder_pos_conv_kernel=6, **config)
    elif name == "RNNT":
        model = torchaudio.models.emformer_rnnt_model(
            input_dim=10, encoding_dim=24, num_symbols=9, segment_length=4, right_context_length=0,
            time_reduction_input_dim=12, time_reduction_stride=2, transformer_num_heads=3, transformer_ffn_dim=40,
            transformer_num_layers=1, transformer_dropout=0.1, transformer_activation="gelu",
            transformer_left_context_length=4, transformer_max_memory_size=0,
            transformer_weight_init_scale_strategy="depthwise", transformer_tanh_on_mem=True, symbol_embedding_dim=16,
            num_lstm_layers=1, lstm_layer_norm=True, lstm_layer_norm_epsilon=1e-3, lstm_dropout=0.1,
        )  # fmt: skip
    elif name == "SquimObjective":
        model = torchaudio.models.squim_objective_model(
            feat_dim=24, win_len=16, d_model=24, nhead=3, hidden_dim=16, num_blocks=1, rnn_type="LSTM", chunk_size=8
        )
    else:
        model = getattr(torchaudio.models, name.partition("-")[0])(**config)
    return model
