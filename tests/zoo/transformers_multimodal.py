"""Models of transformers that read text beside images."""

from __future__ import annotations

import torch

from zoo.registry import ids, pixels, transformer
from zoo.transformers_decoders import EAGER, LLAMA, SDPA
from zoo.transformers_encoders import BERT
from zoo.transformers_vision import VIT

TEXT = {**BERT, "hidden_size": 28, "num_attention_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
CLIP = {"text_config": TEXT, "vision_config": VIT}
transformer("clip", "CLIPModel", lambda: {**ids()(), **pixels()()}, **CLIP, projection_dim=22, **EAGER)
transformer(
    "siglip", "SiglipModel", lambda: {**ids()(), **pixels()()},
    **{**CLIP, "text_config": {**TEXT, "projection_size": 36}}, **SDPA,
)  # fmt: skip
transformer(
    "blip", "BlipForConditionalGeneration", lambda: {**ids()(), **pixels()()},
    text_config={**TEXT, "encoder_hidden_size": 36, "use_cache": False, "sep_token_id": 2}, vision_config=VIT,
    projection_dim=22,
)  # fmt: skip
transformer(
    "llava",
    "LlavaForConditionalGeneration",
    lambda: {"input_ids": torch.cat([torch.full((2, 16), 52), torch.randint(3, 52, (2, 5))], 1), **pixels()()},
    text_config={**LLAMA, "model_type": "llama"},
    vision_config={**VIT, "model_type": "clip_vision_model", "projection_dim": 22},
    image_token_id=52,
    vision_feature_layer=-1,
)
