"""The results that the report of the demo shows, and what it says in words: ``story.txt.j2`` beside this file, and the
figures that go into it.

Law: every figure is a cell of the table, a setting of the run, or what `pack` measured.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from secateur.demo.trials import BATCH, LESS_WORK, Digits, Plan, Trial, parameters_of, run_of
from secateur.inference import Packing
from secateur.report import Results, Row, Run, summarize


def results_of(
    plan: Plan,
    trials: Sequence[Trial],
    latencies: Mapping[int, float],
    packings: Sequence[Packing],
    data: Digits,
    seconds: float,
    command: str,
) -> Results:
    """The table, and what is said of it."""
    dense = trials[0].model
    runs = [run_of(trial, dense, latencies.get(id(trial))) for trial in trials]
    sparsities = sorted({trial.asked for trial in trials if trial.masks and trial.asked})
    shown = 0.9 if 0.9 in sparsities or not sparsities else sparsities[len(sparsities) // 2]
    return Results(
        f"Pruning a network that reads digits ({parameters_of(dense):,} parameters)",
        tuple(runs),
        text=story(runs, shown, packings),
        notes=notes(plan, data, seconds),
        command=command,
        examples=len(data.test_images),
    )


def story(runs: Sequence[Run], sparsity: float, packings: Sequence[Packing]) -> tuple[str, ...]:
    """What the table says."""
    rows = summarize(runs)
    channels = [row for row in rows if row.method.startswith("channels")]
    masked = [row for row in rows if row not in channels]
    there = [row for row in masked if abs(row.sparsity - sparsity) < 0.01] or masked[1:]
    slim = max(masked, key=lambda row: row.sparsity)
    barest = [row for row in masked if abs(row.sparsity - slim.sparsity) < 0.01]
    told = _paragraphs(
        "story",
        dense=rows[0],
        best=_best(there),
        at_random=[row for row in there if row.method == "random"],
        slim=slim,
        hardest=_best(barest) if len(barest) > 1 and slim not in there else None,
        channels=channels[-1] if channels else None,
        packings=[_packed(each) for each in packings],
        batch=BATCH,
    )
    return tuple(re.sub(r"(?<=\d) (?=%|kB|ms)", "\N{NO-BREAK SPACE}", paragraph) for paragraph in told)


def _packed(packing: Packing) -> dict[str, Any]:
    """How many layers skip their zeros, how much faster they are, and why the others do not."""
    stay = Counter(each.why for each in packing.layers if each.kind == "dense")
    return {
        "layers": len(packing.layers),
        "faster": sorted(each.speedup for each in packing.packed if each.speedup),
        "stay": [f"{why} ({count})" for why, count in stay.most_common()],
    }


def notes(plan: Plan, data: Digits, seconds: float) -> tuple[str, ...]:
    """How it was measured."""
    return _paragraphs(
        "notes",
        plan=plan,
        names={method.name for method in plan.methods},
        train_images=len(data.train_images),
        test_images=len(data.test_images),
        batch=BATCH,
        less_work=LESS_WORK,
        seconds=seconds,
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
