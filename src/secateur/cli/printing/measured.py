"""What bench and pack say: a row for each form of the model, and each layer of it.

Law: a form is compared with the dense one, in medians over rounds.
"""

import statistics
from collections.abc import Iterator

from secateur import native
from secateur.cli.measuring import Bench, Form, bytes_of
from secateur.inference import Packing, layers_sheet
from secateur.report import Cells, Sheet
from secateur.support import Part, Rows, bytes_text, ratio

__all__ = ["measured_parts", "measured_sheets", "packed_parts"]


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
