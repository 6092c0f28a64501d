"""``secateur bench``: what zeros would be worth to the user's own model, on this machine.

Law: every figure is measured in this run, beside the dense model, in alternating rounds; the model's weights may be
random, for time does not depend on their values.
"""

import copy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from torch import nn

from secateur import batches, kernels, patterns
from secateur.allocation import uniform
from secateur.factories import inputs_of, model_of
from secateur.inference import Packing, pack
from secateur.progress import track
from secateur.sparsification import sparsify
from secateur.terminal import bytes_text, clear_errors, printing, table_of, terminable

__all__ = ["bench"]

_ROUNDS = 7
_SECONDS_A_ROUND = 0.02


@dataclass(frozen=True)
class _Row:
    name: str
    sparsity: float | None
    model: nn.Module
    packing: Packing | None


def bench(
    factory: Annotated[
        str, typer.Argument(metavar="MODULE:FACTORY", help="What makes the model, called without arguments.")
    ],
    example: Annotated[
        str,
        typer.Option(
            metavar="MODULE:INPUTS",
            help="A tensor or a dict of keyword arguments, or a function that makes one; of the size to be served.",
        ),
    ],
    sparsity: Annotated[
        list[float] | None,
        typer.Option("--sparsity", "-s", help="Fraction removed, in [0, 1). Repeatable; 0.5, 0.8 and 0.9 if left out."),
    ] = None,
    pattern: Annotated[
        list[str] | None,
        typer.Option(
            "--pattern", "-p", help="Repeatable; unstructured, 16x1 and columns:64 if left out. As in secateur prune."
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of torch; its own setting if left out.")] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Show each layer of each form.")] = False,
) -> None:
    """Prune copies of a model in several patterns, pack them, and time them beside the dense one.

    The first row under the dense model is the model as it is, its own zeros packed. Accuracy is not looked at: what the
    zeros cost, only training and validation tell.
    """
    with clear_errors(), terminable():
        chosen = {word: patterns.parse(word) for word in pattern or ("unstructured", "16x1", "columns:64")}
        for word, each in chosen.items():
            if each.density is not None:
                raise ValueError(f"{word} has a sparsity of its own; bench wants patterns that take any.")
        model, _ = model_of(factory)
        inputs = inputs_of(example)
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(threads or before)
            rows = _rows(model, inputs, chosen, sparsity or [0.5, 0.8, 0.9])
            times = _times([_call(row.model, inputs) for row in rows])
            used = torch.get_num_threads()
        finally:
            torch.set_num_threads(before)
        with printing() as console:
            table = table_of("pattern", "sparsity", ">ms", ">times faster", ">size", "packed")
            for row, own in zip(rows, times, strict=True):
                faster = statistics.median(dense / packed for dense, packed in zip(times[0], own, strict=True))
                table.add_row(
                    row.name,
                    "" if row.sparsity is None else f"{row.sparsity:.0%}",
                    f"{statistics.median(own):.3g}",
                    f"{faster:.2f}",
                    bytes_text(_bytes(row.model)),
                    "" if row.packing is None else f"{len(row.packing.packed)} of {len(row.packing.layers)} layers",
                )
            console.print(table)
            console.print(f"\n{used} thread{'s' * (used > 1)}; {kernels.describe()}.")
            console.print("Zeros alone do nothing: a layer is packed where that was measured to be faster.")
            if layers:
                for row in rows[1:]:
                    console.print(
                        f"\n{row.name} {'' if row.sparsity is None else f'{row.sparsity:.0%}'}\n{row.packing}"
                    )
        sys.stdout.flush()


def _rows(model: nn.Module, inputs: Any, chosen: dict[str, patterns.Pattern], sparsities: list[float]) -> list[_Row]:
    model.eval()
    as_it_is = copy.deepcopy(model)
    rows = [_Row("dense", None, model, None), _Row("as it is", None, as_it_is, pack(as_it_is, inputs))]
    wanted = [(word, sparsity) for word in chosen for sparsity in sparsities]
    for word, sparsity in track(wanted, "pruning and packing"):
        other = copy.deepcopy(model)
        sparsify(other, sparsity, pattern=chosen[word], allocate=uniform)
        rows.append(_Row(word, sparsity, other, pack(other, inputs)))
    return rows


def _call(model: nn.Module, inputs: Any) -> Callable[[], Any]:
    return lambda: batches.run(model, inputs)


def _times(calls: list[Callable[[], Any]]) -> list[list[float]]:
    """Milliseconds of each, in rounds in which they alternate; the first round does not count."""
    times: list[list[float]] = [[] for _ in calls]
    with torch.no_grad():
        for turn in track(range(_ROUNDS + 1), "timing"):
            for call, own in zip(calls, times, strict=True):
                started, count = time.perf_counter(), 0
                while not count or time.perf_counter() - started < _SECONDS_A_ROUND:
                    call()
                    count += 1
                if turn:
                    own.append((time.perf_counter() - started) / count * 1e3)
    return times


def _bytes(model: nn.Module) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}.values())
