"""What the report says in words: ``story.txt.j2`` beside this file, and the figures that go into it. The results that
the report shows: the table, the sanity checks, what is smaller and faster.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from secateur.demo.trials import (
    BATCH,
    COLUMN_SPARSITY,
    COLUMNS,
    LESS_WORK,
    Digits,
    Packed,
    Plan,
    Trial,
    compressed_size,
    file_size,
    parameters_of,
    run_of,
    state_bytes,
)
from secateur.inference import Packing
from secateur.report import Check, Results, Row, Run, summarize
from secateur.targets import find_targets

# ---- What the report says in words: ``story.txt.j2`` beside this file, and the figures that go into it.
#
# Law: every figure is a cell of the tables, or a setting of the run.


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


# ---- The results that the report shows: the table, the sanity checks, what is smaller and faster.


def results_of(
    plan: Plan,
    trials: Sequence[Trial],
    checks: Mapping[str, Sequence[Trial]],
    latencies: Mapping[int, float],
    data: Digits,
    seconds: float,
) -> Results:
    """The table, the checks, and what is said of them."""
    runs = [run_of(trial, latencies.get(id(trial))) for trial in trials]
    sparsities = sorted({trial.asked for trial in trials if trial.asked})
    shown = 0.9 if 0.9 in sparsities or not sparsities else sparsities[len(sparsities) // 2]
    return Results(
        f"Pruning a network that reads digits ({parameters_of(trials[0].model):,} parameters)",
        tuple(runs),
        text=story(runs, shown),
        notes=notes(plan, data, seconds, checked=bool(checks)),
        examples=len(data.test_images),
        checks=_checks(trials, checks, plan.tuning_epochs),
    )


def with_shrunken(
    results: Results,
    trials: Sequence[Trial],
    packed: Sequence[Packed],
    latencies: Mapping[int, float],
    batches: Mapping[int, float],
) -> Results:
    """The same results with the table of what is smaller and faster, and what it says in words."""
    dense, runs, skipping = trials[0], [], []
    known = {(each.trial.label, each.trial.asked): each for each in packed}
    for trial in trials:
        run = replace(
            run_of(trial, latencies.get(id(trial))),
            zipped=None,
            batch_ms=batches.get(id(trial)),
            memory=state_bytes(trial.model),
            compressed=compressed_size(trial.model),
        )
        if trial.label.startswith("channels"):
            now, whole = find_targets(trial.model).values(), trial.originals.values()
            removed = 1 - sum(weight.numel() for weight in now) / sum(weight.numel() for weight in whole)
            run = replace(run, sparsity=removed, overall=1 - parameters_of(trial.model) / parameters_of(dense.model))
        elif trial.masks:
            run = replace(run, method=f"{run.method} (zeros)")
            each = known[trial.label, trial.asked]
            # The other seeds' accuracy is that of their masked networks
            measured = each if each.trial is trial else None
            skipping.append(
                replace(
                    run,
                    method=f"{trial.label}, packed",
                    bytes=None if measured is None else file_size(each.many),
                    memory=None if measured is None else state_bytes(each.many),
                    latency_ms=latencies.get(id(measured)),
                    batch_ms=batches.get(id(measured)),
                )
            )
        runs.append(run)
    channels = [run for run in runs if run.method.startswith("channels")]
    runs = [*(run for run in runs if run not in channels), *skipping, *channels]
    said = smaller_in_words(summarize(runs), packed[-1])
    return replace(results, shrunken=tuple(runs), text=(*results.text, *said))


def _checks(trials: Sequence[Trial], spoilt: Mapping[str, Sequence[Trial]], epochs: int) -> tuple[Check, ...]:
    if not spoilt:
        return ()
    one = next(iter(spoilt.values()))[0]
    sound = [trial for trial in trials if (trial.label, trial.asked) == (one.label, one.asked)]
    told = checks_in_words(one.label, epochs)
    groups = [sound, *spoilt.values()]
    return tuple(
        Check(name, tells, tuple(run_of(trial) for trial in group))
        for (name, tells), group in zip(told.items(), groups, strict=True)
    )
