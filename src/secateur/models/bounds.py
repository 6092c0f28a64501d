"""In which form the Gram matrices of a walk are summed, so that they fit in memory and are solved in time.

Law: what they take follows from shapes, before anything runs. What fits is summed whole. A coarser form, blocks of
inputs that are solved each for itself, is named; where that is not enough, an error says so before anything runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, NamedTuple

from torch import Tensor, nn

from secateur.models.blocks import WHOLE, full_name
from secateur.models.jobs import Job, Pruned
from secateur.models.solving import MatrixJob
from secateur.patterns import NM, Block, GroupedColumns, Rows, Unstructured
from secateur.support import Between, all_gather, bytes_text, free_memory, private
from secateur.targets import stored_inputs_first

SHARE = 0.5  # of the free memory that evidence may take
ALWAYS_WHOLE = 6144  # inputs of a convolution: ResNet's and VGG's 4608 are below
PER_WEIGHT = 1 << 17  # a convolution's entries of the Gram matrix for each output, of more inputs than that
IN_TIME = 2048  # inputs of a block of such a convolution: a tenth of a second a block, once
LEAST = 512  # inputs of a block, where memory asks for blocks


class Demand(NamedTuple):
    """So many products with matrices of this shape, whose inputs have a Gram matrix each.

    ``unit`` is how many consecutive inputs stay together, the kernel of a convolution; 0 where all do.

    >>> Demand(1, 16, 8192, 64).entries(2048), Demand(1, 16, 8192, 64).entries(8192)
    (16777216, 67108864)
    """

    number: int
    outputs: int
    inputs: int
    unit: int

    def width(self, most: int) -> int:
        """Inputs of a block, so that blocks are alike: at most so many, but two units at least."""
        if not self.unit or self.inputs <= most:
            return self.inputs
        blocks = math.ceil(self.inputs / most)
        step = self.unit if self.unit > 1 else 64
        return min(self.inputs, max(2, math.ceil(self.inputs / blocks / step)) * step)

    def entries(self, width: int) -> int:
        """Of all its Gram matrices in blocks of this width."""
        full, rest = divmod(self.inputs, width)
        return self.number * (full * width**2 + rest**2)


@dataclass(frozen=True)
class Form:
    """How the Gram matrices of a walk are summed.

    Attributes:
        widths: ``{parameter: inputs of a block}`` of those that are not summed whole, by full name.
        notes: what there is to say of each of these.
    """

    widths: Mapping[str, Annotated[int, Between(1)]] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    def within(self, block: str, wanted: Mapping[str, Tensor]) -> dict[str, int]:
        """Of one block's parameters, by their names in it."""
        full = {local: full_name(block, local) for local in wanted}
        return {local: self.widths[name] for local, name in full.items() if name in self.widths}

    def noted(self, pruned: Pruned, stage: Mapping[str, Tensor]) -> Pruned:
        """With the notes on what was solved in blocks of inputs."""
        in_blocks = {
            name: self.notes[name] for local in stage if (name := full_name(pruned.block, local)) in self.notes
        }
        if not in_blocks:
            return pruned
        layers = (
            replace(each, warnings=(self.notes[each.name], *each.warnings)) if each.name in self.notes else each
            for each in pruned.layers
        )
        return Pruned(pruned.block, tuple(layers), pruned.left_alone, in_blocks)


def form_of(model: nn.Module, blocks: Mapping[str, nn.Module], job: Job) -> Form:
    """Whole where all fits in half of the free memory, and convolutions whose time would grow beyond their size in
    blocks of 2,048 inputs; else the largest are halved until all fits.

    Raises:
        ValueError: not even the smallest blocks fit.
    """
    if "gram" not in job.words:
        return Form()
    demands = demands_of(model, blocks, job)
    pattern = getattr(job, "pattern", None)  # whose groups of weights have to lie in blocks of inputs
    splits = pattern is None or isinstance(pattern, Unstructured | Rows | NM | Block | GroupedColumns)
    every = {name: each for its in demands.values() for name, each in its.items()}
    widths = {name: each.width(IN_TIME if splits and _is_slow(each) else each.inputs) for name, each in every.items()}
    device = next((each.device for each in model.parameters() if each.device.type != "meta"), None)
    known = [each for each in all_gather(free_memory(device)) if each is not None]
    while known and (taken := _taken(demands, widths, job)) > SHARE * min(known):  # the largest is halved
        narrower = {name: each.width(max(LEAST, widths[name] // 2)) for name, each in every.items() if splits}
        left = [name for name, width in narrower.items() if width < widths[name]]
        if not left:
            raise ValueError(_too_much(every, taken, min(known), splits=splits))
        name = max(left, key=lambda each: every[each].entries(widths[each]))
        widths[name] = narrower[name]
    coarse = {name: width for name, width in widths.items() if width < every[name].inputs}
    return Form(coarse, {name: _note(every[name], width) for name, width in coarse.items()})


def demands_of(model: nn.Module, blocks: Mapping[str, nn.Module], job: Job) -> dict[str, dict[str, Demand]]:
    """``{block: {parameter: what it asks for}}``; matrices that share their inputs ask for less than that."""
    targets = set(job.targets)
    turned = set(stored_inputs_first(model, targets))
    found: dict[str, dict[str, Demand]] = {}
    for block, module in blocks.items():
        for local, parameter in module.named_parameters():
            name = full_name(block, local)
            owner = module.get_submodule(local.rpartition(".")[0])
            unseen = private.is_transposed_convolution(owner) or (private.is_convolution(owner) and block != WHOLE)
            if name in targets and parameter.dim() > 1 and parameter.numel() and not unseen:
                found.setdefault(block, {})[name] = _demand(parameter, owner, inputs_first=name in turned)
    return found


def _demand(parameter: Tensor, owner: nn.Module, *, inputs_first: bool) -> Demand:
    shape = tuple(parameter.shape)
    if private.is_convolution(owner):
        groups = int(getattr(owner, "groups", 1))
        return Demand(groups, shape[0] // groups, math.prod(shape[1:]), math.prod(shape[2:]))
    if len(shape) == 2:
        return Demand(1, *(shape[::-1] if inputs_first else shape), 1)
    return Demand(math.prod(shape[:-2]), min(shape[-2:]), max(shape[-2:]), 0)  # experts


def _is_slow(each: Demand) -> bool:
    """Solving takes time by the cube of the inputs, and a convolution of few outputs may have many."""
    return each.unit > 1 and each.inputs > ALWAYS_WHOLE and each.inputs**2 > PER_WEIGHT * each.outputs


def _taken(demands: Mapping[str, Mapping[str, Demand]], widths: Mapping[str, int], job: Job) -> int:
    """Bytes of the block that takes most, with the copies that solvers make of the largest Gram matrix.

    A solver of matrices holds the sums, and beside the dense model the residual; columns that leave hold
    the matrix and its inverse in float64, and a copy. In stages a network of layers holds about one layer's.
    """
    held, copies = (8 if job.beside_dense else 4, 24) if isinstance(job, MatrixJob) else (28, 40)
    found = [0]
    for block, its in demands.items():
        entries = [each.entries(widths[name]) for name, each in its.items()]
        together = max(entries) if block == WHOLE and job.in_stages else sum(entries)
        found.append(held * together + copies * max(widths[name] for name in its) ** 2)
    return max(found)


def _note(each: Demand, width: int) -> str:
    blocks = math.ceil(each.inputs / width)
    whole = bytes_text(4 * each.number * each.inputs**2)
    return (
        f"Gram matrix in {blocks} blocks of {width:,} inputs, solved each for itself; whole, of {each.inputs:,} "
        f"inputs, it takes {whole}."
    )


def _too_much(every: Mapping[str, Demand], taken: int, free: int, *, splits: bool) -> str:
    name = max(every, key=lambda each: every[each].number * every[each].inputs ** 2)
    size = bytes_text(4 * every[name].number * every[name].inputs ** 2)
    how = f"even in blocks of {LEAST} inputs" if splits else "and this pattern leaves them whole:"
    return (
        f"{name}: its Gram matrix takes {size}, {how} all evidence takes {bytes_text(taken)}, and half of the free "
        f"{bytes_text(free)} is less; leave it out with exclude=, or free memory."
    )
