"""The shapes of published models on the meta device, with few layers: what can leave them depends on their widths."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

LAYERS = 2


class Published(NamedTuple):
    """How a model is made, and what it is run on."""

    model: Callable[[], nn.Module]
    inputs: dict[str, Tensor]


def _words(kind: str, configuration: str, **sizes: Any) -> Published:
    tokens = torch.tensor([[7, 6, 5, 4, 1], [1, 2, 3, 5, 4]])
    return _made(kind, configuration, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, **sizes)


def _decoder(kind: str, configuration: str, **sizes: Any) -> Published:
    found = _words(kind, configuration, **sizes)
    return Published(found.model, {**found.inputs, "use_cache": False})  # type: ignore[dict-item]


def _llama(kind: str, width: int, hidden: int, heads: int, shared: int, words: int, **more: Any) -> Published:
    config = more.pop("kind_of_config", f"{kind}Config")
    sizes = {"hidden_size": width, "intermediate_size": hidden, "num_attention_heads": heads, "vocab_size": words}
    options = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_hidden_layers": LAYERS, **more}
    return _decoder(f"{kind}ForCausalLM", config, num_key_value_heads=shared, **sizes, **options)


def _image(kind: str, configuration: str, side: int = 224, **sizes: Any) -> Published:
    return _made(kind, configuration, {"pixel_values": torch.zeros(2, 3, side, side, device="meta")}, **sizes)


def _whisper(width: int, heads: int) -> Published:
    sizes = {"d_model": width, "encoder_attention_heads": heads, "decoder_attention_heads": heads}
    hidden = {"encoder_ffn_dim": 4 * width, "decoder_ffn_dim": 4 * width}
    layers = {"encoder_layers": LAYERS, "decoder_layers": LAYERS, "max_source_positions": 50}
    inputs = {
        "input_features": torch.zeros(2, 80, 100, device="meta"),
        "decoder_input_ids": torch.ones(2, 4, dtype=torch.long, device="meta"),
    }
    return _made(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**inputs, "use_cache": False},  # type: ignore[dict-item]
        **sizes,
        **hidden,
        **layers,
    )


def _made(kind: str, configuration: str, inputs: dict[str, Tensor], **sizes: Any) -> Published:
    def model() -> nn.Module:
        import transformers

        with torch.device("meta"):
            made: nn.Module = getattr(transformers, kind)(getattr(transformers, configuration)(**sizes))
        return made.eval()

    return Published(model, inputs)


_FEW = {"num_hidden_layers": LAYERS}
_MINILM = {"hidden_size": 384, "intermediate_size": 1536}
_SMALL = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6}

PUBLISHED: dict[str, Published] = {
    "Llama 3 8B": _llama("Llama", 4096, 14336, 32, 8, 128256),
    "SmolLM2 135M": _llama("Llama", 576, 1536, 9, 3, 49152, tie_word_embeddings=True),
    "SmolLM2 1.7B": _llama("Llama", 2048, 8192, 32, 32, 49152, tie_word_embeddings=True),
    "TinyLlama 1.1B": _llama("Llama", 2048, 5632, 32, 4, 32000),
    "Qwen2.5 0.5B": _llama("Qwen2", 896, 4864, 14, 2, 151936, tie_word_embeddings=True),
    "Qwen3 0.6B": _llama("Qwen3", 1024, 3072, 16, 8, 151936, head_dim=128, tie_word_embeddings=True),
    "Gemma 2 2B": _llama("Gemma2", 2304, 9216, 8, 4, 256000, head_dim=256),
    "Gemma 3 1B": _llama("Gemma3", 1152, 6912, 4, 1, 262144, kind_of_config="Gemma3TextConfig", head_dim=256),
    "Mistral 7B": _llama("Mistral", 4096, 14336, 32, 8, 32000),
    "Phi-3 mini": _llama("Phi3", 3072, 8192, 32, 32, 32064),
    "GPT-2": _decoder("GPT2LMHeadModel", "GPT2Config", n_layer=LAYERS),
    "OPT 125M": _decoder("OPTForCausalLM", "OPTConfig", **_FEW, ffn_dim=3072),
    "Pythia 160M": _decoder(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", **_FEW, hidden_size=768, intermediate_size=3072, num_attention_heads=12,
        vocab_size=50304,
    ),
    "BERT base": _words("BertForMaskedLM", "BertConfig", **_FEW),
    "MiniLM L6": _words("BertModel", "BertConfig", **_FEW, **_MINILM),
    "RoBERTa base": _words("RobertaForSequenceClassification", "RobertaConfig", **_FEW, vocab_size=50265),
    "DistilBERT": _words("DistilBertForSequenceClassification", "DistilBertConfig", n_layers=LAYERS),
    "ViT-B/16": _image("ViTForImageClassification", "ViTConfig", **_FEW, num_labels=1000),
    "DeiT-S": _image("DeiTForImageClassification", "DeiTConfig", **_FEW, **_SMALL, num_labels=1000),
    "ResNet-50": _image("ResNetForImageClassification", "ResNetConfig", side=64, num_labels=1000),
    "ConvNeXt-T": _image("ConvNextForImageClassification", "ConvNextConfig", side=64, num_labels=1000),
    "Whisper tiny": _whisper(384, 6),
    "Whisper base": _whisper(512, 8),
}  # fmt: skip
