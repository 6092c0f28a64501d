"""Call sites: in which module of a model a function of torch is called, and the index of the call there.

Law: a spot does not depend on what other modules did before, so that it is the same where tokens go other ways.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["Spot", "Whereabouts"]


@dataclass(frozen=True)
class Spot:
    """A call site: the ``number``-th call of a function in the own code of the module at ``path``."""

    path: str
    name: str
    number: int


class Whereabouts:
    """Knows which module of a model runs, while it is entered.

    >>> model = nn.Sequential(nn.ReLU(), nn.ReLU())
    >>> with Whereabouts(model) as where:
    ...     where.spot("relu"), where.spot("relu")
    (Spot(path='', name='relu', number=1), Spot(path='', name='relu', number=2))
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._paths = {id(module): path for path, module in reversed(list(model.named_modules()))}
        self._running: list[tuple[str, Counter[str]]] = [("", Counter())]
        self._hooks: list[RemovableHandle] = []

    def spot(self, name: str) -> Spot:
        """Where a function is called now; asked once a call."""
        path, calls = self._running[-1]
        calls[name] += 1
        return Spot(path, name, calls[name])

    @property
    def module(self) -> nn.Module:
        """The module that runs."""
        return self._model.get_submodule(self._running[-1][0])

    @property
    def visits(self) -> list[object]:
        """For each module that runs, the outer first, what is another for each of its calls."""
        return [calls for _, calls in self._running]

    def __enter__(self) -> Self:
        for module in self._model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._hooks.append(module.register_forward_pre_hook(self._enter, prepend=True))
                self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: nn.Module, *_: Any) -> None:
        self._running.append((self._paths.get(id(module), ""), Counter()))

    def _leave(self, *_: Any) -> None:
        if len(self._running) > 1:
            self._running.pop()
