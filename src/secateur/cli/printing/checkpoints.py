"""What inspect, prune, verify, compress and expand say, on stdout.

Law: what is said of a tensor on one is said on the other.
"""

from collections.abc import Iterator

from rich.console import Console

from secateur.checkpoints import (
    RECORD,
    CheckpointSparsification,
    Inspection,
    TensorInspection,
    inspected_parts,
    left_alone_rows,
    pruned_rows,
)
from secateur.storage import Compression, encoding_rows
from secateur.support import Part, bytes_text, percent, printable, table_of

__all__ = [
    "compressed_parts",
    "print_inspection",
    "pruned_parts",
]


def print_inspection(console: Console, inspection: Inspection, group: bool) -> None:
    for part in inspected_parts(inspection, group=group):
        console.print(part if isinstance(part, str) else table_of(*part))


def pruned_parts(done: CheckpointSparsification) -> Iterator[Part]:
    """How much was pruned, from where to where, and what was left alone."""
    total = done.inspection.total()
    pruned = done.pruned
    yield pruned_rows(done)
    least, *_, most = sorted([*pruned, *pruned], key=_sparsity)
    if percent(least.sparsity) != percent(most.sparsity):
        yield ""
        yield (
            f"From {percent(least.sparsity)} ({printable(least.name)}) to {percent(most.sparsity)} "
            f"({printable(most.name)})."
        )
    if done.left_alone:
        yield ""
        yield left_alone_rows(done)
    yield ""
    if done.stale:
        files = ", ".join(printable(str(path)) for path in done.stale[:4])
        more = f" and {len(done.stale) - 4} more" if len(done.stale) > 4 else ""
        yield f"Copied as they were, not pruned: {files}{more}."
        yield ""
    yield (
        f"Wrote {printable(str(done.out))} ({bytes_text(total.nbytes)} of weights, {done.seconds:.1f} s); "
        f"{RECORD} in it says what was done. The zeros are stored like other numbers: by themselves they make the "
        "files no smaller and the model no faster."
    )


def _sparsity(tensor: TensorInspection) -> float:
    return tensor.sparsity or 0.0


def compressed_parts(done: Compression, line: str) -> list[Part]:
    """The encodings, and a line that says what was written."""
    shown = encoding_rows(done)
    return [shown, "", f"{printable(line, 1000)} ({done.seconds:.1f} s)."]
