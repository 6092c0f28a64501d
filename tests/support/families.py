"""Small configurations of the model families that transformers stacks today, with random weights."""

import pytest
import torch
from torch import nn

SMALL = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXED = {"head_dim": 4, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
GPT2 = {
    "vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENCODER_DECODER = {"vocab_size": 64, "d_model": 16, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1}
T5 = {
    "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8,
}  # fmt: skip
BART = {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 64, "forced_eos_token_id": None,
}  # fmt: skip


def without(settings, *names):
    return {key: value for key, value in settings.items() if key not in names}


FAMILIES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SMALL),
    "mistral": ("MistralForCausalLM", "MistralConfig", SMALL | {"sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", SMALL),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", SMALL | {"head_dim": 4}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", SMALL | MIXED | {"query_pre_attn_scalar": 4}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", SMALL | MIXED | {"query_pre_attn_scalar": 4}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", SMALL),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", without(SMALL, "num_key_value_heads")),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        without(SMALL, "num_key_value_heads", "intermediate_size") | {"ffn_dim": 24, "word_embed_proj_dim": 16},
    ),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"vocab_size": 64, "hidden_size": 16, "n_layer": 2, "n_head": 4}),
    "falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        without(SMALL, "num_key_value_heads", "intermediate_size") | {"alibi": False, "ffn_hidden_size": 24},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", without(SMALL, "num_key_value_heads")),
    "t5": ("T5ForConditionalGeneration", "T5Config", ENCODER_DECODER | T5),
    "bart": ("BartForConditionalGeneration", "BartConfig", ENCODER_DECODER | BART),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        SMALL
        | {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        SMALL | {"head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {
            "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "pad_token_id": 0,
            "eos_token_id": 2,
        },
    ),
}  # fmt: skip
ENCODER_DECODERS = {"t5", "bart"}
# between them they have every kind of block; `make examples` has all
FIRST = ("llama", "gemma3", "phi3", "gpt2", "bloom", "bert", "t5", "mixtral", "mamba")
EVERY_FAMILY = [name if name in FIRST else pytest.param(name, marks=pytest.mark.examples) for name in FAMILIES]


def make(family, seed=0, dtype=torch.float32, **changes):
    """A model of the family in evaluation mode, with some settings changed."""
    import transformers  # of its families only this one is imported

    kind, config, settings = FAMILIES[family]
    torch.manual_seed(seed)
    model = getattr(transformers, kind)(getattr(transformers, config)(**(settings | changes))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:  # larger than the initial values, so that no path of the network is negligible
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model.to(dtype)


def saved_deep(family, folder, layers=4, dtype=torch.float32):
    """A directory of a model of the family with so many blocks in each stack, and the model."""
    usual = FAMILIES[family][2]
    counts = {key: layers for key in usual if key in ("n_layer", "num_layers") or key.endswith("_layers")}
    model = make(family, dtype=dtype, **counts)
    model.save_pretrained(folder)
    return model


def batches(family, count=3, padding=True, size=2, length=12):
    """Token batches of the family's kind; the first row of each is shorter where there is padding."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        ids = torch.randint(3, 64, (size, length), generator=generator)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if padding:
            batch["attention_mask"][0, length - 4 :] = 0
        if family in ENCODER_DECODERS:
            target = torch.randint(3, 64, (size, length), generator=generator)
            batch |= {"decoder_input_ids": target, "decoder_attention_mask": torch.ones_like(target)}
            if padding:
                batch["decoder_attention_mask"][1, length - 3 :] = 0
        made.append(batch)
    return made


class Encoder(nn.Module):
    """PyTorch's own layers under an embedding."""

    def __init__(self, layers=3):
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=True)
        self.head = nn.Linear(16, 5)

    def forward(self, ids, src_key_padding_mask=None):
        return self.head(self.encoder(self.embed(ids), src_key_padding_mask=src_key_padding_mask))
