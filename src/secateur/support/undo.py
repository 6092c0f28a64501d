"""Taking back what was changed: every verb that changes several things changes all of them or none.

Law: what will change is recorded before it changes; if the block raises, also by Ctrl-C, the records are put back last
first, each of them, whatever becomes of the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

_MISSING = object()
# those of a module's attributes that are changed in place: parameters, buffers, hooks, submodules
_TABLES = [key for key, value in vars(nn.Module()).items() if isinstance(value, dict | set)]


class Undo:
    """Records how things are; a ``with`` block that raises puts them back.

    After a block that went well the records are kept, so that ``roll_back`` can be handed out to take it all back
    later; `forget` lets them go.

    >>> weight, options = torch.ones(2), {"lr": 0.1}
    >>> try:
    ...     with Undo() as undo:
    ...         _ = undo.values(weight)
    ...         undo.contents(options)
    ...         weight[0] = 0
    ...         options.update(lr=0.2, momentum=0.9)
    ...         raise KeyboardInterrupt
    ... except KeyboardInterrupt:
    ...     weight, options
    (tensor([1., 1.]), {'lr': 0.1})
    """

    def __init__(self) -> None:
        self._restores: list[Callable[[], object]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        torch.clear_autocast_cache()  # else a caller's autocast goes on with what the weights were
        if kind is not None:
            self.roll_back()

    def call(self, restore: Callable[..., object], *arguments: Any) -> None:
        """Rolling back calls this; what it does, it must be able to do twice."""
        self._restores.append(functools.partial(restore, *arguments))

    def values(self, *tensors: Tensor) -> list[Tensor]:
        """The numbers in tensors, which stay the same objects. Costs a copy of them, which is returned."""
        copies = [tensor.detach().clone() for tensor in tensors]
        for tensor, numbers in zip(tensors, copies, strict=True):
            self.call(_write, tensor, numbers)
        return copies

    def attributes(self, thing: Any, *names: str) -> None:
        """What attributes of an object are, or that they are not there; ``__class__`` and ``__bases__`` too."""
        for name in names:
            self.call(_set, thing, name, getattr(thing, name, _MISSING))

    def contents(self, *containers: Any) -> None:
        """What dicts, lists and sets hold, which stay the same objects and keep their order."""
        for container in containers:
            self.call(_refill, container, list(container.items()) if isinstance(container, dict) else list(container))

    def modules(self, modules: Iterable[nn.Module]) -> None:
        """Which parameters, buffers, hooks, submodules and plain attributes modules have, and of what class they are.

        The tensors are noted, not the numbers in them.
        """
        for module in modules:
            self.attributes(type(module), "__bases__")
            self.attributes(module, "__class__")
            self.contents(*(vars(module)[key] for key in _TABLES if key in vars(module)), vars(module))

    def optimizers(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """What optimizers remember, their groups and their hooks. The tensors are noted, not the numbers in them."""
        for optimizer in optimizers:
            tables = [value for value in vars(optimizer).values() if isinstance(value, dict)]
            groups = [*optimizer.param_groups, *(group["params"] for group in optimizer.param_groups)]
            remembered = [value for value in optimizer.state.values() if isinstance(value, dict)]
            self.contents(*remembered, *groups, *tables, optimizer.param_groups, vars(optimizer))

    def roll_back(self) -> None:
        """Put everything back, the last record first.

        An error on the way is raised when all the others are back. What Ctrl-C breaks into is put back once more.
        """
        failed: BaseException | None = None
        while self._restores:
            restore = self._restores[-1]
            for _ in range(2):
                try:
                    restore()
                except Exception as error:
                    failed = failed or error
                except BaseException as error:
                    failed = error
                    continue
                break
            self._restores.pop()
        if failed is not None:
            raise failed

    def forget(self) -> None:
        """Let the records go: what was changed stays."""
        self._restores.clear()


def _write(tensor: Tensor, numbers: Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(numbers)


def _set(thing: Any, name: str, value: Any) -> None:
    if value is _MISSING:
        if hasattr(thing, name):
            delattr(thing, name)
    elif getattr(thing, name, _MISSING) is not value:  # an unchanged class is not to be written to
        setattr(thing, name, value)


def _refill(container: Any, held: list[Any]) -> None:
    if isinstance(container, list):
        container[:] = held
    else:
        container.clear()
        container.update(held)
