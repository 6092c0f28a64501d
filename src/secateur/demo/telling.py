"""What the report says in words: ``story.txt.j2`` beside this file, and the figures that go into it.

Law: every figure is a cell of the tables, or a setting of the run.
"""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from secateur.demo.data import Digits
from secateur.demo.measuring import Packed
from secateur.demo.training import BATCH
from secateur.demo.trials import COLUMN_SPARSITY, COLUMNS, LESS_WORK, Plan
from secateur.inference import Packing
from secateur.report import Row, Run, summarize

__all__ = ["checks_in_words", "notes", "smaller_in_words", "story"]


def story(runs: Sequence[Run], sparsity: float) -> tuple[str, ...]:
    """What the table says."""
    rows = summarize(runs)
    there = [row for row in rows if abs(row.sparsity - sparsity) < 0.01] or rows[1:]
    slim = max(rows, key=lambda row: row.sparsity)
    barest = [row for row in rows if abs(row.sparsity - slim.sparsity) < 0.01]
    told = _paragraphs(
        "story",
        dense=rows[0],
        best=_best(there),
        at_random=[row for row in there if row.method == "random"],
        slim=slim,
        hardest=_best(barest) if len(barest) > 1 and slim not in there else None,
    )
    return tuple(map(_tight, told))


def smaller_in_words(rows: Sequence[Row], packed: Packed) -> tuple[str, ...]:
    """What the table of shrunken and packed networks says: of its first row, its last, and the last packed one."""
    skips = [row for row in rows if row.method.endswith(", packed")][-1]
    told = _paragraphs(
        "smaller",
        first=rows[0],
        last=rows[-1],
        skips=skips,
        packings=[_what_packed(packing) for packing in packed.packings],
        batch=BATCH,
    )
    return tuple(map(_tight, told))


def _what_packed(packing: Packing) -> dict[str, Any]:
    """What `pack` measured: how many layers it replaced, how fast the 3×3 convolutions were, why others stayed."""
    speeds = [each.speedup for each in packing.layers if each.shape[2:] == (3, 3) and each.speedup]
    stay = Counter(each.why for each in packing.layers if each.kind == "dense")
    return {
        "packed": len(packing.packed),
        "layers": len(packing.layers),
        "speeds": (min(speeds), max(speeds)) if speeds else (),
        "stay": [f"{why} ({count})" for why, count in stay.items()],
    }


def checks_in_words(label: str, epochs: int) -> dict[str, str]:
    """``{check: what it tells}``, the method itself first."""
    return dict(paragraph.split(": ", 1) for paragraph in _paragraphs("checks", label=label, epochs=epochs))


def notes(plan: Plan, data: Digits, seconds: float, *, checked: bool) -> tuple[str, ...]:
    """How it was measured."""
    return _paragraphs(
        "notes",
        plan=plan,
        names={method.name for method in plan.methods},
        train_images=len(data.train_images),
        test_images=len(data.test_images),
        batch=BATCH,
        less_work=LESS_WORK,
        columns=COLUMNS,
        column_sparsity=COLUMN_SPARSITY,
        seconds=seconds,
        checked=checked,
    )


def _best(rows: Sequence[Row]) -> Row:
    return max(rows, key=lambda row: row.after or 0.0)


def _paragraphs(block: str, **figures: Any) -> tuple[str, ...]:
    """The paragraphs of one block of the template."""
    import jinja2

    words = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # plain text: the page escapes it
    )
    words.filters |= {"fixed": _fixed, "percent": _percent, "kilobytes": _kilobytes}
    template = words.get_template("story.txt.j2")
    text = "".join(template.blocks[block](template.new_context(figures)))
    return tuple(" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip())


def _fixed(value: float, digits: int) -> str:
    return f"{value:.{digits}f}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def _kilobytes(size: float | None) -> str:
    return "–" if size is None else f"{size / 1e3:.0f} kB"


def _tight(paragraph: str) -> str:
    return re.sub(r"(?<=\d) (?=%|kB|ms)", "\N{NO-BREAK SPACE}", paragraph)
