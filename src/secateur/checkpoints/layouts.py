"""Which axes of a stored tensor are a layer's outputs and inputs.

Law: `from_rows(to_rows(tensor))` is the tensor. Every pattern is defined on (outputs, inputs, ...), the layout of
`nn.Linear` and of the convolutions; a checkpoint that stores something else is turned here, and nowhere else.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from secateur.targets import is_expert

__all__ = ["Layout", "layout_of"]

# transformers' Conv1D computes x @ W: these models store (inputs, outputs).
_CONV1D_MODELS = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})
_CONV1D_NAMES = re.compile(r"(^|\.)(c_attn|c_proj|c_fc|q_attn)\.weight$")
# Fused experts computed as torch.bmm(x, W): (experts, inputs, outputs).
_BMM_MODELS = frozenset({"llama4", "llama4_text", "gpt_oss", "qwen3_vl_moe", "qwen3_vl_moe_text"})
_EXPERTS_DOWN = re.compile(r"down|output|w2")


@dataclass(frozen=True)
class Layout:
    """How a stored tensor becomes (outputs, inputs, ...) and back.

    ``inputs_first``: stored (inputs, outputs) instead of (outputs, inputs). ``experts``: the first axis counts experts,
    each with a matrix of its own; all their outputs become one axis.

    >>> import torch
    >>> stored = torch.arange(6).reshape(2, 3)  # GPT-2: 2 inputs, 3 outputs
    >>> layout = Layout((2, 3), inputs_first=True)
    >>> layout.to_rows(stored).shape
    torch.Size([3, 2])
    >>> torch.equal(layout.from_rows(layout.to_rows(stored)), stored)
    True
    """

    shape: tuple[int, ...]
    inputs_first: bool = False
    experts: bool = False

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """(outputs, inputs, ...): the shape of ``to_rows(tensor)``."""
        if self.experts:
            count, first, second = self.shape
            return (count * second, first) if self.inputs_first else (count * first, second)
        return self.shape[::-1] if self.inputs_first else self.shape

    def to_rows(self, tensor: Tensor) -> Tensor:
        """The stored tensor as (outputs, inputs, ...); a view where that is possible."""
        if self.inputs_first:
            tensor = tensor.transpose(-2, -1)
        return tensor.flatten(0, 1) if self.experts else tensor

    def from_rows(self, tensor: Tensor) -> Tensor:
        """The inverse of `to_rows`: back to the stored shape."""
        if self.experts:
            tensor = tensor.reshape(self.shape[0], -1, tensor.shape[-1])
        return tensor.transpose(-2, -1) if self.inputs_first else tensor


def layout_of(name: str, shape: tuple[int, ...], config: Mapping[str, object]) -> Layout:
    """The layout of the tensor ``name`` in a checkpoint with this ``config.json``; ``{}`` where there is none.

    (outputs, inputs, ...) but for two cases. In GPT-2 and its kin, known by ``model_type``, the weights of ``c_attn``,
    ``c_proj`` and ``c_fc`` are (inputs, outputs). A 3-D tensor of fused ``experts`` is one matrix for each expert; the
    config's ``hidden_size`` tells which axis is which, and the ``model_type`` where it cannot.

    >>> layout_of("h.0.attn.c_attn.weight", (768, 2304), {"model_type": "gpt2"}).rows_shape
    (2304, 768)
    >>> layout_of("h.0.attn.c_attn.weight", (6144, 2048), {"model_type": "gpt_bigcode"}).rows_shape
    (6144, 2048)
    """
    model = str(config.get("model_type"))
    if len(shape) == 2 and model in _CONV1D_MODELS and _CONV1D_NAMES.search(name):
        return Layout(shape, inputs_first=True)
    if len(shape) == 3 and 0 not in shape and is_expert(name):
        return Layout(shape, inputs_first=_experts_are_inputs_first(name, shape, config), experts=True)
    return Layout(shape)


def _experts_are_inputs_first(name: str, shape: tuple[int, ...], config: Mapping[str, object]) -> bool:
    text = config.get("text_config")
    hidden = config.get("hidden_size") or (text.get("hidden_size") if isinstance(text, Mapping) else None)
    _, first, second = shape
    if hidden in (first, second) and first != second:
        hidden_is_output = _EXPERTS_DOWN.search(name.rsplit("experts", 1)[1]) is not None
        return (hidden == second) if hidden_is_output else (hidden == first)
    return str(config.get("model_type")) in _BMM_MODELS
