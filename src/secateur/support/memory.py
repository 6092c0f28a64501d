"""How much memory is free to this process.

Law: the least of what the machine, the container and the process's own limit leave; None where none of them says it.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

__all__ = ["free_memory"]


def free_memory(device: torch.device | None = None) -> int | None:
    """Bytes that are free: on a CUDA device its own; else the least of MemAvailable, of what the control group's limit
    leaves, and of what RLIMIT_AS (``ulimit -v``) leaves.

    >>> (free_memory() or 1) > 0
    True
    """
    if device is not None and device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    known = [each for each in (_of_machine(), _of_group(), _of_process()) if each is not None]
    return max(0, min(known)) if known else None


def _of_machine() -> int | None:
    found = re.search(r"^MemAvailable:\s*(\d+) kB", _text("/proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _of_group() -> int | None:
    """Of the control group, version 2 or 1; file pages that are not in use count as free."""
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        most, now = _text(limit).strip(), _text(used).strip()
        if most.isdigit() and now.isdigit():
            stat = _text(str(Path(limit).with_name("memory.stat")))
            idle = re.search(r"^(?:total_)?inactive_file (\d+)", stat, re.MULTILINE)
            return int(most) - int(now) + (int(idle[1]) if idle else 0)
    return None


def _of_process() -> int | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    pages = _text("/proc/self/statm").split()
    if limit == resource.RLIM_INFINITY or not pages:
        return None
    return limit - int(pages[0]) * resource.getpagesize()


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
