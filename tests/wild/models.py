"""What a registry of models says of each of them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Wild", "models_of", "pictures", "registries"]


@dataclass(frozen=True)
class Wild:
    """A model of another library, with random weights.

    Attributes:
        registry: the file of `registries` that it is in.
        name: within its registry.
        build: makes the module; the caller has seeded torch, and makes it float64 and adds noise to its weights.
        example: draws what the model is called with, as `shrink` takes it: a tensor, a tuple of positional arguments or
            a dict of keyword arguments, in float32 and of batch 2; other numbers at each call.
        images: the example is a batch of pictures, so that `oneshot` is tried with two of them.
    """

    registry: str
    name: str
    build: Callable[[], nn.Module]
    example: Callable[[], Any]
    images: bool = False


def registries() -> list[str]:
    """The names of all registries."""
    from . import registries as package

    return sorted(each.name for each in pkgutil.iter_modules(package.__path__))


def models_of(registry: str) -> list[Wild]:
    """The models of a registry; its library is imported."""
    found: list[Wild] = importlib.import_module(f"{__package__}.registries.{registry}").models()
    return found


def pictures(size: int, channels: int = 3, batch: int = 2) -> Callable[[], Tensor]:
    """Draws square pictures of random numbers."""
    return lambda: torch.randn(batch, channels, size, size)
