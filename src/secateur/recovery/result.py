"""The result of `recover`: the losses, the error of each part of a block, and the zeros before and after."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from secateur.models import ByText
from secateur.recovery.local import LocalPart
from secateur.support import Chart, Column, Part, Table, bytes_text, printable, warn

# ---- The result of `recover`: the losses, the error of each part of a block, and the zeros before and after.
#
# Law: it holds the numbers, and says them as lines and tables.

LINES, POINTS = 10, 200  # of the learning curve: that are printed, and that are on a page
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
            warn(message)


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
class Recovered(ByText):
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

    def content(self) -> Iterator[Part]:
        """Parts of blocks, the learning curve, and the weights with zeros."""
        parts, curve = self._tables(POINTS)
        if parts.rows:
            yield parts
        if curve.rows:
            yield curve
        if self.zeros:
            yield Table.of(
                "zeros",
                [(name, *counts) for name, counts in self.zeros.items()],
                Column.name("Weight"),
                Column.count("Zeros before", key="before"),
                Column.count("Zeros after", key="after"),
                title="Zeros",
            )
        yield from self.by_text()
        yield from self._lines()

    def summary(self) -> Iterator[Part]:
        """Without the weights, and the curve in a few lines."""
        for table in self._tables(LINES):
            if table.rows:
                yield table
                yield ""
        yield from self.by_text()
        yield from self._lines()

    def _tables(self, spans: int) -> tuple[Table, Table]:
        parts = Table.of(
            "parts",
            self.parts,
            Column("Block", lambda each: each.block),
            Column("Up to", lambda each: each.part),
            Column.figure("Lost before", lambda each: each.before, ".5f", key="before"),
            Column.figure("After", lambda each: each.after, ".5f"),
            title="Block by block",
        )
        names = [f"{each.block}, up to {each.part}" for each in self.parts]
        chart = Chart(
            "Each part's relative error to the teacher",
            "The share of the squared activations that is missing, in the order of the walk.",
            names * 2,
            [*(each.before for each in self.parts), *(each.after for each in self.parts)],
            "lost",
            series=["before"] * len(names) + ["after"] * len(names),
            places=[*range(1, 1 + len(names))] * 2,
            along="part",
        )
        points, loss = self.curve(spans), f"loss ({self.loss})"
        curve = Table.of(
            "curve",
            points,
            Column("Steps", lambda each: each[:2], _span, "right", number=lambda pair: pair[0]),
            Column.figure(loss.capitalize(), lambda each: each[2], ".5f", key="loss"),
            title="By the outputs",
        ).drawn(
            "loss",
            "The learning curve",
            "How far the model's outputs are from the teacher's, before each step; a point is the mean of its steps.",
            label=loss,
            series=[loss] * len(points),
            places=[(first + last) / 2 for first, last, _ in points],
            along="step",
        )
        return replace(parts, charts=[chart]), curve

    def _lines(self) -> Iterator[str]:
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
            yield ""
            yield f"Wrote {printable(str(self.out), 1000)}; secateur.json in it says what was done."


def _tenth(values: Sequence[float]) -> int:
    return max(1, len(values) // 10)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def memory_of(device: torch.device | None) -> int | None:
    """The most memory that was taken, in bytes: of a device by torch, which says so of most, else of the process."""
    backend: Any = None if device is None or device.type in ("cpu", "meta") else torch.get_device_module(device)
    if hasattr(backend, "max_memory_allocated"):
        return int(backend.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _span(steps: Sequence[int]) -> str:
    """Steps in words, from one to another.

    >>> _span((3, 3)), _span((3, 5))
    ('3', '3-5')
    """
    first, last = steps
    return f"{first}" if first == last else f"{first}-{last}"
