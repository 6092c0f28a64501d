"""``secateur experts``: experts leave a directory of shards, by what a text says of them; or how much that would cost.

Law: results on stdout, everything else on stderr; whatever is wrong with the input is one line and exit code 2.
"""

import contextlib
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from secateur.cli.options import Activations, Device, Directory, DryRun, NoRepair, Report, Samples, Seed, SequenceLength
from secateur.cli.terminal import (
    clear_errors,
    command_line,
    join_processes,
    page_at,
    read_text,
    resumable,
    show,
    terminable,
    timing_of,
    warnings_as_lines,
)


def experts(
    directory: Directory,
    data: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Text, .txt or .jsonl, that says what each expert does.", show_default=False),
    ] = None,
    remove: Annotated[
        float,
        typer.Option(metavar="N", help="The fraction of the experts of each mixture that leaves, or how many: 1, 2, …"),
    ] = 0.0,
    out: Annotated[
        Path | None, typer.Option(metavar="OUT", help="The directory to write. Must not exist.", show_default=False)
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Write what the text says here, and what the model loses on a held-out quarter of it.",
            show_default=False,
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Such a profile, not --data: nothing is run.", show_default=False),
    ] = None,
    rank: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What ranks experts: reap, frequency; or criterion, their magnitude.",
            show_default=False,
        ),
    ] = None,
    unreached_first: Annotated[
        bool, typer.Option("--unreached-first", help="Experts that no token was sent to leave before others.")
    ] = False,
    no_repair: NoRepair = False,
    include: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Only mixtures with tensors of these names. Repeatable.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Leave mixtures with these whole. Repeatable.")
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not prove on a small model that nothing else changes.")
    ] = False,
    dry_run: DryRun = False,
    samples: Samples = 128,
    sequence_length: SequenceLength = None,
    seed: Seed = 0,
    activations: Activations = None,
    device: Device = None,
    report: Report = None,
) -> None:
    """Take experts out of a mixture, those that a text needs least; or see first what that would cost.

    The model runs block by block, so that one block is in memory, and shards are sliced one tensor at a time. OUT is an
    ordinary checkpoint: its configuration says the new number, and from_pretrained loads it; never fewer experts stay
    than are chosen at a time. With a text, the last matrices of those that stay take over what the others gave. A run
    that was stopped goes on if the same command is given again, and under torchrun the text is shared out.

    With --profile alone nothing leaves: what the model's outputs lose without a share of its experts is printed, and
    what the text says is kept for --plan.
    """
    with clear_errors(), terminable(), resumable() if out is not None else contextlib.nullcontext():
        page = page_at(report)
        if out is None and not dry_run and profile is None:
            raise ValueError("give --out OUT, the directory to write; --dry-run; or --profile FILE.json.")
        if data is None and plan is None and rank != "criterion":
            raise ValueError("give --data FILE, a .txt or .jsonl, or --plan FILE.json; or --rank criterion.")
        if out is not None and not remove:
            raise ValueError("give --remove N, a fraction of the experts or how many of each mixture.")
        asked: dict[str, Any] = {
            "data": data,
            "remove": remove or None,
            "out": out,
            "profile": profile,
            "plan": plan,
            "rank": rank,
            "unreached_first": unreached_first,
            "no_repair": no_repair,
            "include": include,
            "exclude": exclude,
            "no_verify": no_verify,
            "dry_run": dry_run,
            "samples": samples if data is not None else None,
            "sequence_length": sequence_length,
            "seed": seed if data is not None else None,
        }
        from secateur.checkpoints import called_as
        from secateur.cli.printing import experts_parts
        from secateur.shrinking import experts_sheets, shrink_experts_checkpoint

        join_processes(device)
        batches = None
        if data is not None:
            with warnings_as_lines():
                batches = read_text(directory, data, samples=samples, sequence_length=sequence_length, seed=seed)
        with called_as({"command": command_line("experts", directory, **asked)}):
            done = shrink_experts_checkpoint(
                directory,
                None if dry_run else out,
                remove,
                batches=batches,
                profile=profile,
                plan=plan,
                rank=rank,
                unreached_first=unreached_first,
                repair=not no_repair,
                include=include,
                exclude=exclude,
                text=data or "",
                activations=activations,
                device=device,
                verify=not no_verify,
            )
        if int(os.environ.get("RANK", "0")):
            return
        show(experts_parts(done, profile))
        page.write(
            f"{directory}, its experts",
            "experts",
            [directory],
            asked,
            experts_parts(done, profile),
            lambda: experts_sheets(done),
            timing_of(directory, done.out),
        )
