"""What a model weighs and takes, before and after: bytes and measured milliseconds, for a page.

Law: both sides run in one process, in turns, on the same inputs; nothing is worked out from counts.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from secateur.report.account import Cells, Sheet
from secateur.support import alternating, bytes_text, in_mode, ratio, ratios, run_example

__all__ = ["Timed", "before_and_after"]

ROUNDS, SECONDS = 9, 1.0  # so many at least, and more of what is fast


@dataclasses.dataclass(frozen=True)
class Timed:
    """A model before and after, measured.

    Attributes:
        call: what one call is, in words, such as "1 × 32 tokens".
        nbytes: ``(before, after)``, of parameters and buffers in memory.
        before, after: seconds of one call, in each of the rounds.
        threads: that torch ran in.

    >>> timed = Timed("the example", (400, 100), [0.002, 0.002, 0.003], [0.001, 0.001, 0.0015], 1)
    >>> timed.times_faster, timed.sheet().title
    (2.0, 'Before and after, measured')
    """

    call: str
    nbytes: tuple[int, int]
    before: Sequence[float]
    after: Sequence[float]
    threads: int

    @property
    def times_faster(self) -> float:
        """The median of the rounds' ratios."""
        return ratio([*self.after], [*self.before])

    def line(self) -> str:
        """As it is said in a sentence."""
        each = ratios([*self.after], [*self.before])
        was, now = (f"{1000 * statistics.median(times):.3g} ms" for times in (self.before, self.after))
        rounds = f"medians of {len(each)} rounds, in turns, {self.threads} thread{'s' * (self.threads > 1)}"
        won = sum(faster > 1 for faster in each)
        return (
            f"Measured: {self.call} took {was} and takes {now} ({rounds}). It was faster in {won} of them: "
            f"{self.times_faster:.2f} times in the middle one, {min(each):.2f} to {max(each):.2f} in all."
        )

    def sheet(self) -> Sheet:
        """Bytes and milliseconds, a row each, with a bar for what is left."""
        rows: list[tuple[str, float, float, Any]] = [("bytes in memory", *self.nbytes, lambda each: bytes_text(each))]
        for word, which in (("median", statistics.median), ("fastest round", min), ("slowest round", max)):
            both = [1000 * which(times) for times in (self.before, self.after)]
            rows.append((f"{self.call}: ms, {word}", both[0], both[1], "{:.3g}".format))
        left = [after / before if before else None for _, before, after, _ in rows]
        cells = [
            Cells("what", [row[0] for row in rows]),
            Cells("before", [row[1] for row in rows], [shown(before) for _, before, _, shown in rows]),
            Cells("after", [row[2] for row in rows], [shown(after) for _, _, after, shown in rows]),
            Cells("left", left, ["" if each is None else f"{each:.1%}" for each in left], left),
        ]
        return Sheet("Before and after, measured", cells)


def before_and_after(dense: nn.Module, model: nn.Module, example_inputs: Any, *, call: str = "the example") -> Timed:
    """Run both on the example, in evaluation mode and in turns: at least nine rounds, and one second.

    Args:
        dense: what it was. Keep a copy: verbs change a model in place.
        model: what became of it.
        example_inputs: what both are called with, as in `torch.export`: a tuple holds positional arguments, a mapping
            keyword arguments, and anything else is the only argument.
        call: what that is, in words.

    Raises:
        Exception: whatever a model raises on the example. Modes are put back.

    >>> import copy
    >>> from secateur import shrink
    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    >>> dense = copy.deepcopy(model)
    >>> done = shrink(model, torch.randn(2, 8), 0.5)
    >>> timed = before_and_after(dense, model, torch.randn(2, 8))
    >>> timed.nbytes[1] < timed.nbytes[0]
    True
    """
    with torch.no_grad(), in_mode(dense, training=False), in_mode(model, training=False):
        calls = {at: partial(run_example, each, example_inputs) for at, each in enumerate((dense, model))}
        times = alternating(calls, ROUNDS, seconds=SECONDS, told="timing it before and after")
    return Timed(call, (_nbytes(dense), _nbytes(model)), times[0], times[1], torch.get_num_threads())


def _nbytes(model: nn.Module) -> int:
    """Each tensor once, however many names it has."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({(each.data_ptr(), each.shape): each.nbytes for each in tensors}.values())
