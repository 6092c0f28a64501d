"""Encoders of transformers."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.registry import ids, transformer
from zoo.transformers_decoders import EAGER, SDPA

BERT = {
    "vocab_size": 53, "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 52,
    "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip


def padded() -> Tensor:
    return torch.tensor([[1] * 7, [1] * 5 + [0] * 2])


transformer("bert", "BertForSequenceClassification", ids(attention_mask=padded), **BERT, num_labels=3, **EAGER)
transformer("bert_masked_sdpa", "BertForMaskedLM", ids(attention_mask=padded), **BERT, **SDPA)
transformer("roberta", "RobertaForTokenClassification", ids(), **BERT, num_labels=5, **SDPA)
transformer(
    "distilbert", "DistilBertForSequenceClassification", ids(), vocab_size=53, dim=36, hidden_dim=52, n_layers=2,
    n_heads=3, max_position_embeddings=32, **EAGER,
)  # fmt: skip
transformer("albert", "AlbertForMaskedLM", ids(), **BERT, embedding_size=20, **EAGER)
transformer("electra", "ElectraForPreTraining", ids(), **BERT, embedding_size=20, **SDPA)
transformer(
    "deberta_v2", "DebertaV2ForSequenceClassification", ids(), **BERT, relative_attention=True, position_buckets=4,
    pos_att_type=["p2c", "c2p"], share_att_key=True,
)  # fmt: skip
transformer("mpnet", "MPNetForSequenceClassification", ids(), **BERT, relative_attention_num_buckets=32)
transformer(
    "xlnet", "XLNetForSequenceClassification", ids(), vocab_size=53, d_model=36, n_layer=2, n_head=3, d_inner=52
)
transformer(
    "funnel", "FunnelForSequenceClassification", ids(8), vocab_size=53, block_sizes=[1, 1], num_decoder_layers=1,
    d_model=36, n_head=3, d_head=8, d_inner=52, max_position_embeddings=32,
)  # fmt: skip
transformer("longformer", "LongformerForTokenClassification", ids(8), **BERT, attention_window=4)
transformer(
    "convbert", "ConvBertForSequenceClassification", ids(), **{**BERT, "num_attention_heads": 4, "hidden_size": 40},
    embedding_size=20,
)  # fmt: skip
transformer(
    "squeezebert", "SqueezeBertForSequenceClassification", ids(),
    **{**BERT, "hidden_size": 48, "num_attention_heads": 4}, embedding_size=48,
)  # fmt: skip
transformer("fnet", "FNetForMaskedLM", ids(), **{k: v for k, v in BERT.items() if k != "num_attention_heads"})
transformer("roformer", "RoFormerForMaskedLM", ids(), **BERT, embedding_size=20)
transformer(
    "modernbert", "ModernBertForMaskedLM", ids(), **{**BERT, "num_attention_heads": 3}, local_attention=4,
    global_attn_every_n_layers=2, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, **SDPA,
)  # fmt: skip
