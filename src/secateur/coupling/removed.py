"""What stays in place of a module of a residual branch that left.

Law: it returns zeros of the structure, and where the code around asks the shape, of what the module returned; and it
holds no parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Removed", "replacement"]


@dataclass
class _Zeros:
    """Zeros of a shape: dimension d is ``(times * the input's at + plus) // over``, or ``sizes`` where ``at`` is -1."""

    at: tuple[int, ...]
    sizes: tuple[int, ...]
    times: tuple[int, ...]
    plus: tuple[int, ...]
    over: tuple[int, ...]
    whole: bool  # in memory of their own, for code that writes into them

    def like(self, x: Tensor) -> Tensor:
        shape = []
        for at, size, times, plus, over in zip(self.at, self.sizes, self.times, self.plus, self.over, strict=True):
            if at < 0:
                shape.append(size)
            else:
                given = x.shape[at]
                shape.append(given if (times, plus, over) == (1, 0, 1) else (given * times + plus) // over)
        dtype = x.dtype if x.is_floating_point() or x.is_complex() else torch.get_default_dtype()
        if self.whole:
            return x.new_zeros(shape, dtype=dtype)
        return x.new_zeros((), dtype=dtype).expand(shape)


class Removed(nn.Module):
    """The module in place of one whose residual branch left: it returns zeros, and has no parameters.

    They have the structure of what the module returned, and its shapes only where the code around asks for them:
    otherwise a single 0, which adds at no cost. ``form`` is what a plan holds; see `secateur.shrinking`.

    >>> gone = Removed({"was": "Linear", "input": 0, "returns": ["tuple", {"zeros": None}, None]})
    >>> gone
    Removed(Linear)
    >>> gone(torch.ones(2, 3))
    (tensor(0.), None)
    """

    def __init__(self, form: Mapping[str, Any]) -> None:
        super().__init__()
        self.was = str(form["was"])
        self.input: int | str = form["input"]
        self.cache: str | None = form.get("cache")
        self.layer_idx = int(form.get("layer", 0))
        self.returns: Any = self._held(form["returns"])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Zeros; a cache of keys and values that is passed in gets one entry for each new token."""
        x = kwargs[self.input] if isinstance(self.input, str) else args[self.input]
        if self.cache is not None and kwargs.get(self.cache) is not None:
            _fill(kwargs[self.cache], x, self.layer_idx, crossed=_crossed(kwargs))
        return self._zeros(self.returns, x)

    def extra_repr(self) -> str:
        """The class that it stands for."""
        return self.was

    def _held(self, returns: Any) -> Any:
        """The form, with its shapes as attributes of this module, such that their numbers follow what leaves."""
        if isinstance(returns, Mapping) and "zeros" in returns:
            if returns["zeros"] is None:
                return None, None
            name = f"zeros_{sum(key.startswith('zeros_') for key in vars(self))}"
            at, sizes, times, plus, over = (tuple(int(row[n]) for row in returns["zeros"]) for n in range(5))
            setattr(self, name, _Zeros(at, sizes, times, plus, over, bool(returns["whole"])))
            return None, name
        if isinstance(returns, Mapping):
            return {key: self._held(each) for key, each in returns["dict"].items()}
        return [returns[0], *map(self._held, returns[1:])] if isinstance(returns, list) else returns

    def _zeros(self, returns: Any, x: Tensor) -> Any:
        if isinstance(returns, tuple):
            if returns[1] is not None:
                return getattr(self, returns[1]).like(x)
            return x.new_zeros((), dtype=x.dtype if x.is_floating_point() else torch.get_default_dtype())
        if isinstance(returns, dict):
            return {key: self._zeros(each, x) for key, each in returns.items()}
        if isinstance(returns, list):
            parts = [self._zeros(each, x) for each in returns[1:]]
            return tuple(parts) if returns[0] == "tuple" else parts
        return returns


def _crossed(kwargs: Mapping[str, Any]) -> bool:
    """Whether an attention looks at another sequence, whose keys no one counts."""
    return any(kwargs.get(key) is not None for key in ("key_value_states", "encoder_hidden_states"))


def _fill(cache: Any, x: Tensor, layer: int, *, crossed: bool) -> None:
    """Keys and values of width one: a decoder asks its first layers how many words there were."""
    cache = getattr(cache, "self_attention_cache", cache)
    if not crossed:
        zeros = x.new_zeros((x.shape[0], 1, x.shape[1], 1))
        cache.update(zeros, zeros, layer)


def replacement(form: Mapping[str, Any]) -> nn.Module:
    """The replacement module that a plan's entry describes.

    >>> replacement({"was": "LayerNorm", "returns": "input"})
    Identity()
    """
    return nn.Identity() if form["returns"] == "input" else Removed(form)
