"""2:4 on CUDA: a linear layer with two of every four inputs, for the GPU's sparse tensor cores.

Law: the output is that of the dense layer with its zeros, within rounding; a weight that is not 2:4, or not of a shape
that the GPU takes, is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur.support import private

__all__ = ["SemiStructuredLinear", "why_no_semi_structured_device", "why_not_semi_structured"]

_DTYPES = (torch.float16, torch.bfloat16)
_ROWS, _COLUMNS = 32, 64  # multiples that both of torch's back-ends take in halves; cuSPARSELt alone asks for 16 and 16
_CAPABILITY = (8, 0)  # Ampere, the first with sparse tensor cores


def why_no_semi_structured_device(device: torch.device) -> str:
    """Why 2:4 does not run on a device, or an empty string.

    >>> why_no_semi_structured_device(torch.device("cpu"))
    '2:4 runs on CUDA devices, and the model is on cpu'
    """
    if device.type != "cuda" or torch.version.cuda is None:  # ROCm calls its devices cuda, too
        return f"2:4 runs on CUDA devices, and the model is on {device.type}"
    found = torch.cuda.get_device_capability(device)
    if found < _CAPABILITY:
        return f"2:4 needs a GPU of compute capability 8.0 or later, and {device} has {found[0]}.{found[1]}"
    return ""


def why_not_semi_structured(weight: Tensor) -> str:
    """Why a weight (outputs, inputs) cannot be a `SemiStructuredLinear`, or an empty string.

    >>> why_not_semi_structured(torch.ones(32, 64, dtype=torch.float16))
    'its zeros are not 2:4'
    """
    if weight.dtype not in _DTYPES:
        return f"2:4 on CUDA takes float16 and bfloat16, and its weight is {weight.dtype}"
    rows, columns = weight.shape
    if not rows or not columns or rows % _ROWS or columns % _COLUMNS:
        return f"2:4 on CUDA takes multiples of {_ROWS} outputs and {_COLUMNS} inputs, and it has {rows} and {columns}"
    if int(weight.ne(0).reshape(rows, -1, 4).sum(2).max()) > 2:
        return "its zeros are not 2:4"
    return ""


class SemiStructuredLinear(nn.Module):
    """A linear layer that keeps at most two of every four consecutive inputs, computed by sparse tensor cores.

    For inference on CUDA devices, through `torch.sparse.to_sparse_semi_structured`, whose interface torch calls a
    prototype. What is saved is held in main memory; the GPU has only what it multiplies with, 9/16 of the dense weight,
    made at the first call. On other devices it computes the same, slowly; inputs of another dtype are computed in the
    weight's. Made by ``SemiStructuredLinear.from_dense``.

    Args:
        values: float16 or bfloat16 (outputs, inputs / 2), the two that are kept of each four; zero where fewer are.
        places: uint8 (outputs, inputs / 4), the first's place among the four plus 4 times the second's.
        bias: (outputs), or None.

    Raises:
        ValueError: the shapes do not fit, or a place is none.

    >>> import torch
    >>> weight = torch.zeros(32, 64, dtype=torch.bfloat16)
    >>> weight[:, 2::4] = 2.0
    >>> layer = SemiStructuredLinear.from_dense(weight)
    >>> layer(torch.ones(1, 64, dtype=torch.bfloat16))[0, :3]
    tensor([32., 32., 32.], dtype=torch.bfloat16)
    """

    values: Tensor
    places: Tensor
    bias: Tensor | None

    def __init__(self, values: Tensor, places: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        if values.dim() != 2 or places.shape != (values.shape[0], values.shape[1] // 2) or values.shape[1] % 2:
            raise ValueError(f"places {tuple(places.shape)} for values {tuple(values.shape)}.")
        if bias is not None and bias.shape != values.shape[:1]:
            raise ValueError(f"a bias of shape {tuple(bias.shape)} for {values.shape[0]} outputs.")
        if places.dtype != torch.uint8 or bool(((places >= 16) | (places % 4 >= places // 4)).any()):
            raise ValueError("a place is none of two different ones among four, in order.")
        self.out_features, self.in_features = values.shape[0], 2 * values.shape[1]
        self.register_buffer("values", values.cpu())
        self.register_buffer("places", places.cpu())
        self.register_buffer("bias", None if bias is None else bias.detach())
        self._operand: tuple[Any, Tensor] | None = None

    @classmethod
    def from_dense(cls, weight: Tensor, bias: Tensor | None = None) -> SemiStructuredLinear:
        """The layer of a 2:4 weight; ``ValueError`` says why another one is none."""
        if why := why_not_semi_structured(weight):
            raise ValueError(f"a weight of shape {tuple(weight.shape)} does not do: {why}.")
        fours = weight.detach().reshape(weight.shape[0], -1, 4)
        kept = fours.ne(0).to(torch.uint8).sort(dim=2, descending=True, stable=True).indices[..., :2].sort(dim=2).values
        places = kept[..., 0] + 4 * kept[..., 1]
        return cls(fours.gather(2, kept).flatten(1), places.to(torch.uint8), None if bias is None else bias.clone())

    @property
    def weight(self) -> Tensor:
        """The dense weight (outputs, inputs), in main memory, computed at each access."""
        places = torch.stack([self.places % 4, self.places // 4], 2).long()
        pairs = self.values.view(*places.shape)
        return pairs.new_zeros(*places.shape[:2], 4).scatter_(2, places, pairs).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"the input has shape {tuple(x.shape)}; its last dimension must be {self.in_features}.")
        flat = x.reshape(-1, self.in_features).to(self.values.dtype)
        bias = None if self.bias is None else self.bias.to(self.values.dtype)
        y = functional.linear(flat, self._on(x.device), bias)
        return y.to(x.dtype).reshape(*x.shape[:-1], self.out_features)

    def _on(self, device: torch.device) -> Tensor:
        """What is multiplied with there; on a GPU kept, and made again where the tensors changed."""
        if device.type != "cuda":
            return self.weight.to(device)
        key = (device, self.values.data_ptr(), *map(private.version_of, (self.values, self.places)))
        if self._operand is None or self._operand[0] != key:
            self._operand = key, torch.sparse.to_sparse_semi_structured(self.weight.to(device))
        return self._operand[1]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """The bias moves as any module's does; what is only saved stays in main memory, and in halves."""
        values, places = self.values, self.places
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        changed = self.values.dtype in _DTYPES and self.values.dtype != values.dtype
        self.values, self.places = (self.values.cpu() if changed else values), places
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_operand": None}  # a copy makes its own

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"

    def _layout(self) -> dict[str, Any]:
        return {}

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Tensor], layout: Mapping[str, Any]) -> SemiStructuredLinear:
        return cls(tensors["values"], tensors["places"], tensors.get("bias"), **layout)
