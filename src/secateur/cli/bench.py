"""``secateur bench``: what zeros would be worth to the user's own model, on this machine.

Law: results on stdout, everything else on stderr; whatever is wrong with the input is one line and exit code 2.
"""

from typing import Annotated

import typer

from secateur.cli.terminal import clear_errors, printing, terminable

__all__ = ["bench"]


def bench(
    model: Annotated[
        str,
        typer.Argument(
            metavar="DIR_OR_FACTORY",
            help="A Hugging Face directory, of which no code is run; or module:factory, what makes the model, called "
            "without arguments: the module is imported, and its code is run.",
        ),
    ],
    example: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:INPUTS",
            help="A tensor, a tuple of arguments or a dict of keyword arguments, or a function that makes one; of the "
            "size to be served. Its module is imported and run, too. A directory needs none.",
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, metavar="N", help="Of a directory: how many texts or images at once.")
    ] = 1,
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Of a directory: how many tokens in each text.")] = 64,
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
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Of torch; its own setting if left out.")
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Show each layer of each form.")] = False,
) -> None:
    """Prune copies of a model in several patterns, pack them, and time them beside the dense one.

    Beside them: the model as it is with its own zeros packed, if it has any; half of its work removed as whole channels
    (shrink); and int8, dense and shrunken. Accuracy is not looked at: what the zeros cost, only training and validation
    tell. Importing a module runs its code: name only what you trust.
    """
    with clear_errors(), terminable():
        from secateur import patterns
        from secateur.cli.measuring import measured, model_and_inputs
        from secateur.cli.printing.measured import print_measured

        chosen = {word: patterns.parse(word) for word in pattern or ("unstructured", "16x1", "columns:64")}
        for word, each in chosen.items():
            if each.density is not None:
                raise ValueError(f"{word} has a sparsity of its own; bench wants patterns that take any.")
        for fraction in sparsity or ():
            if not 0 <= fraction < 1:
                raise ValueError(f"--sparsity is a fraction in [0, 1), not {fraction}; 90 % is written 0.9.")
        built, inputs, what = model_and_inputs(model, example, batch, tokens)
        found = measured(built, inputs, chosen, sparsity or [0.5, 0.8, 0.9], threads)
        with printing() as console:
            print_measured(console, found, what, layers=layers)
