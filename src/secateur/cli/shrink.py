"""``secateur shrink``: channels and heads leave a model that a function makes, or a directory of shards.

Law: results on stdout, everything else on stderr; whatever is wrong with the input is one line and exit code 2.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from secateur.cli.calibration import Activations, Data, Device, Samples, Seed, SequenceLength, calibration
from secateur.cli.terminal import clear_errors, command_line, printing, terminable, waiting

__all__ = ["shrink"]


def shrink(
    factory: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="What makes the model, called without arguments: the module is imported, and its code is run. Or a "
            "Hugging Face directory, of which no code is run.",
        ),
    ],
    sparsity: Annotated[
        float,
        typer.Option("--sparsity", "-s", metavar="FRACTION", help="Fraction of the target that leaves, in [0, 1)."),
    ],
    example: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:INPUTS",
            help="A tensor, a tuple of arguments or a dict of keyword arguments, or a function that makes one. "
            "Its module is imported and run, too. A directory needs none.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The directory to write. Must not exist.", show_default=False)
    ] = None,
    target: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="params; of the example macs (multiply-adds), memory or latency (measured time); or units (channels, "
            "heads, ...).",
        ),
    ] = "params",
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Shrink only what tensors of these names take part in. Repeatable."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Leave what these take part in whole. Repeatable.")
    ] = None,
    round_to: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Keep multiples of this many units; 16 of 64 or more if left out."),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Load these first: a safetensors file, an index, or a directory with one."),
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not prove that nothing else changed: faster, in less memory.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would leave, and write nothing.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Every group with all its members, every dimension that stays.")
    ] = False,
    branches: Annotated[
        float,
        typer.Option(
            metavar="FRACTION",
            help="Residual branches that leave first: those that change their stream least on the example.",
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
    no_repair: Annotated[
        bool, typer.Option("--no-repair", help="With data: leave the weights that stay as they are.")
    ] = False,
    samples: Samples = 128,
    sequence_length: SequenceLength = None,
    seed: Seed = 0,
    activations: Activations = None,
    device: Device = None,
) -> None:
    """Take whole channels, heads and hidden units out of a model, and write the smaller one.

    What leaves together is found by watching the model run on the example; units are ranked by the magnitude of their
    weights, whole branches by what they do to the example, which has to be a real one then. Modules are looked for in
    this directory first, and importing one runs its code: name only what you trust. DIR appears complete or not at all,
    with plan.json and model.safetensors; load_shrunken reads it into a model that the factory made.

    Of a Hugging Face directory, of any size, the shards are sliced one tensor at a time, and from_pretrained loads DIR.
    With a text, units are chosen by what it shows that the outputs lose, and what stays is repaired, block by block: a
    run that was stopped goes on if the same command is given again, and under torchrun the text is shared out.
    """
    with clear_errors(), terminable():
        if Path(factory).is_dir():
            if weights is not None or branches:
                raise ValueError(f"{factory} is a directory: leave out {'--weights' if weights else '--branches'}.")
            _shrink_directory(
                Path(factory),
                out,
                sparsity,
                example=example,
                include=include,
                exclude=exclude,
                round_to=round_to,
                target=target,
                no_verify=no_verify,
                dry_run=dry_run,
                verbose=verbose,
                data=data,
                without_data=without_data,
                no_repair=no_repair,
                samples=samples,
                sequence_length=sequence_length,
                seed=seed,
                activations=activations,
                device=device,
            )
            return
        if data is not None:
            raise ValueError("--data is for directories; in Python, shrink(model, example, batches=...) takes batches.")
        import torch

        from secateur.checkpoints import new_directory
        from secateur.cli.factories import blamed, inputs_of, load_weights, model_of
        from secateur.cli.printing.shrunken import print_parts, print_written
        from secateur.shrinking import save_shrunken, shrunk_parts
        from secateur.shrinking import shrink as shrink_model
        from secateur.support import in_mode, run_example

        if example is None:
            raise ValueError("give --example MODULE:INPUTS, what the model is run on; only a directory needs none.")
        if out is None and not dry_run:
            raise ValueError("give --out DIR, the directory to write, or --dry-run.")
        with contextlib.nullcontext() if out is None or dry_run else new_directory(out) as folder:
            with waiting("Building the model"):
                model, expression = model_of(factory)
                inputs = inputs_of(example)
                if weights is not None:
                    load_weights(model, weights)
            started = time.monotonic()
            ran = blamed(f"{factory}, run on {example},")
            with waiting("Watching the model run"), ran, torch.no_grad(), in_mode(model, training=False):
                run_example(model, inputs)
            with waiting("Choosing what leaves" if no_verify else "Choosing what leaves, and proving it"):
                done = shrink_model(
                    model,
                    inputs,
                    sparsity,
                    include=include,
                    exclude=exclude,
                    round_to=round_to,
                    target=target,
                    branches=branches,
                    uniform=uniform,
                    verify=not no_verify,
                )
            if folder is not None:
                with waiting("Writing"):
                    save_shrunken(model, folder)
        with printing() as console:
            print_parts(console, shrunk_parts(done, verbose=verbose))
            proof = "Not proved, as asked" if no_verify else "Proved on random weights that nothing else changed"
            console.print(f"\n{proof} ({time.monotonic() - started:.1f} s).")
            print_written(console, None if dry_run else out, factory, expression)


def _shrink_directory(
    directory: Path,
    out: Path | None,
    sparsity: float,
    *,
    example: str | None,
    include: list[str] | None,
    exclude: list[str] | None,
    round_to: int | None,
    target: str,
    no_verify: bool,
    dry_run: bool,
    verbose: bool,
    data: str | None,
    without_data: bool,
    no_repair: bool,
    samples: int,
    sequence_length: int | None,
    seed: int,
    activations: Path | None,
    device: str | None,
) -> None:
    if out is None and not dry_run:
        raise ValueError("give --out DIR, the directory to write, or --dry-run.")
    from secateur.cli.factories import inputs_of
    from secateur.cli.printing.shrunken import print_checkpoint
    from secateur.shrinking import shrink_checkpoint

    options = {"include": include, "exclude": exclude, "round-to": round_to, "example": example, "target": target}
    if data is not None:
        options |= {"data": data, "samples": samples, "sequence-length": sequence_length, "seed": seed}
    flags = {"no_verify": no_verify, "without_data": without_data, "no_repair": no_repair}
    command = command_line("shrink", directory, sparsity=sparsity, out=out, **options, **flags)
    with calibration(
        directory,
        data,
        samples=samples,
        sequence_length=sequence_length,
        seed=seed,
        activations=activations,
        device=device,
        repair=not no_repair,
        without_data=without_data,
    ) as calibrated:
        done = shrink_checkpoint(
            directory,
            None if dry_run else out,
            sparsity,
            example_inputs=None if example is None else inputs_of(example),
            include=include,
            exclude=exclude,
            round_to=round_to,
            target=target,
            verify=not no_verify,
            arguments={"command": command, "sparsity": sparsity, **options},
            **calibrated,
        )
    if int(os.environ.get("RANK", "0")):
        return
    with printing() as console:
        print_checkpoint(console, done, verbose=verbose)
