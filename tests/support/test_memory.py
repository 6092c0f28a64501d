"""What is free is the least of what the machine, the container and the process's own limit leave."""

from pathlib import Path

import pytest

from secateur.support import free_memory
from secateur.support import machine as module

MACHINE = {"/proc/meminfo": "MemFree: 1 kB\nMemAvailable:    9000 kB\n"}
GROUP = {
    "/sys/fs/cgroup/memory.max": "8000000\n",
    "/sys/fs/cgroup/memory.current": "3000000\n",
    "/sys/fs/cgroup/memory.stat": "active_file 5\ninactive_file 1000000\n",
}
OLD_GROUP = {
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": "700000\n",
    "/sys/fs/cgroup/memory/memory.usage_in_bytes": "300000\n",
    "/sys/fs/cgroup/memory/memory.stat": "total_inactive_file 7\n",
}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        (MACHINE, 9000 * 1024),
        (GROUP, 6_000_000),
        (MACHINE | GROUP, 6_000_000),
        (OLD_GROUP, 400_007),
        (MACHINE | GROUP | {"/sys/fs/cgroup/memory.max": "max\n"}, 9000 * 1024),
        (MACHINE | GROUP | {"/sys/fs/cgroup/memory.current": "9000000\n"}, 0),
    ],
)
def test_the_least_of_what_is_said(files, free, monkeypatch):
    def read(path, **_named):
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read)
    assert free_memory() == free


def test_a_limit_of_the_process_counts(monkeypatch):
    resource = pytest.importorskip("resource")
    files = {**MACHINE, "/proc/self/statm": "2 1 1\n"}
    monkeypatch.setattr(module, "_text", lambda path: files.get(path, ""))
    limit = 10 * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert free_memory() == 8 * resource.getpagesize()
