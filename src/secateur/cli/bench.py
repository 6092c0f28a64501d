"""``secateur bench``: what zeros would be worth to the user's own model, on this machine.

Law: results on stdout, everything else on stderr; whatever is wrong with the input is one line and exit code 2.
"""

from typing import Annotated

import typer

from secateur.cli.options import Batch, Example, Model, Report, Threads, Tokens
from secateur.cli.terminal import clear_errors, page_at, show, terminable


def bench(
    model: Model,
    example: Example = None,
    batch: Batch = 1,
    tokens: Tokens = 64,
    sparsity: Annotated[
        list[float] | None,
        typer.Option(
            "--sparsity",
            "-s",
            metavar="FRACTION",
            help="Fraction removed, in [0, 1). Repeatable; 0.5, 0.8 and 0.9 if left out.",
        ),
    ] = None,
    pattern: Annotated[
        list[str] | None,
        typer.Option(
            "--pattern",
            "-p",
            metavar="PATTERN",
            help="Repeatable; unstructured, 16x1 and columns:64 if left out. As in secateur prune.",
        ),
    ] = None,
    threads: Threads = None,
    layers: Annotated[bool, typer.Option("--layers", help="Show each layer of each form.")] = False,
    report: Report = None,
) -> None:
    """Prune copies of a model in several patterns, pack them, and time them beside the dense one.

    Beside them: the model as it is with its own zeros packed, if it has any; half of its work removed as whole channels
    (shrink); and int8, dense and shrunken. Accuracy is not looked at: what the zeros cost, only training and validation
    tell. Give an example of the size to be served. Importing a module runs its code: name only what you trust.
    """
    with clear_errors(), terminable():
        from secateur import patterns
        from secateur.cli.measuring import measured, model_and_inputs
        from secateur.cli.printing import measured_parts, measured_sheets

        page = page_at(report)
        chosen = {word: patterns.parse(word) for word in pattern or ("unstructured", "16x1", "columns:64")}
        for word, each in chosen.items():
            if each.density is not None:
                raise ValueError(f"{word} has a sparsity of its own; bench wants patterns that take any.")
        for fraction in sparsity or ():
            if not 0 <= fraction < 1:
                raise ValueError(f"--sparsity is a fraction in [0, 1), not {fraction}; 90 % is written 0.9.")
        built, inputs, what = model_and_inputs(model, example, batch, tokens)
        sparsities = sparsity or [0.5, 0.8, 0.9]
        found = measured(built, inputs, chosen, sparsities, threads)
        show(measured_parts(found, what, layers=layers))
        asked = {
            "example": example,
            "batch": batch if what else None,
            "tokens": tokens if what else None,
            "sparsity": sparsities,
            "pattern": [*chosen],
            "threads": threads,
            "layers": layers,
        }
        page.write(
            f"{model}, measured",
            "bench",
            [model],
            asked,
            [*measured_parts(found, what)][1:],
            lambda: measured_sheets(found),
        )
