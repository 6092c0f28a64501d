"""``secateur inspect``: the tensors of a checkpoint.

Law: results on stdout, everything else on stderr; whatever is wrong with the input is one line and exit code 2.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from secateur.cli.options import AsJson, Report
from secateur.cli.terminal import clear_errors, page_at, printing


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A .safetensors file, a .safetensors.index.json, or a Hugging Face directory."
        ),
    ],
    as_json: AsJson = False,
    group: Annotated[
        bool,
        typer.Option("--group", "-g", help="One line for tensors that differ only in numbers: layers.*.fc.weight."),
    ] = False,
    report: Report = None,
) -> None:
    """Show each tensor's shape, dtype, size and zeros, and the n:m and block patterns that hold.

    Tensors are read in pieces: a file of any size takes little memory.
    """
    with clear_errors():
        from secateur.checkpoints import inspect_checkpoint, inspected_sheets, inspected_totals
        from secateur.cli.printing import print_inspection

        page = page_at(report)
        inspection = inspect_checkpoint(path)
        if as_json:
            print(json.dumps(inspection.as_json(), indent=2), flush=True)
        else:
            with printing() as console:
                print_inspection(console, inspection, group)
        asked = {"group": group}
        page.write(
            str(path), "inspect", [path], asked, inspected_totals(inspection), lambda: inspected_sheets(inspection)
        )
