"""The ``secateur`` command: its verbs, each of which has a file of its own.

Law: results on stdout, everything else on stderr; whatever is wrong with the input is one line and exit code 2. A
command imports the library when it runs, so that help and version are there at once.
"""

import inspect
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from secateur.cli import calibrated, checkpoints, detector, shrink, timing
from secateur.cli.options import COMMANDS, SHARED, Shared, taking
from secateur.version import __version__

app = typer.Typer(
    name="secateur",
    help="Prune PyTorch models and checkpoints, and see what is in them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: paragraphs fill the line, and a pipe gets no boxes
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits: 0 for success, 2 for wrong usage or data, 130 when interrupted."""
    app(args=None if arguments is None else list(arguments), prog_name="secateur")


def _show_version(wanted: bool) -> None:
    if wanted:
        from secateur import native

        typer.echo(f"secateur {__version__}\n{native.describe()}")
        raise typer.Exit


def _secateur(**_: Any) -> None:
    """What is shared, each command reads."""


_VERSION = typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
_OWN = inspect.Parameter("version", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, _VERSION])
_OPTIONS = [_OWN, *(option.parameter(name, option.default, required=False) for name, option in SHARED.items())]
app.callback()(taking(_OPTIONS, _secateur))

del calibrated, checkpoints, detector, shrink, timing  # which made the commands
_FIRST = [
    "inspect",
    "prune",
    "verify",
    "shrink",
    "detector",
    "vocabulary",
    "sensitivity",
    "oneshot",
    "recover",
    "fit",
    "deploy",
    "pack",
]
for name in [*_FIRST, *sorted({*COMMANDS} - {*_FIRST})]:
    run, line = COMMANDS[name]
    app.command(name, short_help=line, cls=Shared)(run)
app.command("trim", hidden=True, cls=Shared)(COMMANDS["vocabulary"][0])
