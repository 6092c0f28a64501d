"""Measures models that differ from the dense one in a few blocks; outputs of blocks before those are cached.

Law: what is measured is what a whole run measures. A run that is given other inputs than the dense one was, or passes
on a cache, is run whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from secateur.blockwise import parts_of
from secateur.support import mapped, tensors_in

__all__ = ["Replayed", "pieces_of"]

_BYTES = 2**31  # of what blocks returned, that is kept
_PLAIN = (Tensor, bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


def pieces_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose outputs are cached: the blocks, or the modules with tensors of their own and no children."""
    parts = parts_of(model)
    if "" not in parts:
        return parts
    return {
        name: module
        for name, module in model.named_modules()
        if name and not any(module.children()) and any(True for _ in module.parameters())
    }


@dataclass(eq=False)
class _Pass:
    """One forward pass of the dense model: which pieces ran, and what each returned."""

    given: list[Tensor]  # to the model
    names: list[str] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    whole: bool = False  # it has to be run whole


class Replayed:
    """Runs a measure of a model again and again.

    Args:
        model: the dense one, which is measured once to begin with.
        measure: ``() -> T``, which runs the model any number of times, and each time alike.
        limit: bytes of what pieces returned that are kept; passes beyond are run whole.

    Attributes:
        dense: what the measure is of the dense model.
        passes: how much was run since, in runs of the measure; a run of which half of the pieces were remembered is a
            half.
    """

    def __init__(self, model: nn.Module, measure: Callable[[], float], *, limit: int = _BYTES) -> None:
        self.model, self.measure = model, measure
        self.pieces = pieces_of(model)
        self.passes = 0.0
        self._left = limit
        self._known: list[_Pass] = []
        self._changed: Collection[str] | None = None  # None: the dense run, which is remembered
        self._at = -1
        self._place = self._ran = 0
        self._inside = self._trusted = False
        with self._watched():
            self.dense = measure()
        self._calls = sum(len(each.names) for each in self._known)

    def __call__(self, names: Collection[str]) -> float:
        """The measure of the model as it is now, which differs from the dense one in these tensors alone."""
        homes = {self._home_of(name) for name in names}
        self._changed = self.pieces.keys() if None in homes else {each for each in homes if each is not None}
        self._at, self._ran = -1, 0
        try:
            with self._watched():
                found = self.measure()
        finally:
            self._changed = None
        self.passes += self._ran / self._calls if self._calls else 1.0
        return found

    def _home_of(self, name: str) -> str | None:
        parts = name.split(".")
        return next((path for at in range(len(parts), 0, -1) if (path := ".".join(parts[:at])) in self.pieces), None)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        originals = {name: vars(piece).get("forward") for name, piece in self.pieces.items()}
        handles = [
            self.model.register_forward_pre_hook(lambda _, *given: self._begin(given), with_kwargs=True),
            self.model.register_forward_hook(lambda *_: self._end(), always_call=True),
        ]
        try:
            for name, piece in self.pieces.items():
                piece.forward = self._stand_in(name, piece.forward)
            yield
        finally:
            for handle in handles:
                handle.remove()
            for name, piece in self.pieces.items():
                if originals[name] is None:
                    vars(piece).pop("forward", None)
                else:
                    vars(piece)["forward"] = originals[name]

    def _begin(self, given: Any) -> None:
        self._at, self._place, self._inside = self._at + 1, 0, True
        tensors = list(tensors_in(given))
        if self._changed is None:
            self._known.append(_Pass([each.clone() for each in tensors], whole=not _is_plain(given)))
            return
        known = self._known[self._at] if self._at < len(self._known) else None
        self._trusted = known is not None and not known.whole and len(known.given) == len(tensors)
        self._trusted = self._trusted and known is not None and all(map(_same, tensors, known.given))

    def _end(self) -> None:
        self._inside = self._trusted = False

    def _stand_in(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._changed is None:
                return self._remember(name, original, args, kwargs) if self._inside else original(*args, **kwargs)
            known, place = self._known[self._at] if self._trusted else None, self._place
            self._place += 1
            if known is None or name in self._changed or place >= len(known.names) or known.names[place] != name:
                self._trusted = False  # what follows is given something else
                self._ran += 1
                return original(*args, **kwargs)
            return mapped(known.outputs[place], lambda tensor: tensor.clone())  # the model may write to it

        return forward

    def _remember(self, name: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        known = self._known[self._at]
        output = original(*args, **kwargs)
        known.names.append(name)
        held = sum(each.nbytes for each in tensors_in(output))
        if known.whole or held > self._left or not (_is_plain((args, kwargs)) and _is_plain(output)):
            known.whole = True
            self._left += sum(each.nbytes for out in known.outputs for each in tensors_in(out))
            known.outputs.clear()
        else:
            self._left -= held
            known.outputs.append(mapped(output, lambda tensor: tensor.detach().clone()))
        return output


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _is_plain(value: Any) -> bool:
    """Whether it is nothing but tensors and numbers: a cache that a block writes to is none."""
    if isinstance(value, Mapping):
        return type(value).__module__ == "builtins" and all(map(_is_plain, value.values()))
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
