"""``secateur fit``: a model directory fitted to a budget, by calibration text.

Law: results on stdout, everything else on stderr; whatever is wrong with the input is one line and exit code 2.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from secateur.cli.options import (
    Directory,
    LeaveWhole,
    LookAt,
    NewDirectory,
    Over,
    Pattern,
    Report,
    RoundTo,
    Samples,
    Score,
    Seed,
    SequenceLength,
    Shares,
    Solver,
    Store,
    Text,
)
from secateur.cli.terminal import (
    clear_errors,
    command_line,
    fail,
    one_process,
    page_at,
    read_text,
    resumable,
    show,
    terminable,
    timing_of,
    warnings_as_lines,
)


def fit(
    directory: Directory,
    data: Text,
    out: NewDirectory,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COST=LIMIT",
            help="What may be spent: params, macs, bytes or latency; up to 1 a share of what the model costs, above "
            "that the amount, of latency in milliseconds on this machine. Repeatable: all of them hold.",
        ),
    ] = None,
    keep: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="In place of a budget: the share of the dense model's outputs that has to stay, as --score compares "
            "them: the mean cosine, exp(-divergence), or the share of their variance; and as little as that allows of "
            "--target.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        str, typer.Option(metavar="COST", help="What is to be little, with --keep: params, macs, bytes or latency.")
    ] = "params",
    over: Over = None,
    share: Shares = None,
    score: Score = None,
    include: LookAt = None,
    exclude: LeaveWhole = None,
    solver: Solver = "admm",
    pattern: Pattern = None,
    round_to: RoundTo = None,
    held_back: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="How many sequences of the text the search looks at; a quarter if left out. Levels are made of the "
            "others.",
            show_default=False,
        ),
    ] = None,
    evaluations: Annotated[
        float, typer.Option(metavar="N", help="How often the search may look at all of these.")
    ] = 30.0,
    finals: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="How many choices are finished on a copy, before the best of them is taken."
        ),
    ] = 12,
    samples: Samples = 128,
    sequence_length: SequenceLength = None,
    seed: Seed = 0,
    store: Store = None,
    levels: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Begin with the levels and scores that secateur sensitivity --store FOLDER wrote: none are made.",
        ),
    ] = None,
    report: Report = None,
) -> None:
    """Spend no more than a budget, and lose as little as that allows; or keep so much, and spend as little as can be.

    Of each group some levels are made, of how much of it leaves, and each is repaired. Which of them together lose
    least at the budget is searched with the whole model, which is loaded into memory for it. Then shrink and oneshot go
    through the directory block by block with what was chosen, and mend what stays; from_pretrained loads OUT. A run
    that was stopped goes on if the same command is given again; OUT appears complete or not at all.
    """
    with clear_errors(), terminable(), resumable():
        from secateur.checkpoints import called_as, check_new
        from secateur.search import budget_in_words, fitted_sheets
        from secateur.search import fit as fit_model

        one_process("fit")
        page = page_at(report)
        limits = budget_in_words(budget) if budget else None
        if (limits is None) == (keep is None):
            raise fail(
                "give --budget latency=0.6, what may be spent, or --keep 0.99, what has to stay: one of the two."
            )
        check_new(out)
        asked: dict[str, Any] = {
            "budget": budget or [],
            "keep": keep,
            "target": target if keep is not None else None,
            "data": data,
            "out": out,
            "over": over or [],
            "share": share or [],
            "score": score,
            "include": include or [],
            "exclude": exclude or [],
            "solver": solver if over and "oneshot" in over else None,
            "pattern": pattern,
            "round_to": round_to,
            "held_back": held_back,
            "evaluations": evaluations,
            "finals": finals,
            "samples": samples,
            "sequence_length": sequence_length,
            "seed": seed,
            "store": store,
            "levels": levels,
        }
        said = {"command": command_line("fit", directory, **asked), "directory": str(directory)}
        with warnings_as_lines(), called_as(said):
            batches = read_text(directory, data, samples=samples, sequence_length=sequence_length, seed=seed)
            done = fit_model(
                directory,
                batches,
                budget=limits,
                keep=keep,
                target=target,
                score=score,  # type: ignore[arg-type]
                over=over or ("shrink",),
                shares=share or None,
                include=include or None,
                exclude=exclude or None,
                solver=solver,
                pattern=pattern,
                round_to=round_to,
                held_back=held_back,
                evaluations=evaluations,
                finals=finals,
                seed=seed,
                store=store,
                levels=levels,
                out=out,
            )
        parts = [*done.parts()]
        show(parts)
        page.write(
            f"{directory}, fitted to a budget",
            "fit",
            [directory],
            asked,
            parts,
            lambda: fitted_sheets(done),
            timing_of(directory, out),
        )
