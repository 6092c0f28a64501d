"""The repeated blocks of a model, found by its structure, and which of their weights pruning is for.

Law: no table of architectures. A block is an entry of an outermost list of modules that hold matrices, and of no block
is another one a part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from secateur.targets import is_expert

__all__ = ["experts_owners", "find_blocks", "is_expert"]


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """``{name: module}`` of the blocks that a model stacks, in the order of its modules.

    A stack is a `ModuleList` or `Sequential` whose entries that hold matrices are of one class, or, in a `ModuleList`,
    of several (attention and recurrent blocks in turn). A `Sequential` of several classes, such as an embedding, blocks
    and a head, stacks those of its entries that have parts and whose class comes more than once. Of stacks inside one
    another the outermost counts, so the experts and projections of a block are parts of it. A model may have several
    stacks, such as an encoder and a decoder; a stack that holds less than a hundredth of what the largest one holds is
    no stack but a detail.

    Raises:
        ValueError: there is no stack.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), nn.Linear(4, 9))
    >>> list(find_blocks(model))
    ['1.0', '1.1', '1.2']
    """
    stacks = [(stack, sum(map(_matrix_entries, stack.values()))) for stack in _stacks(model, "")]
    largest = max((size for _, size in stacks), default=0)
    blocks: dict[str, nn.Module] = {}
    for stack, size in stacks:
        if 100 * size >= largest:
            blocks.update(stack)
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no repeated blocks: no ModuleList or Sequential of modules that hold "
            "matrices. Prune it with sparsify, or put its blocks into a ModuleList."
        )
    return blocks


def _stacks(module: nn.Module, path: str) -> Iterator[dict[str, nn.Module]]:
    """The stack that the module is, and those inside its other children."""
    prefix = f"{path}." if path else ""
    stack = _stack(module, prefix)
    if stack:
        yield stack
    for name, child in module.named_children():
        if prefix + name not in stack:
            yield from _stacks(child, prefix + name)


def _stack(module: nn.Module, prefix: str) -> dict[str, nn.Module]:
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return {}
    entries = {f"{prefix}{name}": child for name, child in module.named_children() if _matrix_entries(child)}
    kinds = Counter(type(child) for child in entries.values())
    if isinstance(module, nn.Sequential) and len(kinds) > 1:
        return {name: child for name, child in entries.items() if kinds[type(child)] > 1 and _is_composite(child)}
    if nn.Embedding in kinds or (len(entries) == 1 and isinstance(module, nn.Sequential)):
        return {}
    if len(kinds) > 1 and not all(map(_is_composite, entries.values())):
        return {}
    return entries


def _is_composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _matrix_entries(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.dim() >= 2)


def experts_owners(block: nn.Module) -> list[nn.Module]:
    """The modules that send tokens to experts: those with a child of that name."""
    return [module for module in block.modules() if any(is_expert(name) for name, _ in module.named_children())]
