"""What a model holds and computes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from secateur.support import run_example


def count_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def multiply_adds(model: nn.Module, example: Any) -> int:
    """Of the first of a tensor, or of the keywords in a dict: as torch's own counter has them, alike for all."""
    example = example[:1] if isinstance(example, Tensor) else example
    # attention as matrix products, which are what the counter knows
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run_example(copy.deepcopy(model).eval(), example)
    return counter.get_total_flops() // 2


def bytes_of(model: nn.Module) -> int:
    from safetensors.torch import save

    return len(save({name: tensor.contiguous() for name, tensor in model.state_dict().items()}))
