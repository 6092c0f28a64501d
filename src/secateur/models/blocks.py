"""The repeated blocks of a model, found by its structure, and which of their weights pruning is for. Which matrices of
a model's blocks are pruned, and why the others are left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from secateur.support import matched, private
from secateur.targets import identity_of, is_expert, kinds_within

# ---- The repeated blocks of a model, found by its structure, and which of their weights pruning is for.
#
# Law: no table of architectures. A block is an entry of an outermost list of modules that hold matrices, and of no
# block is another one a part.

WHOLE = ""  # the name of the one block that a network of layers is


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """``{name: module}`` of the blocks that a model stacks, in the order of its modules.

    A stack is a `ModuleList` or `Sequential` whose entries that hold matrices are of one class, or, in a `ModuleList`,
    of several (attention and recurrent blocks in turn); not one of lists, whose entries count. A `Sequential` of
    several classes, such as an embedding, blocks and a head, stacks those of its entries that have parts and whose
    class comes more than once. Of stacks inside one another the outermost counts, so the experts and projections of a
    block are parts of it. A model may have several stacks, such as an encoder and a decoder; a stack that holds less
    than a hundredth of what the largest one holds is no stack but a detail.

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
            "matrices. Put its blocks into a ModuleList, or load it and pass the model itself: in memory a network of "
            "layers is pruned layer by layer."
        )
    return blocks


def parts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The parts of a model that a walk in memory prunes in turn: its blocks, or the whole model under the name "".

    It is the whole model where no blocks are stacked, where most of what they hold are convolutions and recurrent
    layers, or where the blocks are plain layers, as of a perceptron: then what leaves a layer is in two of them.

    >>> list(parts_of(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(2, 2))))
    ['']
    """
    try:
        blocks = find_blocks(model)
    except ValueError:
        if not _matrix_entries(model):
            raise
        return {WHOLE: model}
    if not any(map(_is_composite, blocks.values())):
        return {WHOLE: model}
    inside = [module for block in blocks.values() for module in block.modules()]
    other = sum(p.numel() for m in inside if _unfolds(m) for p in m.parameters(recurse=False) if p.dim() >= 2)
    return {WHOLE: model} if 2 * other > sum(map(_matrix_entries, blocks.values())) else blocks


def widened(model: nn.Module, blocks: Mapping[str, nn.Module], name: str) -> dict[str, nn.Module]:
    """The blocks, in which the smallest module around one that runs again, as ALBERT's does, takes its place and that
    of the others within: so its sums are over all of its runs.

    >>> layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    >>> model = nn.Sequential(nn.Sequential(layers), nn.Linear(2, 3))
    >>> list(widened(model, {"0.0.0": layers[0], "0.0.1": layers[1]}, "0.0.0"))
    ['0']
    """
    around = name.rpartition(".")[0]
    while isinstance(model.get_submodule(around), nn.ModuleList | nn.ModuleDict):  # these do not run themselves
        if not around:
            break
        around = around.rpartition(".")[0]
    inside = f"{around}." if around else ""
    wider = {around if each.startswith(inside) else each: module for each, module in blocks.items()}
    return {each: model.get_submodule(each) for each in wider}


def _unfolds(module: nn.Module) -> bool:
    """Whether its inputs are unfolded before they are multiplied: into patches, or step by step."""
    return private.is_convolution(module) or isinstance(module, nn.RNNBase | nn.RNNCellBase)


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
    if any(isinstance(child, nn.ModuleList | nn.ModuleDict) for child in entries.values()):
        return {}  # these do not run themselves: blocks are inside
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


# ---- Which matrices of a model's blocks are pruned, and why the others are left alone.
#
# Law: what lies outside the blocks, or is shared with another block, is never chosen; each matrix has one reason.


def choose_targets(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    include: str | Iterable[str] | None,
    exclude: str | Iterable[str] | None,
) -> tuple[dict[str, nn.Parameter], dict[str, list[str]]]:
    """``{full name: parameter}`` of the matrices inside blocks that may be pruned, and ``{reason: names}`` of the rest.

    Raises:
        ValueError: a glob matches nothing, asks for what lies outside the blocks, or nothing is left.

    >>> from secateur.models import find_blocks
    >>> blocks = (nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(2))
    >>> model = nn.Sequential(*blocks)
    >>> chosen, left = choose_targets(model, find_blocks(model), None, "*.1.weight")
    >>> [*chosen]
    ['0.0.weight', '1.0.weight']
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    included, excluded = matched(include, names), matched(exclude, names) or set()
    holders: dict[Any, set[str | None]] = {}
    for name, parameter in names.items():
        holders.setdefault(identity_of(parameter), set()).add(block_of(name, blocks))
    targets: dict[str, nn.Parameter] = {}
    left_alone: dict[str, list[str]] = {}
    reasons = kinds_within(model)
    seen = set()
    for name, parameter in names.items():
        if parameter.dim() < 2 or not parameter.is_floating_point() or identity_of(parameter) in seen:
            continue
        seen.add(identity_of(parameter))
        block = block_of(name, blocks)
        reason = None
        if block is None:
            reason = "outside the blocks"
        elif len(holders[identity_of(parameter)]) > 1:
            reason = "shared with another block"
        elif name in excluded:
            reason = "excluded"
        elif included is not None:
            reason = None if name in included else "not included"
        else:
            reason = reasons.get(name)
        if reason is None:
            targets[name] = parameter
        else:
            left_alone.setdefault(reason, []).append(name)
    if included is not None:
        for name in sorted(included):
            for reason in ("outside the blocks", "shared with another block"):
                if name in left_alone.get(reason, ()):
                    raise ValueError(
                        f"{name} is {reason}, and only what is within blocks is pruned here; use sparsify."
                    )
    if not targets:
        said = ", ".join(f"{len(found)} {reason}" for reason, found in left_alone.items())
        raise ValueError(f"no matrix is left to prune ({said}).")
    return targets, left_alone


def full_name(block: str, local: str) -> str:
    """A parameter's name in the model, given its name in a block; a model that is one block has the name "".

    >>> full_name("layers.1", "fc.weight"), full_name("", "fc.weight")
    ('layers.1.fc.weight', 'fc.weight')
    """
    return f"{block}.{local}" if block else local


def block_of(name: str, blocks: Mapping[str, nn.Module]) -> str | None:
    """The block that a parameter is in.

    >>> block_of("layers.1.fc.weight", {"layers.1": nn.Identity()})
    'layers.1'
    """
    if WHOLE in blocks:
        return WHOLE
    parts = name.split(".")
    for count in range(1, len(parts)):
        if (path := ".".join(parts[:count])) in blocks:
            return path
    return None
