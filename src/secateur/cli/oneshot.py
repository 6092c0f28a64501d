"""``secateur oneshot``: a model directory pruned block by block with calibration text.

Law: results on stdout, everything else on stderr; whatever is wrong with the input is one line and exit code 2.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from secateur.cli.options import (
    ALLOCATE,
    Activations,
    Device,
    Directory,
    Exclude,
    Include,
    NewDirectory,
    Pattern,
    Report,
    Samples,
    Seed,
    SequenceLength,
    Solver,
    Sparsity,
    Text,
)
from secateur.cli.terminal import (
    arguments_said,
    clear_errors,
    join_processes,
    memory,
    page_at,
    read_text,
    resumable,
    show,
    terminable,
    timing_of,
    warnings_as_lines,
)

if TYPE_CHECKING:
    from secateur.models import Layer


def oneshot(
    directory: Directory,
    data: Text,
    out: NewDirectory,
    sparsity: Sparsity = None,
    pattern: Pattern = None,
    solver: Solver = "admm",
    allocate: Annotated[str, ALLOCATE] = "uniform",
    values: Annotated[
        str | None,
        typer.Option(metavar="WORD", help="int8: round what is kept to 8 bits, which later columns make up for."),
    ] = None,
    stages: Annotated[
        bool | None,
        typer.Option(
            "--stages/--no-stages",
            help="Solve a block's weights in the order in which they compute, each on what the pruned ones before it "
            "give. If left out: with solvers that mend.",
        ),
    ] = None,
    aim: Annotated[
        float | None,
        typer.Option(
            metavar="FRACTION",
            help="How much of what the dense model would have given a weight makes up for, in [0, 1]. If left out: 0.5 "
            "in stages, else 0.",
        ),
    ] = None,
    samples: Samples = 128,
    sequence_length: SequenceLength = None,
    seed: Seed = 0,
    include: Include = None,
    exclude: Exclude = None,
    activations: Activations = None,
    device: Device = None,
    report: Report = None,
) -> None:
    """Prune a model with calibration text, block by block, and mend what is left.

    Weights are read one block at a time: a model larger than memory is no trouble. Embeddings, heads, normalizations
    and routers are left alone. A run that was stopped goes on where it was if the same command is given again; OUT
    appears complete or not at all. Under torchrun the text is shared out among the processes.
    """
    with clear_errors(), terminable(), resumable():
        from secateur import allocation, patterns, solvers
        from secateur.allocation import narrowest
        from secateur.checkpoints import called_as
        from secateur.cli.printing import pruned_blocks_parts
        from secateur.models import oneshot as prune_blocks
        from secateur.models import pruned_blocks_sheets

        page = page_at(report)
        solve, shared = solvers.parse(solver), allocation.parse(allocate)
        chosen = narrowest(solve) if pattern is None else patterns.parse(pattern)
        options: dict[str, Any] = {
            "data": data,
            "out": str(out),
            "sparsity": sparsity,
            "pattern": patterns.word_of(chosen) if pattern is None else pattern,
            "solver": solver,
            "allocate": allocate,
            **({} if values is None else {"values": values}),
            **({} if stages is None else {"stages" if stages else "no-stages": True}),
            **({} if aim is None else {"aim": aim}),
            "samples": samples,
            "sequence-length": sequence_length,
            "seed": seed,
            "include": include or [],
            "exclude": exclude or [],
        }
        join_processes(device)
        if chosen.density is not None and shared is not allocation.uniform:
            raise ValueError(f"{pattern} keeps the same share of every weight; leave --allocate out.")
        with warnings_as_lines(), called_as(arguments_said("oneshot", directory, options)):
            batches = read_text(directory, data, samples=samples, sequence_length=sequence_length, seed=seed)
            done = prune_blocks(
                directory,
                batches,
                sparsity,
                solver=solve,
                pattern=chosen,
                allocate=shared,
                values=values,
                stages=stages,
                aim=aim,
                include=include or None,
                exclude=exclude or None,
                out=out,
                activations=activations,
                device=device,
                on_layer=functools.partial(_print_layer, started=time.monotonic()),
            )
        if int(os.environ.get("RANK", "0")) == 0:
            show(pruned_blocks_parts(done))
            page.write(
                f"{directory}, pruned block by block",
                "oneshot",
                [directory],
                options,
                pruned_blocks_parts(done),
                lambda: pruned_blocks_sheets(done),
                timing_of(directory, out),
            )


def _print_layer(layer: Layer, started: float) -> None:
    """A line a layer, on stderr."""
    if int(os.environ.get("RANK", "0")):
        return
    error = "no tokens" if not layer.tokens else "no relative error"
    error = error if layer.error is None else f"error {layer.error:.4f}"
    idle = f", experts without tokens: {', '.join(map(str, layer.without_tokens))}" if layer.without_tokens else ""
    print(
        f"{layer.name}: {layer.sparsity:.1%} removed, {error}, {layer.seconds:.1f} s{memory()}{idle} "
        f"({time.monotonic() - started:.0f} s so far)",
        file=sys.stderr,
        flush=True,
    )
