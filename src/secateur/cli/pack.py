"""``secateur pack``: layers that skip zeros, where they are measured to be faster.

Law: results on stdout, everything else on stderr; whatever is wrong with the input is one line and exit code 2.
"""

from pathlib import Path
from typing import Annotated

import typer

from secateur.cli.options import Batch, Example, Model, Report, Threads, Tokens, Weights
from secateur.cli.terminal import clear_errors, page_at, show, terminable


def pack(
    model: Model,
    example: Example = None,
    batch: Batch = 1,
    tokens: Tokens = 64,
    weights: Weights = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The safetensors file to write, which load_packed reads. Must not exist.",
            show_default=False,
        ),
    ] = None,
    at_least: Annotated[
        float, typer.Option(metavar="TIMES", help="How many times faster than the best dense form a layer has to be.")
    ] = 1.1,
    no_kernels: Annotated[
        bool, typer.Option("--no-kernels", help="Plain torch operations only: they train, and export to ONNX.")
    ] = False,
    no_fuse: Annotated[
        bool,
        typer.Option(
            "--no-fuse",
            help="Leave what stands around packed convolutions as it is: normalizations and ReLUs behind them, those "
            "behind dense ones, poolings.",
        ),
    ] = False,
    values: Annotated[
        str | None,
        typer.Option(metavar="WORD", help="int8: round the kernels' weights to 8 bits, and say what that changes."),
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(metavar="WORD", help="int8: also try forms that round their inputs as they come."),
    ] = None,
    semi_structured: Annotated[
        bool, typer.Option("--semi-structured", help="On a CUDA device, also try 2:4 on sparse tensor cores.")
    ] = False,
    include: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Look at the layers of these names only. Repeatable.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Leave these layers as they are. Repeatable.")
    ] = None,
    threads: Threads = None,
    report: Report = None,
) -> None:
    """Replace the layers of a model whose zeros pay by ones that skip them, each timed here, and say what that gains.

    Give a model that has zeros already, such as one by secateur prune, and an example of the size to be served: what is
    faster depends on it, on the number of threads and on the machine. Importing a module runs its code: name only what
    you trust.
    """
    with clear_errors(), terminable():
        from secateur.cli.measuring import load_weights, model_and_inputs, packed
        from secateur.cli.printing import packed_parts
        from secateur.inference import layers_sheet, save_packed

        page = page_at(report)
        if out is not None:
            _check_new(out)
        if weights is not None and Path(model).is_dir():
            raise ValueError(f"{model} is a directory, with weights of its own: leave out --weights.")
        built, example_inputs, what = model_and_inputs(model, example, batch, tokens)
        if weights is not None:
            load_weights(built, weights)
        packing, found = packed(
            built,
            example_inputs,
            threads,
            at_least=at_least,
            kernels_too=not no_kernels,
            fuse=not no_fuse,
            values=values,
            inputs=inputs,
            semi_structured=semi_structured,
            include=include,
            exclude=exclude,
        )
        parts = [*packed_parts(packing, found, what)]
        if out is not None and packing.packed:
            save_packed(built, out)
            parts += ["", f"Wrote {out}; secateur.inference.load_packed(model, {str(out)!r}) puts it in a dense model."]
        show(parts)
        asked = {
            "example": example,
            "batch": batch if what else None,
            "tokens": tokens if what else None,
            "weights": weights,
            "out": out,
            "at_least": at_least,
            "no_kernels": no_kernels,
            "no_fuse": no_fuse,
            "values": values,
            "inputs": inputs,
            "semi_structured": semi_structured,
            "include": include,
            "exclude": exclude,
            "threads": threads,
        }
        page.write(
            f"{model}, packed", "pack", [model], asked, parts[1:], lambda: [layers_sheet("Layer by layer", packing)]
        )
        if out is not None and not packing.packed:
            raise ValueError("no layer was packed, and nothing was written: dense layers are saved as they always are.")


def _check_new(out: Path) -> None:
    """Refuses, before the work, what could not be written after it."""
    if out.exists():
        raise FileExistsError(f"{out} already exists; remove it, or name another file")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{out} cannot be written: there is no folder {out.parent}; create it first")
