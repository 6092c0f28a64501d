"""The ``secateur`` command: its verbs, each of which has a file of its own.

Law: results on stdout, everything else on stderr; whatever is wrong with the input is one line and exit code 2. A
command imports the library when it runs, so that help and version are there at once.
"""

from collections.abc import Sequence
from typing import Annotated

import typer

from secateur.cli.bench import bench
from secateur.cli.demo import demo
from secateur.cli.experts import experts
from secateur.cli.fit import fit
from secateur.cli.inspect import inspect
from secateur.cli.oneshot import oneshot
from secateur.cli.pack import pack
from secateur.cli.prune import prune
from secateur.cli.recover import recover
from secateur.cli.sensitivity import sensitivity
from secateur.cli.shrink import shrink
from secateur.cli.storage import compress, expand
from secateur.cli.verify import verify
from secateur.cli.vocabulary import vocabulary
from secateur.version import __version__

app = typer.Typer(
    name="secateur",
    help="Prune PyTorch models and checkpoints, and see what is in them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: paragraphs fill the line, and a pipe gets no boxes
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits: 0 for success, 2 for wrong usage or data, 130 when interrupted."""
    app(args=None if arguments is None else list(arguments), prog_name="secateur")


def _show_version(wanted: bool) -> None:
    if wanted:
        from secateur import native

        typer.echo(f"secateur {__version__}\n{native.describe()}")
        raise typer.Exit


@app.callback()
def _secateur(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    del version


for verb, line in (
    (inspect, "Show the tensors of a checkpoint: sizes, zeros, patterns."),
    (prune, "Write a pruned copy of a checkpoint directory."),
    (verify, "Prove what a pruned directory claims of itself."),
    (shrink, "Take channels and heads out of a model, which gets smaller."),
    (experts, "Take experts out of a mixture, by what a text says of them."),
    (vocabulary, "Take tokens out of a model and its tokenizer."),
    (sensitivity, "Say what each part of a model would cost it, with a text."),
    (oneshot, "Prune a transformer block by block, with calibration text."),
    (recover, "Train what pruning left towards the model that it came from."),
    (fit, "Spend no more than a budget, and lose as little as can be."),
    (pack, "Put layers that skip zeros where they are faster, measured here."),
    (compress, "Write a copy of a checkpoint in which zeros take little room."),
    (expand, "Write the dense checkpoint that a compressed one was made of."),
    (bench, "What zeros would be worth to your model, measured here."),
    (demo, "Train a small network, prune it, report what that cost."),
):
    app.command(short_help=line)(verb)
app.command("trim", hidden=True)(vocabulary)
