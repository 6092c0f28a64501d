"""What fit says on a page, beside what it prints: sheets of what was chosen, and of the curve.

Law: what is named is what the library says.
"""

from secateur.report import Cells, Chart, Sheet
from secateur.search import Fitted, shown_name
from secateur.support import percent, printable

__all__ = ["fitted_sheets"]


def fitted_sheets(done: Fitted) -> list[Sheet]:
    """A row a group; and a row for each budget of the curve."""
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
    told = "The share that each group keeps; a line joins groups that differ in numbers alone."
    return Sheet("What was chosen", cells, [Chart("What is left of each group", told, names, left, "left", share=True)])


def _curve(done: Fitted) -> Sheet:
    curve, scored = done.chosen.curve, done.chosen.dense_score is not None
    word = done.asked.words[0]
    shares = [percent(each.share) for each in curve]
    values = [each.score if scored else each.loss for each in curve]
    what = "score" if scored else "loss"
    cells = [
        Cells(f"{word} left", [each.share for each in curve], shares, [each.share for each in curve]),
        Cells(what, values, ["" if each is None else f"{each:.5g}" for each in values]),
        Cells("", ["the knee" if each.share == done.chosen.knee else "" for each in curve]),
    ]
    told = f"What the model's {what} is at less and less of its {word}, from left to right."
    return Sheet(
        f"The {what} against the budget", cells, [Chart(f"The {what} by the {word}", told, shares, values, what)]
    )
