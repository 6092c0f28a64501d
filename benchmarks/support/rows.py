"""Rows of a figure in a file, a JSON object a line: what was measured once is not measured again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_rows(path: Path | None) -> list[dict[str, Any]]:
    """The rows that are there; none where there is no file."""
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def add_row(path: Path | None, row: Mapping[str, Any]) -> None:
    """Adds one, if there is a file for them."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
