"""Small mixtures of transformers: their sizes, but for those of experts, tokens to run them on, and what is found of
their directories."""

import dataclasses

import torch

from secateur.checkpoints import open_checkpoint
from secateur.shrinking.kinds.experts import tied_mixtures
from secateur.shrinking.kinds.mixtures import mixtures_of
from secateur.shrinking.request import Request
from secateur.shrinking.select import groups_in_scope

SMALL = {
    "vocab_size": 53, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}  # fmt: skip


def mixtral(experts=4, **config):
    import transformers

    torch.manual_seed(0)
    made = transformers.MixtralConfig(intermediate_size=48, num_local_experts=experts, **SMALL, **config)
    return transformers.MixtralForCausalLM(made)


def batches(count=4):
    draw = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, 53, (2, 16), generator=draw)} for _ in range(count)]


def found_once(folder):
    """In place of `mixtures_of`, for this directory alone: for processes that are forked, and calls that are refused.

    A run that comes to its end changes what was found.
    """
    found = mixtures_of(open_checkpoint(folder), Request(verify=False))

    def known(checkpoint, asked):
        scope = tied_mixtures(found.subject.scope, asked)
        subject = dataclasses.replace(found.subject, scope=scope)
        return dataclasses.replace(found, subject=subject, groups=groups_in_scope(scope, asked, chosen=True))

    return known
