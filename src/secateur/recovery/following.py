"""Which blocks of its teacher each block of a model follows, where some have left.

Law: matched by the weights and in the teacher's order, or not at all; a model of all its teacher's blocks follows each
its own.

A block follows the one whose weights it has, and those after it that have left: the one before a gap can give the next
block what that was trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

__all__ = ["Follows", "Sketch", "followed", "sketch_of"]

SKETCHED = 4096  # entries of a tensor that are compared
CLEARER = 0.5  # of the distance to the block that is second nearest

Sketch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Follows:
    """Of one block: the teacher's that left before it and have none to follow them, and those that it follows; of the
    first of these come the ends of its halves, of the last its output."""

    skipped: tuple[str, ...]
    blocks: tuple[str, ...]


def sketch_of(block: nn.Module) -> Sketch:
    """The first entries of each parameter, with its shape: what is needed to know a block again."""
    found = {}
    for name, each in block.named_parameters():
        if each.is_floating_point() and not each.is_meta:
            shape = "x".join(map(str, each.shape))
            found[f"{name} {shape}"] = each.detach().reshape(-1)[:SKETCHED].float().cpu().clone()
    return found


def followed(
    ours: Sequence[str],
    theirs: Sequence[str],
    sketch: Callable[[str], Sketch],
    sketch_theirs: Callable[[str], Sketch],
) -> dict[str, Follows] | str:
    """For each of the model's blocks what it follows; or why that can't be told.

    Args:
        ours, theirs: the names of the blocks, in their order.
        sketch, sketch_theirs: give what a block is known by; asked only where the names differ.

    >>> known = {f"h.{at}": sketch_of(nn.Linear(9, 9)) for at in range(3)}
    >>> found = followed(["h.0", "h.1"], list(known), {"h.0": known["h.0"], "h.1": known["h.2"]}.get, known.get)
    >>> [each.blocks for each in found.values()]
    [('h.0', 'h.1'), ('h.2',)]
    """
    if list(ours) == list(theirs):
        return {name: Follows((), (name,)) for name in ours}
    counts = f"the model has {len(ours)} blocks and the teacher {len(theirs)}"
    stacks, others = _by_stack(ours), _by_stack(theirs)
    if len(ours) >= len(theirs) or stacks.keys() != others.keys():
        return f"{counts}, of other names"
    found: dict[str, Follows] = {}
    for stack, names in stacks.items():
        every = others[stack]
        known = [sketch_theirs(name) for name in every]
        at = -1
        places = []
        for name in names:
            nearest = _nearest(sketch(name), known)
            if nearest is None or nearest <= at:
                return f"{counts}, and the weights do not say which of these {name} was"
            places.append(at := nearest)
        for name, first, end in zip(names, places, [*places[1:], len(every)], strict=True):
            skipped = tuple(every[:first]) if name == names[0] else ()
            found[name] = Follows(skipped, tuple(every[first:end]))
    return found


def _by_stack(names: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.rpartition(".")[0], []).append(name)
    return found


def _nearest(sketch: Sketch, known: Sequence[Sketch]) -> int | None:
    """Which of the known it is; None where another is about as near."""
    distances = [_distance(sketch, each) for each in known]
    first, second, *_ = [*sorted(distances), float("inf")]
    return distances.index(first) if first < CLEARER * second else None


def _distance(one: Sketch, other: Sketch) -> float:
    """The mean over what both have of ``‖a - b‖² / (‖a‖² + ‖b‖²)``: about 1 for what has nothing to do with each other;
    of matrices alone where there are any, since normalizations are much alike."""
    both = [name for name in one if name in other]
    both = [name for name in both if "x" in name.rpartition(" ")[2]] or both
    shares = []
    for name in both:
        a, b = one[name], other[name]
        size = float(a.square().sum() + b.square().sum())
        shares.append(float((a - b).square().sum()) / size if size > 0 else 0.0)
    return sum(shares) / len(shares) if shares else float("inf")
