"""Models of transformers that hear."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.registry import transformer
from zoo.transformers_decoders import EAGER, SDPA

AUDIO = {
    "vocab_size": 17, "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 52,
    "conv_dim": (14, 18, 22), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 2), "conv_bias": False,
    "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 6, "num_conv_pos_embedding_groups": 3,
    "apply_spec_augment": False,
}  # fmt: skip


def wave() -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 400)}


transformer("wav2vec2", "Wav2Vec2ForCTC", wave, **AUDIO, **EAGER)
transformer(
    "wav2vec2_layer_norm", "Wav2Vec2Model", wave, **{**AUDIO, "conv_bias": True}, feat_extract_norm="layer",
    do_stable_layer_norm=True, **SDPA,
)  # fmt: skip
transformer("hubert", "HubertForSequenceClassification", wave, **AUDIO, num_labels=3, classifier_proj_size=20, **SDPA)
transformer("wavlm", "WavLMModel", wave, **AUDIO, num_buckets=8, max_bucket_distance=16)
transformer("sew", "SEWModel", wave, **AUDIO, squeeze_factor=2)
transformer("wav2vec2_conformer", "Wav2Vec2ConformerModel", wave, **AUDIO, conv_depthwise_kernel_size=5)
transformer(
    "audio_spectrogram_transformer", "ASTForAudioClassification", lambda: {"input_values": torch.randn(2, 24, 16)},
    hidden_size=36, num_hidden_layers=2, num_attention_heads=3, intermediate_size=52, patch_size=8, frequency_stride=4,
    time_stride=4, max_length=24, num_mel_bins=16, num_labels=5, **EAGER,
)  # fmt: skip
