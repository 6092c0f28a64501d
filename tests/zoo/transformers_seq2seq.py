"""Models of transformers that read one sequence and write another."""

from __future__ import annotations

import torch

from zoo.registry import ids, tokens, transformer
from zoo.transformers_decoders import EAGER, SDPA, SPECIAL

SEQ2SEQ = {
    "vocab_size": 53, "max_position_embeddings": 32, "d_model": 36, "encoder_layers": 1, "decoder_layers": 2,
    "encoder_attention_heads": 3, "decoder_attention_heads": 3, "encoder_ffn_dim": 52, "decoder_ffn_dim": 44,
    "use_cache": False, "decoder_start_token_id": 2, "forced_eos_token_id": None, **SPECIAL,
}  # fmt: skip
BOTH = ids(decoder_input_ids=tokens(53, 5))
T5 = {
    "vocab_size": 53, "d_model": 36, "d_kv": 8, "d_ff": 52, "num_layers": 1, "num_decoder_layers": 2, "num_heads": 3,
    "use_cache": False, "relative_attention_num_buckets": 8, "decoder_start_token_id": 0, **SPECIAL,
}  # fmt: skip
transformer("t5", "T5ForConditionalGeneration", BOTH, **T5)
transformer(
    "t5_gated", "T5ForConditionalGeneration", BOTH, **T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False
)
transformer("t5_encoder", "T5EncoderModel", ids(), **{**T5, "num_layers": 2})
transformer("bart", "BartForConditionalGeneration", BOTH, **SEQ2SEQ, **EAGER)
transformer("pegasus", "PegasusForConditionalGeneration", BOTH, **SEQ2SEQ, **SDPA)
transformer("marian", "MarianMTModel", BOTH, **SEQ2SEQ, **EAGER)
transformer("m2m_100", "M2M100ForConditionalGeneration", BOTH, **SEQ2SEQ, **SDPA)
transformer(
    "whisper",
    "WhisperForConditionalGeneration",
    lambda: {"input_features": torch.randn(2, 10, 24), "decoder_input_ids": torch.randint(3, 53, (2, 5))},
    **SEQ2SEQ,
    num_mel_bins=10,
    max_source_positions=12,
    max_target_positions=16,
    suppress_tokens=None,
    begin_suppress_tokens=None,
    **SDPA,
)
transformer(
    "speech_to_text",
    "Speech2TextForConditionalGeneration",
    lambda: {"input_features": torch.randn(2, 24, 10), "decoder_input_ids": torch.randint(3, 53, (2, 5))},
    **SEQ2SEQ,
    input_feat_per_channel=10,
    conv_channels=20,
    max_source_positions=24,
    max_target_positions=16,
    **EAGER,
)
