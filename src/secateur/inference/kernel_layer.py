"""What the layers share that are computed by a kernel in C.

Law: what a layer holds is checked when it is made, and a pickle of it can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from secateur.native import MOST_COLUMNS, scaled

__all__ = ["KernelLayer", "as_stored", "expect", "few_columns", "in_fours", "rounds_with"]


class KernelLayer(nn.Module):
    """What the layers with kernels have: buffers, named in ``STORED``, and a dense weight on request."""

    STORED: ClassVar[tuple[str, ...]] = ("indices", "pointers", "values")

    indices: Tensor
    pointers: Tensor
    values: Tensor
    bias: Tensor | None
    scales: Tensor | None

    def __init__(
        self, stored: Mapping[str, Tensor], bias: Tensor | None, columns: int, rows: int, scales: Tensor | None = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = columns, rows
        for name, tensor in stored.items():
            self.register_buffer(name, tensor)
        self.register_buffer("bias", None if bias is None else bias.detach().float())
        self.register_buffer("scales", scales)
        with torch.no_grad():  # the checks of the operator, at the door
            self(self._nothing())

    def _nothing(self) -> Tensor:
        """No input at all, of a shape that fits."""
        return torch.zeros(0, self.in_features, device=self.values.device)

    def __getstate__(self) -> dict[str, Any]:
        """Indices of 16 bits with a sign: torch's pickles of uint16 cannot be read."""
        buffers = {name: _turned(each, torch.uint16, torch.int16) for name, each in self._buffers.items()}
        return {**vars(self), "_buffers": buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._buffers.setdefault("scales", None)  # which a pickle of before does not have
        self._buffers.update({n: _turned(each, torch.int16, torch.uint16) for n, each in self._buffers.items()})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves as any module does; the values stay float32, bfloat16 or int8, bias and scales float32, whatever
        ``.to(dtype)``."""
        values, others = self.values, {name: getattr(self, name) for name in ("bias", "scales")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.values.dtype not in (torch.float32, torch.bfloat16, torch.int8):
            self.values = values.to(self.values.device)
        for name, before in others.items():
            if before is not None and (now := getattr(self, name)).dtype != torch.float32:
                setattr(self, name, before.to(now.device))
        return self

    def _layout(self) -> dict[str, Any]:
        """What a file says of it beside its tensors."""
        return {"in_features": self.in_features, "out_features": self.out_features}

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Tensor], layout: Mapping[str, Any]) -> Self:
        """The layer of a file's tensors and layout."""
        given: dict[str, Any] = {name: tensors[name] for name in cls.STORED}
        return cls(**given, bias=tensors.get("bias"), scales=tensors.get("scales"), **layout)

    @property
    def weight(self) -> Tensor:
        """The dense weight (outputs, inputs), computed at each access; changing it has no effect."""
        raise NotImplementedError

    def _scaled(self, weight: Tensor) -> Tensor:
        """A weight as the kernels see it, in the dtype that the layer's values stand for."""
        return weight.to(self.values.dtype) if self.scales is None else scaled(weight.float(), self.scales)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, kept={self.values.numel()}{self._in_int8()}"

    def _in_int8(self) -> str:
        inputs = ", inputs=int8" if getattr(self, "rounds_inputs", False) else ""
        return "" if self.scales is None else f", values=int8{inputs}"


def as_stored(weight: Tensor, scales: Tensor | None) -> Tensor:
    """A weight in the dtype in which its values are kept: int8 where there are scales, bfloat16, else float32.

    Raises:
        ValueError: there are scales, and the weight is not int8, or not of so many outputs.
    """
    if scales is None:
        return weight.detach() if weight.dtype == torch.bfloat16 else weight.detach().float()
    if weight.dtype != torch.int8 or scales.shape != weight.shape[:1]:
        raise ValueError(
            f"scales of shape {tuple(scales.shape)} for a weight of {weight.dtype} and shape {tuple(weight.shape)}: "
            "they go with int8, one for each output, as to_int8 gives them."
        )
    return weight.detach()


def in_fours(column: Tensor, values: Tensor, length: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Entries of segments of so many, filled up to multiples of 4 by zeros in the column of the last; values (., 4).

    >>> in_fours(torch.tensor([3, 7]), torch.tensor([5, 6]), torch.tensor([0, 2]))
    (tensor([3, 7, 7, 7]), tensor([[5, 6, 0, 0]]), tensor([0, 4]))
    """
    padded = length + -length % 4
    segment = torch.arange(len(length), device=length.device).repeat_interleave(padded)
    within = torch.arange(len(segment), device=length.device) - (padded.cumsum(0) - padded)[segment]
    is_kept, first = within < length[segment], (length.cumsum(0) - length)[segment]
    at = first + torch.minimum(within, length[segment] - 1)
    return column[at], torch.where(is_kept, values[at], 0).view(-1, 4), padded


def rounds_with(scales: Tensor | None, round_inputs: bool) -> None:
    """ValueError where inputs are to be rounded, and the weight is not."""
    if round_inputs and scales is None:
        raise ValueError("inputs are rounded for a weight in int8 only; give the scales of one.")


def _turned(tensor: Tensor | None, dtype: torch.dtype, other: torch.dtype) -> Tensor | None:
    return tensor.view(other) if tensor is not None and tensor.dtype == dtype else tensor


def expect(x: Tensor, columns: int) -> None:
    if x.shape[-1] != columns:
        raise ValueError(f"the input has shape {tuple(x.shape)}; its last dimension must be {columns}.")


def few_columns(columns: int) -> None:
    if columns > MOST_COLUMNS:
        raise ValueError(f"{columns} inputs; an index of 16 bits counts up to {MOST_COLUMNS}.")
