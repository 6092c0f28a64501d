"""Reads damaged compressed checkpoints, and counts what became of them: read, refused with a clear error, or a crash.

    python benchmarks/storage/fuzz.py [--count 1000000] [--seed 0]

Each file is one of a few sound ones with bytes, numbers, words or lengths of it changed, read from memory by the very
code that reads files. A crash is any exception but CheckpointError; a promise is a tensor of more bytes than the file
can justify. There must be none of either, and the exit status says so.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from secateur.checkpoints import MAX_HEADER, Checkpoint, CheckpointError, TensorEntry, parse_header
from secateur.storage import FREE, JUSTIFIED, CompressedCheckpoint, save_compressed
from secateur.support import to_int8, track

PATH = Path("fuzzed.safetensors")


@dataclass(frozen=True, eq=False)
class InMemory(Checkpoint):
    """A file that is bytes."""

    content: bytes = b""

    def read_into(self, name: str, start: int, view: memoryview) -> None:
        at = self.entries[name].start + start
        view[:] = self.content[at : at + len(view)]


def opened(content: bytes) -> CompressedCheckpoint:
    """As `load_compressed` opens a file."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(len(content) - 8, MAX_HEADER):
        raise CheckpointError("the header is not all there.")  # as read_header says of files
    entries, metadata = parse_header(content[8 : 8 + length], PATH, len(content))
    return CompressedCheckpoint(InMemory(PATH.parent, (PATH,), entries, {PATH: metadata}, content=content))


def read(content: bytes) -> list[tuple[TensorEntry, Tensor | None, Tensor | None]]:
    """Every tensor and mask."""
    checkpoint = opened(content)
    for stored in checkpoint.tensors.values():
        if stored.entry.nbytes > FREE + JUSTIFIED * stored.nbytes:
            raise AssertionError(f"{stored.entry.name}: {stored.nbytes} bytes promise {stored.entry.nbytes}")
    masks = checkpoint.masks
    return [
        (
            entry,
            checkpoint[name] if entry.torch_dtype is not None else torch.from_numpy(checkpoint.raw(name)),
            masks.get(name),
        )
        for name, entry in checkpoint.entries.items()
    ]


def scaled_of(weight: Tensor) -> Tensor:
    """A weight that was rounded to int8."""
    numbers, scales = to_int8(weight)
    return numbers * scales[:, None]


def sound_files() -> list[bytes]:
    """Small files that use every encoding, with and without zstd, masks, signs."""
    generator = torch.Generator().manual_seed(0)

    def sparse(*shape: int, density: float, dtype: torch.dtype = torch.float32) -> Tensor:
        drawn = torch.randn(shape, generator=generator)
        return (drawn * (torch.rand(shape, generator=generator) < density)).to(dtype)

    masked = sparse(40, 40, density=0.4)
    kinds = [
        {"bitmask": sparse(30, 41, density=0.4), "dense": torch.randn(7, generator=generator)},
        {
            "csr8": sparse(64, 64, density=0.05),
            "csr16": sparse(70000, density=0.002).sign().char(),
            "bools": masked > 0,
        },
        {"halves": sparse(33, 33, density=0.3, dtype=torch.bfloat16)},
        {"rounded": scaled_of(sparse(24, 90, density=0.3)), "negative": -scaled_of(sparse(20, 64, density=0.1))},
        {"masked": masked, "signs": -masked.abs() * (masked > 0.5)},
    ]
    files = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            for zstd in (False, True):
                masks = {"masked": masked != 0} if "masked" in kind else None
                save_compressed(kind, Path(folder, "file"), zstd=zstd, masks=masks)
                files.append(Path(folder, "file").read_bytes())
    return files


def damaged(content: bytes, dice: random.Random) -> bytes:
    """The file with one to three things changed."""
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        length = int.from_bytes(content[:8], "little")
        data = min(8 + length, len(content))
        match dice.randrange(7):
            case 0:  # any byte
                content = _with_byte(content, dice.randrange(len(content)), dice)
            case 1:  # a byte of the data
                content = _with_byte(content, dice.randrange(min(data, len(content) - 1), len(content)), dice)
            case 2:  # cut, or longer
                at = dice.randrange(1, len(content) + 1)
                content = content[:at] if dice.random() < 0.5 else content + bytes(dice.randrange(1, 9))
            case 3:  # part of the data at another place
                at, to = dice.randrange(data, len(content) + 1), dice.randrange(data, len(content) + 1)
                piece = content[at : at + dice.randrange(1, 40)]
                content = content[:to] + piece + content[to + len(piece) :]
            case _:  # the header's numbers and words, and then its length to fit
                text = _edited(content[8:data], dice)
                content = len(text).to_bytes(8, "little") + text + content[data:]
        if not content:
            return b"\0"
    return content


def _with_byte(content: bytes, at: int, dice: random.Random) -> bytes:
    return content[:at] + bytes([dice.randrange(256)]) + content[at + 1 :]


def _edited(text: bytes, dice: random.Random) -> bytes:
    numbers = list(re.finditer(rb"\d+", text))
    words = list(re.finditer(rb"[A-Za-z_:0-9]{2,}", text))
    pick = dice.random()
    if numbers and pick < 0.5:
        found = dice.choice(numbers)
        value = int(found[0])
        near = (value + 1, value - 1, value * 2, value * 8, dice.randrange(1000))
        values = (*near, -1, 0, 10**9, 2**31, 2**32, 2**62, 2**63)
        new = str(dice.choice(values)).encode()
    elif words and pick < 0.9:
        found = dice.choice(words)
        new = dice.choice(
            (*(word[0] for word in dice.sample(words, min(4, len(words)))), b"", b"F64", b"true", b"2:4", b"csr8")
        )
    else:
        at = dice.randrange(len(text) + 1)
        return text[:at] + text[at + dice.randrange(1, 9) :]
    return text[: found.start()] + new + text[found.end() :]


def fuzz(count: int, seed: int = 0) -> Counter[str]:
    """What became of ``count`` damaged files; raises what is no CheckpointError."""
    dice = random.Random(seed)
    files = sound_files()
    sound = [read(content) for content in files]
    found: Counter[str] = Counter()
    for _ in track(range(count), "fuzzing"):
        which = dice.randrange(len(files))
        content = damaged(files[which], dice)
        try:
            tensors = read(content)
        except CheckpointError:
            found["refused"] += 1
        except Exception:
            Path("crash.safetensors").write_bytes(content)
            raise
        else:
            found["read, the same" if _same(tensors, sound[which]) else "read, other values"] += 1
    return found


def _same(first: list, second: list) -> bool:  # type: ignore[type-arg]
    return len(first) == len(second) and all(
        (one[0].name, one[0].dtype, one[0].shape) == (other[0].name, other[0].dtype, other[0].shape)
        and torch.equal(one[1].reshape(-1).view(torch.uint8), other[1].reshape(-1).view(torch.uint8))
        for one, other in zip(first, second, strict=True)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    started = time.process_time()
    found = fuzz(arguments.count, arguments.seed)
    seconds = time.process_time() - started
    print(json.dumps({**found, "crashes": 0, "seconds": round(seconds, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
