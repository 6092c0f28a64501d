"""Decoders of transformers.

Heads are 8 wide, and their number times 8 is not the width wherever the architecture allows it.
"""

from __future__ import annotations

from zoo.registry import ids, transformer

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER = {"vocab_size": 53, "max_position_embeddings": 32, "use_cache": False, **SPECIAL}
LLAMA = {
    **DECODER, "hidden_size": 36, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
ODD = {**LLAMA, "hidden_size": 48}  # for those that compute the width of a head from the width of the model
del ODD["head_dim"]
EAGER = {"attn_implementation": "eager"}
SDPA = {"attn_implementation": "sdpa"}
EXPERTS = {"experts_implementation": "eager"}  # the default multiplies in groups, which float64 has not

GPT2 = {"vocab_size": 53, "n_positions": 32, "n_embd": 36, "n_layer": 2, "n_head": 3, "use_cache": False, **SPECIAL}
transformer("gpt2", "GPT2LMHeadModel", ids(), **GPT2, **EAGER)
transformer("gpt2_sdpa", "GPT2LMHeadModel", ids(), **GPT2, n_inner=52, **SDPA)
transformer("gpt_bigcode", "GPTBigCodeForCausalLM", ids(), **GPT2, n_inner=52)
transformer(
    "gpt_neo", "GPTNeoForCausalLM", ids(), **DECODER, hidden_size=36, num_layers=2, num_heads=3, intermediate_size=52,
    attention_types=[[["global", "local"], 1]], window_size=4, **EAGER,
)  # fmt: skip
transformer("gptj", "GPTJForCausalLM", ids(), **GPT2, rotary_dim=4, n_inner=52)
NEOX = {**DECODER, "hidden_size": 36, "num_attention_heads": 3, "intermediate_size": 52, "num_hidden_layers": 2}
transformer("gpt_neox", "GPTNeoXForCausalLM", ids(), **NEOX, **SDPA)
transformer(
    "opt", "OPTForCausalLM", ids(), **DECODER, hidden_size=36, ffn_dim=52, num_hidden_layers=2, num_attention_heads=3,
    word_embed_proj_dim=20, **EAGER,
)  # fmt: skip
transformer(
    "bloom", "BloomForCausalLM", ids(), vocab_size=53, hidden_size=36, n_layer=2, n_head=3, use_cache=False, **SPECIAL
)
transformer("llama", "LlamaForCausalLM", ids(), **LLAMA, **EAGER)
transformer(
    "llama_sdpa_tied", "LlamaForCausalLM", ids(), **LLAMA, tie_word_embeddings=True, attention_bias=True, **SDPA
)
transformer("mistral", "MistralForCausalLM", ids(), **LLAMA, sliding_window=4, **SDPA)
transformer("qwen2", "Qwen2ForSequenceClassification", ids(), **ODD, num_labels=3, **SDPA)
transformer("qwen3", "Qwen3ForCausalLM", ids(), **LLAMA, **EAGER)
transformer("gemma", "GemmaForCausalLM", ids(), **LLAMA, **EAGER)
transformer("gemma2", "Gemma2ForCausalLM", ids(), **LLAMA, query_pre_attn_scalar=8, sliding_window=4, **EAGER)
transformer("phi", "PhiForCausalLM", ids(), **ODD, partial_rotary_factor=0.5, **SDPA)
transformer("phi3", "Phi3ForCausalLM", ids(), **ODD, original_max_position_embeddings=32, **EAGER)
transformer(
    "falcon", "FalconForCausalLM", ids(), vocab_size=53, hidden_size=36, num_hidden_layers=2, num_attention_heads=3,
    multi_query=True, parallel_attn=True, use_cache=False, **SPECIAL, **EAGER,
)  # fmt: skip
transformer(
    "falcon_new_decoder", "FalconForCausalLM", ids(), vocab_size=53, hidden_size=48, num_hidden_layers=2,
    num_attention_heads=6, num_kv_heads=2, new_decoder_architecture=True, use_cache=False, **SPECIAL, **SDPA,
)  # fmt: skip
transformer(
    "mpt", "MptForCausalLM", ids(), vocab_size=53, d_model=36, n_layers=2, n_heads=3, max_seq_len=32, use_cache=False
)
transformer("stablelm", "StableLmForCausalLM", ids(), **ODD, partial_rotary_factor=0.5, **EAGER)
transformer("olmo2", "Olmo2ForCausalLM", ids(), **ODD, **EAGER)
transformer("starcoder2", "Starcoder2ForCausalLM", ids(), **ODD, **SDPA)
transformer("cohere", "CohereForCausalLM", ids(), **ODD, **EAGER)
transformer("granite", "GraniteForCausalLM", ids(), **ODD, residual_multiplier=0.7, **SDPA)
transformer("glm", "GlmForCausalLM", ids(), **LLAMA, **EAGER)
transformer("nemotron", "NemotronForCausalLM", ids(), **LLAMA, **EAGER)
transformer("persimmon", "PersimmonForCausalLM", ids(), **NEOX, partial_rotary_factor=0.5, **EAGER)
transformer("codegen", "CodeGenForCausalLM", ids(), **{**GPT2, "n_embd": 48, "n_head": 4}, rotary_dim=4)
transformer("smollm3", "SmolLM3ForCausalLM", ids(), **ODD, no_rope_layers=[1, 0], **SDPA)
transformer(
    "mixtral", "MixtralForCausalLM", ids(), **ODD, num_local_experts=3, num_experts_per_tok=2, **EAGER, **EXPERTS
)
transformer(
    "mixtral_batched", "MixtralForCausalLM", ids(), **ODD, num_local_experts=3, num_experts_per_tok=2,
    experts_implementation="batched_mm",
)  # fmt: skip
transformer(
    "qwen2_moe", "Qwen2MoeForCausalLM", ids(), **ODD, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20,
    shared_expert_intermediate_size=28, **SDPA, **EXPERTS,
)  # fmt: skip
transformer(
    "deepseek_v3", "DeepseekV3ForCausalLM", ids(), **DECODER, hidden_size=36, intermediate_size=52,
    moe_intermediate_size=20, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3, n_routed_experts=4,
    num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=22, kv_lora_rank=18,
    qk_nope_head_dim=10, qk_rope_head_dim=4, v_head_dim=14, **EAGER, **EXPERTS,
)  # fmt: skip
MAMBA = {"vocab_size": 53, "hidden_size": 28, "num_hidden_layers": 2, "use_cache": False, **SPECIAL}
transformer("mamba", "MambaForCausalLM", ids(), **MAMBA, state_size=5, time_step_rank=3, conv_kernel=4)
transformer(
    "mamba2", "Mamba2ForCausalLM", ids(), **MAMBA, state_size=6, num_heads=8, head_dim=7, n_groups=2, chunk_size=4
)
transformer(
    "rwkv", "RwkvForCausalLM", ids(), **MAMBA, attention_hidden_size=28, intermediate_size=44, context_length=32
)
transformer(
    "recurrent_gemma", "RecurrentGemmaForCausalLM", ids(), **{**LLAMA, "num_key_value_heads": 1}, lru_width=42,
    conv1d_width=4, attention_window_size=8, block_types=("recurrent", "attention"),
)  # fmt: skip
