"""What a call takes beside what was there: the peak of this process's resident memory."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from pathlib import Path


def high_water_mark() -> int:
    """Bytes that were resident at most since the process began, or since the mark was lowered."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux begins ru_maxrss at the peak of the process that started this one
        lines = status.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextlib.contextmanager
def from_its_peak() -> Iterator[dict[str, float]]:
    """``{"peak": bytes}``: how far resident memory rose inside above where it was; Linux."""
    found: dict[str, float] = {}
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is where memory is now
    before = high_water_mark()
    yield found
    found["peak"] = max(high_water_mark() - before, 0)  # pages of files may have been given back meanwhile
