"""``secateur shrink``: parts of a model leave, of what a function makes or of a directory.

Law: a model of repeated blocks does not shrink without data unless that is asked for by name.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from secateur.cli.checkpoints import without_evidence
from secateur.cli.options import TEXT, command
from secateur.cli.terminal import Answer, Asked, join_processes, read_data, resumable, waiting


@command(
    "shrink", "Take channels and heads out of a model, which gets smaller.", "model",
    "sparsity", "example", "out", "target", "criterion", "choose", "allocate", "include", "exclude", "round_to",
    "weights", "leave", "profile", "plan", "uniform", "rotate", "without_data", *TEXT, "no_repair", "no_verify",
    "activations", "device", "dry_run",
    verb="shrinking/module.py:shrink",
)  # fmt: skip
def shrink(asked: Asked) -> Iterator[Any]:
    """Take whole channels, heads and hidden units out of a model, and write the smaller one.

    What leaves together is found by watching the model run on the example; units are ranked by their weights, whole
    branches by what they do to the example, which has to be a real one then. Modules are looked for in
    this directory first, and importing one runs its code: name only what you trust. With --data units leave by what is
    missed least there, and what stays is repaired. OUT appears complete or not at all,
    with plan.json and model.safetensors; load_shrunken reads it into a model that the factory made.

    Of a Hugging Face directory, of any size, the shards are sliced one tensor at a time, and from_pretrained loads OUT.
    With a text, units are chosen by what it shows that the outputs lose, and what stays is repaired, block by block: a
    run that was stopped goes on if the same command is given again, and under torchrun the text is shared out.

    With --leave experts:25% those of each mixture leave that the text needs least, and with --leave blocks:10% whole
    blocks. With --leave outputs:person,car all labels of a classifier leave but these; that needs no text. With
    --profile alone nothing leaves: what the model's outputs lose without a share of its experts is printed, and what
    the text says is kept for --plan.
    """
    without_evidence(asked.criterion, "this command does not collect", "secateur.shrink from Python, with evidence=")
    if asked.out is None and not asked.dry_run and asked.profile is None:
        raise ValueError("give --out DIR, the directory to write, or --dry-run.")
    if asked.data is None:
        for each in ("samples", "sequence_length", "seed"):
            asked[each] = None
    elif asked.without_data:
        raise ValueError("--data names a text, and --without-data says that there is none: leave one of them out.")
    if Path(asked.model).is_dir():
        yield _directory(asked)
        return
    yield from _factory(asked)


HOW = ("target", "criterion", "choose", "allocate", "include", "exclude", "round_to", "rotate")


def _directory(asked: Asked) -> Answer:
    """A directory of shards."""
    from secateur.cli.measuring import inputs_of
    from secateur.kinds import Outputs
    from secateur.shrinking import shrink as shrink_directory
    from secateur.support import printable

    if asked.weights is not None:
        raise ValueError(f"{asked.model} is a directory: leave out --weights.")
    leave = _kinds(asked)
    needs_none = any(isinstance(each, Outputs) for each in leave)
    example = None if asked.example is None else inputs_of(asked.example)
    asked["uniform"] = False  # always, and so not said
    if (
        asked.data is not None and asked.criterion == "magnitude"
    ):  # data chooses: what the criterion is if left out is not what was asked
        asked["criterion"] = None
    how = asked.only("include", "exclude", "choose", "rotate")
    if not leave:
        how = {**asked.only(*HOW), "criterion": asked.criterion or "magnitude", "sparsity": asked.sparsity}
    with calibration(asked, needed=not needs_none) as calibrated, asked.recorded():
        done = shrink_directory(
            asked.model,
            leave=leave,
            out=None if asked.dry_run else asked.out,
            example_inputs=example,
            verify=asked.verify,
            **how,
            **calibrated,
        )
    more = [] if asked.profile is None else [f"The profile is in {printable(str(asked.profile))}."]
    return Answer(done, more=more, title=", shrunk")


def _kinds(asked: Asked) -> list[Any]:
    """What leaves a directory beside units, as it was asked: one kind, and nothing else with it."""
    from secateur.kinds import Blocks, Experts, parse

    kinds = list(parse(asked.leave))
    if asked.profile is not None and not kinds:
        kinds = [Experts()]
    for at, each in enumerate(kinds):
        if isinstance(each, Experts):
            kinds[at] = dataclasses.replace(each, **asked.only("profile", "plan"), text=asked.data or "")
    if not kinds:
        if asked.sparsity is None:
            raise ValueError("give --sparsity FRACTION, how much leaves, or --leave experts:25%.")
        return kinds
    word, directory = " ".join(f"--leave {each}" for each in asked.leave or ["experts"]), asked.model
    if asked.data is None and any(isinstance(each, Blocks) for each in kinds):
        raise ValueError(f"{directory} is a directory: its blocks leave by what a text shows; pass --data FILE.")
    if asked.sparsity:
        raise ValueError(
            f"{directory} is a directory: with {word} nothing else leaves it. Leave --sparsity out, and ask for the "
            "units of what that wrote."
        )
    given = [name for name in ("allocate", "round_to") if getattr(asked, name) is not None]
    if given or asked.criterion != "magnitude" or asked.target != "params":
        others = ", ".join(f"--{name.replace('_', '-')}" for name in (*given, "criterion", "target"))
        raise ValueError(f"{others} say how units leave; with {word} they stay in {directory}.")
    return kinds


def _factory(asked: Asked) -> Iterator[Any]:
    """A model that a function makes."""
    import torch

    from secateur.checkpoints import new_directory
    from secateur.cli.measuring import blamed, inputs_of, load_weights, model_of
    from secateur.report import before_and_after
    from secateur.shrinking import save_shrunken
    from secateur.shrinking import shrink as shrink_model
    from secateur.support import batch_inputs, device_of, in_mode, moved, printable, run_example

    if asked.example is None and asked.data is None:
        raise ValueError(
            "give --example MODULE:INPUTS, what the model is run on, or --data; only a directory needs none."
        )
    out = None if asked.dry_run else asked.out
    with contextlib.nullcontext() if out is None else new_directory(out) as folder:
        with waiting("Building the model"):
            model, expression = model_of(asked.model)
            given: dict[str, Any] = {}
            if asked.data is not None:
                given = {"batches": read_data(asked, model), "repair": asked.repair}
            inputs = batch_inputs(given["batches"][0]) if asked.example is None else inputs_of(asked.example)
            inputs = moved(inputs, device_of(model))
            if asked.weights is not None:
                load_weights(model, asked.weights)
        dense = None if asked.report is None else copy.deepcopy(model)
        started = time.monotonic()
        ran = blamed(f"{asked.model}, run on {asked.example or asked.data},")
        with waiting("Watching the model run"), ran, torch.no_grad(), in_mode(model, training=False):
            run_example(model, inputs)
        with waiting("Choosing what leaves, and proving it" if asked.verify else "Choosing what leaves"):
            done = shrink_model(
                model,
                inputs,
                asked.sparsity,
                leave=asked.leave,
                **asked.only("uniform", "verify", *HOW),
                **given,
            )
        if folder is not None:
            with waiting("Writing"):
                save_shrunken(model, folder)
    seconds = f"({time.monotonic() - started:.1f} s)"
    more = [f"Nothing was written {seconds}."]
    if out is not None:
        more = [
            f"Wrote plan.json and model.safetensors to {printable(str(out))} {seconds}.",
            *loading(out, asked.model, expression),
        ]
    yield Answer(
        done,
        more=more,
        title=", shrunk",
        timed=None if dense is None else functools.partial(before_and_after, dense, model, inputs),
    )


def loading(out: Path, factory: str, expression: str) -> list[str]:
    """The lines of Python that load it, each on one line, to be copied."""
    from secateur.support import printable

    module, _, name = factory.partition(":")
    lines = (
        "from secateur import load_shrunken",
        f"from {module} import {name.partition('.')[0]}",
        f"model = load_shrunken({expression}, {str(out)!r})",
    )
    return ["To load it:", "", *(f"    {printable(line, 1000)}" for line in lines)]


@contextlib.contextmanager
def calibration(asked: Asked, *, needed: bool = True) -> Iterator[dict[str, Any]]:
    """What a verb is given of a text: the batches, and where they are run; nothing without data.

    Raises:
        ValueError: there is no data, a model of repeated blocks, and no word that this is meant.
    """
    if asked.data is None:
        if needed and not asked.without_data and asked.plan is None:
            _ask_for_data(Path(asked.model))
        yield {}
        return
    with resumable():
        join_processes(asked.device)
        yield {"batches": read_data(asked), **asked.only("repair", "activations", "device")}


def _ask_for_data(directory: Path) -> None:
    from secateur.checkpoints import meta_model_of, open_checkpoint
    from secateur.models import convolutions_in_files, find_blocks

    model = meta_model_of(open_checkpoint(directory))
    try:
        find_blocks(model)
    except ValueError:
        return
    how = {
        "input_ids": "pass --data FILE, a .txt or .jsonl",
        "pixel_values": "pass --data FOLDER, some dozens of pictures",
    }.get(getattr(model, "main_input_name", ""), "")
    how = how if how and not convolutions_in_files(model) else "load the model and call shrink(..., batches=...)"
    raise ValueError(
        f"{directory}: {type(model).__name__} is made of repeated blocks, which do not survive a choice by their "
        "weights alone: without 10% of SmolLM2-135M perplexity goes from 15 to 325 000; where a text chooses and "
        f"repairs, to 15.6. So {how}; or say --without-data, to train it afterwards."
    )
