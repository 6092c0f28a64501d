"""The machine that something was measured on.

Law: neither host name nor path.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path

__all__ = ["processor"]


def processor() -> str:
    """The name of the processor, or "unknown".

    >>> bool(processor())
    True
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1].strip() if model else platform.processor() or "unknown"
