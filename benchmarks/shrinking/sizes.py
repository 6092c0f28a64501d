"""What a model holds and computes."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def count_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def multiply_adds(model: nn.Module, example: Tensor) -> int:
    """As torch's own counter has them, the same for both libraries."""
    # attention as matrix products, which are what the counter knows
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        copy.deepcopy(model).eval()(example[:1])
    return counter.get_total_flops() // 2


def bytes_of(model: nn.Module) -> int:
    from safetensors.torch import save

    return len(save({name: tensor.contiguous() for name, tensor in model.state_dict().items()}))
