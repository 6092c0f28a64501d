"""What a call takes beside what was there: the peak of this process's resident memory; Linux."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


def high_water_mark() -> int:
    """Bytes that were resident at most since the process began, or since the mark was lowered."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@contextlib.contextmanager
def from_its_peak() -> Iterator[dict[str, float]]:
    """``{"peak": bytes}``: how far resident memory rose inside above where it was."""
    found: dict[str, float] = {}
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is where memory is now
    before = high_water_mark()
    yield found
    found["peak"] = max(high_water_mark() - before, 0)  # pages of files may have been given back meanwhile
