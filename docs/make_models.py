"""Write docs/models.md from the rows that `make wild` wrote: ``python docs/make_models.py``.

Law: the page says nothing that a row does not, and a test holds it to what this would write.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "tests" / "wild" / "rows.json"
PAGE = ROOT / "docs" / "models.md"
HEAD = """# Models of other libraries

`make wild` builds each model below as its library does, with random weights in float64. It tries on each:

- `shrink` by 30 % of the parameters. A checker that shares no code with the library's own proof compares the result
  with the original whose removed entries are zero, in evaluation and in training mode.
- On some of as many kinds, `shrink` by 20 % of a model in `channels_last`, in bfloat16 and in float16, and whether on
  the meta device, without values, the same is coupled.
- `sparsify` by half, a step of a `Pruner`, saving and loading, and `oneshot` where the inputs are pictures. Of more
  than 5 million parameters it solves all layers from one run: stage by stage it runs the pictures once for each layer.

Where a model takes any, pictures have 96 pixels a side, which shows as much as 224 and costs a sixth. Families that
have no small model have fewer or narrower blocks here (`tests/wild/registries`).

**At most** is how much of the parameters can leave. **Seconds** are those of `shrink` with its proof, of one thread of
a processor. **Stays whole** names what keeps most parameters, beside the model's inputs and outputs.

| status | what it means |
|---|---|
| right | both modes compute the same |
| refused | `shrink` changed nothing and says why |
| unjudged | the checker can't say, and says why |
| untried | it is in the list, and has not run yet |

<!-- Made from tests/wild/rows.json: python docs/make_models.py -->
"""
_OTHERS = ("sparsify", "pruner", "oneshot", "saved", "channels_last", "bfloat16", "float16", "meta")
_LONG = 160


def page() -> str:
    """The whole page."""
    rows = json.loads(ROWS.read_text())
    lines = [HEAD, *_totals(rows)]
    for registry in sorted({row["registry"] for row in rows}):
        mine = [row for row in rows if row["registry"] == registry]
        lines += ["", f"## {registry}", "", "| model | parameters | status | at most | seconds | stays whole |"]
        lines += ["|---|---|---|---|---|---|", *map(_row, mine)]
        if notes := [note for row in mine for note in _notes(row)]:
            lines += ["", *notes]
    return "\n".join(lines) + "\n"


def _totals(rows: list[dict[str, Any]]) -> Iterator[str]:
    counts = Counter(row["status"] for row in rows)
    seconds = [row["seconds"] for row in rows if "seconds" in row]
    said = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    yield f"- {len(rows)} models: {said}."
    share, median, most = counts["right"] / (len(rows) - counts["untried"]), statistics.median(seconds), max(seconds)
    bad = sum(
        str(row.get(verb)).startswith(("wrong", "crash", "timeout")) for row in rows for verb in ("status", *_OTHERS)
    )
    is_met = share >= 0.99 and not bad and median < 3 and most < 60
    yield (
        f"- Of those tried, {share:.1%} are right, and {bad or 'none'} wrong or crashed. Seconds of `shrink`: "
        f"{median:.1f} in the median, {most:.1f} at most. The goal is at least 99 %, none, less than 3 and less than "
        f"60: {'met' if is_met else '**missed**'} for these."
    )
    peaks = [row["peak"] for row in rows if "peak" in row]
    yield f"- Megabytes that a process held: {statistics.median(peaks):.0f} in the median, {max(peaks)} at most."
    for verb in _OTHERS:
        tried = Counter(str(row[verb]).partition(":")[0] for row in rows if row.get(verb, "none") != "none")
        said = ", ".join(f"{count} {status}" for status, count in tried.most_common())
        yield f"- `{verb}` was tried on {sum(tried.values())} of them{': ' if said else ''}{said}."


def _row(row: dict[str, Any]) -> str:
    most = f"{row['most']:.1f} %" if "most" in row else ""
    seconds = f"{row['seconds']:.1f}" if "seconds" in row else ""
    whole = row.get("whole") or (row.get("less") or {}).get("whole") or []
    cells = (
        row["name"],
        f"{row['parameters'] / 1e6:.1f} M" if "parameters" in row else "",
        row["status"],
        most,
        seconds,
        _reasons(whole),
    )
    return f"| {' | '.join(cells)} |"


def _reasons(whole: list[str]) -> str:
    named = (each.partition(": ") for each in whole[:2])
    return "; ".join(f"`{name}`: {_short(reason)}" for name, _, reason in named)


def _notes(row: dict[str, Any]) -> Iterator[str]:
    if row["status"] != "right":
        yield f"- {row['name']}: {_short(row.get('message') or row.get('stopped', ''), 400)}"
    for verb in _OTHERS:
        said = str(row.get(verb, "right"))
        if said not in ("right", "none"):
            yield f"- {row['name']}, `{verb}`: {_short(said, 300)}"


def _short(text: str, room: int = _LONG) -> str:
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return text if len(text) <= room else f"{text[:room]}…"


if __name__ == "__main__":
    PAGE.write_text(page())
