"""``secateur recover``: a pruned directory trained towards the one that it came from, by blocks and by its outputs.

Law: results on stdout, everything else on stderr; whatever is wrong with the input is one line and exit code 2.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from secateur.cli.options import (
    Activations,
    Batch,
    Device,
    Exclude,
    NewDirectory,
    Report,
    Samples,
    Seed,
    SequenceLength,
)
from secateur.cli.terminal import (
    arguments_said,
    clear_errors,
    memory,
    one_process,
    page_at,
    read_text,
    resumable,
    show,
    terminable,
    timing_of,
    warnings_as_lines,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from secateur.recovery import LocalPart

PAUSE = 10.0  # seconds between two lines about steps


def recover(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What any verb wrote: the pruned directory.")],
    teacher: Annotated[Path, typer.Option(metavar="DIR", help="The directory that it came from.")],
    out: NewDirectory,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Text to train on, .txt or .jsonl. If left out: what the teacher writes, 512 tokens a sequence.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=0, metavar="N", help="By the outputs, each over one batch; 0: none.")] = 500,
    local: Annotated[
        int, typer.Option(min=0, metavar="N", help="Epochs for each half of a block, one after the other; 0: none.")
    ] = 2,
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="kl of logits, cosine of embeddings, or mse. If left out: by what the teacher returns.",
            show_default=False,
        ),
    ] = None,
    adapters: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="RANK",
            help="By the outputs, move weights by low-rank updates under their masks, merged exactly; nothing else.",
            show_default=False,
        ),
    ] = None,
    rate: Annotated[float, typer.Option(metavar="RATE", help="The highest learning rate by the outputs.")] = 1e-4,
    share: Annotated[
        float,
        typer.Option(
            metavar="FRACTION",
            help="How much of the loss by the outputs is the teacher's; the rest is the text's own, the next token. 0: "
            "fine-tuning on the text alone.",
        ),
    ] = 1.0,
    autocast: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="bfloat16: by the outputs, multiply matrices in it, which is faster where the processor can. Weights, "
            "losses and the optimizer stay in float32.",
            show_default=False,
        ),
    ] = None,
    local_rate: Annotated[float, typer.Option(metavar="RATE", help="The highest learning rate of a block.")] = 2e-4,
    local_batches: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many batches a block sees, spread over all of them.")
    ] = 128,
    batch: Batch = 8,
    samples: Samples = 512,
    sequence_length: SequenceLength = None,
    seed: Seed = 0,
    include: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Train what has these names, and nothing else. Repeatable.")
    ] = None,
    exclude: Exclude = None,
    activations: Activations = None,
    teacher_on_disk: Annotated[
        bool,
        typer.Option(
            "--teacher-on-disk",
            help="By the outputs, too, hold one block of the teacher: slower by reading all of them at each step.",
        ),
    ] = False,
    device: Device = None,
    report: Report = None,
) -> None:
    """Train what pruning left towards the model that it came from. What is zero stays zero, to the last one.

    First block by block against the teacher's activations, with one block of each model in memory; then the whole model
    by the teacher's outputs, with both in memory: --steps 0 leaves that out, --teacher-on-disk the teacher. No labels
    are needed. A run that was stopped goes on where it was if the same command is given again; OUT appears complete or
    not at all, and secateur verify OUT counts its zeros.
    """
    with clear_errors(), terminable(), resumable():
        from secateur.checkpoints import called_as
        from secateur.cli.printing import recovered_parts
        from secateur.recovery import Sampled, recovered_sheets
        from secateur.recovery import recover as train

        one_process("recover")
        page = page_at(report)
        options: dict[str, Any] = {
            "teacher": str(teacher),
            "data": data,
            "out": str(out),
            "steps": steps,
            "local": local,
            "loss": loss,
            "adapters": adapters,
            "rate": rate,
            "share": share,
            "autocast": autocast,
            "local-rate": local_rate,
            "local-batches": local_batches,
            "batch": batch,
            "samples": samples,
            "sequence-length": sequence_length,
            "seed": seed,
            "include": include or [],
            "exclude": exclude or [],
        }
        with warnings_as_lines(), called_as(arguments_said("recover", directory, options)):
            if data is None:
                batches: Any = Sampled(samples, sequence_length, batch)
            else:
                texts = read_text(directory, data, samples=samples, sequence_length=sequence_length, seed=seed)
                batches = _in_batches(texts, batch)
            done = train(
                directory,
                teacher,
                batches,
                steps=steps,
                local=local,
                loss=loss,
                adapters=adapters,
                rate=rate,
                share=share,
                autocast=autocast,
                local_rate=local_rate,
                local_batches=local_batches,
                include=include or None,
                exclude=exclude or None,
                seed=seed,
                out=out,
                activations=activations,
                teacher_on_disk=teacher_on_disk,
                device=device,
                on_part=_say_part,
                on_step=_saying(steps),
            )
        show(recovered_parts(done))
        page.write(
            f"{directory}, recovered",
            "recover",
            [directory],
            options,
            recovered_parts(done),
            lambda: recovered_sheets(done),
            timing_of(directory, out),
        )


def _in_batches(texts: list[Any], size: int) -> list[Any]:
    """Sequences of one length together; all that `read_text` gives are, or there is one."""
    import torch

    return [torch.cat(texts[at : at + size]) for at in range(0, len(texts), size)]


def _say_part(part: LocalPart) -> None:
    """A line a part of a block, on stderr."""
    print(
        f"{part.block}, up to {part.part}: relative error {part.after:.5f} to the teacher, before {part.before:.5f}"
        f"{memory()}",
        file=sys.stderr,
        flush=True,
    )


def _saying(steps: int) -> Callable[[int, float], None]:
    """A line now and then, on stderr."""
    said = time.monotonic()

    def say(number: int, loss: float) -> None:
        nonlocal said
        if number in (1, steps) or time.monotonic() - said >= PAUSE:
            said = time.monotonic()
            print(f"step {number:,} of {steps:,}: loss {loss:.5f}{memory()}", file=sys.stderr, flush=True)

    return say
