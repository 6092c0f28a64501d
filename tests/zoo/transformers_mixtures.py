"""Mixtures of experts of transformers: those of their configurations that count experts, as small as they can be built.

Those that are not here: vision towers and whole multimodal models around a decoder that is here.
"""

from __future__ import annotations

import torch

from zoo.registry import ids, miniature

COMMON = {
    "vocab_size": 53,
    "hidden_size": 48,
    "intermediate_size": 52,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "share_expert_dim": 24,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 32,
    "sliding_window": 4,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # attention
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "qk_head_dim": 12,
    "v_head_dim": 8,
    "index_n_heads": 4,
    "index_head_dim": 8,
    "index_topk": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "swa_num_attention_heads": 6,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "swa_v_head_dim": 8,
    "rel_extent": 32,
    "o_groups": 2,
    "o_lora_rank": 12,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
    "chunk_size": 4,
    # experts
    "moe_hidden_size": 28,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "moe_num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LATENT = {"num_key_value_heads": 6}  # attention of which keys are made of a narrow stream has as many as queries
SEQUENCES = ids(decoder_input_ids=lambda: torch.randint(3, 53, (2, 5)))


def mixture(name, model, example=None, **config):
    miniature(f"mixture_{name}", model, example or ids(), COMMON, **config)


mixture("afmoe", "AfmoeForCausalLM")
mixture("aria", "AriaTextForCausalLM")
mixture("axk1", "AXK1ForCausalLM", **LATENT)
mixture("axk2", "AXK2ForCausalLM", **LATENT)
mixture("bailing_hybrid", "BailingHybridForCausalLM")
mixture("beam", "BeamForCausalLM", mlp_layer_types=["dense", "sparse"])
mixture("cohere2", "Cohere2MoeForCausalLM")
mixture(
    "dbrx",
    "DbrxForCausalLM",
    d_model=48,
    n_heads=6,
    n_layers=2,
    max_seq_len=32,
    attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
    # as wide as the model: transformers 5.6 builds no router of another width that runs
    ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 2, "hidden_size": 48},
)
mixture("deepseek_v2", "DeepseekV2ForCausalLM", **LATENT)
mixture("deepseek_v2_groups", "DeepseekV2ForCausalLM", **LATENT, topk_method="group_limited_greedy")
mixture("deepseek_v3", "DeepseekV3ForCausalLM", **LATENT)
mixture("deepseek_v32", "DeepseekV32ForCausalLM", **LATENT)
mixture("deepseek_v4", "DeepseekV4ForCausalLM", mlp_layer_types=["moe", "moe"])
mixture("deepseek_v4_hash", "DeepseekV4ForCausalLM", mlp_layer_types=["hash_moe", "moe"])
mixture("doge", "DogeForCausalLM", is_moe=True, num_experts=16)
mixture("dots1", "Dots1ForCausalLM")
mixture("dots3_note", "Dots3NoteForCausalLM", **LATENT)
mixture("ernie4_5", "Ernie4_5_MoeForCausalLM")
mixture("exaone", "ExaoneMoeForCausalLM")
mixture("flex_olmo", "FlexOlmoForCausalLM")
mixture("flint", "FlintForCausalLM")
mixture(
    "gemma4", "Gemma4ForCausalLM", vocab_size_per_layer_input=53, hidden_size_per_layer_input=8, global_head_dim=8,
    enable_moe_block=True, layer_types=["sliding_attention", "full_attention"],
)  # fmt: skip
mixture("glm4", "Glm4MoeForCausalLM")
mixture("glm4_lite", "Glm4MoeLiteForCausalLM", **LATENT)
mixture(
    "glm4v",
    "Glm4vMoeTextModel",
    rope_parameters={
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0,
    },
)  # fmt: skip
mixture("glm_dsa", "GlmMoeDsaForCausalLM", **LATENT)
mixture("gpt_oss", "GptOssForCausalLM")
mixture("granite", "GraniteMoeForCausalLM")
mixture("granite_hybrid", "GraniteMoeHybridForCausalLM")
mixture("granite_shared", "GraniteMoeSharedForCausalLM")
mixture("granite_swa", "GraniteMoeSWAForCausalLM")
mixture("hunyuan", "HunYuanMoEV1ForCausalLM")
mixture("hy_v3", "HYV3ForCausalLM")
mixture("hy_v4", "HYV4ForCausalLM")
mixture("inkling", "InklingForCausalLM")
mixture("inkling2", "Inkling2ForCausalLM")
mixture("jamba", "JambaForCausalLM")
mixture("jetmoe", "JetMoeForCausalLM")
mixture("kimi_linear", "KimiLinearForCausalLM", **LATENT)
mixture("kolibri1", "Kolibri1ForCausalLM")
mixture("laguna", "LagunaForCausalLM")
mixture("lfm2", "Lfm2MoeForCausalLM", layer_types=["conv", "full_attention"], num_dense_layers=1)
mixture("llama4", "Llama4ForCausalLM")
mixture(
    "longcat", "LongcatFlashForCausalLM", **LATENT, num_layers=2, head_dim=4, ffn_hidden_size=52,
    expert_ffn_hidden_size=20, zero_expert_num=2,
)  # fmt: skip
mixture("mellum", "MellumForCausalLM")
mixture("mimo_v2", "MiMoV2FlashForCausalLM", num_attention_heads=8, num_key_value_heads=4)
mixture("minimax", "MiniMaxForCausalLM")
mixture("minimax_m2", "MiniMaxM2ForCausalLM")
mixture("minimax_m3", "MiniMaxM3VLForCausalLM")
mixture("mistral4", "Mistral4Model", **LATENT)
mixture("mistral_large4", "MistralLarge4TextModel", **LATENT)
mixture("mixtral", "MixtralForCausalLM", router_jitter_noise=0.1)
mixture("muse_spark", "MuseSparkTextModel")
mixture("nemotron_h", "NemotronHForCausalLM", layers_block_type=["moe", "attention"])
mixture(
    "nllb", "NllbMoeForConditionalGeneration", SEQUENCES, d_model=48, encoder_layers=2, decoder_layers=2,
    encoder_attention_heads=6, decoder_attention_heads=6, encoder_ffn_dim=52, decoder_ffn_dim=52,
    encoder_sparse_step=2, decoder_sparse_step=2, expert_capacity=8, decoder_start_token_id=2,
)  # fmt: skip
mixture("olmoe", "OlmoeForCausalLM")
mixture("openai_privacy_filter", "OpenAIPrivacyFilterModel")
mixture("phimoe", "PhimoeForCausalLM")
mixture("qwen2", "Qwen2MoeForCausalLM")
mixture("qwen3", "Qwen3MoeForCausalLM")
mixture("qwen3_5", "Qwen3_5MoeForCausalLM")
mixture("qwen3_next", "Qwen3NextForCausalLM")
mixture("qwen3_omni", "Qwen3OmniMoeThinkerTextModel")
mixture("qwen3_vl", "Qwen3VLMoeTextModel")
mixture("qwen4_exp", "Qwen4ExpForCausalLM")
mixture("solar_open", "SolarOpenForCausalLM")
mixture("step3p7", "Step3p7TextModel", mlp_layer_types=["dense", "sparse"])
mixture(
    "switch", "SwitchTransformersForConditionalGeneration", SEQUENCES, d_model=48, d_kv=8, d_ff=52, num_heads=6,
    num_layers=2, num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, expert_capacity=8,
    decoder_start_token_id=0,
)  # fmt: skip
mixture("zaya", "ZayaForCausalLM", num_experts_per_tok=1)
