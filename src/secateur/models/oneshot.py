"""One-shot pruning of a model made of repeated blocks: calibrate, prune and repair one block after the other.

Law: a block is pruned by what reaches it from the pruned blocks before it; its weights change only when all of them
are solved, and are written down before the next block is read. Memory is one block, as it was and as it becomes, and
the activations between two, of the dense model as well where that runs beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur import allocation, patterns, solvers
from secateur.allocation import Allocation, check_sparsity, narrowest, uniform
from secateur.evidence import needs
from secateur.models.in_directory import prune_directory, prune_in_memory
from secateur.models.jobs import Layer
from secateur.models.reach import reached_by_name
from secateur.models.result import OneShot
from secateur.models.solving import OneShotRequest, Solve
from secateur.patterns import Pattern
from secateur.solvers import admm
from secateur.support import (
    Forward,
    check_choose,
    directories,
    for_directories,
    globs_of,
    name_of,
    refuse_sharded,
    without_autocast,
)

AIM = 0.5  # in benchmarks/oneshot the best of 0, 0.5 and 1
GATHERED = frozenset(["gram", "input_norm", "input_mean", "input_var"])


@without_autocast()
def oneshot(
    model: nn.Module | Path | str,
    batches: Iterable[Any],
    sparsity: float | None = None,
    *,
    solver: str | Solve = admm,
    pattern: str | Pattern | None = None,
    allocate: str | Allocation = uniform,
    values: str | None = None,
    stages: bool | None = None,
    aim: float | None = None,
    choose: str | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    out: Path | str | None = None,
    forward: Forward | None = None,
    activations: Path | str | None = None,
    device: torch.device | str | None = None,
    on_layer: Callable[[Layer], None] | None = None,
) -> OneShot:
    """Prunes a model of repeated blocks with calibration data, block by block, as SparseGPT does (Frantar & Alistarh
    2023, arXiv:2301.00774) and Wanda (Sun et al. 2023, arXiv:2306.11695): in memory, or a directory larger than it.

    For each block in the order in which the model runs them, and each stage of it: run the batches up to it through
    the pruned ones before it, sum what each of its matrices is multiplied with, and solve them; then run the block
    again with its new weights. The dense model runs beside, and a weight is moved half of the way to what restores its
    outputs first. Without stages all matrices of a block are solved from one run, as in the authors' code. Sums are
    over tokens, in float32 or wider, and leave out what an ``attention_mask`` calls padding; they do not depend on how
    tokens are batched.

    Blocks are found by structure (`find_blocks`), their weights by watching the products in them: ``Linear``,
    ``Conv1D``, each expert of a fused tensor, the parts of ``MultiheadAttention``. Embeddings, heads and all else
    outside the blocks, and routers, normalizations and adapters inside them, are left alone. An expert that no token
    was sent to is pruned by magnitude, and named in its layer's ``without_tokens``.

    In memory, a network without repeated blocks, or mostly of convolutions and recurrent layers, is one block whose
    layers are the stages: convolutions as products with patches, and the gates of LSTM, GRU and RNN. Each stage runs
    the batches from the start.

    A model in memory is changed in place, block by block; if a block fails, those before it stay pruned. A directory
    is not changed: the result is written beside ``out`` and renamed at the end, and a run that was killed goes on where
    it was when it is started again. In processes of `torch.distributed`, each takes its share of the batches.

    Args:
        model: any module, or a Hugging Face directory with safetensors files.
        batches: what a DataLoader yields: tensors, tuples of the inputs and targets, which are not needed, or mappings
            of keyword arguments. Gone through several times; what is no sequence is put into a list.
        sparsity: fraction of each weight that is removed; none for a pattern that fixes it, such as ``NM(2, 4)``.
        solver: ``(weight, sparsity, pattern, *, <evidence>) -> (new weight, mask)``, by default `admm`; others are in
            `secateur.solvers`, and `from_criterion` makes one of any criterion. It may ask
            for ``gram``, ``input_norm``, ``input_mean`` and ``input_var``. Or a word, such as ``"sparsegpt"``.
        pattern: `Unstructured` by default, and `Rows` where the solver's scores compare within an output, as Wanda's
            and DSnoT's do; or a word, such as ``"2:4"``. Experts, and other matrices that share a tensor, compete
            apart.
        allocate: how the sparsity is shared out among the weights; see `secateur.allocation`. `uniform` gives all the
            same; any other is asked about Wanda's scores on the dense model, which costs one more run if it looks at
            them.
        values: "int8" to also round what is kept to 8 bits with a scale for each output, by `with_rounding` of the
            solver: later columns make up for what rounding changes, what rounds to 0 is zero, too, and `secateur.pack`
            with the same word then changes nothing more. The weights stay in their dtype, and a half holds the rounded
            numbers nearly.
        stages: solve a block's weights in the order in which they compute, each stage (queries, keys and values, say,
            then the attention's output) on what the pruned stages before it give; else all from one run. By default
            where the solver names ``gram``, and so repairs.
        aim: how far a weight is moved towards restoring the dense model before it is pruned, from 0 to 1: the dense
            model is run beside the pruned one, and least squares fits this share of the residual, which is the dense
            output, or the dense stream that it is added to, minus the present one. By default one half in stages, if
            the solver names ``gram``, else 0.
        choose: "gates" to choose masks by the loss of the whole model, which is in memory as a whole meanwhile. They
            begin with those that the walk chooses, and learn for 200 steps of a batch while the weights stay, each
            group keeping as many; then a walk solves on them. A quarter of the batches is held back; where they lose
            no less there than the walk's, before repair or after, those are taken. It rarely pays: see
            docs/guides/oneshot.md.
        include, exclude: globs over parameter names, as `find_targets` takes them; include can ask for routers.
        out: for a directory, the one to write, which must not exist.
        forward: ``(model, batch) -> outputs``; by default ``model(inputs)``, or ``model(**mapping)``.
        activations: a folder for what blocks pass on, in files mapped into memory; by default it stays in memory.
        device: for a directory, where blocks are computed; by default the processor.
        on_layer: called with each `Layer` once it is solved.

    Returns:
        What was done: it prints as a table, and holds the numbers.

    Raises:
        ValueError: no blocks in a directory's model, no batches, a glob without a match, a sparsity or shape that does
            not fit the pattern, another word for values or choose, activations that are NaN; gates that no gradient
            reaches, or a solver that does not keep the mask that they chose; in a directory, blocks that run in
            turns more than once.
        TypeError: the solver asks for what is not gathered here, or a batch is of no known kind.
        CheckpointError: a directory that cannot be read, or an ``out`` that cannot be written.

    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
    >>> done = oneshot(model, [torch.randn(32, 8)], 0.5)
    >>> [(layer.name, layer.sparsity, layer.tokens) for layer in done.layers]
    [('0.0.weight', 0.5, 32), ('1.0.weight', 0.5, 32)]
    """
    solver, allocate = solvers.parse(solver), allocation.parse(allocate)
    if values not in (None, "int8"):
        raise ValueError(f"values is 'int8' or None, not {values!r}.")
    check_choose(choose, "gates")
    if values is not None:
        solver = solvers.with_rounding(solver)
    pattern = narrowest(solver) if pattern is None else patterns.parse(pattern)
    _check_sparsity(sparsity, pattern)
    words = needs(solver)
    if impossible := sorted(set(words) - GATHERED):
        raise TypeError(
            f"{name_of(solver)} asks for {', '.join(impossible)}; a walk over blocks gathers "
            f"{', '.join(sorted(GATHERED))} and no gradients."
        )
    stages = "gram" in words if stages is None else stages
    if aim is None:
        aim = AIM if stages and "gram" in words else 0.0
    if not 0 <= aim <= 1:
        raise ValueError(f"aim must be from 0 to 1: the share of the residual that is fitted; got {aim}.")
    if aim and "gram" not in words:
        raise TypeError(
            f"{name_of(solver)} does not name the Gram matrix, which aim={aim:g} needs; leave aim "
            "out, or take a solver that does, such as admm."
        )
    request = OneShotRequest(
        sparsity,
        solver,
        pattern,
        allocate,
        words,
        globs_of(include),
        globs_of(exclude),
        forward,
        None if activations is None else Path(activations),
        on_layer,
        stages,
        float(aim),
        choose,
    )
    if isinstance(model, Path | str):
        done = prune_directory(*directories(model, out), batches, request, device)
        return done.over_texts(model, batches, forward=forward, activations=activations, device=device)
    for_directories(out=out)
    refuse_sharded(model, "oneshot")
    reach = reached_by_name(model, batches, forward=forward)
    return replace(prune_in_memory(model, batches, request), reach=reach)


def _check_sparsity(sparsity: float | None, pattern: Pattern) -> None:
    if sparsity is not None:
        check_sparsity(sparsity)
    if pattern.density is None and sparsity is None:
        raise ValueError(f"{pattern} needs a sparsity: the fraction of each weight to remove, in [0, 1].")
    if pattern.density is not None and sparsity is not None and abs(1 - pattern.density - sparsity) > 1e-9:
        raise ValueError(f"{pattern} removes {1 - pattern.density:g} of the weights, not {sparsity}; leave it out.")
