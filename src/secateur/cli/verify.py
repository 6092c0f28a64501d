"""``secateur verify``: what a pruned directory claims of itself, counted.

Law: results on stdout, everything else on stderr; whatever is wrong with the input is one line and exit code 2.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from secateur.cli.options import AsJson, Report
from secateur.cli.terminal import clear_errors, page_at, show


def verify(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A directory with secateur.json beside the weights.")
    ],
    source: Annotated[
        Path | None, typer.Option(metavar="DIR", help="What it was pruned from: then all else has to be unchanged.")
    ] = None,
    as_json: AsJson = False,
    report: Report = None,
) -> None:
    """Count on the stored bytes what DIR's secateur.json says: sparsity, pattern, and what was left alone.

    Of a directory that shrink wrote: whether each tensor is what its plan leaves of the source's, and has the bytes
    that were written, also where zeros were made in it later, as fit does; where blocks left, whether each is the
    source's that its blocks.json names. Of one that experts wrote: whether each is the source's that its experts.json
    names, byte for byte. Of one that vocabulary wrote: whether each has the rows of the tokens that stayed, and texts
    of these are read as by the source.

    Exit code 0: all that was checked holds. 1: something does not, and is named. 2: there is nothing to check.
    """
    with clear_errors():
        from secateur.checkpoints import verified_parts, verified_sheets, verify_checkpoint

        page = page_at(report)
        found = verify_checkpoint(directory, source)
        if as_json:
            print(json.dumps(found.as_json(), indent=2), flush=True)
        else:
            show(verified_parts(found))
        asked = {"source": source}
        page.write(
            f"{directory}, verified",
            "verify",
            [directory],
            asked,
            verified_parts(found),
            lambda: verified_sheets(found),
        )
    if not found.ok:
        raise typer.Exit(1)
