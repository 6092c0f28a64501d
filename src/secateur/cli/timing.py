"""Commands that time a model, on this machine or another one: bench, cost, pack; and the demo."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from secateur.cli.options import command
from secateur.cli.terminal import Answer, Asked


@command(
    "bench", "What zeros would be worth to your model, measured here.", "model",
    "example", "batch", "tokens", "sparsities", "patterns", "threads", batch=1,
)  # fmt: skip
def bench(asked: Asked) -> Iterator[Any]:
    """Prune copies of a model in several patterns, pack them, and time them beside the dense one.

    Beside them: the model as it is with its own zeros packed, if it has any; half of its work removed as whole channels
    (shrink); and int8, dense and shrunken. Accuracy is not looked at: what the zeros cost, only training and validation
    tell. Give an example of the size to be served. Importing a module runs its code: name only what you trust.
    """
    from secateur import patterns
    from secateur.cli.measuring import measured, model_and_inputs

    chosen = {word: patterns.parse(word) for word in asked.patterns or ("unstructured", "16x1", "columns:64")}
    for word, each in chosen.items():
        if each.density is not None:
            raise ValueError(f"{word} has a sparsity of its own; bench wants patterns that take any.")
    for fraction in asked.sparsities or ():
        if not 0 <= fraction < 1:
            raise ValueError(f"--sparsity is a fraction in [0, 1), not {fraction}; 90 % is written 0.9.")
    built, inputs, what = model_and_inputs(asked.model, asked.example, asked.batch, asked.tokens)
    asked["patterns"], asked["sparsities"] = [*chosen], asked.sparsities or [0.5, 0.8, 0.9]
    if not what:  # what the example is says --example
        asked["batch"] = asked["tokens"] = None
    found = measured(built, inputs, chosen, asked.sparsities, asked.threads, what=what)
    yield Answer(found, title=", measured")


@command(
    "cost", "Write small files that say what a model costs on another machine.", "model",
    "emit", "example", "batch", "tokens", "runtime",
    required=("emit",), batch=1, runtime="onnxruntime",
)  # fmt: skip
def cost(asked: Asked) -> Iterator[Any]:
    """Write a small ONNX file of each operation that a model has at fewer units, and a script that times them there.

    Copy the folder to the board and run time_probes.py there, which needs onnxruntime and numpy alone. Its board.csv is
    what --runtime of fit takes. Give an example of the size to be served: a table is of one. The runtime is
    onnxruntime, onnxruntime:int8 or onnxruntime:int4.
    """
    from secateur.checkpoints import check_new
    from secateur.cli.measuring import model_and_inputs
    from secateur.search import write_probes

    check_new(asked.emit)
    built, inputs, what = model_and_inputs(asked.model, asked.example, asked.batch, asked.tokens)
    if not what:  # what the example is says --example
        asked["batch"] = asked["tokens"] = None
    yield Answer(write_probes(built, inputs, asked.emit, runtime=asked.runtime), title=", probes of it")


@command(
    "pack", "Put layers that skip zeros where they are faster here.", "model",
    "example", "batch", "tokens", "weights", "out", "at_least", "values", "inputs", "include", "exclude", "threads",
    verb="inference/packing.py:pack", batch=1,
)  # fmt: skip
def pack(asked: Asked) -> Iterator[Any]:
    """Replace the layers of a model whose zeros pay by ones that skip them, each timed here, and say what that gains.

    Give a model that has zeros already, such as one by secateur prune, and an example of the size to be served: what is
    faster depends on it, on the number of threads and on the machine. Importing a module runs its code: name only what
    you trust.
    """
    from secateur.cli.measuring import load_weights, model_and_inputs, packed
    from secateur.inference import save_packed

    if asked.out is not None:
        _check_new(asked.out)
    if asked.weights is not None and Path(asked.model).is_dir():
        raise ValueError(f"{asked.model} is a directory, with weights of its own: leave out --weights.")
    built, inputs, what = model_and_inputs(asked.model, asked.example, asked.batch, asked.tokens)
    if asked.weights is not None:
        load_weights(built, asked.weights)
    if not what:  # what the example is says --example
        asked["batch"] = asked["tokens"] = None
    done, more = packed(
        built,
        inputs,
        asked.threads,
        what=what,
        **asked.only("at_least", "values", "inputs", "include", "exclude"),
    )
    if asked.out is not None and done.packed:
        save_packed(built, asked.out)
        load = f"secateur.inference.load_packed(model, {str(asked.out)!r})"
        more += ["", f"Wrote {asked.out}; {load} puts it in a dense model."]
    yield Answer(done, more=more, title=", packed")
    if asked.out is not None and not done.packed:
        raise ValueError("no layer was packed, and nothing was written: dense layers are saved as they always are.")


def _check_new(out: Path) -> None:
    """Refuses, before the work, what could not be written after it."""
    if out.exists():
        raise FileExistsError(f"{out} already exists; remove it, or name another file")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{out} cannot be written: there is no folder {out.parent}; create it first")


@command("demo", "Train a small network, prune it, report what that cost.", "", "out", "method")
def demo(asked: Asked) -> Iterator[Any]:
    """Train a small network on handwritten digits, prune it in many ways, and report what that cost and gained.

    OUT is a folder, secateur-demo if left out. It may exist: the page and the results in it are replaced.
    """
    from secateur.demo import METHODS, run_demo
    from secateur.report import load_results

    if asked.method and any("list" in name.split(",") for name in asked.method):
        for name, each in METHODS.items():
            typer.echo(f"{name:<10} {each.line}")
        return
    with contextlib.redirect_stdout(sys.stderr) if asked.as_json else contextlib.nullcontext():
        page = run_demo(asked.out, methods=asked.method)  # which prints as it goes on, and writes a page of its own
    if asked.as_json:
        yield load_results(page.with_name("results.json"))
