"""The tables of `sensitivity` and `fit` on a page: groups with their costs, the choice, and the curve.

Law: what is named and measured is what the library says.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from secateur.report import Cells, Chart, Sheet
from secateur.search.levels import shown_name, told, told_share
from secateur.support import percent, printable

if TYPE_CHECKING:
    from secateur.search.fitted import Fitted
    from secateur.search.sensitivity import Sensitivity

__all__ = ["fitted_sheets", "sensitivity_sheets"]

_LABELS = {"kl": "divergence (kl)", "cosine": "1 - cosine"}  # a chart says that more of it is worse


def sensitivity_sheets(found: Sensitivity) -> list[Sheet]:
    """The sheets of a `Sensitivity`, a row for each group: its errors and the model's scores at each share, with a
    chart of the scores at the middle one.
    """
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
    labels = [f"{name} ({kind})" for name, kind in zip(names, kinds, strict=True)]
    label = _LABELS.get(found.score, found.score)
    charts = [Chart("What each group costs", caption, labels, by_share[middle], label)]
    return [Sheet("Group by group", cells, charts)]


def _at(found: Sensitivity, name: str, share: float) -> tuple[float | None, float | None]:
    """Error and score of a group at a share; None where it has no such level."""
    for level, value in zip(found.levels[name], found.scores[name], strict=True):
        if level.share == share:
            return level.error, value if math.isfinite(value) else None
    return None, None


def fitted_sheets(done: Fitted) -> list[Sheet]:
    """The sheets of a `Fitted`: a table of groups, and one of the curve's budgets."""
    return [_groups(done), *([_curve(done)] if done.chosen.curve else [])]


def _groups(done: Fitted) -> Sheet:
    levels = {
        name: each[done.chosen.choice.get(name, 0)] for name, each in done.levels.items() if name in done.whole_or_not
    }
    names = [printable(shown_name(name), 1000) for name in levels]
    left = [each.kept / each.of for each in levels.values()]
    cells = [
        Cells("group", names),
        Cells("kind", [done.levels.kind[name] for name in levels]),
        Cells("units", [each.of for each in levels.values()], [f"{each.of:,}" for each in levels.values()]),
        Cells("left", [each.kept for each in levels.values()], [f"{each.kept:,}" for each in levels.values()]),
        Cells("share left", left, [percent(each) for each in left], left),
        Cells("error", [each.error for each in levels.values()], [f"{each.error:.4f}" for each in levels.values()]),
    ]
    caption = "The share that each group keeps; a line joins groups that differ in numbers alone."
    chart = Chart("What is left of each group", caption, names, left, "left", share=True)
    return Sheet("What was chosen", cells, [chart])


def _curve(done: Fitted) -> Sheet:
    curve, scored = done.chosen.curve, done.chosen.dense_score is not None
    word = done.asked.words[0]
    shares = [percent(each.share) for each in curve]
    values = [each.score if scored else each.loss for each in curve]
    what = "score" if scored else "loss"
    cells = [
        Cells(f"{word} left", [each.share for each in curve], shares, [each.share for each in curve]),
        Cells(what, values, ["" if each is None else f"{each:.5g}" for each in values]),
        Cells("note", ["the knee" if each.share == done.chosen.knee else "" for each in curve]),
    ]
    chart = Chart(
        f"The {what} by the {word}",
        f"What the model's {what} is at less and less of its {word}.",
        shares,
        values,
        what,
        series=["the best choice found"] * len(curve),
        places=[100 * (1 - each.share) for each in curve],
        along=f"{word} gone (%)",
    )
    return Sheet(f"The {what} against the budget", cells, [chart])
