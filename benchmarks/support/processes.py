"""A measurement in a process of its own, where nothing was imported, allocated or cached before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def in_a_process(
    told: str,
    file: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
    python: str | None = None,
) -> Any:
    """What ``file``, run with the arguments, says in the last line that it prints, which is JSON.

    ``python`` is another environment's.

    Raises:
        RuntimeError: it failed; the message begins with what was ``told`` and ends with what the process said.
    """
    done = subprocess.run(
        [python or sys.executable, file, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})},
        check=False,
        timeout=timeout,
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"{told} failed:\n{done.stderr[-3000:]}")
    return json.loads(lines[-1])
