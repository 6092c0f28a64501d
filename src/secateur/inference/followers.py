"""What follows a convolution in a model's run: the batch normalization and the activation that alone read its output.

Law: what is named reads the output alone; where anything else does, or the model returns it, nothing is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from secateur.support import private

__all__ = ["Absorbed", "may_be_absorbed", "may_follow", "rectifier_of", "run_and_follow"]

_RECTIFIERS = {nn.ReLU: "relu", nn.ReLU6: "relu6", nn.Hardswish: "hardswish", nn.SiLU: "silu"}


class Absorbed(nn.Identity):
    """In place of a module whose work is done by the packed layer before it.

    >>> Absorbed()
    Absorbed()
    """


def rectifier_of(module: nn.Module) -> str:
    """The word that `secateur.native.sparse_convolution` has for an activation; or "".

    >>> rectifier_of(nn.ReLU6()), rectifier_of(nn.Hardtanh(0, 6)), rectifier_of(nn.Hardtanh()), rectifier_of(nn.GELU())
    ('relu6', 'relu6', '', '')
    """
    if type(module) is nn.Hardtanh and (module.min_val, module.max_val) == (0, 6):
        return "relu6"
    return _RECTIFIERS.get(type(module), "")


def may_be_absorbed(module: nn.Module) -> bool:
    """Whether a packed convolution can do the work of a module that follows it: a batch normalization in evaluation
    mode, a ReLU or another activation that it has in its store, of torch's own classes and without hooks.

    >>> may_be_absorbed(nn.BatchNorm2d(4).eval()), may_be_absorbed(nn.BatchNorm2d(4)), may_be_absorbed(nn.ReLU())
    (True, False, True)
    """
    if private.hooks_of(module) or nn.utils.parametrize.is_parametrized(module):
        return False
    if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d):
        return not module.training and module.running_mean is not None and module.running_var is not None
    return bool(rectifier_of(module))


def may_follow(model: nn.Module, which: Callable[[nn.Module], bool] = may_be_absorbed) -> dict[str, nn.Module]:
    """The modules that may be replaced and have one name only: another name would go on calling what was replaced."""
    names = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    return {name: each for name, each in model.named_modules() if names[id(each)] == 1 and which(each)}


def run_and_follow(
    convolutions: Mapping[str, nn.Module],
    followers: Mapping[str, nn.Module],
    run: Callable[[], Any],
    poolings: Mapping[str, nn.Module] = MappingProxyType({}),
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """What follows what, from one run of the model: the names of what may be absorbed after each convolution, in the
    order of their work; and for each convolution and follower that a pooling alone reads, that pooling.

    Args:
        followers: see `may_follow`.
        run: calls the model and returns its outputs.
        poolings: max-poolings, by their names.
    """
    watched = {**convolutions, **followers, **poolings}
    with _Readers() as readers:
        handles: list[Any] = []
        try:
            for name, module in watched.items():
                handles.append(module.register_forward_pre_hook(readers.entering(name)))
                handles.append(module.register_forward_hook(readers.leaving(name), always_call=True))
            readers.returned(run())
        finally:
            for handle in handles:
                handle.remove()
    found: dict[str, list[str]] = {}
    for name in convolutions:
        chain: list[str] = []
        normed = False
        while (follower := readers.only_reader(chain[-1] if chain else name)) in followers:
            rectifies = bool(rectifier_of(followers[follower]))
            if normed and not rectifies:
                break
            chain.append(follower)
            normed = True
            if rectifies:
                break
        found[name] = chain
    pooled = {name: readers.only_reader(name) for name in (*convolutions, *followers)}
    return found, {name: reader for name, reader in pooled.items() if reader in poolings}


class _Readers(private.DispatchMode):  # type: ignore[no-untyped-call]
    """Which watched module's operations read which watched module's output; "" is any other reader."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inside: list[str] = []
        self.calls: Counter[str] = Counter()
        self.made: dict[int, tuple[str, Tensor]] = {}  # by the id of the tensor, which is held to keep it
        self.read_by: dict[str, set[str]] = {}

    def entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            del module, args
            self.inside.append(name)
            self.calls[name] += 1

        return enter

    def leaving(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            del module, args
            self.inside.pop()
            if isinstance(output, Tensor):  # one that it was given and changed in place is its own from now on
                self.made[id(output)] = name, output
                self.read_by.setdefault(name, set())

        return leave

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.note([*args, *(kwargs or {}).values()], self.inside[-1] if self.inside else "")
        return func(*args, **(kwargs or {}))

    def note(self, values: Iterable[Any], reader: str) -> None:
        for value in private.tree_leaves(list(values)):
            known = self.made.get(id(value))
            if known is not None and known[1] is value:
                self.read_by[known[0]].add(reader)

    def returned(self, outputs: Any) -> None:
        self.note([outputs], "")

    def only_reader(self, name: str) -> str:
        """The one module that reads an output, where both are called once; or ""."""
        readers = self.read_by.get(name, set())
        if self.calls[name] != 1 or len(readers) != 1:
            return ""
        (reader,) = readers
        return reader if self.calls[reader] == 1 else ""
