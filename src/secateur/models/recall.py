"""What modules returned in an earlier pass over the same batch, returned again where a pass would compute the same.

Law: a pass with it gives the same bits as one without. A module is recalled only where its parameters are those of
then, and it is given what it was given then: the batch, or what other modules returned that were recalled themselves.
So functions between modules end the chain, and what is behind them is computed. Whoever changes parameters has them
among the opened ones of each pass before, or says `forget`.

A network of layers is one block, and a walk in stages runs all of it again for each stage. With this a stage runs what
lies between the solved modules around it and its own.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from secateur.support import free_memory, mapped, private, running_as, tensors_in

SHARE = 0.25  # of the free memory, that may be held
_PLAIN = (str, bytes, int, float, complex, type(None), torch.Size, torch.dtype, torch.device)


class _Returned(NamedTuple):
    """What a module returned, of what it was given; where ``written``, it wrote that to what it was given, too."""

    given: Hashable
    output: Any
    versions: tuple[int, ...]
    number: int
    nbytes: int
    written: bool


class _UnknownError(Exception):
    """Of what a module is given it is not known whether that is the same as before."""


class Recall:
    """The memory of the passes through a module, which the modules within return from.

    >>> block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> recall, x = Recall(block), torch.ones(1, 2)
    >>> for _ in range(2):
    ...     with torch.no_grad(), recall.opening([block[1].weight]), recall.passing(0, x):
    ...         found = block(x)
    >>> torch.equal(found, block(x)), recall.nbytes
    (True, 8)
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.nbytes = 0
        device = next((each.device for each in block.parameters()), None)
        free = free_memory(device)
        self._most = 0 if free is None else int(SHARE * free)
        self._held: dict[Hashable, dict[nn.Module, _Returned]] = {}
        self._copied: set[nn.Module] = set()  # what they return is written to by others
        self._excluded: set[nn.Module] = set()  # they run twice in a pass, or write to what they are given
        self._names: dict[int, tuple[weakref.ref[Tensor], Hashable, int]] = {}  # of this pass
        self._ran: set[nn.Module] = set()
        self._now: dict[nn.Module, _Returned] | None = None  # what is held of this pass
        self._last, self._keeps = 0, True

    @contextlib.contextmanager
    def opening(self, opened: Iterable[Tensor] = (), *, coarse: bool = False, keeps: bool = True) -> Iterator[None]:
        """A context for the passes with these parameters opened: what is computed with them is looked at, or changes.

        Args:
            opened: the modules that hold them run.
            coarse: So do modules that hold more than a twentieth of all others.
            keeps: What modules return is held from now on; of modules around them in their places.
        """
        if torch.is_inference_mode_enabled():  # its tensors count no writes
            yield
            return
        closed = self._closed({id(each) for each in opened}, coarse=coarse)
        self._keeps = keeps
        if keeps:
            self._leave(closed)
        with running_as({each: functools.partial(self._run, each, each.forward) for each in closed}):
            yield

    @contextlib.contextmanager
    def passing(self, key: Hashable, given: Any) -> Iterator[None]:
        """A context for one pass, in which the block is ``given`` what it is given in each pass of this key."""
        self._ran.clear()
        for number, tensor in enumerate(tensors_in(given)):
            self._name(tensor, ("given", number))
        self._now = self._held.setdefault(key, {})
        try:
            yield
        finally:
            self._now = None
            self._names.clear()

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """These have new values from now on."""
        self._leave(self._closed({id(each) for each in parameters}, coarse=False))

    def _leave(self, closed: Collection[nn.Module]) -> None:
        """Of the others nothing is held."""
        for held in self._held.values():
            for module in [each for each in held if each not in closed]:
                self._drop(module, held)

    def _closed(self, opened: Collection[int], *, coarse: bool) -> set[nn.Module]:
        """The modules within that hold none of these parameters."""
        found: set[nn.Module] = set()
        most = 0.05 * len(list(self.block.modules())) if coarse else math.inf

        def look(module: nn.Module) -> tuple[bool, int]:
            """Whether it holds none, and how many modules it is."""
            parts = [look(each) for each in module.children()]
            size = 1 + sum(count for _, count in parts)
            own = any(id(each) in opened for each in private.parameters_of(module).values())
            is_closed = all(closed for closed, _ in parts) and not own
            if is_closed and size <= most and not isinstance(module, torch.jit.ScriptModule):
                found.add(module)
            return is_closed, size

        look(self.block)
        return found - self._excluded - {self.block}

    def _run(self, module: nn.Module, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        held = self._now
        if held is None:
            return original(*args, **kwargs)
        if module in self._ran:
            self._exclude(module)
        self._ran.add(module)
        if module in self._excluded:
            return original(*args, **kwargs)
        try:
            given = self._key((args, kwargs))
        except _UnknownError:
            return original(*args, **kwargs)
        known = held.get(module)
        if known is not None and known.given == given:
            if tuple(map(private.version_of, tensors_in(known.output))) == known.versions:
                return self._again(module, known, args)
            self._copied.add(module)
        output = original(*args, **kwargs)
        if not self._keeps:
            return output
        written = self._key_or_none((args, kwargs)) != given
        if written and not (isinstance(output, Tensor) and len(args) == 1 and output is args[0] and not kwargs):
            self._exclude(module)
            return output
        return self._keep(module, given, output, held, written=written)

    def _again(self, module: nn.Module, known: _Returned, args: Any) -> Any:
        if known.written:
            output = args[0].copy_(known.output)
        else:
            output = mapped(known.output, Tensor.clone if module in self._copied else Tensor.detach)
        self._name_all(output, known.number)
        return output

    def _keep(
        self, module: nn.Module, given: Hashable, output: Any, held: dict[nn.Module, _Returned], *, written: bool
    ) -> Any:
        try:
            self._key(output, named=False)
        except _UnknownError:
            return output
        for inside in module.modules():
            self._drop(inside, held)
        nbytes = sum(each.nbytes for each in tensors_in(output))
        if self.nbytes + nbytes <= self._most:
            self.nbytes += nbytes
            self._last += 1
            own = mapped(output, Tensor.clone if written or module in self._copied else Tensor.detach)
            versions = tuple(map(private.version_of, tensors_in(own)))
            held[module] = _Returned(given, own, versions, self._last, nbytes, written)
            self._name_all(output, self._last)
        return output

    def _drop(self, module: nn.Module, held: dict[nn.Module, _Returned]) -> None:
        if (known := held.pop(module, None)) is not None:
            self.nbytes -= known.nbytes

    def _exclude(self, module: nn.Module) -> None:
        self._excluded.add(module)
        for held in self._held.values():
            self._drop(module, held)

    # ---- what is the same ----

    def _name(self, tensor: Tensor, name: Hashable) -> None:
        self._names[id(tensor)] = weakref.ref(tensor), name, private.version_of(tensor)

    def _name_all(self, output: Any, number: int) -> None:
        for place, tensor in enumerate(tensors_in(output)):
            self._name(tensor, (number, place))

    def _key_or_none(self, value: Any) -> Hashable | None:
        try:
            return self._key(value)
        except _UnknownError:
            return None

    def _key(self, value: Any, *, named: bool = True) -> Hashable:
        """What tells a value from others: of tensors their names; `_UnknownError` where that is not known."""
        if isinstance(value, Tensor):
            if not named:
                return None
            found = self._names.get(id(value))
            if found is None or found[0]() is not value or found[2] != private.version_of(value):
                raise _UnknownError
            return found[1]
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, tuple | list):
            return type(value), tuple(self._key(each, named=named) for each in value)
        if isinstance(value, Mapping):
            return type(value), tuple((key, self._key(each, named=named)) for key, each in value.items())
        raise _UnknownError
