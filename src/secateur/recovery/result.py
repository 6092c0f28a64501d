"""The result of `recover`: the losses, the error of each part of a block, and the zeros before and after. The tables of
`recover` on a page: the learning curve, parts of blocks, zeros before and after.
"""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from secateur.recovery.local import LocalPart
from secateur.report import Cells, Chart, Reported, Sheet
from secateur.support import Part, Rows, bytes_text, printable

# ---- The result of `recover`: the losses, the error of each part of a block, and the zeros before and after.
#
# Law: it holds the numbers, and says them as lines and tables.

LINES = 10  # of the learning curve that a table shows
NOISE = 1e-3  # of a loss: what rounding to bfloat16 does to it


@dataclass(frozen=True)
class Judged:
    """The mean loss over the same batches before the steps by the outputs and after the last one."""

    batches: int
    before: float
    after: float
    loss: str

    @property
    def is_kept(self) -> bool:
        """Whether the steps are: they did not make it worse, by more than rounding may."""
        return self.after <= self.before + NOISE * abs(self.before)

    def described(self) -> dict[str, Any]:
        """As JSON, which knows no infinite number."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }

    def said(self) -> str:
        """In one sentence.

        >>> Judged(2, 0.5, 0.25, "kl").said()
        'Over 2 batches the loss (kl) was 0.50000 before the steps and 0.25000 after them.'
        """
        word = "1 batch" if self.batches == 1 else f"{self.batches} batches"
        before, after = apart(self.before, self.after)
        found = f"Over {word} the loss ({self.loss}) was {before} before the steps and {after} after them"
        return f"{found}." if self.is_kept else f"{found}: they are not kept."

    def warn(self, rate: float) -> None:
        """Says so and what to do, where the steps are not kept."""
        if not self.is_kept:
            message = f"{self.said()} Lower rate= ({rate:g}; try {rate / 3:.1g}), or take more text."
            warnings.warn(message, UserWarning, stacklevel=4)


def apart(before: float, after: float) -> tuple[str, str]:
    """Both with as many digits as tell them apart, five at least.

    >>> apart(0.5, 0.25), apart(0.003001, 0.003004), apart(1.0, 1.0)
    (('0.50000', '0.25000'), ('0.003001', '0.003004'), ('1.00000', '1.00000'))
    """
    for digits in range(5, 18):
        found = f"{before:.{digits}f}", f"{after:.{digits}f}"
        if before == after or found[0] != found[1]:
            break
    return found


@dataclass(frozen=True)
class Recovered(Reported):
    """The result of `recover`; prints as a table.

    Attributes:
        losses: of each step by the outputs, before it.
        loss: the word or the name of what they are.
        parts: a `LocalPart` for each part of a block that was trained locally.
        zeros: ``{name: (before, after)}`` of the weights that have zeros, or are masked.
        rows: of the outputs that were compared, such as tokens, over all steps.
        seconds: wall time.
        memory: the most that the process has had, in bytes, where the system says so; of a GPU what torch took.
        left_out: what was asked for and could not be done, and why.
        out: the directory, where one was written.
        judged: how it did before the steps by the outputs and after them. What made it worse is not kept.
    """

    losses: tuple[float, ...]
    loss: str | None
    parts: tuple[LocalPart, ...]
    zeros: Mapping[str, tuple[int, int]]
    rows: int
    seconds: float
    memory: int | None = None
    left_out: tuple[str, ...] = ()
    out: Path | None = None
    judged: Judged | None = None

    @property
    def steps(self) -> int:
        """How many there were by the outputs."""
        return len(self.losses)

    @property
    def first(self) -> float | None:
        """The mean loss of the first tenth of the steps."""
        return _mean(self.losses[: _tenth(self.losses)])

    @property
    def last(self) -> float | None:
        """The mean loss of the last tenth of the steps."""
        return _mean(self.losses[len(self.losses) - _tenth(self.losses) :])

    def curve(self, spans: int = LINES) -> list[tuple[int, int, float]]:
        """``(first step, last step, mean loss)`` of at most so many spans of steps."""
        edges = sorted({round(len(self.losses) * at / spans) for at in range(spans + 1)})
        return [(low + 1, high, _mean(self.losses[low:high]) or 0.0) for low, high in itertools.pairwise(edges)]

    def _sheets(self) -> list[Sheet]:

        return recovered_sheets(self)

    def _parts(self) -> Iterator[Part]:
        if self.parts:
            rows = [(each.block, each.part, f"{each.before:.5f}", f"{each.after:.5f}") for each in self.parts]
            yield Rows(("Block", "Up to", ">Lost before", ">After"), rows)
            yield ""
        if self.losses:
            points = [(f"{a}-{b}" if a < b else f"{a}", f"{loss:.5f}") for a, b, loss in self.curve()]
            yield Rows((">Steps", f">Loss ({self.loss})"), points)
            yield ""
        yield from self.lines()

    def lines(self) -> Iterator[str]:
        """All but the tables."""
        if self.parts:
            before, after = (_mean([getattr(each, name) for each in self.parts]) or 0 for name in ("before", "after"))
            yield (
                f"{len(self.parts)} parts of blocks: mean relative error {after:.5f} to the teacher, before "
                f"{before:.5f}."
            )
        if self.losses:
            yield (
                f"{self.steps:,} steps over {self.rows:,} rows: the loss ({self.loss}) went from "
                f"{self.first:.5f} to {self.last:.5f}, over the first and last tenth."
            )
        if self.judged is not None:
            yield self.judged.said()
        before, after = (sum(pair[at] for pair in self.zeros.values()) for at in (0, 1))
        if self.zeros:
            yield f"Zeros in {len(self.zeros)} weights: {before:,} before, {after:,} after."
        else:
            yield "No weight has zeros to keep."
        yield from (f"Left out: {printable(each, 1000)}." for each in self.left_out)
        memory = "" if self.memory is None else f", at most {bytes_text(self.memory)} of memory"
        yield f"{self.seconds:.1f} s{memory}."
        if self.out is not None:
            yield f"In {printable(str(self.out), 1000)}."


def _tenth(values: Sequence[float]) -> int:
    return max(1, len(values) // 10)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def memory_of(device: torch.device | None) -> int | None:
    """The most memory that was taken, in bytes: of a GPU by torch, else of the process."""
    if device is not None and device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ---- The tables of `recover` on a page: the learning curve, parts of blocks, zeros before and after.
#
# Law: the zeros before and after are said.

POINTS = 200  # of the learning curve on a page
ROWS = 20  # of its table


def recovered_sheets(done: Recovered) -> list[Sheet]:
    """The sheets of a `recover` result: the learning curve, the parts of blocks, and the weights with zeros."""
    sheets = []
    if done.losses:
        curve, rows = done.curve(POINTS), done.curve(ROWS)
        loss = f"loss ({done.loss})"
        chart = Chart(
            "The learning curve",
            "How far the model's outputs are from the teacher's, before each step; a point is the mean of its steps.",
            [_span(first, last, "step") for first, last, _ in curve],
            [value for *_, value in curve],
            loss,
            series=[loss] * len(curve),
            places=[(first + last) / 2 for first, last, _ in curve],
            along="step",
        )
        values = [value for *_, value in rows]
        cells = [
            Cells("steps", [first for first, *_ in rows], [_span(first, last) for first, last, _ in rows]),
            Cells(loss, values, [f"{each:.5f}" for each in values]),
        ]
        sheets.append(Sheet("By the outputs", cells, [chart]))
    if done.parts:
        names = [printable(each.block, 1000) for each in done.parts]
        ends = [printable(each.part, 1000) for each in done.parts]
        before, after = [each.before for each in done.parts], [each.after for each in done.parts]
        cells = [
            Cells("block", names),
            Cells("up to", ends),
            Cells("lost before", before, [f"{each:.5f}" for each in before]),
            Cells("after", after, [f"{each:.5f}" for each in after]),
        ]
        places = list(range(1, 1 + len(names)))
        chart = Chart(
            "Each part's relative error to the teacher",
            "The share of the squared activations that is missing, in the order of the walk.",
            [f"{name}, up to {end}" for name, end in zip(names, ends, strict=True)] * 2,
            [*before, *after],
            "lost",
            series=["before"] * len(names) + ["after"] * len(names),
            places=places * 2,
            along="part",
        )
        sheets.append(Sheet("Block by block", cells, [chart]))
    if done.zeros:
        before_after = [[pair[at] for pair in done.zeros.values()] for at in (0, 1)]
        cells = [
            Cells("weight", [printable(name, 1000) for name in done.zeros]),
            *(
                Cells(f"zeros {word}", counts, [f"{each:,}" for each in counts])
                for word, counts in zip(("before", "after"), before_after, strict=True)
            ),
        ]
        sheets.append(Sheet("Zeros", cells))
    return sheets


def _span(first: int, last: int, word: str = "") -> str:
    """Steps in words, from one to another.

    >>> _span(3, 3), _span(3, 5, "step")
    ('3', 'steps 3-5')
    """
    if first == last:
        return f"{word} {first}".strip()
    return f"{word}s {first}-{last}" if word else f"{first}-{last}"
