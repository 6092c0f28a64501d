"""The parts of a block that are trained one after the other: attention up to the residual sum behind it, then the rest.

Law: no names of architectures. A part ends where a normalization is given a tensor of the block's own shape that
matrices have a share in which the part before had none of; a block without such a place is one part. Every parameter of
the block is in one part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.support import tensors_in
from secateur.targets import KINDS

__all__ = ["Part", "parts_of_block", "run_to", "seen_at", "stream_in"]

OUTPUT = ""  # where the last part of a block ends
_NORMALIZATIONS = next(kind for kind in KINDS if kind.reason == "normalizations")


@dataclass(frozen=True)
class Part:
    """Names of parameters in the block, and the normalization whose input is compared; "" is the block's output.

    ``sum`` is where the part's last matrix is added up, if that is not the end: before a normalization that ends the
    block.
    """

    end: str
    parameters: tuple[str, ...]
    sum: str = OUTPUT


class _ReachedError(BaseException):
    """Ends a run of a block; no `Exception`, so that no model's own code takes it for an error."""


def stream_in(value: Any) -> Tensor | None:
    """Of what a block is given or returns the residual stream: the first tensor of floating numbers and features.

    >>> stream_in((torch.ones(2, 3), None)).shape
    torch.Size([2, 3])
    """
    found = (each for each in tensors_in(value) if each.is_floating_point() and each.dim() >= 2)
    return next(found, None)


def normalizations_in(block: nn.Module) -> dict[str, nn.Module]:
    """Those modules of a block that normalize, by their classes or, where these are unknown, by their names."""
    return {
        name: module
        for name, module in block.named_modules()
        if (isinstance(module, _NORMALIZATIONS.modules) or _NORMALIZATIONS.named.search(f"{name}.weight"))
        and all(each.dim() < 2 for each in module.parameters())
    }


@contextlib.contextmanager
def seen_at(block: nn.Module, names: Collection[str], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Within, what these modules of the block are given is shown, of each the first time that it is run."""
    modules = dict(block.named_modules())
    met: set[str] = set()

    def hook(name: str) -> Callable[..., None]:
        def look(_module: nn.Module, args: Any, kwargs: Any) -> None:
            given = stream_in((args, kwargs))
            if name not in met and given is not None:
                met.add(name)
                see(name, given)

        return look

    handles = [modules[name].register_forward_pre_hook(hook(name), with_kwargs=True) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_to(block: nn.Module, end: str, run: Callable[[], Any]) -> Tensor:
    """The tensor at the end of a part; the block is run no further than that.

    Raises:
        ValueError: the block did not come to it.
    """
    found: list[Tensor] = []
    if end == OUTPUT:
        output = stream_in(run())
        if output is None:
            raise ValueError(f"a {type(block).__name__} returns no tensor of features.")
        return output

    def stop(_name: str, given: Tensor) -> None:
        found.append(given)
        raise _ReachedError

    with seen_at(block, [end], stop), contextlib.suppress(_ReachedError):
        run()
    if not found:
        raise ValueError(f"a {type(block).__name__} did not run its {end}, as it did before; pass batches of one kind.")
    return found[0]


def parts_of_block(
    block: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    run: Callable[[], Any],
    ends: Collection[str] | None = None,
) -> list[Part]:
    """The parts of a block, first to last, found by one run and the way of gradients back from each normalization.

    Args:
        block: any module.
        parameters: those of it that are trained, by their names in the block.
        run: runs the block once.
        ends: the normalizations at which a part may end; None: all.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.norm1, self.norm2 = nn.LayerNorm(4), nn.LayerNorm(4)
    ...         self.mix, self.up = nn.Linear(4, 4), nn.Linear(4, 4)
    ...     def forward(self, x):
    ...         x = x + self.mix(self.norm1(x))
    ...         return x + self.up(self.norm2(x))
    >>> block = Block()
    >>> [part.end for part in parts_of_block(block, dict(block.named_parameters()), lambda: block(torch.randn(2, 4)))]
    ['norm2', '']
    """
    named = {name: each for name, each in parameters.items() if each.is_floating_point()}
    flags = {name: each.requires_grad for name, each in named.items()}
    candidates = [name for name in normalizations_in(block) if ends is None or name in ends]
    seen: dict[str, Tensor] = {}
    try:
        for each in named.values():
            each.requires_grad_(True)
        with torch.enable_grad(), seen_at(block, candidates, seen.__setitem__):
            output = stream_in(run())
        reached = {name: _reached(given, named) for name, given in seen.items() if _comparable(given, output)}
    finally:
        for name, each in named.items():
            each.requires_grad_(flags[name])
    every = frozenset(name for name, each in named.items() if each.dim() >= 2)
    parts: list[tuple[str, frozenset[str]]] = []
    before: frozenset[str] = frozenset()
    for name, names in reached.items():
        matrices = names & every
        if not matrices < every:
            continue
        if matrices > before:
            parts.append((name, names))
        elif parts and matrices == before:
            parts[-1] = (name, names)  # the last one before the next matrix is at the residual stream
        before = before | matrices
    found, taken = [], frozenset[str]()
    for name, names in parts:
        found.append(Part(name, tuple(each for each in named if each in names - taken), name))
        taken |= names
    last = [name for name, names in reached.items() if names & every == every]
    return [*found, Part(OUTPUT, tuple(name for name in named if name not in taken), last[-1] if last else OUTPUT)]


def _comparable(given: Tensor, output: Tensor | None) -> bool:
    return output is not None and given.shape == output.shape and given.requires_grad


def _reached(given: Tensor, parameters: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """The parameters that a tensor was computed with."""
    with torch.enable_grad():
        total = given.sum()
    gradients = torch.autograd.grad(total, list(parameters.values()), retain_graph=True, allow_unused=True)
    return frozenset(name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None)
