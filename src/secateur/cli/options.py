"""Options that more than one command has: declared once, so that they mean the same and say the same.

Law: an option of one name has one declaration, unless it means another thing in another command. Which options a
command takes stands in its signature, since typer reads it there: commands that take the same spell the same.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

# ---- what is read and written ----

Directory = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="A Hugging Face directory with .safetensors files; none of its code is run."),
]
Model = Annotated[
    str,
    typer.Argument(
        metavar="DIR_OR_FACTORY",
        help="A Hugging Face directory, of which no code is run; or module:factory, what makes the model, called "
        "without arguments: the module is imported, and its code is run.",
    ),
]
Example = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:INPUTS",
        help="What the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments, or a "
        "function that makes one. Its module is imported and run, too. A directory needs none.",
        show_default=False,
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="Load these first: a safetensors file, an index, or a directory with one."),
]
NewDirectory = Annotated[Path, typer.Option(metavar="OUT", help="The directory to write. Must not exist.")]
NewCopy = Annotated[
    Path, typer.Option(metavar="OUT", help="What to write: a directory for a directory, which must not exist.")
]
Report = Annotated[
    Path | None,
    typer.Option(
        metavar="PAGE.html", help="Write what was asked and what came of it to one HTML page, too, with plots."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would leave, and write nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]

# ---- what is removed ----

Sparsity = Annotated[
    float | None,
    typer.Option(
        "--sparsity",
        "-s",
        metavar="FRACTION",
        help="Fraction of the weights to remove, in [0, 1); an n:m pattern has its own.",
    ),
]
Pattern = Annotated[
    str | None,
    typer.Option(
        "--pattern",
        "-p",
        metavar="PATTERN",
        help="unstructured, rows, 2:4 or any n:m, 16x1 or any block, columns:64, channels. If left out, unstructured; "
        "rows for what compares within a row, as wanda and dsnot do.",
    ),
]
ALLOCATE: Any = typer.Option(
    metavar="NAME",
    help="How the sparsity is shared out: everywhere, by one threshold; uniform, the same share of each weight; "
    "erk, by shape; owl, by outliers; or progression, more with depth.",
)  # one verb has a default, another none
Allocate = Annotated[str | None, ALLOCATE]
Include = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB", help="Prune the weights of these names, and no others. Repeatable."),
]
Exclude = Annotated[
    list[str] | None, typer.Option(metavar="GLOB", help="Leave these alone, whatever else is said. Repeatable.")
]

RoundTo = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Keep multiples of this many units; 16 of 64 or more if left out, or fewer where that is coarse.",
    ),
]
Solver = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="What chooses the weights, and mends the others: admm, alps or sparsegpt. dsnot, wanda, ria and "
        "magnitude only choose.",
    ),
]

# ---- how it is timed ----

Batch = Annotated[int, typer.Option(min=1, metavar="N", help="Of a directory: how many texts or images at once.")]
Tokens = Annotated[int, typer.Option(min=1, metavar="N", help="Of a directory: how many tokens in each text.")]
Threads = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="How many torch computes with; its own setting if left out.")
]

# ---- calibration text ----

Text = Annotated[
    str,
    typer.Option(
        metavar="FILE",
        help="Calibration text, .txt or .jsonl; code=a.txt,maths:2=b.txt for several, by weights; or random tokens.",
    ),
]
Samples = Annotated[int, typer.Option(min=1, metavar="N", help="How many sequences of the text.")]
SequenceLength = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Tokens in each; at most 2048 if left out, less if the model takes less."),
]
Seed = Annotated[int, typer.Option(metavar="N", help="For the choice of sequences.")]
Activations = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Keep what blocks pass on in files here, and not in memory."),
]
Device = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Where blocks are computed, such as cuda. The processor if left out."),
]

NoRepair = Annotated[bool, typer.Option("--no-repair", help="With data: leave what stays as it is.")]

# ---- levels ----

Over = Annotated[
    list[str] | None,
    typer.Option(
        metavar="VERB",
        help="What may leave: shrink, units of groups, which is meant if left out; or oneshot, entries of layers. "
        "Repeatable.",
        show_default=False,
    ),
]
Shares = Annotated[
    list[float] | None,
    typer.Option(
        "--share",
        metavar="FRACTION",
        help="A level: how much of a group leaves, in (0, 1). Repeatable; 0.1, 0.3, 0.5 and 0.7 if left out, "
        "and of fit 0.05 to 0.9 in steps of 0.05, with oneshot of 0.1.",
        show_default=False,
    ),
]
LookAt = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB", help="Only groups and layers with tensors of these names. Repeatable."),
]
LeaveWhole = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB", help="Leave groups and layers with tensors of these names whole. Repeatable."),
]
Score = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="What the model loses: kl, of its logits; cosine, of its embeddings; change, of its outputs. If left out, "
        "what fits the model.",
        show_default=False,
    ),
]
Store = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Keep levels and scores here: a run that was stopped goes on, and finished parts are not made again.",
    ),
]
