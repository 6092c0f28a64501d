"""``secateur sensitivity``: what each group of a model costs when it alone loses some of its units or entries.

Law: results on stdout, everything else on stderr; whatever is wrong with the input is one line and exit code 2.
"""

import contextlib
from typing import Annotated, Any

import typer

from secateur.cli.options import (
    AsJson,
    Directory,
    LeaveWhole,
    LookAt,
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
    one_process,
    page_at,
    read_text,
    resumable,
    show,
    terminable,
    warnings_as_lines,
)


def sensitivity(
    directory: Directory,
    data: Text,
    over: Over = None,
    share: Shares = None,
    score: Score = None,
    include: LookAt = None,
    exclude: LeaveWhole = None,
    solver: Solver = "admm",
    pattern: Pattern = None,
    round_to: RoundTo = None,
    rows: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many tokens of the text scores are measured on.")
    ] = 1024,
    samples: Samples = 128,
    sequence_length: SequenceLength = None,
    seed: Seed = 0,
    store: Store = None,
    as_json: AsJson = False,
    report: Report = None,
) -> None:
    """Say what each head group, width and channel group, or each layer, costs when it alone goes to 10, 30, 50, 70 %.

    Of each there are two numbers: how far the outputs of what consumes it are off after repair, and what the model's
    own outputs lose by it. The model is loaded into memory and nothing of it is written. What is found is kept in a
    folder where --store names one, from which other verbs go on.
    """
    with clear_errors(), terminable(), contextlib.nullcontext() if store is None else resumable():
        from secateur import solvers
        from secateur.cli.measuring import model_in
        from secateur.cli.printing import json_of
        from secateur.search import SHARES, sensitivity_sheets
        from secateur.search import sensitivity as measure

        one_process("sensitivity")
        page = page_at(report)
        solve = solvers.parse(solver)
        if score is not None:
            _check_score(score)
        asked: dict[str, Any] = {
            "data": data,
            "over": over or ["shrink"],
            "share": share or list(SHARES),
            "score": score,
            "include": include or [],
            "exclude": exclude or [],
            "solver": solver if over and "oneshot" in over else None,
            "pattern": pattern,
            "round_to": round_to,
            "rows": rows,
            "samples": samples,
            "sequence_length": sequence_length,
            "seed": seed,
            "store": store,
        }
        with warnings_as_lines():
            batches = read_text(directory, data, samples=samples, sequence_length=sequence_length, seed=seed)
            found = measure(
                model_in(directory),
                batches,
                score=score,  # type: ignore[arg-type]
                over=asked["over"],
                shares=asked["share"],
                include=include or None,
                exclude=exclude or None,
                solver=solve,
                pattern=pattern,
                round_to=round_to,
                rows=rows,
                store=store,
            )
        parts = [*found.parts()]
        if as_json:
            print(json_of(found))
        else:
            show(parts)
        page.write(
            f"{directory}, what each part costs",
            "sensitivity",
            [directory],
            asked,
            parts,
            lambda: sensitivity_sheets(found),
        )


def _check_score(word: str) -> None:
    from secateur.search import SCORES

    if word not in SCORES:
        raise ValueError(f"--score must be one of {', '.join(SCORES)}, not {word}; functions are for Python.")
