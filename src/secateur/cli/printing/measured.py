"""What bench prints: a row for each form of the model, and what was measured."""

import statistics

from rich.console import Console

from secateur import native
from secateur.cli.measuring import Bench, bytes_of
from secateur.support import bytes_text, ratio, table_of

__all__ = ["print_measured"]


def print_measured(console: Console, found: Bench, what: str, *, layers: bool) -> None:
    rows = [
        (
            form.name,
            "" if form.sparsity is None else f"{form.sparsity:.0%}",
            f"{1e3 * statistics.median(own):.3g}",
            f"{ratio(own, found.times[0]):.2f}",
            bytes_text(bytes_of(form.model)),
            "" if form.packing is None else f"{len(form.packing.packed)} of {len(form.packing.layers)} layers",
        )
        for form, own in zip(found.forms, found.times, strict=True)
    ]
    console.print(table_of(("pattern", "sparsity", ">ms", ">times faster", ">size", "packed"), rows))
    console.print(f"\n{what}{found.threads} thread{'s' * (found.threads > 1)}; {native.describe()}.")
    for name, why in found.missing.items():
        console.print(f"No {name}: {why}")
    console.print("Zeros alone do nothing: a layer is packed where that was measured to be faster.")
    if layers:
        for form in found.forms:
            if form.packing is not None:
                percentage = "" if form.sparsity is None else f" {form.sparsity:.0%}"
                console.print(f"\n{form.name}{percentage}\n{form.packing}")
