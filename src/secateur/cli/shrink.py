"""Calibration text for a directory: the options that say which, declared once, and what is made of them. ``secateur
shrink``: channels and heads leave a model that a function makes, or a directory of shards.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from secateur.cli.options import (
    Activations,
    Device,
    DryRun,
    Example,
    Model,
    NoRepair,
    Report,
    RoundTo,
    Samples,
    Seed,
    SequenceLength,
    Weights,
)
from secateur.cli.prune import without_evidence
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
    waiting,
    warnings_as_lines,
)

# ---- Calibration text for a directory: the options that say which, declared once, and what is made of them.
#
# Law: a model of repeated blocks does not shrink without data unless that is asked for by name.

Data = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Calibration text, .txt or .jsonl; or random, for tokens without sense. For a directory.",
        show_default=False,
    ),
]


@contextlib.contextmanager
def calibration(
    directory: Path,
    data: str | None,
    *,
    samples: int,
    sequence_length: int | None,
    seed: int,
    activations: Path | None,
    device: str | None,
    repair: bool,
    without_data: bool,
) -> Iterator[dict[str, Any]]:
    """What `shrink_checkpoint` is given of it: the batches, and where they are run; nothing without data.

    Raises:
        ValueError: there is no data, a model of repeated blocks, and no word that this is meant.
    """
    if data is None:
        if not without_data:
            _ask_for_data(directory)
        yield {}
        return
    if without_data:
        raise ValueError("--data names a text, and --without-data says that there is none: leave one of them out.")
    with resumable():
        join_processes(device)
        with warnings_as_lines():
            batches = read_text(directory, data, samples=samples, sequence_length=sequence_length, seed=seed)
        yield {"batches": batches, "repair": repair, "activations": activations, "device": device}


def _ask_for_data(directory: Path) -> None:
    from secateur.checkpoints import meta_model_of, open_checkpoint
    from secateur.models import find_blocks

    model = meta_model_of(open_checkpoint(directory))
    try:
        find_blocks(model)
    except ValueError:
        return
    reads = getattr(model, "main_input_name", None) == "input_ids"
    how = "pass --data FILE, a .txt or .jsonl" if reads else "load the model and call shrink(..., batches=...)"
    raise ValueError(
        f"{directory}: {type(model).__name__} is made of repeated blocks, which do not survive a choice by their "
        "weights alone: without 10% of SmolLM2-135M perplexity goes from 15 to 325 000; where a text chooses and "
        f"repairs, to 15.6. So {how}; or say --without-data, to train it afterwards."
    )


# ---- ``secateur shrink``: channels and heads leave a model that a function makes, or a directory of shards.
#
# Law: results on stdout, everything else on stderr; whatever is wrong with the input is one line and exit code 2.


def shrink(
    factory: Model,
    sparsity: Annotated[
        float,
        typer.Option("--sparsity", "-s", metavar="FRACTION", help="Fraction of the target that leaves, in [0, 1)."),
    ],
    example: Example = None,
    out: Annotated[
        Path | None, typer.Option(metavar="OUT", help="The directory to write. Must not exist.", show_default=False)
    ] = None,
    target: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="params; of the example macs (multiply-adds) or latency (measured time); or units (channels, heads).",
        ),
    ] = "params",
    criterion: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What ranks units, by the sum over their weights: magnitude, lamp, ln_norm or random.",
        ),
    ] = "magnitude",
    allocate: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How many units each group loses: uniform, everywhere, erk or progression. If left out, the same "
            "share of each, heads last.",
            show_default=False,
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Shrink only what tensors of these names take part in. Repeatable."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Leave what these take part in whole. Repeatable.")
    ] = None,
    round_to: RoundTo = None,
    weights: Weights = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not prove that nothing else changed: faster, in less memory.")
    ] = False,
    dry_run: DryRun = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Every group with all its members, every dimension that stays.")
    ] = False,
    branches: Annotated[
        float,
        typer.Option(
            metavar="FRACTION",
            help="Residual branches that leave first: those that change their stream least on the example. Of a "
            "directory whole blocks, by what the outputs lose on --data, and with -s 0 nothing else.",
        ),
    ] = 0.0,
    uniform: Annotated[
        bool,
        typer.Option(
            "--uniform",
            help="Keep what the model's config can say, so that from_pretrained loads it. Directories: always.",
        ),
    ] = False,
    data: Data = None,
    without_data: Annotated[
        bool,
        typer.Option("--without-data", help="Choose by the weights alone, though the model is of repeated blocks."),
    ] = False,
    no_repair: NoRepair = False,
    samples: Samples = 128,
    sequence_length: SequenceLength = None,
    seed: Seed = 0,
    activations: Activations = None,
    device: Device = None,
    report: Report = None,
) -> None:
    """Take whole channels, heads and hidden units out of a model, and write the smaller one.

    What leaves together is found by watching the model run on the example; units are ranked by their weights, whole
    branches by what they do to the example, which has to be a real one then. Modules are looked for in
    this directory first, and importing one runs its code: name only what you trust. OUT appears complete or not at all,
    with plan.json and model.safetensors; load_shrunken reads it into a model that the factory made.

    Of a Hugging Face directory, of any size, the shards are sliced one tensor at a time, and from_pretrained loads OUT.
    With a text, units are chosen by what it shows that the outputs lose, and what stays is repaired, block by block: a
    run that was stopped goes on if the same command is given again, and under torchrun the text is shared out.
    """
    with clear_errors(), terminable():
        page = page_at(report)
        without_evidence(criterion, "this command does not collect", "secateur.shrink from Python, with evidence=")
        asked: dict[str, Any] = {
            "sparsity": sparsity,
            "example": example,
            "out": out,
            "target": target,
            "criterion": criterion,
            "allocate": allocate,
            "include": include,
            "exclude": exclude,
            "round_to": round_to,
            "weights": weights,
            "no_verify": no_verify,
            "dry_run": dry_run,
            "branches": branches or None,
            "uniform": uniform,
        }
        how = {key: asked[key] for key in ("target", "criterion", "allocate", "include", "exclude", "round_to")}
        if out is None and not dry_run:
            raise ValueError("give --out DIR, the directory to write, or --dry-run.")
        if Path(factory).is_dir():
            if weights is not None:
                raise ValueError(f"{factory} is a directory: leave out --weights.")
            if branches:
                _check_blocks(factory, how, sparsity=sparsity, data=data)
            from secateur.checkpoints import called_as
            from secateur.cli.measuring import inputs_of
            from secateur.cli.printing import blocks_parts, directory_parts
            from secateur.shrinking import blocks_sheets, directory_sheets, shrink_checkpoint, shrink_depth_checkpoint

            said: dict[str, Any] = {"round-to" if key == "round_to" else key: value for key, value in how.items()}
            said["example"] = example
            if data is not None:
                said |= {"data": data, "samples": samples, "sequence-length": sequence_length, "seed": seed}
            asked |= {
                "data": data,
                "without_data": without_data,
                "no_repair": no_repair,
            }
            if data is not None:  # which chooses: what the criterion is if left out is not what was asked
                asked["criterion"] = None if criterion == "magnitude" else criterion
                asked |= {"samples": samples, "sequence_length": sequence_length, "seed": seed}
                asked |= {"activations": activations, "device": device}
            if branches:
                said["branches"] = branches
            flags = {"no_verify": no_verify, "without_data": without_data, "no_repair": no_repair}
            command = command_line("shrink", factory, sparsity=sparsity, out=out, **said, **flags)
            with (
                called_as({"command": command, "sparsity": sparsity, **said}),
                calibration(
                    Path(factory),
                    data,
                    samples=samples,
                    sequence_length=sequence_length,
                    seed=seed,
                    activations=activations,
                    device=device,
                    repair=not no_repair,
                    without_data=without_data,
                ) as calibrated,
            ):
                if branches:
                    short = shrink_depth_checkpoint(
                        factory,
                        None if dry_run else out,
                        branches,
                        include=include,
                        exclude=exclude,
                        example_inputs=None if example is None else inputs_of(example),
                        verify=not no_verify,
                        **calibrated,
                    )
                    show(blocks_parts(short))
                    page.write(
                        f"{factory}, shrunk",
                        "shrink",
                        [factory],
                        asked,
                        blocks_parts(short),
                        lambda: blocks_sheets(short),
                        timing_of(Path(factory), short.out),
                    )
                    return
                done = shrink_checkpoint(
                    factory,
                    None if dry_run else out,
                    sparsity,
                    example_inputs=None if example is None else inputs_of(example),
                    verify=not no_verify,
                    **how,
                    **calibrated,
                )
            if int(os.environ.get("RANK", "0")):
                return
            show(directory_parts(done, verbose=verbose))
            page.write(
                f"{factory}, shrunk",
                "shrink",
                [factory],
                asked,
                directory_parts(done),
                lambda: directory_sheets(done),
                timing_of(Path(factory), done.out),
            )
            return
        if data is not None:
            raise ValueError("--data is for directories; in Python, shrink(model, example, batches=...) takes batches.")
        import torch

        from secateur.checkpoints import new_directory
        from secateur.cli.measuring import blamed, inputs_of, load_weights, model_of
        from secateur.cli.printing import model_parts, print_loading
        from secateur.report import before_and_after
        from secateur.shrinking import model_sheets, save_shrunken
        from secateur.shrinking import shrink as shrink_model
        from secateur.support import in_mode, run_example

        if example is None:
            raise ValueError("give --example MODULE:INPUTS, what the model is run on; only a directory needs none.")
        with contextlib.nullcontext() if out is None or dry_run else new_directory(out) as folder:
            with waiting("Building the model"):
                model, expression = model_of(factory)
                inputs = inputs_of(example)
                if weights is not None:
                    load_weights(model, weights)
            dense = copy.deepcopy(model) if page.path is not None else None
            started = time.monotonic()
            ran = blamed(f"{factory}, run on {example},")
            with waiting("Watching the model run"), ran, torch.no_grad(), in_mode(model, training=False):
                run_example(model, inputs)
            with waiting("Choosing what leaves" if no_verify else "Choosing what leaves, and proving it"):
                shrunk = shrink_model(
                    model,
                    inputs,
                    sparsity,
                    branches=branches,
                    uniform=uniform,
                    verify=not no_verify,
                    **how,
                )
            if folder is not None:
                with waiting("Writing"):
                    save_shrunken(model, folder)
        written, seconds = None if dry_run else out, time.monotonic() - started
        show(model_parts(shrunk, written, seconds, verbose=verbose))
        if written is not None:
            print_loading(written, factory, expression)
        if dense is not None:
            page.write(
                f"{factory}, shrunk",
                "shrink",
                [factory],
                asked,
                model_parts(shrunk, written, seconds),
                lambda: model_sheets(shrunk),
                functools.partial(before_and_after, dense, model, inputs),
            )


def _check_blocks(directory: str, how: dict[str, Any], *, sparsity: float, data: str | None) -> None:
    """`ValueError` for what cannot be asked of the blocks of a directory."""
    if data is None:
        raise ValueError(f"{directory} is a directory: its blocks leave by what a text shows; pass --data FILE.")
    if sparsity:
        raise ValueError(
            f"{directory} is a directory: whole blocks leave it, and nothing else with them. Ask for -s 0 with "
            "--branches, and then for the units of what that wrote."
        )
    given = [name for name in ("allocate", "round_to") if how[name] is not None]
    if given or how["criterion"] != "magnitude" or how["target"] != "params":
        others = ", ".join(f"--{name.replace('_', '-')}" for name in (*given, "criterion", "target"))
        raise ValueError(f"{others} say how units leave; with --branches whole blocks leave {directory}.")
