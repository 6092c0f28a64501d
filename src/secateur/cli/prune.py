"""``secateur prune``: a pruned copy of a checkpoint directory.

Law: results on stdout, everything else on stderr; whatever is wrong with the input is one line and exit code 2.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from secateur.cli.terminal import clear_errors, command_line, printing, terminable

__all__ = ["prune"]


def prune(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A directory with .safetensors files, such as Hugging Face's.")
    ],
    out: Annotated[Path, typer.Option(metavar="OUT", help="The directory to write. Must not exist.")],
    sparsity: Annotated[
        float | None,
        typer.Option("--sparsity", "-s", metavar="FRACTION", help="Fraction of the weights to remove, in [0, 1)."),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--pattern",
            "-p",
            metavar="PATTERN",
            help="unstructured (default), rows, 2:4 or any n:m, 16x1 or any block, columns:64, channels.",
        ),
    ] = None,
    allocate: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="everywhere (default), by one threshold; uniform, the same share of each tensor; erk, by shape; "
            "owl, by outliers; or progression, more with depth.",
        ),
    ] = None,
    criterion: Annotated[
        str, typer.Option(metavar="NAME", help="What ranks the weights: magnitude, lamp, ln_norm or random.")
    ] = "magnitude",
    seed: Annotated[int, typer.Option(metavar="N", help="For the random criterion.")] = 0,
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Prune the tensors of these names, and no others. Repeatable."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Leave these alone, whatever else is said. Repeatable.")
    ] = None,
) -> None:
    """Write a pruned copy of a checkpoint directory, without its model code.

    Embeddings, normalizations, output heads and routers are left alone unless you --include them. Everything but the
    removed weights is kept byte for byte. OUT appears complete or not at all.
    """
    with clear_errors(), terminable():
        from secateur import allocation, criteria
        from secateur.checkpoints import sparsify_checkpoint
        from secateur.cli.printing.checkpoints import print_pruned
        from secateur.evidence import needs
        from secateur.patterns import word_of

        if asked := needs(criteria.parse(criterion)):
            raise ValueError(
                f"{criterion} asks for {', '.join(asked)}, which files of weights don't show; take magnitude, lamp, "
                "ln_norm or random, or secateur oneshot, which runs the model."
            )
        scores, chosen, shared = allocation.settled(criterion, pattern, allocate)
        if chosen.density is not None and allocate is not None:
            raise ValueError(f"{pattern} keeps the same share of every tensor; leave --allocate out.")
        options: dict[str, Any] = {
            "out": str(out),
            "sparsity": sparsity,
            "pattern": word_of(chosen) if pattern is None else pattern,
            "allocate": None if chosen.density is not None else allocate or getattr(shared, "__name__", None),
            "criterion": criterion,
            "seed": seed,
            "include": include or [],
            "exclude": exclude or [],
        }
        done = sparsify_checkpoint(
            directory,
            out,
            sparsity,
            pattern=chosen,
            criterion=scores,
            allocate=shared,
            include=include or (),
            exclude=exclude or (),
            seed=seed,
            arguments={
                "command": command_line("prune", directory, **options),
                "directory": str(directory),
                **options,
            },
        )
        with printing() as console:
            print_pruned(console, done)
