"""``secateur prune``: a pruned copy of a checkpoint directory.

Law: results on stdout, everything else on stderr; whatever is wrong with the input is one line and exit code 2.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from secateur.cli.options import Allocate, Exclude, Include, NewDirectory, Pattern, Report, Sparsity
from secateur.cli.terminal import arguments_said, clear_errors, page_at, show, terminable, timing_of


def prune(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A directory with .safetensors files, such as Hugging Face's.")
    ],
    out: NewDirectory,
    sparsity: Sparsity = None,
    pattern: Pattern = None,
    allocate: Allocate = None,
    criterion: Annotated[
        str, typer.Option(metavar="NAME", help="What ranks the weights: magnitude, lamp, ln_norm or random.")
    ] = "magnitude",
    seed: Annotated[int, typer.Option(metavar="N", help="For the random criterion.")] = 0,
    include: Include = None,
    exclude: Exclude = None,
    report: Report = None,
) -> None:
    """Write a pruned copy of a checkpoint directory, without its model code.

    Weights compete over the whole model, unless the criterion or --allocate says otherwise. Embeddings, normalizations,
    output heads and routers are left alone unless you --include them. Everything but the removed weights is kept byte
    for byte. OUT appears complete or not at all.
    """
    with clear_errors(), terminable():
        from secateur import allocation
        from secateur.checkpoints import called_as, pruned_sheets, sparsify
        from secateur.cli.printing import pruned_parts
        from secateur.patterns import word_of

        page = page_at(report)
        without_evidence(criterion, "files of weights don't show", "secateur oneshot, which runs the model")
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
        with called_as(arguments_said("prune", directory, options)):
            done = sparsify(
                directory,
                sparsity,
                pattern=chosen,
                criterion=scores,
                allocate=shared,
                include=include or (),
                exclude=exclude or (),
                seed=seed,
                out=out,
            )
        show(pruned_parts(done))
        page.write(
            f"{directory}, pruned",
            "prune",
            [directory],
            options,
            pruned_parts(done),
            lambda: pruned_sheets(done),
            timing_of(directory, out),
        )


def without_evidence(criterion: str, why: str, instead: str) -> None:
    """``ValueError`` for a criterion that asks for what data says: ``why`` there is none, what to take ``instead``."""
    from secateur import criteria
    from secateur.evidence import needs

    if asked := needs(criteria.parse(criterion)):
        raise ValueError(
            f"{criterion} asks for {', '.join(asked)}, which {why}; take magnitude, lamp, ln_norm or random, or "
            f"{instead}."
        )
