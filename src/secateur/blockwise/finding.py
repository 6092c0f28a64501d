"""The repeated blocks of a model, found by its structure, and which of their weights pruning is for.

Law: no table of architectures. A block is an entry of an outermost list of modules that hold matrices, and of no block
is another one a part.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from torch import nn

from secateur.support import private

__all__ = ["experts_owners", "find_blocks", "is_expert", "left_alone_within"]

# Inside blocks; what lies outside of them is never touched.
_ROUTERS = re.compile(r"(^|\.)(router|shared_expert_gate)(\.|$)")
_ADAPTERS = re.compile(r"(^|\.)(lora|vera|oft|hada|lokr|adalora)_[A-Za-z0-9_]+(\.|$)")
_POSITIONS = re.compile(r"(^|\.)(relative_attention_bias|[A-Za-z0-9_]*embed(ding)?s?)(\.|$)", re.IGNORECASE)
_EXPERTS = re.compile(r"^[a-z_]*experts$")


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


def left_alone_within(block: nn.Module) -> dict[str, str]:
    """``{parameter of the block: reason}`` of the matrices that are not pruned unless they are asked for.

    Routers (they choose experts: by name, or a direct neighbour of ``experts``), embeddings and position biases,
    normalizations, and low-rank adapters, of which a factor is small and was trained to correct the weight beside it.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    >>> left_alone_within(Block())
    {'gate.weight': 'router'}
    """
    reasons: dict[str, str] = {}
    for path, module in block.named_modules():
        routers = [
            name
            for name in dict(module.named_children())
            if re.fullmatch("gate|wg|router|.*_router", name)
            and any(_EXPERTS.match(n) for n, _ in module.named_children())
        ]
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            if parameter.dim() < 2:
                continue
            if _ROUTERS.search(full):
                reasons[full] = "router"
            elif _ADAPTERS.search(full):
                reasons[full] = "adapter"
            elif isinstance(module, nn.Embedding) or _POSITIONS.search(full):
                reasons[full] = "embedding"
            elif private.is_normalization(module):
                reasons[full] = "normalization"
        for child in routers:
            prefix = f"{path}.{child}" if path else child
            for name, parameter in module.get_submodule(child).named_parameters():
                if parameter.dim() >= 2:
                    reasons[f"{prefix}.{name}"] = "router"
    return reasons


def is_expert(name: str) -> bool:
    """Whether a parameter of a block belongs to one of several experts.

    >>> is_expert("mlp.experts.3.up_proj.weight"), is_expert("mlp.shared_expert.up_proj.weight")
    (True, False)
    """
    return any(_EXPERTS.match(part) for part in name.split("."))


def experts_owners(block: nn.Module) -> list[nn.Module]:
    """The modules that send tokens to experts: those with a child of that name."""
    return [module for module in block.modules() if any(_EXPERTS.match(name) for name, _ in module.named_children())]
