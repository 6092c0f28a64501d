"""``secateur demo``: the whole story in minutes.

Law: results on stdout, everything else on stderr; whatever is wrong with the input is one line and exit code 2.
"""

from pathlib import Path
from typing import Annotated

import typer

from secateur.cli.terminal import clear_errors


def demo(
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The directory for report.html.")] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Prune by this method; repeatable, or several with commas. list shows all."),
    ] = None,
) -> None:
    """Train a small network on handwritten digits, prune it in many ways, and report what that cost and gained."""
    with clear_errors():
        from secateur.demo import METHODS, run_demo

        if method and any("list" in name.split(",") for name in method):
            for name, each in METHODS.items():
                typer.echo(f"{name:<10} {each.line}")
            return
        run_demo(out, methods=method or None)
