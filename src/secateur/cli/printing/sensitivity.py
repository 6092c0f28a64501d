"""What sensitivity says: sheets for a page, and JSON.

Law: what is named and measured is what the library says; a score that is no number is null.
"""

import json
import math

from secateur.report import Cells, Chart, Sheet
from secateur.search import Sensitivity, shown_name, told, told_share
from secateur.support import printable

__all__ = ["json_of", "sensitivity_sheets"]


def sensitivity_sheets(found: Sensitivity) -> list[Sheet]:
    """A row a group: its errors and the model's scores at each share, with a chart of the scores at the middle one."""
    levels, shares = found.levels, found.shares
    names = [printable(shown_name(name), 1000) for name in levels]
    kinds = [levels.kind[name] for name in levels]
    sizes = [each[0].of for each in levels.values()]
    cells = [
        Cells("group", names),
        Cells("kind", kinds),
        Cells("units", sizes, [f"{size:,}" for size in sizes]),
    ]
    for share in shares:
        errors = [_at(found, name, share)[0] for name in levels]
        cells.append(
            Cells(f"error at {told_share(share)}", errors, ["" if each is None else f"{each:.4f}" for each in errors])
        )
    by_share = {share: [_at(found, name, share)[1] for name in levels] for share in shares}
    for share, values in by_share.items():
        largest = max((each for each in values if each is not None), default=0.0)
        bars = [None if each is None or not largest > 0 else max(each, 0.0) / largest for each in values]
        texts = ["" if each is None else told(each) for each in values]
        cells.append(Cells(f"{found.score} at {told_share(share)}", values, texts, bars))
    middle = min(shares, key=lambda share: abs(share - 0.5))
    caption = (
        f"What the model loses ({found.score}) where {told_share(middle)} of each group alone leaves; a line joins "
        "groups that differ in numbers alone."
    )
    labels = [f"{name} ({kind})" if _is_twice(name, names) else name for name, kind in zip(names, kinds, strict=True)]
    chart = Chart("What each group costs", caption, labels, by_share[middle], found.score)
    return [Sheet("Group by group", cells, [chart])]


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


def _at(found: Sensitivity, name: str, share: float) -> tuple[float | None, float | None]:
    """Error and score of a group at a share; None where it has no such level."""
    for level, value in zip(found.levels[name], found.scores[name], strict=True):
        if level.share == share:
            return level.error, value if math.isfinite(value) else None
    return None, None


def _is_twice(name: str, names: list[str]) -> bool:
    return names.count(name) > 1
