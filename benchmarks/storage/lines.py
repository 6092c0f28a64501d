"""What a calibration file of one line of a gigabyte takes, of memory and of time, in a process of its own.

python benchmarks/storage/lines.py txt|jsonl|json
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.storage.hostile import tokenizer
from secateur.models import read_calibration

AROUND = {"txt": ("", ""), "jsonl": ('{"text": "', '"}\n'), "json": ('[{"text": "', '"}]')}
PIECE = "the secateur is a small shear " * 33334


def main(kind: str, pieces: int = 1000) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer().save_pretrained(folder)
        short, path = Path(folder, "short.txt"), Path(folder, f"long.{kind}")
        short.write_text(PIECE[:3000])
        options = {"samples": 2, "sequence_length": 8}
        read_calibration(short, tokenizer_directory=folder, **options)  # what any text takes
        with path.open("w") as file:
            file.write(AROUND[kind][0])
            file.writelines(PIECE for _ in range(pieces))
            file.write(AROUND[kind][1])
        before, began = _peak(), time.monotonic()
        try:
            came = f"{len(read_calibration(path, tokenizer_directory=folder, **options))} batches"
        except ValueError as error:
            came = str(error).removeprefix(f"{path}: ")
        seconds = round(time.monotonic() - began, 1)
        return {"kind": kind, "GB": path.stat().st_size / 1e9, "more GB": _peak() - before, "s": seconds, "came": came}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
