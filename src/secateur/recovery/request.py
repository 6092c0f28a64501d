"""The checked arguments of `recover`.

Law: what the bytes of a result depend on can be said as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from secateur.recovery.losses import OutputLoss, parse
from secateur.support import Forward, described, matched

__all__ = ["Request", "check_vocabularies", "names_to_train"]


@dataclass(frozen=True)
class Request:
    """The checked arguments of `recover`; see there."""

    steps: int
    local: int
    loss: str | OutputLoss | None
    adapters: int | None
    rate: float
    local_rate: float
    local_batches: int
    seed: int
    share: float = 1.0
    masks: Any = None
    include: str | Iterable[str] | None = None
    exclude: str | Iterable[str] | None = None
    forward: Forward | None = None
    autocast: torch.dtype | str | None = None

    def __post_init__(self) -> None:
        parse(self.loss)
        if self.autocast not in (None, torch.bfloat16, "bfloat16"):
            raise ValueError(
                f"autocast is bfloat16, or left out; got {self.autocast!r}. In float16 gradients vanish unless losses "
                "are scaled, which is not done here."
            )
        for name, least in (("steps", 0), ("local", 0), ("local_batches", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} is a whole number, {least} or more; got {value!r}.")
        if not self.steps and not self.local:
            raise ValueError("steps=0 and local=0: nothing is asked for.")
        if self.adapters is not None and (type(self.adapters) is not int or self.adapters < 1):
            raise ValueError(f"adapters is the rank of the updates, 1 or more; got {self.adapters!r}.")
        for name in ("rate", "local_rate"):
            value = getattr(self, name)
            if not (_is_number(value) and 0 < value < math.inf):
                raise ValueError(f"{name} is a number above 0; got {value!r}.")
        if not (_is_number(self.share) and 0 <= self.share <= 1):
            raise ValueError(
                f"share must be from 0 to 1, the teacher's part of the loss by the outputs; got {self.share!r}."
            )
        if not self.steps and self.adapters is not None:
            raise ValueError("adapters= move weights by the outputs; steps=0 leaves that out.")
        if not self.steps and self.share != 1:
            raise ValueError("share= is of the loss by the outputs; steps=0 leaves that out.")
        if type(self.seed) is not int:
            raise ValueError(f"seed is a whole number; got {self.seed!r}.")

    @property
    def narrow(self) -> torch.dtype | None:
        """The dtype in which matrices are multiplied by the outputs; None: their own."""
        return None if self.autocast is None else torch.bfloat16

    def described(self) -> dict[str, Any]:
        """As JSON: what a run that goes on must have in common with the one that was killed, beside the data."""
        plain = ("steps", "local", "adapters", "rate", "local_rate", "local_batches", "seed", "share")
        said = {name: getattr(self, name) for name in plain}
        loss = self.loss if self.loss is None or isinstance(self.loss, str) else described(self.loss)
        globs = {name: _listed(getattr(self, name)) for name in ("include", "exclude")}
        return {**said, "loss": loss, **globs, "autocast": None if self.narrow is None else "bfloat16"}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _listed(globs: str | Iterable[str] | None) -> list[str] | None:
    if globs is None:
        return None
    return [globs] if isinstance(globs, str) else list(globs)


def check_vocabularies(model: nn.Module, teacher: nn.Module, forward: Forward | None) -> None:
    """`ValueError` where tokens have left one of them: those that stay have other numbers than in the other, and both
    are run on the same. A custom ``forward`` may translate them."""
    sizes = []
    for each in (model, teacher):
        find: Any = getattr(each, "get_input_embeddings", None)
        try:
            sizes.append(int(find().weight.shape[0]))
        except (AttributeError, NotImplementedError, TypeError):  # of transformers' models, and of few others
            return
    if forward is None and sizes[0] != sizes[1]:
        what = (
            "Recover first and take tokens away then, or take them from the teacher, too."
            if sizes[0] < sizes[1]
            else "Are the two the wrong way round?"
        )
        raise ValueError(
            f"the model knows {sizes[0]:,} tokens and the teacher {sizes[1]:,}: one number is not the same token in "
            f"both. {what}"
        )


def names_to_train(
    model: nn.Module,
    include: str | Iterable[str] | None,
    exclude: str | Iterable[str] | None,
    *,
    asking: bool = True,
) -> list[str]:
    """The parameters that move: those of these names, whether they ask for a gradient or not; without ``include`` those
    of floating numbers that ask, but for embeddings that nothing else uses, if that leaves any.

    An embedding learns little from little text, most of its rows nothing; it is half of a small encoder's parameters,
    and of the optimizer's work at each step.

    Args:
        model, include, exclude: as for `recover`.
        asking: whether it matters which ask for a gradient; of a model that was only built, it does not.

    Raises:
        ValueError: a glob matches nothing, or nothing is left.

    >>> names_to_train(nn.Linear(2, 2), None, "bias")
    ['weight']
    >>> names_to_train(nn.Sequential(nn.Embedding(9, 2), nn.Linear(2, 2)), None, None)
    ['1.weight', '1.bias']
    """
    every = dict(model.named_parameters(remove_duplicate=False))
    included, excluded = matched(include, every), matched(exclude, every) or set()
    first = {id(each): name for name, each in model.named_parameters()}
    chosen = {
        first[id(each)]
        for name, each in every.items()
        if each.is_floating_point() and (each.requires_grad or not asking if included is None else name in included)
    }
    if included is None:
        chosen = chosen - {first[each] for each in _only_looked_up(model)} or chosen
    chosen -= {first[id(every[name])] for name in excluded}
    if not chosen:
        why = "include= and exclude= leave none" if include or exclude else "none of them requires a gradient"
        raise ValueError(f"no parameter of {type(model).__name__} is to be trained: {why}.")
    return [name for name, _ in model.named_parameters() if name in chosen]


def _only_looked_up(model: nn.Module) -> set[int]:
    """The ids of parameters that are embeddings' and nothing else's, such as a head's that is tied to one."""
    lookups = (nn.Embedding, nn.EmbeddingBag)
    holders: dict[int, list[bool]] = {}
    for module in model.modules():
        for each in module.parameters(recurse=False):
            holders.setdefault(id(each), []).append(isinstance(module, lookups))
    return {key for key, found in holders.items() if all(found)}
