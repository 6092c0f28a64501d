"""What each command prints of its result on stdout, as lines and tables; on a page it is the same."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from secateur import native, shrinking
from secateur.checkpoints import (
    RECORD,
    CheckpointSparsification,
    Inspection,
    TensorInspection,
    inspected_parts,
    left_alone_rows,
    pruned_rows,
)
from secateur.cli.measuring import Bench, Form, bytes_of
from secateur.cli.terminal import printing
from secateur.inference import Packing, layers_sheet
from secateur.report import Cells, Sheet
from secateur.shrinking import (
    CheckpointShrinking,
    Shrunk,
    ShrunkDepth,
    ShrunkExperts,
    checkpoint_parts,
    depth_parts,
    proof_words,
    shrunk_parts,
)
from secateur.storage import Compression, encoding_rows
from secateur.support import Part, Rows, bytes_text, percent, printable, ratio, table_of
from secateur.vocabulary import ShrunkVocabulary, vocabulary_parts

if TYPE_CHECKING:
    from secateur.models import OneShot
    from secateur.recovery import Recovered
    from secateur.search import Sensitivity


# ---- What oneshot says when all blocks are done, on stdout.
#
# Law: what was left alone, what was warned of and what no token reached is said.


def pruned_blocks_parts(done: OneShot) -> Iterator[Part]:
    """Sums over all weights; reasons, warnings, experts without tokens; where it is."""
    yield (
        f"Pruned {len(done.layers)} weights, {percent(done.sparsity)} of their entries; the mean squared relative "
        f"error of their outputs is {done.error:.4f}."
    )
    for reason, names in done.left_alone.items():
        yield f"Left alone, {reason}: {len(names)}, such as {printable(names[0])}."
    for warning in done.warnings:
        yield f"Warning: {printable(warning, 400)}"
    idle = [layer.name for layer in done.layers if layer.without_tokens or not layer.tokens]
    if idle:
        yield (
            f"{len(idle)} weights have experts that no token was sent to, and were pruned by magnitude there, such as "
            f"{printable(idle[0])}; more calibration text may reach them."
        )
    yield ""
    yield f"Wrote {printable(str(done.out))} ({done.seconds:.1f} s); secateur.json in it says what was done."


# ---- What inspect, prune, verify, compress and expand say, on stdout.
#
# Law: what is said of a tensor on one is said on the other.


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


# ---- What experts says: what its result says of itself, and where it is.
#
# Law: what is drawn is what is printed, of every mixture.


def experts_parts(done: ShrunkExperts, profile: Path | None) -> Iterator[Part]:
    """What left, on what it was proved, and where it is."""
    yield from shrinking.experts_parts(done)
    yield f"{proof_words(done)}."
    if done.left_out:
        files = ", ".join(printable(str(path)) for path in done.left_out[:4])
        yield f"Left out, as they hold the weights in other forms: {files}."
    if profile is not None:
        yield f"The profile is in {printable(str(profile))}."
    if done.out is None:
        yield f"No model was written ({done.seconds:.1f} s)."
    else:
        yield f"Wrote {printable(str(done.out))}; from_pretrained loads it ({done.seconds:.1f} s)."


# ---- What bench and pack say: a row for each form of the model, and each layer of it.
#
# Law: a form is compared with the dense one, in medians over rounds.


def measured_parts(found: Bench, what: str, *, layers: bool = False) -> Iterator[Part]:
    """The forms and what was measured of each; with ``layers`` those of every packed one."""
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
    yield Rows(("~pattern", "sparsity", ">ms", ">times faster", ">size", "packed"), rows)
    yield ""
    yield f"{what}{threads_text(found.threads)}; {native.describe()}."
    yield from (f"No {name}: {why}" for name, why in found.missing.items())
    yield "Zeros alone do nothing: a layer is packed where that was measured to be faster."
    if layers:
        for form in found.forms:
            if form.packing is not None:
                yield ""
                yield _title(form)
                yield form.packing.parts[0]


def measured_sheets(found: Bench) -> list[Sheet]:
    """A row a form, with bars for its time; then the layers of every packed one."""
    names = [_title(form) for form in found.forms]
    medians = [1e3 * statistics.median(own) for own in found.times]
    most = max(medians)
    sizes = [bytes_of(form.model) for form in found.forms]
    faster = [ratio(own, found.times[0]) for own in found.times]
    cells = [
        Cells("form", names),
        Cells("ms", medians, [f"{each:.3g}" for each in medians], [each / most for each in medians]),
        Cells(
            "ms, fastest round", [1e3 * min(own) for own in found.times], [f"{1e3 * min(o):.3g}" for o in found.times]
        ),
        Cells(
            "ms, slowest round", [1e3 * max(own) for own in found.times], [f"{1e3 * max(o):.3g}" for o in found.times]
        ),
        Cells("times faster", faster, [f"{each:.2f}" for each in faster]),
        Cells("size", sizes, [bytes_text(each) for each in sizes]),
    ]
    packed = [(_title(form), form.packing) for form in found.forms if form.packing is not None]
    return [Sheet("Form by form", cells), *(layers_sheet(f"The layers of {name}", each) for name, each in packed)]


def packed_parts(packing: Packing, found: Bench, what: str) -> Iterator[Part]:
    """The layers and their sum; then the whole model, as it was and packed."""
    rows, said = packing.parts
    yield from (rows, "", said)
    if packing.packed:
        dense, packed = (1e3 * statistics.median(own) for own in found.times)
        faster = ratio(found.times[1], found.times[0])
        yield f"The model takes {packed:.3g} ms, and took {dense:.3g}; round by round {faster:.2f} times as fast."
    yield f"{what}{threads_text(found.threads)}; {native.describe()}."


def threads_text(threads: int) -> str:
    return f"{threads} thread{'s' * (threads > 1)}"


def _title(form: Form) -> str:
    return form.name if form.sparsity is None else f"{form.name} {form.sparsity:.0%}"


# ---- What recover says when it is done, on stdout.
#
# Law: the zeros before and after are said, and what was left out.


def recovered_parts(done: Recovered) -> Iterator[Part]:
    """All but the tables; where it is."""
    yield from (line for line in done.lines() if not line.startswith("In "))
    yield ""
    yield f"Wrote {printable(str(done.out))}; secateur.json in it says what was done."


# ---- What sensitivity says, as JSON.
#
# Law: what is named and measured is what the library says; a score that is no number is null.


def json_of(found: Sensitivity) -> str:
    """All of it, as JSON."""
    return json.dumps(
        {
            "score": found.score,
            "dense": found.dense,
            "rows": found.rows,
            "runs": found.passes,
            "groups": [
                {
                    "name": name,
                    "kind": found.levels.kind[name],
                    "units": each[0].of,
                    "levels": [
                        {
                            "share": level.share,
                            "kept": level.kept,
                            "error": level.error,
                            "loss": level.loss,
                            "score": value if math.isfinite(value) else None,
                            "costs": dict(level.costs),
                        }
                        for level, value in zip(each, found.scores[name], strict=True)
                    ],
                }
                for name, each in found.levels.items()
            ],
            "left_alone": dict(found.levels.left_alone),
        },
        indent=1,
    )


# ---- What shrink says: what its result says of itself, and how to load what was written.
#
# Law: what leaves and what stays is named as the library names it.


def model_parts(done: Shrunk, out: Path | None, seconds: float, *, verbose: bool = False) -> Iterator[Part]:
    """What left a model, whether that was proved, and where it is."""
    yield from shrunk_parts(done, verbose=verbose)
    yield ""
    proof = "Proved on random weights that nothing else changed" if done.asked.verify else "Not proved, as asked"
    yield f"{proof} ({seconds:.1f} s)."
    if out is None:
        yield "Nothing was written."
    else:
        yield f"Wrote plan.json and model.safetensors to {printable(str(out))}."


def print_loading(out: Path, factory: str, expression: str) -> None:
    """The lines of Python that load it, each on one line, to be copied."""
    module, _, name = factory.partition(":")
    with printing() as console:
        console.print("To load it:\n")
        for line in (
            "from secateur import load_shrunken",
            f"from {module} import {name.partition('.')[0]}",
            f"model = load_shrunken({expression}, {str(out)!r})",
        ):
            console.print(f"    {printable(line, 1000)}", soft_wrap=True)


def directory_parts(done: CheckpointShrinking, *, verbose: bool = False) -> Iterator[Part]:
    """What left a directory, on what that was proved, and where it is."""
    yield from checkpoint_parts(done, verbose=verbose)
    yield ""
    yield f"{proof_words(done)} ({done.seconds:.1f} s)."
    if done.left_out:
        files = ", ".join(printable(str(path)) for path in done.left_out[:4])
        yield f"Left out, as they hold the weights in other forms: {files}."
    yield "Nothing was written." if done.out is None else f"Wrote {printable(str(done.out))}; from_pretrained loads it."


def blocks_parts(done: ShrunkDepth) -> Iterator[Part]:
    """Which blocks left a directory, on what that was proved, and where it is."""
    yield from depth_parts(done)
    if done.left_out:
        files = ", ".join(printable(str(path)) for path in done.left_out[:4])
        yield f"Left out, as they hold the weights in other forms: {files}."
    if done.out is None:
        yield f"Nothing was written ({done.seconds:.1f} s)."
    else:
        yield f"Wrote {printable(str(done.out))}; from_pretrained loads it ({done.seconds:.1f} s)."


# ---- What vocabulary says: what its result says of itself, and where it is.
#
# Law: tokens are printed as text that holds no control character.


def shrunken_parts(done: ShrunkVocabulary) -> Iterator[Part]:
    """What left, what that does to text, on what it was proved, and where it is."""
    yield from vocabulary_parts(done)
    if done.left_out:
        files = ", ".join(printable(str(path)) for path in done.left_out[:4])
        yield f"Left out, as they say the old numbers or hold the weights in other forms: {files}."
    if done.left_whole:
        names = ", ".join(printable(name) for name in done.left_whole[:4])
        yield f"Left whole, as long as the vocabulary and no part of the model: {names}."
    yield ""
    took = f"{done.seconds:.1f} s, {done.counting:.1f} of them for counting"
    if done.out is None:
        yield f"Nothing was written ({took})."
    else:
        loads = "; from_pretrained loads it" if done.fields else ""  # of a table of tokens there is no configuration
        yield f"Wrote {printable(str(done.out))}{loads} ({took})."
